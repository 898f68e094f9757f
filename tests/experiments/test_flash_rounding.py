"""The rounding experiment at toy size: the bias where it must be, and none where it must not."""

import numpy as np
import pytest

from experiments.flash_rounding import REMEDIES, Config, headline, main, products, tables
from stabmon.output.jsonl import read_jsonl


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    runs = tmp_path_factory.mktemp("flash_rounding")
    return main(Config(rows=2000, ones=(1, 2), gaps=(3.0, 9.0), heads=6, runs=runs))


def test_two_ones_of_one_sign_are_biased_away_from_zero_and_beta_takes_it_away(toy):
    cell = {(r["sign"], r["beta"], r["ones"], r["gap"]): r for r in toy.bias}
    assert cell["same", None, 2, 9.0]["z"] > 20
    assert abs(cell["same", 2.0, 2, 9.0]["ulp"]) < cell["same", None, 2, 9.0]["ulp"] / 5


def test_the_bias_reaches_delta_and_exact_sums_do_not(toy):
    row = {r["remedy"]: r for r in toy.remedies if r["gap"] == 9.0}
    assert set(row) == set(REMEDIES)
    assert row["none"]["z"] > 10
    for remedy in ("O in float32", "δ = rowsum(dP ∘ P)"):
        assert abs(row[remedy]["mean"]) < row["none"]["mean"] / 20


def test_the_monitor_counts_the_rows_that_drift(toy):
    assert toy.correlation > 0.8
    assert toy.heads[0]["repeated"] == 0
    assert toy.heads[-2]["repeated"] == 2000


def test_the_monitor_also_counts_logits_whose_products_are_not_one(toy):
    assert toy.heads[-1]["repeated"] > 500
    assert abs(toy.heads[-1]["delta_error"]) < toy.heads[-2]["delta_error"] / 3


def test_rows_and_figure_are_written(toy):
    assert toy.figure.stat().st_size > 1_000_000
    lines = toy.figure.with_suffix(".jsonl").read_text().splitlines()
    assert len(lines) == len(toy.bias) + len(toy.remedies) + len(toy.heads)


def test_tables_and_headline_come_from_the_rows(toy):
    rows = read_jsonl(toy.figure.with_suffix(".jsonl"))
    text = tables(rows)
    assert text.count("\n| one sign | plain |") == 2
    assert all(f"| {remedy} |" in text for remedy in REMEDIES)
    assert headline(rows).startswith("reproduces: two P̄ = 1 bias P̄ V from a gap of 9 on")
    unhealed = [r | {"mean": 1e-3} if r.get("remedy") == "O in float32" else r for r in rows]
    assert headline(unhealed).startswith("partly: ")
    assert "2 of 3 remedies heal" in headline(unhealed)


def test_a_tie_is_broken_by_what_is_left():
    # 1 + 1.0078125 lies between two bfloat16 values above 2; a hair more decides.
    logits = np.array([[5.0, 5.0, -6.0]], np.float32)
    values = -np.array([[[1.0], [1.0078125], [1.0]]], np.float32)
    found, exact, _ = products(logits, values)
    assert found.item() == -2.015625
    assert exact.item() == pytest.approx(-2.0078292, abs=1e-6)
