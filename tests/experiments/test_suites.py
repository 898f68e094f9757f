"""The suites of benign changes and of faults: toy size, and what their rows come to."""

from dataclasses import replace

import pytest

from experiments import benign, faults_suite
from experiments.loop.optimizer import OptimizerConfig, make_schedule
from experiments.loop.step import MonitorConfig
from models.config import GPTConfig
from stabmon.alarms.signatures import Fault


def small(base, runs):
    return replace(
        base,
        runs=runs,
        batch=8,
        model=GPTConfig(layers=1, model=16, heads=2, context=16, backend="flash"),
        optimizer=OptimizerConfig(warmup=5, every=5, keep=2),
        monitor=MonitorConfig(lags=(5,), delta=0, activations=0, weights=0, symptoms=1),
        alarms=replace(base.alarms, window=10),
    )


@pytest.mark.slow
def test_both_suites_run_and_judge_at_toy_size(tmp_path):
    base = small(benign.BASE, tmp_path)
    quiet = benign.main(
        benign.Config(
            seeds=(5,),
            steps=60,
            onset=30,
            base=base,
            cases=("constant", "lion"),
            results=tmp_path / "benign.jsonl",
        )
    )
    assert [x["case"] for x in quiet.rows] == ["constant", "lion"]
    assert [x["clean_steps"] for x in quiet.rows] == [45, 45]
    config = faults_suite.Config(
        seeds=(5,),
        steps=60,
        onset=40,
        base=small(faults_suite.BASE, tmp_path),
        cases=("clean", "rate ×0", "shifted targets"),
        results=tmp_path / "faults.jsonl",
    )
    rows = faults_suite.main(config).rows
    assert [x["named"] for x in rows][:2] == ["clean", Fault.STILL]


def test_a_schedule_ends_where_it_says():
    at = lambda step, **kind: float(
        make_schedule(OptimizerConfig(decay=1000, floor=0.0, **kind))(step)
    )
    assert at(1100, schedule="cosine") == pytest.approx(0.0, abs=1e-9)
    assert at(800, schedule="wsd") == at(100) == pytest.approx(1e-3)
    assert at(599, schedule="restart") < 1e-5 < at(601, schedule="restart")
    assert at(700, schedule="step") == pytest.approx(1e-3 / 3)


def test_a_name_is_right_wrong_unknown_or_never_said():
    outcome = faults_suite.outcome_of
    assert outcome(Fault.DATA, True, (Fault.DATA,)) == "right"
    assert outcome(Fault.ATTENTION, True, (Fault.DATA,)) == "wrong"
    assert outcome(Fault.UNKNOWN, True, (Fault.DATA,)) == "unknown"
    assert outcome("clean", False, (Fault.DATA,)) == "not noticed"
