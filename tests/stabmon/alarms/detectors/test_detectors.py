"""The band detector: dwell, both sides, own level, non-finite values, resuming."""

import json
from pathlib import Path

import numpy as np
import pytest

from stabmon.alarms.detectors.bands import BandDetector
from stabmon.alarms.lead import first_by_key, lead_times
from stabmon.alarms.reference import Band, Reference
from stabmon.runs.run import Run

STEPS = np.arange(0, 1000, 50)


def recorded(metrics):
    """A run read back from disk, with these metrics."""
    arrays = {key: (steps, np.asarray(values, float)) for key, (steps, values) in metrics.items()}
    return Run("x", Path("x"), {}, arrays, (), ())


def reference(judged="reference"):
    flat = lambda x: np.full(len(STEPS), x)
    bands = {key: Band(STEPS, flat(1.0), flat(0.1), judged) for key in ("m", "loss")}
    return Reference(bands, (100, 200), {})


def feed(detector, values, key="m"):
    """Steps at which `key` raises an alarm, one value each 50 steps."""
    return [
        step
        for step, value in zip(STEPS, values, strict=False)
        if detector.update(int(step), {key: float(value)})
    ]


def test_two_samples_running_are_needed():
    assert feed(BandDetector(reference()), [1, 2, 1, 2, 1, 2, 2, 2]) == [300]


def test_two_samples_on_different_sides_are_not_enough():
    assert feed(BandDetector(reference()), [2, 0, 2, 0, 2, 0]) == []


def test_a_change_of_side_begins_the_count_anew():
    assert feed(BandDetector(reference()), [2, 0, 0]) == [100]


def test_falling_counts_as_much_as_rising():
    detector = BandDetector(reference())
    alarms = [
        a for i, x in enumerate([1, 0.4, 0.4]) for a in detector.update(50 * i, {"m": float(x)})
    ]
    assert [alarm.z for alarm in alarms] == [pytest.approx(-6.0)]


def test_the_threshold_is_exclusive_and_a_longer_dwell_waits():
    assert feed(BandDetector(reference(), threshold=10.5), [2, 2, 2]) == []
    assert feed(BandDetector(reference(), dwell=4), [2, 2, 2, 2]) == [150]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_value_alarms_at_once(bad):
    assert feed(BandDetector(reference()), [1, bad]) == [50]


def test_own_level_is_learned_and_silent_until_then():
    detector = BandDetector(reference("own"))
    assert feed(detector, [9, 9, 5, 5, 5, 5, 5, 6, 6]) == [400]


def test_a_non_finite_value_never_enters_the_own_level():
    detector = BandDetector(reference("own"))
    feed(detector, [5, 5, np.nan, 5, 5])
    assert detector.score("m", 400, 5.0).z == pytest.approx(0.0)


def test_a_metric_without_a_band_is_ignored():
    assert feed(BandDetector(reference()), [9, 9, 9], key="other") == []


def test_stopped_and_resumed_alarms_at_the_same_step():
    values = [5, 5, 5, 5, 5, 5, 9, 9, 9]
    whole = BandDetector(reference("own"))
    expected = feed(whole, values)
    for cut in range(len(values)):
        first, second = BandDetector(reference("own")), BandDetector(reference("own"))
        steps = feed(first, values[:cut])
        second.restore(json.loads(json.dumps(first.state())))
        for step, value in list(zip(STEPS, values, strict=False))[cut:]:
            steps += [step] if second.update(int(step), {"m": float(value)}) else []
        assert steps == expected
        assert second.state() == whole.state()


def test_replay_and_lead_times():
    run = recorded({"m": (STEPS, [1] * 4 + [2] * 16), "loss": (STEPS, [1] * 10 + [2] * 10)})
    alarms = first_by_key(run, BandDetector(reference()))
    table = lead_times(alarms, {"loss": "loss", "mine": "m", "silent": "none"}, "loss", 1000, 150)
    rows = [(r.monitor, r.first, r.after, r.lead, r.lead_is_bound) for r in table]
    assert rows == [
        ("mine", 250, 100, 300, False),
        ("loss", 550, 400, 0, False),
        ("silent", None, None, None, False),
    ]


def test_replay_stops_before_a_checkpoint():
    run = recorded({"m": (STEPS, [1] * 4 + [2] * 16)})
    assert first_by_key(run, BandDetector(reference()), before=250) == {}


def test_without_an_alarm_of_the_loss_the_lead_is_a_bound():
    run = recorded({"m": (STEPS, [1] * 4 + [2] * 16)})
    alarms = first_by_key(run, BandDetector(reference()))
    (row,) = lead_times(alarms, {"mine": "m"}, "loss", 1000, None)
    assert (row.lead, row.lead_is_bound, row.after) == (750, True, None)
