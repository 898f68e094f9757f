"""The healthy window: when it ends, what enters, the ratchet; the same from a recorded run."""

import math
from pathlib import Path

import numpy as np
import pytest

from stabmon.alarms.detectors.bands import BandDetector
from stabmon.alarms.detectors.window import HealthyWindow, median_and_spread
from stabmon.alarms.reference import Reference, freeze
from stabmon.runs.run import Run

STEPS = np.arange(0, 1000, 20)


def test_median_and_spread_are_of_the_bulk():
    x = 5 + 0.5 * np.random.default_rng(0).normal(size=4000)
    median, spread = median_and_spread(np.concatenate([x, np.full(200, 1e6)]))
    assert median == pytest.approx(5, abs=0.1)
    assert spread == pytest.approx(0.5, rel=0.1)


def test_the_spread_has_a_floor():
    assert median_and_spread([2.0, 2.0, 2.0], floor=0.1) == (2.0, pytest.approx(0.2))
    assert median_and_spread([0.0, 0.0, 0.0]) == (0.0, 1e-6)


def levels(window, values, every=20):
    return [window.level("m", every * i, x) for i, x in enumerate(values)]


def test_nothing_is_judged_before_the_end_and_the_warm_up_does_not_enter():
    got = levels(HealthyWindow(100, 300), [50.0] * 5 + [1.0] * 20)
    assert got[:17] == [None] * 17  # until the twelfth sample
    assert got[17] == (1.0, pytest.approx(0.02))


def test_a_metric_that_is_sampled_seldom_gets_its_samples_all_the_same():
    got = levels(HealthyWindow(100, 300, least=8), [1.0] * 12, every=100)
    assert [x is not None for x in got].index(True) == 9  # after samples at 100 … 800


def test_a_value_that_is_not_finite_never_enters():
    window = HealthyWindow(0, 100, least=3)
    assert levels(window, [1.0, math.nan, math.inf, 1.0, 1.0, 1.0, 1.0])[-1] == (1.0, 0.02)


def test_the_level_stays_without_a_ratchet_and_follows_one_way_with_it():
    values = [1.0] * 12 + [2.0] * 20 + [0.5] * 20
    assert levels(HealthyWindow(0, 200), values)[-1] == (1.0, pytest.approx(0.02))
    up = levels(HealthyWindow(0, 200, ratchet=1), values)[-1]
    assert up == (pytest.approx(1.98), pytest.approx(0.02 * 1.98))
    down = levels(HealthyWindow(0, 200, ratchet=-1), values)[-1]
    assert down == (pytest.approx(0.52), pytest.approx(0.02))


def test_the_spread_widens_with_the_age_of_the_level_from_the_ratchet_on():
    values = [1.0] * 12 + [2.0] * 9
    fixed = levels(HealthyWindow(0, 200, 3, widen=2.0), values)
    assert fixed[11] == (1.0, pytest.approx(0.02))  # frozen at step 220
    assert fixed[20] == (1.0, pytest.approx(0.02 * math.sqrt(1 + (400 - 220) / 400)))
    young = levels(HealthyWindow(0, 200, 3, ratchet=1, widen=2.0), values)
    assert young[20] == (pytest.approx(1.98), pytest.approx(0.02 * 1.98 * math.sqrt(1 + 20 / 400)))


def test_a_window_without_length_is_refused():
    with pytest.raises(ValueError, match="expected first <= last, got 300 and 200"):
        HealthyWindow(300, 200)
    with pytest.raises(ValueError, match="least >= 3 samples, got 2"):
        HealthyWindow(0, 10, least=2)
    with pytest.raises(ValueError, match="expected widen > 0, got 0"):
        HealthyWindow(0, 10, widen=0)


def recorded(values):
    return Run("r", Path("r"), {}, {"m": (STEPS, np.asarray(values, float))}, (), ())


def test_frozen_bands_judge_only_what_comes_after_and_do_not_follow():
    values = np.where(STEPS < 100, 9.0, 1.0) - 0.002 * np.maximum(STEPS - 500, 0)
    reference = freeze(recorded(values), ["m"], (100, 300), warmup=100)
    detector = BandDetector(reference)
    steps = [
        s
        for s, x in zip(STEPS.tolist(), values.tolist(), strict=True)
        if detector.update(s, {"m": x})
    ]
    assert steps == [580]  # 1 − 0.002 · 80 is 8 spreads of 0.02 down, for the second time
    assert reference.bands["m"](900) == (1.0, pytest.approx(0.02))


def test_a_frozen_reference_survives_its_file(tmp_path):
    reference = freeze(recorded(np.ones(50)), ["m"], (100, 300))
    reference.save(tmp_path / "own.json")
    loaded = Reference.load(tmp_path / "own.json")
    assert loaded.bands["m"].judged == "after"
    assert BandDetector(loaded).score("m", 200, 99.0) is None
    assert BandDetector(loaded).score("m", 320, 99.0).z > 1000


def test_a_window_within_the_warm_up_is_refused():
    with pytest.raises(ValueError, match="begins within the warm-up of 200 steps"):
        freeze(recorded(np.ones(50)), ["m"], (100, 300), warmup=200)


def test_too_few_values_are_refused():
    broken = np.where(STEPS > 120, math.nan, 1.0)
    with pytest.raises(ValueError, match="has 2 finite values of 'm'"):
        freeze(recorded(broken), ["m"], (100, 300))
