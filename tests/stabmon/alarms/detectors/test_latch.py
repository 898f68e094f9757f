"""Dwell, hysteresis and cooldown; what is refused."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stabmon.alarms.detectors.latch import Latches, Patience


def steps_of(patience, scores, every=10):
    latches = Latches(patience)
    return [every * i for i, score in enumerate(scores) if latches.update("m", every * i, score)]


def test_dwell_counts_samples_running_on_one_side():
    assert steps_of(Patience(dwell=3), [2, 2, 0, 2, 2, 2]) == [50]
    assert steps_of(Patience(dwell=2), [2, -2, 2, -2, -2]) == [40]


def test_at_the_threshold_itself_nothing_counts():
    assert steps_of(Patience(dwell=1), [1, 1, -1]) == []


def test_between_the_thresholds_an_alarm_goes_on_and_no_other_comes():
    wavering = [2, 0.8, 2, 0.8, 2]
    assert steps_of(Patience(dwell=1, rearm=0.5, cooldown=0), wavering) == [0]
    assert steps_of(Patience(dwell=1, rearm=0.9, cooldown=0), wavering) == [0, 20, 40]


def test_a_condition_that_lasts_alarms_once():
    assert steps_of(Patience(dwell=1, cooldown=0), [2] * 200) == [0]


def test_the_cooldown_holds_back_until_it_is_over_and_only_then():
    assert steps_of(Patience(dwell=1, cooldown=50), [2, 0, 2, 0, 0, 0, 2]) == [0, 60]
    assert steps_of(Patience(dwell=1, cooldown=50), [2, 0, 2, 2, 2, 2, 2]) == [0, 50]


def test_a_score_that_is_no_number_needs_no_dwell():
    assert steps_of(Patience(dwell=5), [0, math.nan]) == [10]


def test_a_metric_is_active_until_it_is_calm_again():
    latches = Latches(Patience(dwell=2, cooldown=1000))
    seen = []
    for i, score in enumerate([2, 2, 0.7, 0, 0, 2, 2]):
        latches.update("m", i, score)
        seen.append(latches.active() == ("m",))
    assert seen == [False, True, True, True, False, False, True]


@given(st.lists(st.floats(-3, 3), max_size=60), st.integers(1, 4), st.integers(0, 100))
def test_alarms_keep_their_distance_and_have_dwelt(scores, dwell, cooldown):
    fired = steps_of(Patience(dwell, 0.5, cooldown), scores)
    assert all(b - a >= cooldown for a, b in itertools.pairwise(fired))
    for step in fired:
        tail = scores[step // 10 + 1 - dwell : step // 10 + 1]
        assert len(tail) == dwell
        assert all(x > 1 for x in tail) or all(x < -1 for x in tail)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dwell": 0}, "at least 1 sample, got 0"),
        ({"rearm": 0.0}, r"in \(0, 1\], got 0.0"),
        ({"rearm": 1.5}, r"in \(0, 1\], got 1.5"),
        ({"cooldown": -1}, "steps >= 0, got -1"),
    ],
)
def test_senseless_patience_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Patience(**wrong)
