"""Each signature is named, thin evidence is not, and the place is that of the alarms."""

import json
import math

import pytest

from stabmon.alarms.detectors.base import Alarm
from stabmon.alarms.diagnosis import diagnose
from stabmon.alarms.signatures import Fault, sign_of
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
    UPDATE,
)

HELD_OUT = "evaluation/global/loss/value"


def up(key, step=600, rule="z", **place):
    return Alarm(step, rule, key, 2.0, 1.0, 9.0, **place)


def down(key, step=600, rule="z", **place):
    return Alarm(step, rule, key, 0.3, 1.0, -9.0, **place)


CASES = {
    Fault.ATTENTION: [
        [down(DELTA2), down(QUERY, 700)],
        [down(DELTA2), up(RADIAL, 650)],
        [down(DELTA2), down(QUERY), up(LOGIT), down(ENTROPY, 800), up(GRADIENT, 900)],
        [down(DELTA2), down(QUERY), down(ROUTER, 900)],  # the router follows much later
        [down(DELTA2), down(QUERY), up(UPDATE, 900), up(LOSS, 900)],
        [down(DELTA2), down(QUERY), up(LOAD, 900), up(MARGIN, 900)],  # so does the load
    ],
    Fault.LEARNING_RATE: [
        [down(ROUTER, 500), down(DELTA2)],
        [up(UPDATE, 500, "surge"), down(DELTA2)],
        [up(UPDATE, 500, "surge"), up(LOSS, 510), up(LOGIT, 550)],
        [
            up(UPDATE, 500),
            down(ROUTER, 520),
            up(LOAD, 520),
            down(DELTA2),
            down(RANK, 650, "danger"),
        ],
        [up(UPDATE, 500), down(ENTROPY, rule="all heads"), down(DELTA2, 700), down(QUERY, 700)],
    ],
    Fault.BALANCE: [
        [up(LOAD)],
        [up(MARGIN)],
        [up(LOAD), up(MARGIN), up(ROUTER)],
        [up(GRADIENT, 540, "shift")],
        [down(ROUTER, rule="shift")],
        [up(GRADIENT, 540, "shift"), down(DELTA2, 850), down(QUERY, 860)],
    ],
    Fault.NO_QK_NORM: [[down(ENTROPY, rule="all heads"), up(LOGIT)]],
    Fault.LOW_RANK: [
        [down(RANK, rule="danger"), up(GRADIENT)],
        [down(RANK, rule="danger"), up(GRADIENT), up(LOSS)],
    ],
    Fault.REPEATED_DATA: [
        [down(LOSS, rule="shift")],
        [down(LOSS, rule="shift"), down(ENTROPY)],
        [down(LOSS, rule="shift"), down(DELTA2, 900), down(QUERY, 900)],
    ],
    Fault.NONFINITE: [
        [Alarm(600, "non-finite", LOSS, math.nan, math.nan, math.nan)],
        [down(DELTA2), down(QUERY), Alarm(900, "z", LOSS, math.inf, 1.0, math.inf)],
    ],
    Fault.SEVERAL: [
        [up(UPDATE, 500), down(DELTA2), up(RADIAL, 650)],
        [down(DELTA2), down(QUERY), up(LOAD, 620), up(MARGIN, 620)],
    ],
    Fault.UNKNOWN: [
        [],
        [down(DELTA2)],
        [up(RADIAL)],
        [up(LOGIT)],
        [down(ENTROPY)],
        [up(GRADIENT)],
        [down(RANK, rule="danger")],
        [up(HELD_OUT)],
        [up("weights/global/q/norm/mean")],
    ],
}


@pytest.mark.parametrize(
    ("fault", "alarms"), [(fault, alarms) for fault, cases in CASES.items() for alarms in cases]
)
def test_the_fault_is_named(fault, alarms):
    diagnosis = diagnose(1000, alarms)
    assert diagnosis.fault is fault, diagnosis
    assert (diagnosis.confidence >= 0.5) == (fault is not Fault.UNKNOWN)
    assert bool(diagnosis.evidence) == any(sign_of(alarm) for alarm in alarms)
    json.dumps(diagnosis.event())


def test_the_order_of_the_alarms_does_not_matter():
    for cases in CASES.values():
        for alarms in cases:
            assert diagnose(1000, alarms).fault is diagnose(1000, alarms[::-1]).fault


def test_a_short_jump_of_the_gradient_alone_is_a_dirty_batch_and_a_lasting_one_is_not():
    alarms = [up(GRADIENT, rule="surge")]
    assert diagnose(620, alarms, active=()).fault is Fault.DIRTY_BATCH
    assert "the gradient norm is back already" in diagnose(620, alarms, active=()).evidence
    assert diagnose(620, alarms, active=(GRADIENT,)).fault is Fault.UNKNOWN
    with_spectrum = [*alarms, down(DELTA2)]
    assert diagnose(620, with_spectrum, active=(DELTA2,)).fault is Fault.UNKNOWN


