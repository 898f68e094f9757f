"""The ladder at work on a tiny run: its story in order, and the same story when it is killed."""

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

from experiments.loop import acting
from experiments.loop.acting import Acting, AlarmConfig
from experiments.loop.checkpoints import Checkpoints
from experiments.loop.optimizer import OptimizerConfig
from experiments.loop.step import MonitorConfig, make_step
from experiments.train import Config, train
from models.config import GPTConfig
from stabmon.alarms.detector_set import DetectorSet
from stabmon.alarms.detectors.grades import Health
from stabmon.alarms.detectors.latch import Patience
from stabmon.alarms.detectors.limits import Threshold
from stabmon.recovery.ladder import EXIT_UNRECOVERED, Kind
from stabmon.recovery.replay import replay_events
from stabmon.runs.jsonl import read_jsonl
from stabmon.runs.run import load_run

slow = pytest.mark.slow
ROOT = Path(__file__).parents[2]
UPDATE = "symptoms/global/update_norm/value"
LIMIT = 0.05  # 0.06 at the full learning rate; calm again under a half of it


def tiny(folder, **changes):
    """One configuration for all tests, acting or not: its step is compiled once."""
    settings = Config(
        name="tiny",
        runs=Path(folder),
        steps=40,
        batch=4,
        model=GPTConfig(layers=1, model=16, heads=2, context=16),
        optimizer=OptimizerConfig(warmup=5, every=5, keep=2, control=True),
        monitor=MonitorConfig(delta=0, activations=0, weights=0, symptoms=1),
        checkpoint_every=10,
        quiet=True,
        act=True,
        alarms=AlarmConfig(watch=10, verify=15, dwell=5, joint=1),
    )
    return dataclasses.replace(settings, **changes)


def limited(limit=LIMIT):
    """A board that holds the updates to be too large from step 20 on, unless the rate is cut."""
    patience = Patience(dwell=1, cooldown=0)
    detector = lambda: Threshold("limit", UPDATE, limit, 20, patience=patience)
    return lambda *_, **__: DetectorSet({"limit": detector()})


@pytest.fixture
def board(monkeypatch):
    monkeypatch.setattr(acting, "standard_detectors", limited())


def story(config):
    """Events but for their time: (kind, step, what)."""
    names = {"action": "action", "alarm": "key", "diagnosis": "fault", "incident": "change"}
    events = read_jsonl(config.runs / "tiny" / "events.jsonl")
    return [(e["kind"], e["step"], e.get(names.get(e["kind"], ""), "")) for e in events]


def final_state(config):
    init, _, _ = make_step(config.model, config.optimizer, config.monitor, config.fault)
    return Checkpoints(config.runs / "tiny" / "checkpoints").restore(init(config.seed))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    config = tiny(tmp_path_factory.mktemp("whole"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(acting, "standard_detectors", limited())
        return config, train(config)


def test_the_events_tell_the_story_in_order(whole):
    config, result = whole
    assert story(config) == [
        ("alarm", 20, UPDATE),
        ("diagnosis", 20, "learning rate"),
        ("incident", 20, "opened"),
        ("action", 20, "scale learning rate"),
        ("action", 30, "roll back"),
        ("action", 30, "scale learning rate"),
        ("action", 30, "reset optimizer"),
        ("rewind", 10, ""),
        ("action", 25, "resume"),
        ("finished", 40, ""),
    ]
    assert (result.step, result.code) == (40, 0)


def test_the_learning_rate_is_cut_to_what_the_ladder_says(whole):
    config, _ = whole
    assert float(optax.tree.get(final_state(config).opt_state, "control_scale")) == pytest.approx(
        0.2
    )
    steps, norms = load_run(config.runs / "tiny").metrics[UPDATE]
    late = norms[(steps >= 20) & (steps < 40)]
    assert len(late) == 20
    assert np.all((late > 0.010) & (late < 0.015))  # 0.06 at the full rate


def test_the_moments_begin_anew_at_the_rollback(whole):
    config, _ = whole
    assert int(optax.tree.get(final_state(config).opt_state, "mu") is not None)
    counts = [
        int(x) for _, x in optax.tree.get_all_with_path(final_state(config).opt_state, "count")
    ]
    assert min(counts) == 30  # since step 10
    assert max(counts) == 40  # the schedule went on


class Killed(BaseException):
    """Stands for SIGKILL: nothing more is written."""


def dies(*_, **__):
    raise Killed


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (Acting, "_undo"),  # nothing is undone yet
        (Checkpoints, "delete"),  # all is, but the later checkpoints are still there
    ],
)
def test_killed_in_the_midst_of_a_rollback_it_ends_in_the_same_state(
    whole, tmp_path, board, monkeypatch, where, name
):
    config = tiny(tmp_path)
    with monkeypatch.context() as patch:
        # Deletions before the rollback are of the ledger's making.
        if name == "delete":
            alive = Checkpoints.delete
            patch.setattr(
                Checkpoints, name, lambda self, step: dies() if step == 30 else alive(self, step)
            )
        else:
            patch.setattr(where, name, dies)
        with pytest.raises(Killed):
            train(config)
    train(dataclasses.replace(config, resume=True))
    assert story(config) == story(whole[0])
    jax.tree.map(np.testing.assert_array_equal, final_state(config), final_state(whole[0]))
    runs = [load_run(c.runs / "tiny").metrics for c in (config, whole[0])]
    assert runs[0].keys() == runs[1].keys()
    for key in runs[0]:
        np.testing.assert_array_equal(runs[0][key], runs[1][key])


