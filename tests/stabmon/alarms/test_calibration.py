"""Thresholds from clean seeds: the rate asked for, and the one found by leaving one out."""

import math
from pathlib import Path

import numpy as np
import pytest

from stabmon.alarms.calibration import calibrate
from stabmon.alarms.detectors.latch import Patience
from stabmon.alarms.detectors.limits import Threshold
from stabmon.alarms.lead import alarms_of
from stabmon.runs.run import Run

ONE = Patience(dwell=1, cooldown=0)
build = lambda t: Threshold("limit", "m", t, patience=ONE)


def run(seed, count=300, every=10, scale=1.0):
    x = scale * np.abs(np.random.default_rng(seed).normal(size=count))
    return Run(f"s{seed}", Path("x"), {}, {"m": (every * np.arange(count), x)}, (), ())


def test_the_threshold_is_the_smallest_that_keeps_the_rate():
    runs = [run(s, count=300) for s in range(3)]
    candidates = [2.0, 2.2, 2.4, 2.6, 2.8, 3.0]
    found = calibrate(runs, build, candidates, rate=10.0)
    count = lambda t: sum(len(alarms_of(r, build(t))) for r in runs)
    assert found.steps == 3 * 2990
    assert count(found.threshold) / found.steps * 10_000 == pytest.approx(found.fitted_rate)
    assert found.fitted_rate <= 10.0 < count(found.threshold - 0.2) / found.steps * 10_000
    # 10 in 10,000 steps are 1 % of the samples: |x| > 2.58.
    assert found.threshold == pytest.approx(2.6, abs=0.25)
    assert found.achieved_rate == pytest.approx(10.0, rel=0.7)
    assert found.achieved_rate < found.unseen_bound < 3 * found.achieved_rate


def test_an_odd_seed_is_judged_by_the_others():
    found = calibrate([run(0), run(1), run(2, scale=3.0)], build, [2.0, 4.0, 8.0, 16.0], rate=0.0)
    assert found.threshold == 16.0 or found.threshold == 8.0
    assert found.left_out[2] == 4.0
    assert found.alarms[2] > 0
    assert found.achieved_rate > found.fitted_rate == 0.0


def test_no_alarm_at_all_still_leaves_a_bound():
    found = calibrate([run(0), run(1)], build, [50.0], rate=1.0)
    assert (found.achieved_rate, found.alarms) == (0.0, (0, 0))
    assert found.unseen_bound == pytest.approx(2.996 / found.steps * 10_000, rel=1e-3)


def test_no_threshold_is_enough():
    assert calibrate([run(0), run(1)], build, [0.5], rate=1.0).threshold == math.inf


@pytest.mark.parametrize(
    ("runs", "candidates", "rate", "message"),
    [
        ([run(0)], [1.0], 1.0, "at least two clean runs, got 1"),
        ([run(0), run(1)], [], 1.0, "expected thresholds to try"),
        ([run(0), run(1)], [1.0], -1.0, "a rate >= 0"),
        ([run(0), run(1, count=1)], [1.0], 1.0, "s1 spans no step"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(runs, candidates, rate, message):
    with pytest.raises(ValueError, match=message):
        calibrate(runs, build, candidates, rate)
