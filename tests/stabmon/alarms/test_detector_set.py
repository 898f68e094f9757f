"""The default board on synthetic runs: quiet when clean, right when not, resumable."""

import json
import math

import numpy as np
import pytest

from stabmon.alarms.detector_set import DetectorSet
from stabmon.alarms.detectors.grades import Health
from stabmon.alarms.detectors.limits import Threshold
from stabmon.alarms.reference import Band, Reference
from stabmon.alarms.signatures import Fault
from stabmon.alarms.standard import standard_detectors
from tests.stabmon.alarms.streams import (
    DELTA2,
    ENTROPY,
    GRADIENT,
    LOAD,
    LOGIT,
    LOSS,
    MARGIN,
    QUERY,
    RADIAL,
    RANK,
    ROUTER,
    SHARP,
    UPDATE,
    stream,
)

slide = lambda to, over: lambda t: 1 + (to - 1) * min(t / over, 1)
FAULTS = {
    Fault.ATTENTION: {DELTA2: slide(0.3, 400), QUERY: slide(0.3, 500), RADIAL: slide(-1.0, 600)},
    Fault.LEARNING_RATE: {UPDATE: 8.0, ROUTER: slide(0.5, 200), DELTA2: slide(0.5, 300), LOSS: 1.3},
    Fault.BALANCE: {LOAD: slide(2.5, 100), MARGIN: slide(2.0, 100)},
    Fault.DIRTY_BATCH: {GRADIENT: lambda t: 20.0 if t == 0 else 1.0},
    Fault.NO_QK_NORM: {ENTROPY: 0.3, SHARP: 14.0, LOGIT: 20.0},
    Fault.LOW_RANK: {RANK: slide(0.3, 100), GRADIENT: slide(9.0, 50)},
    Fault.REPEATED_DATA: {LOSS: slide(0.1, 100)},
    Fault.NONFINITE: {LOSS: math.nan},
}


def watch(board, samples):
    return [alarm for step, values in samples for alarm in board.update(step, values)]


@pytest.mark.parametrize("seed", [0])
def test_ten_thousand_clean_steps_raise_nothing(seed):
    board = standard_detectors()
    assert watch(board, stream(seed, 10_000)) == []
    assert board.healthy
    assert (board.grade, board.health) == (6, Health.HEALTHY)
    assert board.diagnose().fault is Fault.UNKNOWN


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("seed", range(2))
def test_each_fault_is_noticed_after_its_onset_and_named(fault, seed):
    board = standard_detectors()
    alarms = watch(board, stream(seed, 1400, 800, FAULTS[fault]))
    assert min(alarm.step for alarm in alarms) >= 800
    assert board.diagnose().fault is fault, board.diagnose()


@pytest.mark.parametrize("fault", [Fault.ATTENTION, Fault.LEARNING_RATE])
def test_without_a_router_too(fault):
    board = standard_detectors()
    watch(board, stream(0, 1400, 800, FAULTS[fault], dense=True))
    assert board.diagnose().fault is fault, board.diagnose()


def test_with_normalised_queries_and_keys_their_alignment_is_not_judged():
    turned = {"delta50/global/q/radial_alignment/mean": 0.4}
    raised = lambda board: [
        a.rule for step in range(0, 600, 25) for a in board.update(step, turned)
    ]
    assert raised(standard_detectors()) == ["limit"]
    assert raised(standard_detectors(qk_norm=True)) == []


def test_the_place_is_read_from_the_worst_layer_and_head():
    board = standard_detectors()
    alarms = watch(board, stream(0, 1400, 800, FAULTS[Fault.ATTENTION]))
    assert {(a.layer, a.head) for a in alarms if a.key == DELTA2} == {(3, 1)}
    assert (board.diagnose().layer, board.diagnose().head) == (3, 1)
    assert alarms[0].event()["layer"] == 3


