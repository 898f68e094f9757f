"""Fixed limits, all heads together, surges of a symptom, slow drift."""

import math

import numpy as np
import pytest

from stabmon.alarms.detectors.deviations import AllHeads, Cusum, RobustZ
from stabmon.alarms.detectors.latch import Patience
from stabmon.alarms.detectors.limits import Threshold
from stabmon.alarms.detectors.surges import Surge
from stabmon.alarms.detectors.window import HealthyWindow
from stabmon.alarms.diagnosis import diagnose
from stabmon.alarms.signatures import Fault

ENTROPY, SHARP = "attention/global/entropy/mean", "attention/global/sharp_heads/mean"


def feed(detector, values, key="m", every=10):
    return [
        alarm for i, x in enumerate(values) for alarm in detector.update(every * i, {key: float(x)})
    ]


def noise(seed, count, spread=0.05):
    return 1 + spread * np.random.default_rng(seed).normal(size=count)


def test_above_the_limit_and_not_at_it():
    (alarm,) = feed(Threshold("limit", "m", 1e4), [1e4, 1e4, 10_001, 2e4])
    assert (alarm.step, alarm.reference, alarm.direction) == (20, 1e4, "up")


def test_a_limit_of_zero_counts_anything_above_it():
    assert [a.step for a in feed(Threshold("limit", "m", 0.0), [0, 0, 1, 0, 0])] == [20]


def test_before_its_first_step_only_what_is_not_finite_alarms():
    detector = Threshold("limit", "m", 1.0, first=50)
    assert [a.step for a in feed(detector, [0, 2, math.nan, 0, 0, 0])] == [20]
    assert [a.step for a in feed(Threshold("limit", "m", 1.0, first=50), [2] * 9)] == [50]


def test_a_negative_limit_is_refused():
    with pytest.raises(ValueError, match="limit: expected a number >= 0, got -1"):
        Threshold("limit", "m", -1.0)


def test_half_of_the_mean_entropy_is_all_heads_and_more_than_half_is_not():
    heads = lambda: AllHeads(HealthyWindow(0, 200))
    assert [a.step for a in feed(heads(), [2.0] * 30 + [1.0] * 3, ENTROPY)] == [310]
    assert feed(heads(), [2.0] * 30 + [1.02] * 50, ENTROPY) == []


def test_most_heads_sharp_is_all_heads_unless_they_were_before():
    heads = lambda: AllHeads(HealthyWindow(0, 200))
    (alarm,) = feed(heads(), [0.1] * 30 + [0.5] * 3, SHARP)
    assert (alarm.step, alarm.direction) == (310, "up")
    assert feed(heads(), [0.1] * 30 + [0.45] * 9, SHARP) == []
    assert feed(heads(), [0.4] * 30 + [0.89] * 9, SHARP) == []


def test_heads_that_were_sharp_from_the_start_are_no_healthy_level():
    heads = lambda: AllHeads(HealthyWindow(0, 200))
    (alarm,) = feed(heads(), [1.0] * 30, SHARP)
    assert (alarm.step, alarm.value, alarm.reference) == (220, 1.0, 0.9)
    assert alarm.direction == "up"
    found = diagnose(alarm.step, [alarm])
    assert found.fault is Fault.NO_QK_NORM
    assert feed(heads(), [0.85] * 30, SHARP) == []
    with pytest.raises(ValueError, match=r"most: expected a share from 0\.5 to 1, got 1\.5"):
        AllHeads(HealthyWindow(0, 200), most=1.5)


def test_one_outlier_is_a_surge_and_does_not_blind_the_baseline():
    x = noise(0, 200)
    x[100], x[105] = 30.0, 1.7
    alarms = feed(Surge("surge", "m", patience=Patience(dwell=1, cooldown=0)), x)
    assert [a.step for a in alarms] == [1000, 1050]
    assert alarms[1].reference == pytest.approx(1.0, rel=0.05)


def test_a_surge_is_one_sided():
    x = noise(0, 200)
    x[100] = 0.3
    assert feed(Surge("surge", "m"), x) == []
    (alarm,) = feed(Surge("plunge", "m", side="down"), x)
    assert (alarm.step, alarm.direction) == (1000, "down")


def test_what_falls_slowly_is_no_surge():
    falling = noise(1, 500) * np.exp(-np.arange(500) / 300)
    assert feed(Surge("surge", "m", threshold=4.0), falling) == []


def test_before_the_warm_up_ends_nothing_enters_the_baseline():
    x = np.concatenate([np.full(20, 1000.0), noise(2, 100)])
    x[80] = 3.0
    assert [a.step for a in feed(Surge("surge", "m", first=200), x)] == [800]


def test_a_surge_without_sense_is_refused():
    with pytest.raises(ValueError, match=r"between 0 and 1, got 1\.0"):
        Surge("surge", "m", decay=1.0)
    with pytest.raises(ValueError, match="at least 3 samples, got 2"):
        Surge("surge", "m", settle=2)


def test_z_takes_the_harmful_side_only():
    window = lambda: HealthyWindow(0, 200)
    up = np.concatenate([noise(3, 30), np.full(9, 2.0)])
    down = np.concatenate([noise(3, 30), np.full(9, 0.1)])
    assert [a.step for a in feed(RobustZ("z", "m", window(), "up"), up)] == [310]
    assert feed(RobustZ("z", "m", window(), "down"), up) == []
    assert [a.direction for a in feed(RobustZ("z", "m", window(), "both"), down)] == ["down"]


def test_a_drift_too_small_for_z_is_found_and_a_lone_outlier_is_not():
    window = lambda: HealthyWindow(0, 200, floor=0.05)
    drifting = noise(4, 300) - np.maximum(np.arange(300) - 100, 0) * 0.001
    drift = Cusum("drift", "m", window(), "down")
    (alarm,) = feed(drift, drifting)
    assert 1500 < alarm.step < 2900
    assert feed(RobustZ("z", "m", window(), "down"), drifting[:230]) == []
    alone = noise(5, 300)
    alone[100] = 0.01
    assert feed(Cusum("drift", "m", window(), "down"), alone) == []


def test_the_ratchet_does_not_let_a_slow_collapse_be_absorbed():
    course = np.concatenate([np.linspace(1, 2, 100), np.linspace(2, 1.2, 600)])
    detector = RobustZ("z", "m", HealthyWindow(0, 200, ratchet=1, floor=0.04), "down")
    (alarm,) = feed(detector, course)
    assert alarm.reference == pytest.approx(1.92, abs=0.02)  # a spread of 4 % below the best
    assert alarm.value == pytest.approx(1.92 * (1 - 6 * 0.04), abs=0.05)
