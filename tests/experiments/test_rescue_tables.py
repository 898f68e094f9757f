"""Tables and verdict of the rescue experiment, from rows made up here."""

import math

import pytest

from experiments.msign_rescue import DRAWN, figure, headline, tables
from experiments.support.rescue import bracket, holds, over

RESCUED = {
    "clean": (2.0, 2.0, 4.0),
    "adamw": (2.5, 2.6, 5.2),
    "attention P=50": (2.04, 2.06, 4.16),
    "attention P=100": (2.08, 2.08, 4.0),
    "attention P=300": (2.08, 2.2, 4.0),
    "MLP P=50": (2.6, 2.5, 4.9),
}


def rows(configuration="fault", losses=RESCUED, seeds=(0, 1, 2)):
    numbers = dict.fromkeys(("perplexity", "grad_max", "max_logit", "stable_rank"), 1.0)
    jacobian = [{"step": 5, "a": 0.1, "M": 1.0, "aM": 0.1}]
    jacobian.append({"step": 9, "a": 0.5, "M": 3.0, "aM": 1.5})
    return [
        {"configuration": configuration, "arm": arm, "seed": seed, "loss": loss, "curve": [loss]}
        | {"end": loss**2}
        | numbers
        | {"jacobian": jacobian, "settings": {"steps": 1200, "evaluate_every": 23}}
        for arm, of in losses.items()
        for seed, loss in zip(seeds, of, strict=True)
    ]


def test_the_loss_is_compared_with_the_clean_run_of_the_seed():
    assert over(rows(), "fault", "adamw") == pytest.approx([25, 30, 30])
    assert "| adamw | 0, 1, 2 | 2.50, 2.60, 5.20 | +25.0 %, +30.0 %, +30.0 % | +56.2 %" in tables(
        rows()
    )
    assert "| 0.5 | 3 | 1.5 |" in tables(rows())


@pytest.mark.parametrize(
    ("arm", "losses"),
    [
        ("adamw", (2.5, 2.6, 4.7)),
        ("attention P=50", (2.04, 2.06, 4.3)),
        ("attention P=50", (2.04, 2.06, math.nan)),
    ],
)
def test_one_seed_that_misses_undoes_the_claim(arm, losses):
    assert holds(rows(), "fault")
    assert not holds(rows(losses=RESCUED | {arm: losses}), "fault")


def test_a_seed_that_is_not_there_undoes_the_claim():
    assert not holds([row for row in rows() if row["seed"] < 2], "fault")


def test_the_period_where_it_breaks_is_the_first_with_a_seed_that_misses():
    assert bracket(rows(), "fault") == "at 100–300"
    uneven = RESCUED | {"attention P=50": (2.04, 2.2, 4.16)}
    assert bracket(rows(losses=uneven), "fault") == "at 100–300"
    lost = {k: RESCUED[k] for k in ("clean", "adamw", "attention P=300")}
    assert bracket(rows(losses=lost), "fault") == "below 300"
    assert bracket(rows(losses={k: RESCUED[k] for k in ("clean", "attention P=50")}), "fault") == ""


def test_two_configurations_are_wanted():
    both = rows() + rows("experts")
    assert headline(both).startswith("reproduces: within 5 % of clean in 2 of 2 configurations")
    assert headline(rows()).startswith("partly: within 5 % of clean in 1 of 1")
    lost = rows(losses=RESCUED | {"adamw": (2.0, 2.0, 4.0)})
    assert headline(lost).startswith("not at this size")
    tried = rows("rate", {"clean": (2.0,), "attention P=10": (2.2,)}, seeds=(10,))
    assert headline(both + tried).startswith("partly: within 5 % of clean in 2 of 3")
    assert "not rate 10.0 on a development seed" in headline(both + tried)
    mended = RESCUED | {"MLP P=50": (2.6, 2.0, 4.8)}
    assert headline(rows() + rows("experts", mended)).startswith(
        "partly: within 5 % of clean in 2 of 2"
    )
    assert "\n" not in headline(both)


def test_seeds_of_development_are_listed_and_not_judged():
    early = rows(losses={"clean": (2.0,), "adamw": (2.0,)}, seeds=(10,))
    assert headline(rows() + early) == headline(rows())
    assert "| fault | adamw | 10 | 1,200 | 2.00 | +0.0 % |" in tables(rows() + early)


def test_the_figure_has_a_curve_for_each_run():
    early = rows(losses={"clean": (2.0,)}, seeds=(10,))
    traces = figure(rows() + early).to_dict()["data"]
    assert len(traces) == len(rows())
    named = {x["name"] for x in traces if x["showlegend"]}
    assert named == {arm if arm in DRAWN else "others" for arm in RESCUED}
