"""Rows: found again by their settings, appended whole, measured once."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from experiments.support.rows import append_row, key, latest, measured, rows_there
from stabmon.runs.jsonl import read_jsonl


@dataclass(frozen=True)
class Settings:
    seed: int
    runs: Path
    rates: tuple[tuple[str, float], ...] = (("all", 1e-3),)


def test_settings_are_the_same_in_a_row_and_in_a_dataclass_wherever_runs_lie(tmp_path):
    file = tmp_path / "deep" / "x.jsonl"
    measured(file, Settings(1, tmp_path), lambda: {"loss": 2.0})
    (row,) = read_jsonl(file)
    assert key(row["settings"]) == key(Settings(1, Path("elsewhere")))
    assert "runs" not in row["settings"]


def test_what_is_there_is_not_measured_again(tmp_path):
    file, calls = tmp_path / "x.jsonl", []
    for seed in (0, 1, 0):
        settings = Settings(seed, tmp_path)
        row = measured(file, settings, lambda seed=seed: calls.append(seed) or {"seed": seed})
        assert row["seed"] == seed
    assert calls == [0, 1]


def test_other_settings_are_measured(tmp_path):
    file = tmp_path / "x.jsonl"
    measured(file, {"seed": 0}, lambda: {"loss": 1.0})
    measured(file, {"seed": 0, "steps": 5}, lambda: {"loss": 2.0})
    assert [row["loss"] for row in read_jsonl(file)] == [1.0, 2.0]


def test_a_torn_line_goes_when_the_next_is_written(tmp_path):
    file = tmp_path / "x.jsonl"
    append_row(file, {"a": 1})
    with file.open("a") as torn:
        torn.write('{"a": 2')
    append_row(file, {"a": float("inf")})
    assert read_jsonl(file) == [{"a": 1}, {"a": float("inf")}]


def test_rows_come_in_the_order_of_the_settings_and_the_last_measurement_counts(tmp_path):
    file = tmp_path / "x.jsonl"
    for seed, loss in ((0, 1.0), (1, 2.0), (0, 3.0), (2, 4.0)):
        append_row(file, {"loss": loss, "settings": {"seed": seed}})
    append_row(file, {"note": "without settings"})
    found = rows_there(file, [{"seed": 1}, {"seed": 0}, {"seed": 7}])
    assert [row["loss"] for row in found] == [2.0, 3.0]
    kept = [row.get("loss") for row in latest(read_jsonl(file))]
    assert kept == [2.0, 3.0, 4.0, None]


def test_settings_that_are_none_are_refused():
    with pytest.raises(TypeError, match="a dataclass or a mapping, got int"):
        key(3)
