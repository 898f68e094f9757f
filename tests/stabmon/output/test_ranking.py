"""Checkpoints by loss among those that are finite and free of alarms."""

import math
from pathlib import Path

import numpy as np
import pytest

from stabmon.output.ranking import alarms_against, rank_checkpoints
from stabmon.quantities import HELD_OUT
from stabmon.runs.run import Run

RATIO, LOSS = "activations/global/rank_ratio/min", "symptoms/global/loss/value"
BROKEN = "symptoms/global/nonfinite/value"
STEPS = np.arange(10, 401, 10)


def run(ratios=None, losses=None, broken=None, events=()):
    """A run of 400 steps, with one value for each hundred."""
    given = ((RATIO, ratios), (LOSS, losses), (BROKEN, broken))
    metrics = {key: (STEPS, np.repeat(x, 10)) for key, x in given if x}
    return Run("r", Path("r"), {}, metrics, tuple(events), ())


def alarm(step, key="k", rule="z"):
    return {"kind": "alarm", "step": step, "key": key, "rule": rule}


def ranked(made, steps=(100, 200, 300, 400)):
    return [(x.step, x.against) for x in rank_checkpoints(made, steps)]


def test_the_loss_decides_and_the_grade_does_not():
    made = run(ratios=[0.65, 0.62, 0.45, 0.25], losses=[3.0, 2.05, 2.0, 1.0])
    assert ranked(made) == [(400, ""), (300, ""), (200, ""), (100, "")]
    assert [x.grade for x in rank_checkpoints(made, [100, 400])] == [2, 6]


def test_what_alarms_speak_against_comes_after_all_others():
    events = [alarm(150), {"kind": "rewind", "step": 120}, alarm(350, "other")]
    made = run(losses=[2.0, 2.0, 1.95, 1.0], events=events)
    assert ranked(made) == [(300, ""), (200, ""), (100, ""), (400, "alarms")]
    assert alarms_against(made, 400) == ("other",)


def test_a_spike_is_held_against_a_checkpoint_for_a_while_and_a_collapse_for_good():
    made = run(losses=[2.0] * 4, events=[alarm(100, "a", "spike"), alarm(120, "b", "drift")])
    assert alarms_against(made, 1100) == ("a", "b")
    assert alarms_against(made, 1101) == ("b",)


def test_a_metric_that_could_not_be_read_is_nothing_against_a_checkpoint():
    made = run(losses=[2.0] * 4, events=[alarm(100, rule="unreadable")])
    assert {against for _, against in ranked(made)} == {""}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_comes_last(bad):
    made = run(losses=[3.0, bad, 2.0, 1.0], broken=[0, 0, 0, 3])
    assert ranked(made) == [(300, ""), (100, ""), (400, "not finite"), (200, "not finite")]


def test_one_noisy_batch_does_not_decide():
    steps = np.arange(100, 1000, 10)
    losses = np.where(steps == 500, 0.5, 2.0) - steps / 1e4
    made = Run("r", Path("r"), {}, {LOSS: (steps, losses)}, (), ())
    assert ranked(made, [500, 900]) == [(900, ""), (500, "")]


def test_the_held_out_loss_is_taken_as_it_is_and_first():
    made = run(losses=[9.0] * 4)
    made.metrics[HELD_OUT] = (np.array([100, 200, 300]), np.array([3.0, 2.0, 1.0]))
    assert [x.loss for x in rank_checkpoints(made, [300, 250])] == [1.0, 2.0]


def test_checkpoints_before_any_sample_are_not_ranked():
    last = rank_checkpoints(run(ratios=[0.65] * 4, losses=[2.0] * 4), [5, 400])[-1]
    assert (last.step, last.against, last.loss, last.measured) == (5, "no loss", None, None)
