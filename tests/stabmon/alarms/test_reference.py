"""Bands learned from clean runs, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

from stabmon.alarms.reference import Reference, learn
from stabmon.runs.run import Run

STEPS = np.arange(0, 1000, 20)
KEY = "delta50/global/delta2/entropy/mean"


def run(name, values, key=KEY):
    return Run(name, Path(name), {}, {key: (STEPS, np.asarray(values))}, (), ())


def clean(seed, offset=0.0):
    """A bent course with white noise of spread 0.01."""
    noise = 0.01 * np.random.default_rng(seed).normal(size=len(STEPS))
    return run(f"seed{seed}", 0.8 - 0.3 * STEPS / 1000 + offset + noise)


def test_course_and_spread_are_recovered():
    reference = learn([clean(s) for s in range(6)], {KEY: "reference"}, (100, 300))
    expected, sd = reference.bands[KEY](500)
    assert expected == pytest.approx(0.65, abs=0.005)
    assert sd == pytest.approx(0.01 * np.sqrt(1 + 1 / 6), rel=0.25)


def test_a_level_of_its_own_for_each_run_does_not_widen_the_band():
    runs = [clean(s, offset=s) for s in range(6)]
    own = learn(runs, {KEY: "own"}, (100, 300))
    shared = learn(runs, {KEY: "reference"}, (100, 300))
    assert own.bands[KEY](500)[1] < 0.02
    assert shared.bands[KEY](500)[1] > 1.0


def test_non_finite_values_are_left_out():
    broken = clean(0)
    broken.metrics[KEY][1][10] = np.nan
    reference = learn([broken, clean(1), clean(2)], {KEY: "reference"}, (100, 300))
    assert np.all(np.isfinite(reference.bands[KEY].mean))
    assert reference.bands[KEY](200)[0] == pytest.approx(0.74, abs=0.01)


def test_saved_and_loaded_is_the_same(tmp_path):
    reference = learn([clean(s) for s in range(3)], {KEY: "own"}, (100, 300), source={"by": "me"})
    path = tmp_path / "deep" / "reference.json"
    reference.save(path)
    loaded = Reference.load(path)
    assert loaded.window == (100, 300)
    assert loaded.source == {"runs": ["seed0", "seed1", "seed2"], "by": "me"}
    assert loaded.bands[KEY](500) == pytest.approx(reference.bands[KEY](500), rel=1e-4)
    assert loaded.bands[KEY].judged == "own"


def test_a_single_run_is_refused():
    with pytest.raises(ValueError, match="at least two clean runs, got 1"):
        learn([clean(0)], {KEY: "reference"}, (100, 300))


def test_a_missing_metric_is_refused_with_its_neighbours():
    with pytest.raises(ValueError, match=r"no 'delta50/global/nothing'.*delta2/entropy/mean"):
        learn([clean(0), clean(1)], {"delta50/global/nothing": "own"}, (100, 300))


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"format": 1, "bands": {"a": {}}}'])
def test_a_file_that_is_no_reference_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"x\.json is no reference file"):
        Reference.load(path)


def test_a_newer_format_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"format": 99}')
    with pytest.raises(ValueError, match="has format 99, this code reads 1"):
        Reference.load(path)
