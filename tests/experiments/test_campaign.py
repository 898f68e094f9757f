"""The campaign at toy size, the disturbances that it injects, its tables from made-up rows."""

import dataclasses
import math

import numpy as np
import pytest

from experiments.campaign import BASE, CASES, Config, figure, headline, main, plan, tables
from experiments.faults import Disturbance, Scales, disturbed, scales
from experiments.loop.alarms import AlarmConfig
from experiments.loop.optimizer import OptimizerConfig
from experiments.loop.step import MonitorConfig
from experiments.support import recorded
from experiments.support.arms import CLEAN, truth_of
from models.config import GPTConfig
from stabmon.alarms.signatures import Fault
from stabmon.runs.jsonl import read_jsonl
from stabmon.runs.run import load_run

TOY = Config(
    seeds=(5,),
    clean_seeds=(5,),
    steps=60,
    clean_steps=60,
    onset=40,
    base=dataclasses.replace(
        BASE,
        batch=8,
        model=GPTConfig(layers=1, model=16, heads=2, context=16, backend="flash"),
        optimizer=OptimizerConfig(warmup=5, every=5, keep=2),
        monitor=MonitorConfig(lags=(5,), delta=0, activations=0, weights=0, symptoms=1),
        alarms=AlarmConfig(on=True, window=10),
    ),
    cases=("clean", "learning rate ×10", "NaN in the gradient"),
)
BATCHES = [np.full((8, 5), step, np.int32) + 10 * np.arange(8)[:, None] for step in range(50)]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    runs = tmp_path_factory.mktemp("campaign")
    base = dataclasses.replace(TOY.base, runs=runs)
    config = dataclasses.replace(TOY, base=base, results=runs / "campaign.jsonl")
    return config, main(config).rows


@pytest.mark.slow
def test_each_run_is_judged_and_the_faults_are_named(toy):
    config, rows = toy
    assert [x["case"] for x in rows] == list(config.cases)
    assert [x["named"] for x in rows] == [CLEAN, Fault.LEARNING_RATE, Fault.NONFINITE]
    assert [x["false_alarms"] for x in rows] == [[], [], []]
    assert [x["clean_steps"] for x in rows] == [45, 0, 0]
    assert [(row["seed"], row["right"]) for row in rows] == [(5, True)] * 3
    assert (config.base.runs / "campaign.html").stat().st_size > 1e6


@pytest.mark.slow
def test_a_fault_is_journalled_and_changes_nothing_before_its_onset(toy):
    config, _ = toy
    runs = config.base.runs
    (row,) = read_jsonl(runs / "learning-rate-x10-seed5" / "faults.jsonl")
    assert row == {"kind": "learning rate", "amount": 10, "onset": 40, "end": None}
    key = "symptoms/global/update_norm/value"
    clean, faulty = (
        dict(zip(*(x.tolist() for x in load_run(runs / name).metrics[key]), strict=True))
        for name in ("clean-seed5", "learning-rate-x10-seed5")
    )
    assert [clean[step] for step in range(1, 40)] == [faulty[step] for step in range(1, 40)]
    assert faulty[40] == pytest.approx(10 * clean[40], rel=1e-4)


@pytest.mark.slow
def test_what_is_there_is_not_run_again_and_judged_anew_where_that_is_asked_for(toy, monkeypatch):
    config, rows = toy
    monkeypatch.setattr(recorded, "train", lambda _: pytest.fail("was run again"))
    base = dataclasses.replace(config.base, runs=config.base.runs / "nowhere")
    moved = dataclasses.replace(config, base=base)
    assert main(moved).rows == rows
    before = len(read_jsonl(config.results))
    assert main(dataclasses.replace(config, again=True)).rows == rows
    assert len(read_jsonl(config.results)) == 2 * before


def test_the_plan_has_longer_clean_runs_and_a_rescue_that_may_act():
    verdicts, rescues = plan(Config())
    assert len({run.name for _, run in (*verdicts, *rescues)}) == len(verdicts) + len(rescues)
    assert {run.steps for case, run in verdicts if case.startswith("clean")} == {4100}
    assert {run.steps for case, run in verdicts if not case.startswith("clean")} == {1200}
    assert not any(run.act or run.optimizer.control for _, run in verdicts)
    assert all(run.act and run.optimizer.control for _, run in rescues)
    (experts,) = {run.model.experts for case, run in verdicts if "experts" in case}
    assert experts == 8


