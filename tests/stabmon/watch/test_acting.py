"""The ladder carried out by `Watch` on a stranger's loop: its story, and the same when killed."""

import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from stabmon.alarms.detector_set import DetectorSet
from stabmon.alarms.detectors.latch import Patience
from stabmon.alarms.detectors.limits import Threshold
from stabmon.monitor.snapshots import TrackDeltaState, find_state
from stabmon.recovery.carrying_out import CarryingOut
from stabmon.recovery.checkpoints import OrbaxCheckpoints
from stabmon.recovery.ladder import EXIT_UNRECOVERED, Policy
from stabmon.recovery.ledger import CheckpointLedger
from stabmon.recovery.recovery import Recovery
from stabmon.recovery.replay import replay_events
from stabmon.recovery.watcher import Watcher
from stabmon.runs.jsonl import read_jsonl
from stabmon.runs.run import load_run
from stabmon.watch import defaults as module
from stabmon.watch import journal
from tests.stabmon.watch.loop import build, run

ROOT = Path(__file__).parents[3]
RATIO = "symptoms/global/update_ratio/value"
POLICY = Policy(watch=10, verify=15, joint=1)


def limited(limit):
    """Detectors that hold any update above a limit, from step 20 on, to be too large."""
    patience = Patience(dwell=1, cooldown=0)
    detector = lambda: Threshold("limit", RATIO, limit, first=20, patience=patience)
    return lambda *_, **__: DetectorSet({"limit": detector()})


