"""A level that changes for good is called, a course, a spike and noise are not."""

import math

import numpy as np
import pytest

from stabmon.alarms.detectors.shifts import Shift


def watch(values, **options):
    detector = Shift("shift", "m", **options)
    alarms = [a for i, x in enumerate(values) for a in detector.update(10 * i, {"m": float(x)})]
    return detector, alarms


def noisy(seed, count, course=lambda i: 1.0, sd=0.1):
    rng = np.random.default_rng(seed)
    return [course(i) * math.exp(sd * rng.normal()) for i in range(count)]


def test_z_is_the_median_distance_from_the_line_before():
    before = [math.exp(0.1 * i + 0.05 * (-1) ** i) for i in range(10)]
    after = [math.exp(0.1 * i + 0.6) for i in range(10, 13)]
    _, (alarm,) = watch(before + after, before=10, recent=3)
    sign, at = (-1.0) ** np.arange(10), np.arange(10)
    y = 0.1 * at + 0.05 * sign
    slope = np.median([(y[j] - y[i]) / (j - i) for i in at for j in at if i < j])
    rest = y - slope * at - np.median(y - slope * at)
    late = np.array([0.1 * i + 0.6 - slope * i for i in range(10, 13)]) - np.median(y - slope * at)
    assert alarm.step == 120
    assert alarm.z == pytest.approx(np.median(late) / (1.4826 * np.median(np.abs(rest))))
    assert alarm.reference == pytest.approx(np.exp(slope * 12 + np.median(y - slope * at)))


@pytest.mark.parametrize("seed", range(5))
def test_a_level_twice_as_high_is_called_within_the_samples_held_against_the_line(seed):
    _, alarms = watch(noisy(seed, 160, lambda i: 2.0 if i >= 80 else 1.0))
    assert [80 <= a.step // 10 < 88 for a in alarms] == [True]


@pytest.mark.parametrize("seed", range(5))
def test_a_steady_rise_is_not_called(seed):
    assert watch(noisy(seed, 600, lambda i: math.exp(0.01 * i)))[1] == []


@pytest.mark.parametrize("spike", [1, 3])
def test_a_spike_shorter_than_half_of_what_is_held_against_the_line_is_not_called(spike):
    assert watch(noisy(0, 200, lambda i: 50.0 if 80 <= i < 80 + spike else 1.0))[1] == []


def test_the_other_side_is_not_called_unless_both_are_asked_for():
    fallen = noisy(0, 160, lambda i: 0.4 if i >= 80 else 1.0)
    assert watch(fallen)[1] == []
    assert [a.direction for a in watch(fallen, side="both")[1]] == ["down"]


def test_what_stays_becomes_the_course_and_the_alarm_ends():
    raised = noisy(0, 90, lambda i: 2.0 if i >= 80 else 1.0)
    assert watch(raised)[0].active() == ("m",)
    assert watch(raised + noisy(1, 60, lambda i: 2.0))[0].active() == ()


def test_nothing_is_judged_before_the_warm_up_and_too_few_samples_are_refused():
    assert watch([1.0] * 38 + [9.0] * 8, first=200)[1] == []
    with pytest.raises(ValueError, match="before >= 8 and recent >= 1 samples, got 4 and 2"):
        Shift("shift", "m", before=4, recent=2)