def test_the_factors_hold_from_the_onset_to_the_end():
    wrong = (Disturbance("learning rate", 10, 5), Disturbance("gradient", math.nan, 7, 8))
    assert scales(wrong, 4) == Scales(1, 1, 1)
    assert scales(wrong, 6) == Scales(10, 1, 1)
    assert math.isnan(scales(wrong, 7).gradient)
    assert scales(wrong, 8) == Scales(10, 1, 1)


def test_a_small_batch_is_fed_as_often_as_shapes_need():
    tokens = disturbed([Disturbance("batch", 4, 3)], BATCHES, 3, 0, 256)
    np.testing.assert_array_equal(tokens, np.concatenate([BATCHES[3][:2]] * 4))


def test_repeated_data_begin_anew():
    again = [Disturbance("repeated data", 3, 10)]
    places = [int(disturbed(again, BATCHES, step, 0, 256)[0, 0]) for step in range(8, 17)]
    assert places == [8, 9, 10, 11, 12, 10, 11, 12, 10]


def test_a_dirty_batch_is_the_same_noise_each_time():
    dirty = [Disturbance("dirty batch", 1.0, 3, 4)]
    first, second = (disturbed(dirty, BATCHES, 3, 0, 256) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert len(np.unique(first)) > 20
    np.testing.assert_array_equal(disturbed(dirty, BATCHES, 4, 0, 256), BATCHES[4])


def made_up(case, seed, truth, named, false=(), actions=()):
    return {
        "kind": "verdict",
        "case": case,
        "seed": seed,
        "truth": truth,
        "named": named,
        "first_named": named,
        "first_alarm": 20,
        "loss_alarm": None,
        "lead": 680,
        "false_alarms": false,
        "clean_steps": 0 if truth != CLEAN else 20_000,
        "false_actions": actions,
        "steps": 1200,
        "right": named == truth,
    }


def test_tables_and_headline_come_from_the_rows_alone():
    rows = [
        made_up("clean", 1, CLEAN, CLEAN, ("330 spike k",)),
        made_up("clean", 2, CLEAN, CLEAN),
        *(made_up("x", i, "batch", "batch" if i else "unknown") for i in range(5)),
        {"kind": "rescue", "case": "x", "seed": 1, "steps": 9, "clean": 2.0, "faulty": 3.0}
        | {"act": 2.1, "excess": 0.05, "actions": ["roll back 550"]},
    ]
    assert headline(rows) == (
        "met: 4 of 5 faults named right, 1 false alarms and 0 actions advised in 40,000 clean "
        "steps (0.2 per 10,000, 95 % upper bound 1.2); `--act` ends +5.0% from the clean loss at "
        "worst in 1 runs"
    )
    assert headline([*rows, made_up("clean", 3, CLEAN, "x", (), ("9 stop",))]).startswith("not met")
    text = tables(rows)
    assert "| batch |  | 4 | 1 |" in text
    assert "| clean | 1 | 330 spike k | – |" in text
    assert "| x | 1 | 2.000 | 3.000 | 2.100 | +5.0% | roll back 550 |" in text
    assert text.count("unknown ✗") == 1
    assert "> 680, > 680" in text
    assert len(figure(rows).to_dict()["data"][0]["x"]) == 4
    assert headline([made_up("x", 1, "batch", "unknown")]).startswith("not met: 0 of 1")


def test_every_kind_of_fault_has_a_case():
    assert {truth_of(arm) for arm in CASES.values()} >= {str(x) for x in Fault} - {
        Fault.UNKNOWN,
        Fault.NO_QK_NORM,
        Fault.LOW_RANK,
        # Held by `faults_suite`, and by tests of the detectors.
        Fault.DATA,
        Fault.STILL,
        Fault.IMPOSSIBLE,
    }


def test_an_end_before_the_onset_is_refused():
    with pytest.raises(ValueError, match="gradient: ends at 3, before its onset 5"):
        Disturbance("gradient", 0, 5, 3)
