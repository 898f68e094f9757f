"""One contract over every detector: resumable, JSON for a state, non-finite values, quiet."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stabmon.alarms.detectors.bands import BandDetector
from stabmon.alarms.detectors.deviations import AllHeads, Cusum, RobustZ
from stabmon.alarms.detectors.grades import GradeWatch
from stabmon.alarms.detectors.latch import Patience
from stabmon.alarms.detectors.limits import Threshold
from stabmon.alarms.detectors.shifts import Shift
from stabmon.alarms.detectors.surges import Surge
from stabmon.alarms.detectors.window import HealthyWindow
from stabmon.alarms.reference import Band, Reference
from stabmon.alarms.standard import standard_detectors

ENTROPY = "attention/global/entropy/mean"
RANK = "activations/global/rank_ratio/min"
QUICK = Patience(dwell=2, cooldown=30)


def bands():
    steps = np.asarray([0, 1000])
    return Reference({"m": Band(steps, np.ones(2), np.full(2, 0.1), "own")}, (50, 150), {})


BUILD = {
    "bands": (lambda: BandDetector(bands()), "m"),
    "z": (lambda: RobustZ("z", "m", HealthyWindow(50, 150), patience=QUICK), "m"),
    "ratchet": (lambda: RobustZ("z", "m", HealthyWindow(50, 150, ratchet=1), "down"), "m"),
    "drift": (lambda: Cusum("drift", "m", HealthyWindow(50, 150), "up", patience=QUICK), "m"),
    "surge": (lambda: Surge("surge", "m", first=20, settle=8, patience=QUICK), "m"),
    "shift": (lambda: Shift("shift", "m", 20, "up", 6.0, 16, 5, patience=QUICK), "m"),
    "threshold": (lambda: Threshold("limit", "m", 3.0, patience=QUICK), "m"),
    "heads": (lambda: AllHeads(HealthyWindow(50, 150), patience=QUICK), ENTROPY),
    "grade": (lambda: GradeWatch(20, patience=QUICK), RANK),
    "board": (standard_detectors, ENTROPY),
}


def scaled(key, x):
    """A value of the metric's usual size."""
    return 0.6 * x if key == RANK else x


def feed(detector, key, samples):
    return [
        (alarm.step, alarm.rule, alarm.key, str(alarm.value))
        for step, x in samples
        for alarm in detector.update(step, {key: scaled(key, x)})
    ]


noise = np.random.default_rng(0).normal(size=40) * 0.02
# Healthy, a bad stretch, recovery, a non-finite value, and another bad stretch.
STORY = [1.0] * 22 + [0.3] * 6 + [1.0] * 8 + [math.nan] + [1.0] * 8 + [4.0] * 8 + [0.3] * 8
STEPS = [(10 * i, x * (1 + noise[i % 40])) for i, x in enumerate(STORY)]


@pytest.mark.parametrize("name", BUILD)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(cut=st.integers(0, len(STEPS)))
def test_interrupted_is_as_uninterrupted(name, cut):
    build, key = BUILD[name]
    whole, first, second = build(), build(), build()
    expected = feed(whole, key, STEPS)
    alarms = feed(first, key, STEPS[:cut])
    second.restore(json.loads(json.dumps(first.state())))
    assert alarms + feed(second, key, STEPS[cut:]) == expected
    assert json.dumps(second.state()) == json.dumps(whole.state())
    assert second.active() == whole.active()
    assert expected


@pytest.mark.parametrize("name", BUILD)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [2, 21])
def test_a_non_finite_value_alarms_at_once_and_leaves_no_trace(name, bad, at):
    if name == "grade":
        pytest.skip("a ratio that cannot be read says nothing about the rank: test_grades.py")
    build, key = BUILD[name]
    healthy = [(10 * i, 1.0 + noise[i % 40]) for i in range(60)]
    broken = [(step, bad if i == at else x) for i, (step, x) in enumerate(healthy)]
    detector = build()
    alarms = feed(detector, key, broken)
    assert [(step, value) for step, _, _, value in alarms] == [(10 * at, str(scaled(key, bad)))]
    assert detector.active() == ()
    assert not any(
        text in json.dumps(detector.state()["latches" if name != "board" else "loss"])
        for text in ("NaN", "Infinity")
    )


@pytest.mark.parametrize("name", BUILD)
def test_metrics_of_others_are_ignored(name):
    detector = BUILD[name][0]()
    assert [a for i in range(40) for a in detector.update(10 * i, {"other": 5.0 * (i > 25)})] == []


@pytest.mark.parametrize("seed", range(3))
def test_a_level_that_does_not_move_is_quiet(seed):
    rng = np.random.default_rng(seed)
    for name, (build, key) in BUILD.items():
        detector = build()
        samples = [(10 * i, 1 + 0.05 * float(rng.normal())) for i in range(1000)]
        assert feed(detector, key, samples) == [], name
