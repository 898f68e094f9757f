"""Healthy and slightly worse beats collapsing and slightly better."""

import math
from pathlib import Path

import numpy as np
import pytest

import stabmon
from stabmon.output.ranking import active_alarms, grade_of, rank_checkpoints, state_of
from stabmon.runs.run import Run

RATIO, LOSS = "activations/global/rank_ratio/min", "symptoms/global/loss/value"
STEPS = np.arange(10, 401, 10)


def run(ratios=None, losses=None, events=()):
    """A run of 400 steps, with one value for each hundred."""
    given = ((RATIO, ratios), (LOSS, losses))
    metrics = {key: (STEPS, np.repeat(x, 10)) for key, x in given if x}
    return Run("r", Path("r"), {}, metrics, tuple(events), ())


def alarm(step, key="k"):
    return {"kind": "alarm", "step": step, "key": key}


def order(made, steps=(100, 200, 300, 400), **options):
    return [x.step for x in rank_checkpoints(made, steps, **options)]


def test_grades_equal_the_metrics():
    ratios = [0.0, 0.1, 0.100001, 0.3, 0.5, 0.55, 0.7, 0.71, 1.0, math.nan, math.inf]
    assert [grade_of(x) for x in ratios] == [int(stabmon.grade(np.float32(x))) for x in ratios]


def test_a_collapsing_checkpoint_with_a_lower_loss_is_not_the_best():
    made = run(ratios=[0.65, 0.62, 0.45, 0.25], losses=[3.0, 2.05, 2.0, 1.0])
    states = {x.step: x.state for x in rank_checkpoints(made, (100, 200, 300, 400))}
    assert states == {100: "healthy", 200: "healthy", 300: "danger", 400: "danger"}
    assert order(made)[:2] == [200, 100]


def test_caution_must_be_better_by_the_tolerance():
    made = run(ratios=[0.65, 0.55, 0.45, 0.45], losses=[3.0, 2.0, 2.0, 1.7])
    assert order(made) == [400, 200, 300, 100]
    assert order(made, tolerance=0.5) == [200, 400, 100, 300]


def test_two_grades_lost_within_100_steps_are_a_danger():
    assert state_of({0: 7, 100: 5}, 100) == "danger"
    assert state_of({0: 7, 101: 5}, 101) == "healthy"
    assert state_of({0: 7, 100: 5}, 50) == "healthy"
    assert state_of({}, 50) == "no grade"


def test_an_alarm_is_caution_until_a_rewind_undoes_it():
    events = [alarm(150), {"kind": "rewind", "step": 120}, alarm(350, "other")]
    made = run(ratios=[0.65] * 4, losses=[2.0, 2.0, 1.95, 1.9], events=events)
    assert active_alarms(made, 400) == ("other",)
    assert [x.alarms for x in rank_checkpoints(made, [300])] == [()]
    assert order(made) == [300, 200, 100, 400]


def test_a_loss_that_is_not_finite_is_a_danger():
    made = run(losses=[2.0, math.nan, 2.0, 2.0])
    assert [x.state for x in rank_checkpoints(made, [100, 200])] == ["no grade", "danger"]


def test_one_noisy_batch_does_not_decide():
    steps = np.arange(100, 1000, 10)
    losses = np.where(steps == 500, 0.5, 2.0) - steps / 1e4
    made = Run("r", Path("r"), {}, {LOSS: (steps, losses)}, (), ())
    assert [x.step for x in rank_checkpoints(made, [500, 900])] == [900, 500]


def test_the_held_out_loss_is_taken_as_it_is_and_first():
    made = run(losses=[9.0] * 4)
    held_out = (np.array([100, 200, 300]), np.array([3.0, 2.0, 1.0]))
    made.metrics["evaluation/global/loss/value"] = held_out
    assert [x.loss for x in rank_checkpoints(made, [300, 250])] == [1.0, 2.0]


def test_checkpoints_before_any_sample_come_last():
    made = run(ratios=[0.65] * 4, losses=[2.0] * 4)
    last = rank_checkpoints(made, [5, 400])[-1]
    assert (last.step, last.loss, last.measured) == (5, None, None)


def test_a_negative_tolerance_is_refused():
    with pytest.raises(ValueError, match="tolerance: expected a fraction >= 0, got -1"):
        rank_checkpoints(run(), [1], tolerance=-1.0)
