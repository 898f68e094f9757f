"""The rounding experiment at toy size: the bias where it must be, and none where it must not."""

import numpy as np
import pytest

from experiments.flash_rounding import (
    REMEDIES,
    Config,
    correlation,
    figure,
    headline,
    main,
    parts,
    products,
    tables,
)
from stabmon.runs.jsonl import read_jsonl


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    runs = tmp_path_factory.mktemp("flash_rounding")
    return main(Config(rows=2000, ones=(1, 2), gaps=(3.0, 9.0), heads=6, runs=runs))


def test_two_ones_of_one_sign_are_biased_away_from_zero_and_beta_takes_it_away(toy):
    cell = {(r["sign"], r["beta"], r["ones"], r["gap"]): r for r in parts(toy.rows)[0]}
    assert cell["same", None, 2, 9.0]["z"] > 20
    assert abs(cell["same", 2.0, 2, 9.0]["ulp"]) < cell["same", None, 2, 9.0]["ulp"] / 5


def test_the_bias_reaches_delta_and_exact_sums_do_not(toy):
    row = {r["remedy"]: r for r in parts(toy.rows)[1] if r["gap"] == 9.0}
    assert set(row) == set(REMEDIES)
    assert row["none"]["z"] > 10
    for remedy in ("O in float32", "δ = rowsum(dP ∘ P)"):
        assert abs(row[remedy]["mean"]) < row["none"]["mean"] / 20


def test_the_monitor_counts_the_rows_that_drift(toy):
    heads = parts(toy.rows)[2]
    assert correlation(toy.rows) > 0.8
    assert heads[0]["repeated"] == 0
    assert heads[-2]["repeated"] == 2000


def test_the_monitor_also_counts_logits_whose_products_are_not_one(toy):
    even, apart = parts(toy.rows)[2][-2:]
    assert apart["repeated"] > 500
    assert abs(apart["delta_error"]) < even["delta_error"] / 3


def test_rows_and_figure_are_written(toy):
    assert toy.figure.stat().st_size > 1_000_000
    assert toy.figure == toy.file.with_suffix(".html")
    assert read_jsonl(toy.file) == toy.rows
    plain, beta2, beta8, heads = figure(toy.rows).to_dict()["data"]
    assert [x["name"] for x in (plain, beta2, beta8)] == ["plain", "β = 2", "β = 8"]
    assert max(plain["y"]) > 3 * max(*beta2["y"], *beta8["y"])
    assert len(heads["y"]) == 7


def test_tables_and_headline_come_from_the_rows(toy):
    rows = toy.rows
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
