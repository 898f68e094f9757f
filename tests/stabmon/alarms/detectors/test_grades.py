"""The grade table and its states: every cadence, steady, falling and non-finite ratios."""

import math

import numpy as np
import pytest

import stabmon
from stabmon.alarms.detectors.grades import (
    FIRST,
    RATIO,
    THRESHOLDS,
    GradeWatch,
    Health,
    grade_of,
    health_of,
)
from stabmon.metrics.activations import GRADE_THRESHOLDS

CADENCES = (10, 50, 100, 150, 200, 300, 500, 1000)


def story(course, until, every=50, first=0):
    """[(step, rule)] of the alarms, and {step: state}; `course` is the ratio at a step."""
    watch = GradeWatch(first)
    alarms, states = [], {}
    for step in range(0, until + 1, every):
        alarms += [(a.step, a.rule) for a in watch.update(step, {RATIO: float(course(step))})]
        states[step] = watch.health
    return alarms, states


def rules(course, until, every=50, **options):
    return [rule for _, rule in story(course, until, every, **options)[0]]


def falls(high, low, begin, over):
    """A straight fall from `high` to `low` that takes `over` steps."""
    return lambda step: high + (low - high) * min(max((step - begin) / over, 0.0), 1.0)


def test_the_grades_are_those_of_the_device_next_to_every_threshold_too():
    assert THRESHOLDS == GRADE_THRESHOLDS
    near = [
        x
        for t in np.asarray(THRESHOLDS, np.float32)
        for x in (np.nextafter(t, np.float32(0)), t, np.nextafter(t, np.float32(1)))
    ]
    ratios = [*near, 0.0, 0.05, 0.35, 1.0, math.nan, math.inf, -math.inf]
    device = stabmon.grade(np.asarray(ratios, np.float32)).tolist()
    assert [grade_of(float(x)) for x in ratios] == device
    assert [grade_of(float(np.float64(x))) for x in THRESHOLDS] == list(range(7))


@pytest.mark.parametrize("every", CADENCES)
@pytest.mark.parametrize("over", [300, 1000, 3000])
def test_a_fall_from_063_to_008_alarms_at_every_cadence(every, over):
    alarms, states = story(falls(0.63, 0.08, 2000, over), 2000 + over + 2 * every, every)
    assert [step for step, _ in alarms if step <= 2000] == []
    assert "danger" in [rule for _, rule in alarms]
    assert list(states.values())[-1] is Health.DANGER


@pytest.mark.parametrize("every", CADENCES)
@pytest.mark.parametrize("level", [0.05, 0.25, 0.42, 0.6, 0.9])
def test_what_has_been_steady_from_the_start_is_healthy_everywhere(every, level):
    alarms, states = story(lambda step: level, 20 * every, every)
    assert (alarms, set(states.values())) == ([], {Health.HEALTHY})
    recorded = {step: level for step in states}
    assert {health_of(recorded, step) for step in recorded} == {Health.HEALTHY}


@pytest.mark.parametrize("every", CADENCES)
def test_a_fall_is_a_rate_per_step_whatever_the_cadence(every):
    """Within one interval a fall of 0.2 is 0.2 · 100/every in 100 steps, as far as can be told."""
    quick = rules(falls(0.75, 0.55, 3000, 10), 6000, every)
    assert quick[-1:] == (["danger"] if every <= 100 else ["falling"] if every <= 200 else [])
    slower = rules(falls(0.95, 0.55, 3000, 3.6 * every), 3000 + 9 * every, every)
    assert slower[-1:] == (["danger"] if every <= 50 else ["falling"] if every <= 100 else [])
    assert rules(falls(0.95, 0.55, 3000, 1000), 6000, every) == []


def test_one_grade_within_a_hundred_steps_is_a_state_of_its_own():
    alarms, states = story(falls(0.65, 0.55, 500, 50), 2000, 50)
    assert [rule for _, rule in alarms] == ["falling"]
    assert max(states.values(), key=list(Health).index) is Health.FALLING
    assert states[2000] is Health.HEALTHY
    assert rules(falls(0.65, 0.55, 500, 400), 2000, 50) == []


def test_a_ratio_that_wavers_about_a_threshold_loses_nothing():
    assert rules(lambda step: 0.6 + 0.03 * (-1) ** (step // 100), 3000, 50) == []


@pytest.mark.parametrize("every", CADENCES)
@pytest.mark.parametrize("seed", range(3))
def test_noise_is_quiet(every, seed):
    rng = np.random.default_rng(seed)
    assert rules(lambda step: 0.6 * (1 + 0.03 * rng.normal()), 1000 * every, every) == []


@pytest.mark.parametrize("every", [50, 100, 200, 300])
def test_low_and_falling_is_caution(every):
    alarms, states = story(falls(0.6, 0.35, 1000, 1500), 2500 + 3 * every, every)
    assert [rule for _, rule in alarms] == ["caution"]
    assert 1600 < alarms[0][0] <= 1600 + 3 * every  # at 0.5, and one sample back
    assert states[1600 // every * every] is Health.HEALTHY
    flat = story(falls(0.6, 0.35, 1000, 1500), 9000, every)[1]
    assert flat[9000 // every * every] is Health.HEALTHY


def test_one_odd_batch_is_nothing():
    assert rules(lambda step: 0.2 if step == 500 else 0.66, 1000, 50) == []
    assert rules(lambda step: 0.95 if step == 500 else 0.66, 1000, 50) == []


def test_a_run_that_has_always_been_low_is_judged_by_what_it_loses():
    assert "danger" in rules(lambda step: 0.25 if step < 800 else 0.12, 1050, 50)


def test_the_warm_up_is_not_looked_at():
    course = lambda step: 0.75 if step < FIRST else 0.3
    assert rules(course, 2000, 50, first=FIRST) == []
    assert health_of({step: course(step) for step in range(0, 2000, 50)}, 1950) is Health.HEALTHY


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_ratio_that_is_no_number_changes_nothing(bad):
    broken = lambda step: bad if step in (500, 550, 600) else 0.6
    assert story(broken, 2000) == ([], dict.fromkeys(range(0, 2001, 50), Health.HEALTHY))
    falling = falls(0.63, 0.08, 1000, 300)
    gaps = lambda step: bad if step % 150 == 0 else falling(step)
    assert "danger" in rules(gaps, 2000)


@pytest.mark.parametrize("every", CADENCES)
def test_the_state_of_a_recorded_ratio_is_that_of_the_detector(every):
    rng = np.random.default_rng(every)
    steps = range(0, 200 * every, every)
    wild = 0.5 + 0.4 * np.sin(np.arange(200) / 9) + 0.03 * rng.normal(size=200)
    walk = dict(zip(steps, wild.tolist(), strict=True))
    states = story(walk.__getitem__, max(walk), every, first=FIRST)[1]
    assert {step: health_of(walk, step) for step in walk} == states
    assert len(set(states.values())) > 1
