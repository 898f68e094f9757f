"""The grade table: grades, caution, danger, and a run that has always been low."""

import math

import numpy as np
import pytest

from stabmon.alarms.detectors.grades import THRESHOLDS, GradeWatch, Health, grade_of
from stabmon.metrics.activations import GRADE_THRESHOLDS, grade

KEY = "activations/global/rank_ratio/min"


def story(values, every=50, **settings):
    """[(step, rule)] of the alarms, and the health after each sample."""
    watch = GradeWatch(**settings)
    alarms, states = [], []
    for i, x in enumerate(values):
        alarms += [(a.step, a.rule) for a in watch.update(every * i, {KEY: float(x)})]
        states.append(watch.health)
    return alarms, states


def test_the_grades_are_those_of_the_device():
    assert THRESHOLDS == GRADE_THRESHOLDS
    for ratio in (0.0, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 1.0):
        assert grade_of(ratio) == int(grade(np.float32(ratio)))
    assert grade_of(math.nan) == 0


def test_low_and_falling_is_caution_after_two_hundred_steps():
    values = [0.6] * 5 + [0.6 - 0.02 * i for i in range(10)]
    alarms, states = story(values)
    assert alarms == [(550, "caution")]  # 0.48, and 0.50 before it
    assert states[-1] is Health.CAUTION


def test_low_and_flat_is_healthy():
    assert story([0.6] * 5 + [0.48] * 30)[0] == [(300, "caution")]  # the fall itself
    assert story([0.6] * 5 + [0.48] * 30)[1][-1] is Health.HEALTHY
    assert story([0.42] * 30)[0] == []


def test_under_three_tenths_for_two_samples_is_danger():
    slow = [0.5 - 0.006 * i for i in range(45)]
    alarms, states = story(slow)
    assert [rule for _, rule in alarms] == ["caution", "danger"]
    assert alarms[1][0] == 50 * 35
    assert states[-1] is Health.DANGER


def test_two_grades_within_a_hundred_steps_are_danger_and_in_a_thousand_not():
    assert (550, "danger") in story([0.66] * 10 + [0.45] * 5)[0]
    gradual = [0.66] * 10 + list(np.linspace(0.66, 0.52, 20)) + [0.52] * 10
    assert story(gradual)[0] == []


def test_one_odd_batch_is_nothing():
    assert story([0.66] * 10 + [0.2] + [0.66] * 10)[0] == []


def test_a_run_that_has_always_been_low_is_judged_by_what_it_loses():
    assert story([0.25] * 30)[0] == []
    assert (850, "danger") in story([0.25] * 16 + [0.12] * 5)[0]


def test_the_warm_up_is_not_looked_at():
    assert story([0.75] * 4 + [0.3] * 4 + [0.32] * 20, first=200)[0] == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_ratio_that_is_no_number_is_danger(bad):
    alarms, states = story([0.6] * 10 + [bad])
    assert alarms == [(500, "danger")]
    assert states[-1] is Health.DANGER
