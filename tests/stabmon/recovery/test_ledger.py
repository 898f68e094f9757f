"""Which checkpoints are trusted, which may go, and what never is called healthy."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stabmon.recovery.ledger import CheckpointLedger

saves = st.tuples(st.just("save"), st.booleans(), st.sampled_from([None, 0, 3, 6]))
notes = st.tuples(st.just("note"), st.booleans(), st.none())
rewinds = st.tuples(st.just("rewind"), st.none(), st.integers(0, 60))


def run(ledger, until, bad=(), every=100, sample=10, grade=6, loss=2.0):
    """A run that saves each `every` steps and is not healthy at the steps in `bad`."""
    for step in range(sample, until + 1, sample):
        ledger.note(step, step not in bad)
        if step % every == 0:
            ledger.saved(step, grade, loss)
    return ledger


def test_trust_takes_the_dwell_on_both_sides():
    ledger = run(CheckpointLedger(dwell=200), 500)
    assert ledger.last_healthy() == 300
    assert ledger.last_healthy(before=300) == 200


def test_what_was_saved_shortly_before_or_after_an_alarm_is_never_trusted():
    ledger = run(CheckpointLedger(dwell=200), 2000, bad=[650])
    trusted = [e.step for e in ledger.entries.values() if e.trusted]
    assert [s for s in trusted if 400 < s < 900] == []
    assert {400, 900} <= set(trusted)


def test_what_is_not_finite_or_of_a_low_grade_is_never_healthy():
    for grade, loss in ((6, math.nan), (6, math.inf), (3, 2.0)):
        assert run(CheckpointLedger(dwell=100), 1000, grade=grade, loss=loss).last_healthy() is None
    ledger = CheckpointLedger(dwell=100)
    ledger.saved(10, 6, 2.0, finite=False)
    ledger.note(500, healthy=True)
    assert ledger.last_healthy() is None


def test_a_run_without_grades_has_healthy_checkpoints_all_the_same():
    assert run(CheckpointLedger(dwell=100), 1000, grade=None).last_healthy() == 900


def test_the_last_healthy_checkpoint_outlives_any_number_of_bad_ones():
    ledger = CheckpointLedger(dwell=200, keep=2)
    run(ledger, 600)
    for step in range(610, 5000, 10):
        ledger.note(step, healthy=False)
        if step % 100 == 0:
            ledger.saved(step, 1, 9.0)
            ledger.forget(ledger.deletable())
    assert ledger.last_healthy() == 400
    assert set(ledger.entries) == {300, 400, 4800, 4900} | {min(ledger.entries)}


def test_the_best_is_healthy_first_and_low_in_loss_second():
    ledger = CheckpointLedger(dwell=100)
    for step, loss in ((100, 3.0), (300, 2.0), (500, 2.5)):
        ledger.saved(step, 6, loss)
        ledger.note(step + 100, healthy=True)
    ledger.saved(700, 2, 0.1)
    ledger.note(900, healthy=True)
    assert ledger.best() == 300


def test_going_back_forgets_the_future_and_its_alarm():
    ledger = run(CheckpointLedger(dwell=200), 1000, bad=[950])
    ledger.rewind(700)
    assert max(ledger.entries) == 700
    ledger.saved(800, 6, 2.0)
    ledger.note(1000, healthy=True)
    assert ledger.last_healthy() == 800


@given(st.lists(st.booleans(), min_size=5, max_size=80), st.integers(1, 4))
def test_a_steady_pruning_never_loses_the_last_healthy_one(health, keep):
    ledger, held = CheckpointLedger(dwell=30, keep=keep), None
    for i, healthy in enumerate(health):
        ledger.note(10 * i, healthy)
        ledger.saved(10 * i, 6, 2.0)
        ledger.forget(ledger.deletable())
        newest = ledger.last_healthy()
        assert held is None or (newest is not None and newest >= held)
        assert len(ledger.entries) <= keep + 4
        held = newest
    clone = CheckpointLedger(dwell=30, keep=keep)
    clone.restore(json.loads(json.dumps(ledger.state())))
    assert clone == ledger


def test_pruning_does_not_keep_checkpoints_from_becoming_trusted():
    ledger = CheckpointLedger(dwell=1000, keep=2)
    for step in range(0, 5000, 10):
        ledger.note(step, healthy=True)
        if step % 100 == 0:
            ledger.saved(step, 6, 2.0)
            ledger.forget(ledger.deletable())
    assert ledger.last_healthy() >= 2900


def test_a_loss_that_is_no_number_survives_the_state_as_json():
    ledger = run(CheckpointLedger(), 100, loss=math.nan)
    clone = CheckpointLedger()
    clone.restore(json.loads(json.dumps(ledger.state(), allow_nan=False)))
    assert math.isnan(clone.entries[100].loss)
    assert not clone.entries[100].finite


def test_a_ledger_without_sense_is_refused():
    with pytest.raises(ValueError, match="keep >= 1, got 500 and 0"):
        CheckpointLedger(keep=0)


@given(
    st.lists(st.one_of(saves, notes, rewinds), max_size=60),
    st.integers(1, 4),
    st.sampled_from([0, 30, 1000]),
)
def test_a_finite_checkpoint_is_kept_whatever_grade_dwell_and_rotation_say(story, keep, dwell):
    """At every moment: the newest that is known to be finite, of all that were ever saved."""
    ledger, finite, step = CheckpointLedger(dwell=dwell, keep=keep), set(), 0
    for what, good, extra in story:
        step += 10
        if what == "save":
            ledger.saved(step, extra, 2.0, good)
            finite |= {step} if good else set()
            ledger.forget(ledger.deletable())
        elif what == "note":
            ledger.note(step, good)
        else:
            back = ledger.target(before=step)
            if back is not None:
                step = back
                ledger.rewind(step)
                finite = {at for at in finite if at <= step}
        ledger.forget(ledger.deletable())
        assert max(finite, default=None) in (None, *ledger.entries)
        target = ledger.target()
        assert (target is None) == (not finite)
        assert target is None or ledger.entries[target].finite
        assert len(ledger.entries) <= keep + 6


def test_a_nan_right_after_a_save_leaves_something_to_go_back_to():
    ledger = CheckpointLedger()
    for step in range(10, 1001, 10):
        ledger.note(step, healthy=step < 503)
        if step % 100 == 0:
            ledger.saved(step, 3, 2.0 if step < 503 else math.nan)
            ledger.forget(ledger.deletable())
    assert ledger.last_healthy() is None
    assert ledger.target(before=1000) == 500


def test_trust_is_preferred_and_then_a_checkpoint_that_no_alarm_is_near():
    ledger = CheckpointLedger(dwell=100)
    for step, grade, loss in ((100, 6, 2.0), (200, 6, 2.0), (300, 3, 2.0), (400, 6, math.nan)):
        ledger.saved(step, grade, loss)
    assert ledger.target() == 200
    ledger.note(250, healthy=False)
    assert ledger.target() == 100  # 200 is suspect, 300 of a low grade
    ledger.forget([100])
    assert ledger.target() == 300
    assert ledger.target(before=300) == 200
    assert ledger.target(before=200) is None
    ledger.note(400, healthy=True)
    assert ledger.last_healthy() is None