def begin(folder, policy=POLICY, act=True, limit=2.5e-3, **options):
    """(watch, tx, fresh state) of a run that acts, saved by Orbax."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "standard_detectors", limited(limit))
        saved = {}
        hand = lambda name: lambda *given: getattr(saved["it"], name)(*given)
        watch, tx, state = build(
            folder / "run",
            act=act,
            policy=policy,
            ledger=CheckpointLedger(5),
            save=hand("save"),
            restore=hand("restore"),
            delete=hand("delete"),
            **options,
        )
    saved["it"] = OrbaxCheckpoints(folder / "run" / "checkpoints", like=state)
    return watch, tx, state


def train(folder, steps=60, **options):
    """Begin or resume as a user does; (watch, final state)."""
    watch, tx, state = begin(folder, **options)
    with watch:
        state = run(watch, tx, watch.resume(state), steps)
    return watch, state


def story(folder):
    """All that was journalled, what a rollback abandoned too: (kind, step, what)."""
    names = {"action": "action", "alarm": "key", "diagnosis": "fault", "incident": "change"}
    events = [e for e in read_jsonl(folder / "run" / "events.jsonl") if e["kind"] != "ended"]
    return [(e["kind"], e["step"], e.get(names.get(e["kind"], ""), "")) for e in events]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, *train(folder)


def test_the_events_tell_the_story_in_order(whole):
    assert story(whole[0]) == [
        ("alarm", 20, RATIO),
        ("diagnosis", 20, "learning rate"),
        ("incident", 20, "opened"),
        ("action", 20, "scale learning rate"),
        ("action", 30, "roll back"),
        ("action", 30, "scale learning rate"),
        ("action", 30, "reset optimizer"),
        ("rewind", 10, ""),
        ("action", 25, "resume"),
    ]


def test_the_learning_rate_is_cut_to_what_the_ladder_says_and_not_multiplied(whole):
    _, watch, state = whole
    assert float(optax.tree.get(state.opt_state, "control_scale")) == pytest.approx(
        watch.watcher.recovery.standing.scale
    )
    assert watch.watcher.recovery.standing.scale == pytest.approx(
        0.5 * 0.4 ** watch_rollbacks(watch)
    )


def watch_rollbacks(watch):
    return watch.watcher.recovery.standing.rollbacks


class Killed(BaseException):
    """Stands for SIGKILL: nothing more is written."""


def dies(*_, **__):
    raise Killed


def equal(one, other):
    assert story(one[0]) == story(other[0])
    jax.tree.map(np.testing.assert_array_equal, one[2], other[2])
    runs = [load_run(found[0] / "run").metrics for found in (one, other)]
    assert runs[0].keys() == runs[1].keys()
    for key in runs[0]:
        np.testing.assert_array_equal(runs[0][key], runs[1][key])


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (CarryingOut, "_undo"),  # nothing is undone yet
        (journal.Journal, "rewind"),  # restored, but the log does not know
        (CarryingOut, "_remove"),  # all is undone, but later checkpoints are still there
    ],
)
def test_killed_in_the_midst_of_a_rollback_it_ends_in_the_same_state(
    whole, tmp_path, monkeypatch, where, name
):
    alive = getattr(where, name)
    with monkeypatch.context() as patch:
        patch.setattr(where, name, dies if name != "_remove" else _once_journalled(tmp_path, alive))
        with pytest.raises(Killed):
            train(tmp_path)
    equal((tmp_path, *train(tmp_path)), whole)


def _once_journalled(folder, alive):
    """Deleting dies as soon as a rollback is in the journal."""
    journalled = folder / "run" / "recovery.json"
    return lambda self, step: dies() if journalled.exists() else alive(self, step)


@pytest.mark.parametrize("steps", [21, 31])
def test_interrupted_at_any_step_it_ends_in_the_same_state(whole, tmp_path, steps):
    train(tmp_path, steps)
    equal((tmp_path, *train(tmp_path)), whole)


@pytest.mark.slow
def test_sigkill_by_the_system_in_the_midst_of_a_rollback(whole, tmp_path):
    script = (
        "import os, signal, pathlib\n"
        "from tests.stabmon.watch import test_acting as t\n"
        "t.journal.Journal.rewind = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"t.train(pathlib.Path({str(tmp_path)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL
    assert json.loads((tmp_path / "run" / "recovery.json").read_text())["target"] == 10
    equal((tmp_path, *train(tmp_path)), whole)


def test_without_act_it_only_advises_and_the_run_is_the_same(tmp_path):
    advised, state = train(tmp_path / "a", act=False)
    quiet, same = train(tmp_path / "b", act=False, limit=1e9)
    jax.tree.map(np.testing.assert_array_equal, state.params, same.params)
    actions = [e for e in load_run(advised.folder).events if e["kind"] == "action"]
    assert {e["dry"] for e in actions} == {True}
    assert "roll back" in {e["action"] for e in actions}
    assert load_run(quiet.folder).events == ()


def test_a_replay_of_an_advised_run_says_what_was_said(tmp_path):
    watch, _ = train(tmp_path, act=False)
    found = load_run(watch.folder)
    said = [{k: v for k, v in x.items() if k != "time"} for x in found.events]
    watcher = Watcher(limited(2.5e-3)(), Recovery(POLICY, CheckpointLedger(5)))
    again = replay_events(found, watcher)
    drop = lambda rows: [row for row in rows if row["kind"] != "action"]
    assert drop(again) == drop(said)


def test_where_nothing_helps_the_run_stops_with_its_own_code(tmp_path):
    once = Policy(watch=10, verify=15, joint=1, max_rollbacks=1)
    watch, _ = train(tmp_path, policy=once, limit=1e-9)
    assert (watch.stopped, watch.exit_code) == (True, EXIT_UNRECOVERED)
    assert watch.step < 60
    assert [kind for kind, _, _ in story(tmp_path)][-2:] == ["action", "stopped"]


def test_skipped_data_are_not_fed_again(tmp_path):
    skipping = Policy(watch=10, verify=15, joint=1, skip_data=True)
    watch, _ = train(tmp_path, policy=skipping)
    assert watch.data_step > watch.step
    assert "skip data" in {what for _, _, what in story(tmp_path)}


def test_every_action_is_told_to_the_caller(tmp_path):
    heard = []
    train(
        tmp_path,
        on_events=[lambda seen: heard.extend(action.kind.value for action in seen.actions)],
    )
    assert heard[:2] == ["scale learning rate", "roll back"]


def test_a_checkpoint_without_notes_does_not_count(tmp_path):
    watch, _ = train(tmp_path, steps=21)
    (watch.folder / "watch" / "00000020.json").unlink()
    again, _, state = begin(tmp_path)
    with again:
        again.resume(state)
    assert again.step == 10


def test_snapshots_of_another_configuration_are_told(tmp_path):
    train(tmp_path, steps=11)
    watch, _, state = begin(tmp_path)
    ring = find_state(state.opt_state)
    other = dataclasses.replace(ring, every=5)
    state = state._replace(
        opt_state=jax.tree.map(
            lambda x: other if isinstance(x, TrackDeltaState) else x,
            state.opt_state,
            is_leaf=lambda x: isinstance(x, TrackDeltaState),
        )
    )
    watch.recovery.restore = lambda step: state
    with watch:
        watch.resume(state)
    events = read_jsonl(watch.folder / "events.jsonl")
    assert "the ring starts anew" in next(e["reason"] for e in events if e["kind"] == "warning")
