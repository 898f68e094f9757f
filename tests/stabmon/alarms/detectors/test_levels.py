"""A loss that stands too high, values that cannot be, and changes that are known."""

import numpy as np
import pytest

from stabmon.alarms.detectors.conditions import Conditions
from stabmon.alarms.detectors.impossible import Impossible
from stabmon.alarms.detectors.levels import Level
from stabmon.quantities import CHANGED, HELD_OUT, LEARNING_RATE, LOSS, PER_RATE, UPDATE_RATIO


def alarms(detector, values, key=LOSS):
    return [a for i, x in enumerate(values) for a in detector.update(10 * i, {key: float(x)})]


def course(seed, samples=150):
    rng = np.random.default_rng(seed)
    return 2 + 2 * np.exp(-np.arange(samples) / 30) + 0.1 * rng.standard_normal(samples)


@pytest.mark.parametrize("seed", range(5))
def test_a_loss_that_learns_is_quiet_and_one_that_stands_a_fifth_higher_is_not(seed):
    healthy = course(seed)
    assert alarms(Level("level", LOSS), healthy) == []
    raised = alarms(Level("level", LOSS), healthy + 0.4 * (np.arange(150) >= 100))
    assert [a.direction for a in raised] == ["up"]
    assert 1000 <= raised[0].step <= 1300


def test_a_loss_of_nothing_and_one_that_stands_still_cannot_be():
    assert [a.step for a in alarms(Impossible(LOSS), [2.0, 1.9, 0.0, 1.8])] == [20]
    assert [a.step for a in alarms(Impossible(LOSS), [2.0] * 4 + [1.9] * 5)] == [80]
    assert alarms(Impossible(HELD_OUT), [2.0] * 9, HELD_OUT) == []


def test_updates_are_judged_over_the_rate_where_it_is_known():
    conditions = Conditions()
    assert conditions.judged({UPDATE_RATIO: 0.01}) == {UPDATE_RATIO: 0.01}
    assert conditions.judged({UPDATE_RATIO: 0.01, LEARNING_RATE: 0.1})[PER_RATE] == 0.01 / 0.1


def test_a_declared_change_and_a_rate_that_is_raised_are_seen_and_a_decay_is_not():
    conditions = Conditions()
    rates = np.linspace(1.0, 0.1, 50)
    assert not any(conditions.note(10 * i, {LEARNING_RATE: x}) for i, x in enumerate(rates))
    assert conditions.note(500, {LEARNING_RATE: 1.0})
    conditions = Conditions()
    conditions.note(0, {LEARNING_RATE: 1.0})
    conditions.note(10, {LEARNING_RATE: 1.0})
    seen = [conditions.note(20 + i, {LEARNING_RATE: 1.0, CHANGED: 20.0}) for i in range(3)]
    assert seen == [True, False, False]
