"""The recovery ladder, rung by rung; nothing is done in a log-only run; killed and resumed."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stabmon.alarms.detectors.base import Alarm
from stabmon.alarms.detectors.grades import Health
from stabmon.alarms.diagnosis import Diagnosis
from stabmon.alarms.signatures import Fault
from stabmon.recovery.ladder import (
    EXIT_UNRECOVERED,
    Kind,
    Observation,
    Phase,
    Policy,
    Standing,
    transition,
)
from stabmon.recovery.ledger import CheckpointLedger
from stabmon.recovery.recovery import Recovery

ALARM = [Alarm(0, "z", "m", 0.3, 1.0, -9.0)]


def named(fault, quantities=2):
    return Diagnosis(0, fault, 0.8, ("seen",), quantities=quantities)


class Run:
    """A training loop in miniature: samples each 10 steps, a checkpoint each 100."""

    def __init__(self, **policy):
        settings = {"act": True, "watch": 200, "verify": 300, "max_rollbacks": 2} | policy
        self.recovery = Recovery(Policy(**settings), CheckpointLedger(dwell=100))
        self.step, self.done = 0, []

    def go(self, until, alarms=(), **seen):
        """Sample up to `until`; with a rollback carried out if one is asked for."""
        while self.step < until:
            self.step += 10
            healthy = seen.get("healthy", not alarms)
            more = {k: v for k, v in seen.items() if k != "healthy"}
            actions = self.recovery.update(self.step, alarms, healthy=healthy, **more)
            self.done += [(self.step, action.kind) for action in actions]
            if self.recovery.phase is Phase.ROLLING_BACK:
                self.step = self.recovery.standing.target
                self.recovery.rolled_back()
                return self
            if self.step % 100 == 0:
                self.recovery.ledger.saved(self.step, 6, 2.0)
            alarms = ()
        return self

    def sick(self, until, **seen):
        return self.go(until, healthy=False, **seen)


def test_a_healthy_run_is_left_alone():
    run = Run().go(5000)
    assert (run.done, run.recovery.phase) == ([], Phase.RUNNING)


@pytest.mark.parametrize("fault", [Fault.UNKNOWN, Fault.DIRTY_BATCH, Fault.REPEATED_DATA])
def test_nothing_is_done_about_what_is_not_understood_or_passes(fault):
    run = Run().go(1000).go(1010, ALARM, diagnosis=named(fault))
    assert (run.done, run.recovery.phase) == ([], Phase.RUNNING)


@pytest.mark.parametrize(
    "fault", [Fault.ATTENTION, Fault.LEARNING_RATE, Fault.BALANCE, Fault.NO_QK_NORM, Fault.SEVERAL]
)
def test_a_named_fault_halves_the_learning_rate_and_is_watched(fault):
    run = Run().go(1000).go(1010, ALARM, diagnosis=named(fault))
    assert run.done == [(1010, Kind.SCALE_LEARNING_RATE)]
    assert (run.recovery.phase, run.recovery.standing.scale) == (Phase.WATCHING, 0.5)
    run.sick(1200).go(1300)
    assert run.done[-1] == (1210, Kind.RESUME)
    assert (run.recovery.phase, run.recovery.standing.scale) == (Phase.RUNNING, 0.5)


def test_a_single_quantity_is_not_acted_on_until_another_speaks():
    run = Run().go(1000).go(1010, ALARM, diagnosis=named(Fault.BALANCE, 1))
    assert (run.done, run.recovery.phase) == ([], Phase.RUNNING)
    run.go(1020, ALARM, diagnosis=named(Fault.BALANCE, 2))
    assert run.done == [(1020, Kind.SCALE_LEARNING_RATE)]
    alone = Run(joint=1).go(1000).go(1010, ALARM, diagnosis=named(Fault.BALANCE, 1))
    assert alone.done == [(1010, Kind.SCALE_LEARNING_RATE)]
    rate = Run().go(1000).go(1010, ALARM, diagnosis=named(Fault.LEARNING_RATE, 1))
    assert rate.done == [(1010, Kind.SCALE_LEARNING_RATE)]
    with pytest.raises(ValueError, match="joint: expected at least 1 quantity, got 0"):
        Policy(joint=0)


def test_caution_by_the_grade_table_halves_too():
    run = Run().go(1000).sick(1010, health=Health.CAUTION, grade=4)
    assert run.recovery.phase is Phase.WATCHING


def test_not_healthy_after_watching_rolls_back_to_a_checkpoint_before_the_alarm():
    run = Run().go(1000).go(1010, ALARM, diagnosis=named(Fault.ATTENTION)).sick(2000)
    assert run.done == [
        (1010, Kind.SCALE_LEARNING_RATE),
        (1210, Kind.ROLL_BACK),
        (1210, Kind.SCALE_LEARNING_RATE),
        (1210, Kind.RESET_OPTIMIZER),
    ]
    assert run.step == 900  # 1000 was saved 10 steps before the alarm
    assert run.recovery.standing == Standing(Phase.VERIFYING, until=1200, scale=0.2, rollbacks=1)


@pytest.mark.parametrize(
    "seen",
    [
        {"health": Health.DANGER, "grade": 2},
        {"alarms": ALARM, "diagnosis": named(Fault.NONFINITE)},
        {"alarms": ALARM, "diagnosis": named(Fault.LOW_RANK)},
    ],
)
def test_danger_rolls_back_at_once(seen):
    run = Run().go(1000)
    run.sick(1010, **seen)
    assert [kind for _, kind in run.done] == [
        Kind.ROLL_BACK,
        Kind.SCALE_LEARNING_RATE,
        Kind.RESET_OPTIMIZER,
    ]
    assert run.step == 900


def test_danger_while_watching_does_not_wait():
    run = Run().go(1000).go(1010, ALARM, diagnosis=named(Fault.ATTENTION))
    run.sick(1050, health=Health.DANGER, grade=1)
    assert run.recovery.phase is Phase.VERIFYING


def test_verified_goes_on_with_the_smaller_learning_rate():
    run = Run().go(1000).sick(1010, health=Health.DANGER, grade=2).go(1190)
    assert run.recovery.phase is Phase.VERIFYING
    run.go(1200)
    assert (run.done[-1], run.recovery.phase) == ((1200, Kind.RESUME), Phase.RUNNING)
    assert run.recovery.standing.scale == 0.4


def test_while_verifying_the_alarm_is_at_grade_three():
    run = Run().go(1000).sick(1010, health=Health.DANGER, grade=2)
    run.sick(950, health=Health.CAUTION, grade=3)
    assert run.recovery.standing.rollbacks == 2
    calm = Run().go(1000).sick(1010, health=Health.DANGER, grade=2).go(950, grade=3)
    assert calm.recovery.standing.rollbacks == 1  # a run that has always been S3


def test_after_so_many_rollbacks_it_stops():
    run = Run(max_rollbacks=2).go(1000)
    for _ in range(3):
        run.sick(run.step + 10, health=Health.DANGER, grade=1)
    assert run.done[-1][1] is Kind.STOP
    assert run.recovery.stop
    assert EXIT_UNRECOVERED not in (0, 1, 2)
    before = len(run.done)
    run.sick(3000, health=Health.DANGER, grade=1)
    assert len(run.done) == before


def test_without_a_healthy_checkpoint_it_stops():
    run = Run().sick(50, health=Health.DANGER, grade=1)
    assert [kind for _, kind in run.done] == [Kind.STOP]


def test_log_only_advises_and_neither_waits_nor_stops():
    run = Run(act=False).go(1000).go(1010, ALARM, diagnosis=named(Fault.ATTENTION)).sick(3000)
    kinds = [kind for _, kind in run.done]
    assert kinds.count(Kind.ROLL_BACK) == 2
    assert kinds[-1] is Kind.STOP
    assert run.step == 3000
    assert not run.recovery.stop
    assert run.recovery.standing.scale == 1.0
    (action,) = (
        Run(act=False)
        .go(1000)
        .recovery.update(1010, ALARM, healthy=False, diagnosis=named(Fault.ATTENTION))
    )
    assert action.event()["dry"] is True


def test_at_s0_the_batches_are_kept_once():
    run = Run().go(1000).sick(1100, grade=0, health=Health.CAUTION)
    assert [kind for _, kind in run.done] == [Kind.KEEP_BATCHES, Kind.SCALE_LEARNING_RATE]
    recovery = Recovery(Policy())
    action, *_ = recovery.update(150, grade=0, healthy=False, health=Health.DANGER)
    assert action.fields == {"first": 0, "last": 350}


def test_an_s0_that_the_grade_table_does_not_mind_is_none():
    assert Run().go(1000, grade=0).done == []  # a warm-up passes through it


def test_msign_comes_first_for_attention_numerics_if_wanted():
    run = Run(msign=True).go(1000).go(1010, ALARM, diagnosis=named(Fault.ATTENTION))
    assert [kind for _, kind in run.done] == [Kind.MSIGN, Kind.SCALE_LEARNING_RATE]
    other = Run(msign=True).go(1000).go(1010, ALARM, diagnosis=named(Fault.LEARNING_RATE))
    assert [kind for _, kind in other.done] == [Kind.SCALE_LEARNING_RATE]


def test_the_offending_data_is_skipped_if_wanted():
    recovery = Run(skip_data=True).go(1000).recovery
    actions = recovery.update(1010, healthy=False, health=Health.DANGER, grade=1)
    assert actions[-1].kind is Kind.SKIP_DATA
    assert actions[-1].fields == {"first": 900, "last": 1010}


def bound_to(fault, every, saved_every, **policy):
    """What is done, by whom a NaN at step `fault` is met each time unless its data are skipped."""
    recovery = Recovery(Policy(act=True, watch=200, verify=300, **policy), CheckpointLedger(100))
    step, skipped, done = 0, False, []
    while step < 3000 and not recovery.stop:
        step += every
        if step % saved_every == 0:
            recovery.ledger.saved(step, 3, 2.0)
        if step - every < fault <= step and not skipped:
            broken = named(Fault.NONFINITE)
            done += recovery.update(step, ALARM, 3, healthy=False, diagnosis=broken)
        else:
            done += recovery.update(step, (), 3, healthy=True)
        if recovery.phase is Phase.ROLLING_BACK:
            skipped |= any(x.kind is Kind.SKIP_DATA for x in recovery.pending)
            step = recovery.standing.target
            recovery.rolled_back()
            recovery.restore(json.loads(json.dumps(recovery.state(), allow_nan=False)))
    return recovery, done


@given(
    st.integers(400, 2500), st.sampled_from([10, 20]), st.sampled_from([100, 200]), st.booleans()
)
@settings(max_examples=40, deadline=None)
def test_a_fault_bound_to_a_step_is_skipped_or_stops_the_run(fault, every, saved_every, skip):
    recovery, done = bound_to(fault, every, saved_every, skip_data=skip)
    kinds = [action.kind for action in done]
    assert kinds.count(Kind.SCALE_LEARNING_RATE) == 1
    assert kinds.count(Kind.ROLL_BACK) == 1
    assert recovery.standing.scale == 0.4
    if skip:
        assert (kinds[-1], recovery.phase) == (Kind.RESUME, Phase.RUNNING)
    else:
        assert (kinds[-1], recovery.phase) == (Kind.STOP, Phase.STOPPED)
        assert "came back at the same step after a rollback" in done[-1].reason
        assert "skip its data" in done[-1].reason


def test_a_second_fault_at_another_step_is_one_of_its_own():
    run = Run().go(1000)
    run.sick(1010, alarms=ALARM, diagnosis=named(Fault.NONFINITE))
    run.go(1500).sick(1510, alarms=ALARM, diagnosis=named(Fault.NONFINITE))
    assert [kind for _, kind in run.done].count(Kind.ROLL_BACK) == 2
    assert run.recovery.phase is Phase.VERIFYING


def test_a_run_without_trust_goes_back_to_what_is_finite():
    run = Run().go(150)
    run.sick(160, health=Health.DANGER, grade=2)
    assert run.step == 100


def test_killed_in_the_midst_of_a_rollback_the_same_actions_are_pending():
    recovery = Run().go(1000).recovery
    actions = recovery.update(1010, healthy=False, health=Health.DANGER, grade=1)
    again = Recovery(recovery.policy, CheckpointLedger(dwell=100))
    again.restore(json.loads(json.dumps(recovery.state(), allow_nan=False)))
    assert list(again.pending) == actions
    assert again == recovery
    assert again.update(1020, healthy=False, health=Health.DANGER) == []
    again.rolled_back()
    recovery.rolled_back()
    assert again == recovery


@pytest.mark.parametrize("cut", [500, 1010, 1100, 1205, 1300])
def test_interrupted_is_as_uninterrupted(cut):
    def story(run, begin, end):
        for step in range(begin, end, 10):
            alarms = ALARM if step in (1010, 2000) else ()
            seen = {"healthy": not 1010 <= step < 1100, "diagnosis": named(Fault.BALANCE)}
            run.update(step, alarms, 6, **seen)
            if step % 100 == 0:
                run.ledger.saved(step, 6, 2.0)

    make = lambda: Recovery(Policy(act=True, watch=200), CheckpointLedger(dwell=100))
    whole, first, second = make(), make(), make()
    cut = cut // 10 * 10
    story(whole, 10, 2500)
    story(first, 10, cut)
    second.restore(json.loads(json.dumps(first.state())))
    story(second, cut, 2500)
    assert second == whole
    assert whole.standing.scale == 0.25


def test_transitions_are_pure():
    seen = Observation(10, False, Health.CAUTION, 4)
    start = Standing()
    assert transition(Policy(), start, seen) == transition(Policy(), start, seen)
    assert start == Standing()


def test_rolled_back_without_a_rollback_is_refused():
    with pytest.raises(ValueError, match="no rollback is under way, the phase is 'running'"):
        Recovery().rolled_back()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"watch": 0}, "watch and verify >= 1 steps"),
        ({"max_rollbacks": -1}, "max_rollbacks >= 0"),
        ({"cut": 1.0}, r"cut: expected a factor between 0 and 1, got 1\.0"),
        ({"halve": 0.0}, r"halve: expected a factor between 0 and 1, got 0\.0"),
    ],
)
def test_a_policy_without_sense_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Policy(**wrong)


def test_a_newer_state_is_refused():
    state = Recovery().state() | {"format": 99}
    with pytest.raises(ValueError, match="format 99, this code reads up to 1"):
        Recovery().restore(state)