@pytest.mark.parametrize("steps", [pytest.param(21, marks=slow), 27, pytest.param(32, marks=slow)])
def test_interrupted_at_any_step_it_ends_in_the_same_state(whole, tmp_path, board, steps):
    config = tiny(tmp_path)
    train(dataclasses.replace(config, steps=steps))
    train(dataclasses.replace(config, resume=True))
    kept = [event for event in story(config) if event[0] != "finished"]
    assert kept == [event for event in story(whole[0]) if event[0] != "finished"]
    jax.tree.map(np.testing.assert_array_equal, final_state(config), final_state(whole[0]))


@slow
def test_sigkill_by_the_system_in_the_midst_of_a_rollback(whole, tmp_path, board):
    script = (
        "import os, signal, sys; sys.path.insert(0, 'tests/experiments')\n"
        "import test_acting as t\n"
        "t.acting.standard_detectors = t.limited()\n"
        "t.acting.RunLog.rewind = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"t.train(t.tiny({str(tmp_path)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=200, check=False)
    assert done.returncode == -signal.SIGKILL
    config = tiny(tmp_path)
    assert json.loads((tmp_path / "tiny" / "recovery.json").read_text())["target"] == 10
    train(dataclasses.replace(config, resume=True))
    assert story(config) == story(whole[0])


def test_without_act_it_only_advises_and_the_run_is_the_same_run(tmp_path, board):
    advised = tiny(
        tmp_path / "a",
        act=False,
        alarms=AlarmConfig(on=True, watch=10, verify=15, dwell=5, joint=1),
    )
    plain = tiny(tmp_path / "b", act=False, alarms=AlarmConfig())
    losses = [train(config).loss for config in (advised, plain)]
    assert losses[0] == losses[1]
    events = load_run(advised.runs / "tiny").events
    assert {e["dry"] for e in events if e["kind"] == "action"} == {True}
    assert "roll back" in {e.get("action") for e in events}
    assert [e["kind"] for e in load_run(plain.runs / "tiny").events] == ["finished"]


def test_a_replay_of_an_advised_run_says_what_was_said(tmp_path, board):
    alarms = AlarmConfig(on=True, watch=10, verify=15, dwell=5, joint=1)
    config = tiny(tmp_path, act=False, alarms=alarms, checkpoint_every=0)
    train(config)
    run = load_run(config.runs / "tiny")
    said = [{k: v for k, v in x.items() if k != "time"} for x in run.events]
    policy = acting.Policy(watch=10, verify=15, joint=1)
    watcher = acting.Watcher(limited()(), acting.Recovery(policy, acting.CheckpointLedger(5)))
    assert replay_events(run, watcher) == said[:-1]
    assert {x["kind"] for x in said} == {"alarm", "diagnosis", "incident", "action", "finished"}


def test_where_nothing_helps_the_run_stops_with_its_own_code(tmp_path, monkeypatch):
    monkeypatch.setattr(acting, "standard_detectors", limited(1e-6))
    config = tiny(
        tmp_path, alarms=AlarmConfig(watch=10, verify=15, dwell=5, joint=1, max_rollbacks=1)
    )
    result = train(config)
    assert result.code == EXIT_UNRECOVERED
    assert result.step < 40
    kinds = [event[2] or event[0] for event in story(config)]
    assert kinds.count("roll back") == 1
    assert kinds[-2:] == ["stop", "stopped"]


def test_around_an_s0_the_batches_are_written(tmp_path):
    log, saved = type("Log", (), {"event": lambda *_, **__: None})(), None
    order = [np.array([step, step + 1]) for step in range(1000)]
    actor = Acting(tmp_path, log, saved, acting.Watcher(limited()(), acting.Recovery()))
    actor._windows = order
    actor.watcher.detectors = type(
        "Board",
        (),
        {
            "update": lambda *_: [],
            "recent": [],
            "grade": 0,
            "healthy": False,
            "health": Health.DANGER,
        },
    )()
    actor.observe(300, {})
    (path,) = tmp_path.glob("batches-*.json")
    fed = json.loads(path.read_text())
    assert (min(map(int, fed)), max(map(int, fed)), fed["299"]) == (100, 500, [299, 300])


def test_skipped_data_are_not_fed_again(tmp_path, board):
    skipping = AlarmConfig(watch=10, verify=15, dwell=5, joint=1, skip_data=True)
    config = tiny(tmp_path, alarms=skipping)
    train(config)
    notes = Checkpoints(config.runs / "tiny" / "checkpoints").notes(40)
    assert notes["data_shift"] == 20  # steps 10 to 30
    assert Kind.SKIP_DATA.value in {what for _, _, what in story(config)}


def test_a_checkpoint_without_alarms_is_not_resumed_with_them(tmp_path, board):
    config = tiny(tmp_path, act=False, alarms=AlarmConfig())
    config = dataclasses.replace(config, steps=10)
    train(config)
    (config.runs / "tiny" / "config.json").unlink()
    (config.runs / "tiny" / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="was saved without alarms"):
        train(dataclasses.replace(config, act=True, resume=True))