def test_a_place_that_keeps_changing_is_not_named():
    board = DetectorSet({"limit": Threshold("limit", "m/global/x/mean", 1.0)})
    for i in range(9):
        values = {"m/global/x/mean": 2.0 * (i > 7), "m/global/x/worst_layer": float(i % 4)}
        alarms = board.update(i, values)
    assert alarms[0].layer is None
    assert "layer" not in alarms[0].event()


def test_the_layer_of_a_key_by_layer_is_in_the_key():
    board = DetectorSet({"limit": Threshold("limit", "m/layer_07/x/min", 1.0)})
    values = {"m/layer_07/x/min": 2.0, "m/layer_07/x/worst_head": 5.0}
    (alarm,) = board.update(0, values)
    assert (alarm.layer, alarm.head) == (7, 5)


@pytest.mark.parametrize("cut", [305, 805, 960, 1250])
def test_interrupted_is_as_uninterrupted(cut):
    factors = FAULTS[Fault.ATTENTION]
    whole, first, second = standard_detectors(), standard_detectors(), standard_detectors()
    expected = watch(whole, stream(1, 1400, 800, factors))
    alarms = watch(first, stream(1, cut, 800, factors))
    second.restore(json.loads(json.dumps(first.state())))
    assert alarms + watch(second, stream(1, 1400, 800, factors, first=cut)) == expected
    assert second.state() == whole.state()
    assert second.diagnose() == whole.diagnose()
    assert expected


def test_an_incident_of_values_that_are_not_finite_is_one_alarm():
    board = standard_detectors()
    assert [a.rule for a in board.update(50, {LOSS: math.nan})] == ["non-finite"]
    everywhere = dict.fromkeys((LOSS, GRADIENT, UPDATE, DELTA2, QUERY, ENTROPY, RANK), math.nan)
    assert [a for step in range(60, 2000, 10) for a in board.update(step, everywhere)] == []
    assert board.diagnose().fault is Fault.NONFINITE
    assert not board.healthy
    board.update(2000, dict.fromkeys(everywhere, 1.0))
    assert [a.rule for a in board.update(2010, {LOSS: math.inf})] == ["non-finite"]


def test_metrics_that_cannot_be_read_are_one_alarm_and_no_reason_to_stop():
    board = standard_detectors()
    metrics = dict.fromkeys((DELTA2, QUERY, ENTROPY, RANK), math.nan)
    assert [a.rule for a in board.update(50, {LOSS: 2.0} | metrics)] == ["unreadable"]
    assert board.update(60, {LOSS: 2.0} | metrics) == []
    assert board.diagnose().fault is Fault.UNKNOWN
    assert board.health is Health.HEALTHY
    assert [a.rule for a in board.update(70, {LOSS: math.nan} | metrics)] == ["non-finite"]
    assert board.diagnose().fault is Fault.NONFINITE


def test_an_alarm_that_lasts_stays_evidence_and_one_that_ended_does_not():
    board = DetectorSet({"limit": Threshold("limit", "m/.*", 1.0)}, span=100)
    for step in range(0, 400, 10):
        board.update(step, {"m/a": 2.0, "m/b": 2.0 * (step < 50)})
    assert [alarm.key for alarm in board.recent] == ["m/a"]


def test_bands_of_clean_runs_are_judged_besides():
    at = [0, 10_000]
    band = Band(np.asarray(at), np.array([9.0, 9.0]), np.array([0.1, 0.1]))
    board = standard_detectors(reference=Reference({DELTA2: band}, (100, 300), {}))
    alarms = watch(board, stream(0, 300))
    assert {alarm.rule for alarm in alarms} == {"band"}
    assert DELTA2 in board.active()


def test_a_state_of_other_detectors_is_refused():
    state = DetectorSet({"limit": Threshold("limit", "m", 1.0)}).state()
    with pytest.raises(
        ValueError,
        match=r"of detectors \['limit'\], this board has \['activ",
    ):
        standard_detectors().restore(state)


def test_a_board_without_window_is_refused():
    with pytest.raises(ValueError, match="length >= 1, got 100 and 0"):
        standard_detectors(length=0)
