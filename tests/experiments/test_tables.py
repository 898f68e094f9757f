"""Markdown tables from rows."""

import pytest

from experiments.support.tables import (
    crossed,
    each,
    first,
    grouped,
    listed,
    listing,
    median_range,
    table,
)

ROWS = [
    {"arm": "b", "seed": 1, "late": {"Δ2": 0.5}, "alarm": None},
    {"arm": "a", "seed": 1, "late": {"Δ2": 0.25}, "alarm": 20},
    {"arm": "b", "seed": 2, "late": {"Δ2": -0.125}, "alarm": 30},
]


def test_groups_come_in_the_order_of_their_first_row_and_keep_theirs():
    columns = {"seeds": each("seed"), "Δ2": each("late/Δ2", "+.2f", " %"), "of": first("seed")}
    assert table(ROWS, "arm", columns).splitlines() == [
        "| arm | seeds | Δ2 | of |",
        "|---|---|---|---|",
        "| b | 1, 2 | +0.50 %, -0.12 % | 1 |",
        "| a | 1 | +0.25 % | 1 |",
    ]


def test_several_values_together_tell_groups_apart():
    by = {"run": lambda row: row["arm"] * 2, "seed": "seed"}
    lines = table(ROWS, by, {"alarm": each("alarm")}).splitlines()
    assert lines[2:] == ["| bb | 1 | – |", "| aa | 1 | 20 |", "| bb | 2 | 30 |"]


def test_names_make_lines_and_groups_columns():
    alarms = lambda of, name: listed(row[name] for row in of)
    text = crossed("metric", ["alarm", "seed"], grouped(ROWS, "arm"), alarms)
    assert text.splitlines()[2:] == ["| alarm | –, 30 | 20 |", "| seed | 1, 2 | 1 |"]


def test_mappings_are_lines():
    assert listing([{"a": 1, "b": 2}, {"a": 3, "b": 4}]).endswith("| 1 | 2 |\n| 3 | 4 |")


@pytest.mark.parametrize(
    ("values", "text"),
    [([5], "5"), ([1, 2], "1.5 (1–2)"), ([1, 3, None], "2 (1–3), 1 never"), ([], "never")],
)
def test_the_range_of_steps_counts_what_never_came(values, text):
    assert median_range(values) == text


def test_no_value_is_a_dash():
    assert listed([]) == "–"
