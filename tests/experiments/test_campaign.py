"""The campaign at toy size, the disturbances that it injects, and how runs are judged."""

import dataclasses
import math

import numpy as np
import pytest

from experiments.acting import AlarmConfig
from experiments.campaign import CASES, Config, main
from experiments.faults import Disturbance, Scales, disturbed, scales
from experiments.step import MonitorConfig, OptimizerConfig
from experiments.verdicts import CLEAN, judge
from models.config import GPTConfig
from stabmon.alarms.signatures import Fault
from stabmon.output.runlog import Run, load_run, read_jsonl

DENSE = GPTConfig(layers=1, model=16, heads=2, context=16, backend="flash")
TOY = Config(
    seeds=(5,),
    clean_seeds=(5,),
    steps=60,
    onset=40,
    batch=8,
    dense=DENSE,
    optimizer=OptimizerConfig(warmup=5, every=5, keep=2),
    monitor=MonitorConfig(lags=(5,), delta=0, activations=0, weights=0, symptoms=1),
    alarms=AlarmConfig(on=True, window=10),
    cases=("clean", "learning rate ×10", "NaN"),
)
BATCHES = [np.full((8, 5), step, np.int32) + 10 * np.arange(8)[:, None] for step in range(50)]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    config = dataclasses.replace(TOY, runs=tmp_path_factory.mktemp("campaign"))
    return config, main(config)


def test_each_run_is_judged_and_the_faults_are_named(toy):
    config, verdicts = toy
    assert [x.case for x in verdicts] == list(config.cases)
    assert [x.named for x in verdicts] == [CLEAN, Fault.LEARNING_RATE, Fault.NONFINITE]
    assert [x.false_alarms for x in verdicts] == [0, 0, 0]
    rows = read_jsonl(config.runs / "verdicts.jsonl")
    assert [(row["seed"], row["right"]) for row in rows] == [(5, True)] * 3


def test_a_fault_is_journalled_and_changes_nothing_before_its_onset(toy):
    config, _ = toy
    (row,) = read_jsonl(config.runs / "learning-rate-×10-5" / "faults.jsonl")
    assert row == {"kind": "learning rate", "amount": 10, "onset": 40, "end": None}
    key = "symptoms/global/update_norm/value"
    clean, faulty = (
        dict(zip(*map(np.ndarray.tolist, load_run(config.runs / name).metrics[key]), strict=True))
        for name in ("clean-5", "learning-rate-×10-5")
    )
    assert [clean[step] for step in range(1, 40)] == [faulty[step] for step in range(1, 40)]
    assert faulty[40] == pytest.approx(10 * clean[40], rel=1e-4)


def test_a_run_that_is_there_is_not_run_again(toy, monkeypatch):
    config, verdicts = toy
    monkeypatch.setattr("experiments.campaign.train", lambda _: pytest.fail("was run again"))
    assert main(config) == verdicts


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


def test_alarms_before_the_onset_are_false_and_those_without_a_name_unknown(tmp_path):
    alarms = [{"kind": "alarm", "step": step, "key": "k"} for step in (30, 70)]
    verdict = judge(Run("r", tmp_path, {}, {}, tuple(alarms), ()), "c", 0, "x", 50, 100, 20)
    assert (verdict.false_alarms, verdict.clean_steps, verdict.named) == (1, 30, Fault.UNKNOWN)
    assert (verdict.first_alarm, verdict.lead) == (20, 30)


def test_every_kind_of_fault_has_a_case():
    assert {case.truth for case in CASES.values()} >= set(Fault) - {
        Fault.UNKNOWN,
        Fault.NO_QK_NORM,
        Fault.LOW_RANK,
    }


def test_an_end_before_the_onset_is_refused():
    with pytest.raises(ValueError, match="gradient: ends at 3, before its onset 5"):
        Disturbance("gradient", 0, 5, 3)