def test_entropy_that_falls_with_the_loss_is_repeated_data():
    alarms = [down(ENTROPY)]
    assert diagnose(620, alarms, loss_falling=True).fault is Fault.REPEATED_DATA
    assert diagnose(620, alarms, loss_falling=False).fault is Fault.UNKNOWN


def test_a_held_out_loss_that_rises_while_the_loss_falls_is_repeated_data():
    alarms = [up(RADIAL, 600), up(HELD_OUT, 650)]
    assert diagnose(660, alarms, loss_falling=True).fault is Fault.REPEATED_DATA
    assert diagnose(660, alarms, loss_falling=False).fault is Fault.UNKNOWN
    small_batch = [up(GRADIENT, rule="shift"), up(HELD_OUT, 700)]
    assert diagnose(720, small_batch, loss_falling=True).fault is Fault.BALANCE


def test_a_quiet_router_speaks_for_attention_and_is_told_from_none():
    alarms = [down(DELTA2), down(QUERY)]
    measured = [ROUTER, DELTA2, "symptoms/global/update_ratio/value"]
    without, quiet = diagnose(620, alarms), diagnose(620, alarms, measured=measured)
    assert quiet.confidence > without.confidence
    assert "the router's entropy is quiet" in quiet.evidence
    assert "no router is measured" in without.evidence


def test_layer_and_head_are_those_most_alarms_agree_on():
    at = lambda layer, head: {"layer": layer, "head": head}
    alarms = [down(DELTA2, **at(3, 1)), down(QUERY, **at(3, 1)), up(LOGIT, **at(0, 2))]
    assert (diagnose(700, alarms).layer, diagnose(700, alarms).head) == (3, 1)
    split = [down(DELTA2, **at(3, 1)), down(QUERY, **at(2, 1))]
    assert (diagnose(700, split).layer, diagnose(700, split).head) == (None, None)
    heads = [down(DELTA2, **at(3, 1)), down(QUERY, **at(3, 2))]
    assert (diagnose(700, heads).layer, diagnose(700, heads).head) == (3, None)


def test_the_evidence_gives_step_key_value_and_expectation():
    (first, *_) = diagnose(700, [down(DELTA2), down(QUERY)]).evidence
    assert first == f"Δ2 went down at step 600: {DELTA2} = 0.3, expected 1 (rule z)"


def test_the_parts_of_several_are_listed():
    diagnosis = diagnose(700, CASES[Fault.SEVERAL][0])
    assert set(diagnosis.parts) == {Fault.ATTENTION, Fault.LEARNING_RATE}
    assert diagnosis.evidence[0].startswith("together: ")


def test_the_quantities_that_speak_for_a_diagnosis_are_counted():
    assert diagnose(620, [up(LOAD)]).quantities == 1
    assert diagnose(620, [up(LOAD), up(LOAD, 610)]).quantities == 1
    assert diagnose(620, [up(LOAD), up(MARGIN)]).quantities == 2
    assert diagnose(620, [up(LOAD), up(RANK)]).quantities == 1  # it speaks against it
    several = [up(UPDATE, 500), down(DELTA2), up(RADIAL, 650)]
    assert diagnose(660, several).quantities == 2
    assert diagnose(620, [up(LOAD)]).event()["quantities"] == 1


@pytest.mark.parametrize("alarms", [[down(DELTA2), down(QUERY)], [down(DELTA2)]])
def test_what_was_never_measured_is_said(alarms):
    found = diagnose(620, alarms, measured=[LOSS, DELTA2, QUERY])
    assert "update size (needs updates=)" in found.evidence[-1]
    assert "loss (needs" not in found.evidence[-1]
    assert "Δ2 (needs" not in found.evidence[-1]
    assert not any("never measured" in words for words in diagnose(620, alarms).evidence)


def test_where_the_size_of_updates_is_not_measured_the_fault_is_a_candidate_and_no_more():
    found = diagnose(620, [down(DELTA2), down(QUERY)], measured=[DELTA2])
    assert found.fault is Fault.UNKNOWN
    assert [name for name, _ in found.candidates] == [Fault.ATTENTION.value]


def test_a_non_finite_value_that_is_over_leaves_the_name_to_what_follows():
    nan = Alarm(500, "non-finite", HELD_OUT, math.nan)
    alarms = [nan, down(DELTA2), down(QUERY)]
    still = diagnose(620, alarms, active=[HELD_OUT, DELTA2, QUERY])
    over = diagnose(620, alarms, active=[DELTA2, QUERY])
    assert (still.fault, over.fault) == (Fault.NONFINITE, Fault.ATTENTION)
