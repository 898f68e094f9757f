"""The ladder at work in `train`: its story, and the same story when it is interrupted.

The ladder itself, kills in the midst of a rollback included, is tested on `stabmon.Watch`.
"""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from experiments.loop import alarms
from experiments.loop.alarms import AlarmConfig, keep_batches
from experiments.loop.checkpoints import checkpoints
from experiments.loop.optimizer import OptimizerConfig
from experiments.loop.step import MonitorConfig, make_step
from experiments.train import Config, train
from models.config import GPTConfig
from stabmon.alarms.detector_set import DetectorSet
from stabmon.alarms.detectors.latch import Patience
from stabmon.alarms.detectors.limits import Threshold
from stabmon.recovery.ladder import Action, Kind
from stabmon.recovery.watcher import Seen
from stabmon.runs.jsonl import read_jsonl
from stabmon.runs.run import load_run

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
    monkeypatch.setattr(alarms, "standard_detectors", limited())


def story(config):
    """Events but for their time: (kind, step, what)."""
    names = {"action": "action", "alarm": "key", "diagnosis": "fault", "incident": "change"}
    events = read_jsonl(config.runs / "tiny" / "events.jsonl")
    return [(e["kind"], e["step"], e.get(names.get(e["kind"], ""), "")) for e in events]


def final_state(config):
    init, _, _ = make_step(config.model, config.optimizer, config.monitor, config.fault)
    return checkpoints(config.runs / "tiny", init(config.seed)).restore()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    config = tiny(tmp_path_factory.mktemp("whole"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alarms, "standard_detectors", limited())
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


@pytest.mark.parametrize("steps", [pytest.param(21, marks=pytest.mark.slow), 27])
def test_interrupted_at_any_step_it_ends_in_the_same_state(whole, tmp_path, board, steps):
    config = tiny(tmp_path)
    train(dataclasses.replace(config, steps=steps))
    train(dataclasses.replace(config, resume=True))
    kept = [event for event in story(config) if event[0] != "finished"]
    assert kept == [event for event in story(whole[0]) if event[0] != "finished"]
    jax.tree.map(np.testing.assert_array_equal, final_state(config), final_state(whole[0]))


def test_an_unwatched_run_has_no_alarm(tmp_path):
    plain = tiny(tmp_path, act=False, alarms=AlarmConfig(), steps=20)
    train(plain)
    assert [e["kind"] for e in load_run(plain.runs / "tiny").events] == ["finished"]


def test_around_an_s0_the_batches_are_written(tmp_path):
    order: list = [np.array([step, step + 1]) for step in range(1000)]
    fields = {"first": 100, "last": 500}
    action = Action(Kind.KEEP_BATCHES, 300, "the grade is S0", False, fields)
    keep_batches(tmp_path, order, lambda: 0)(Seen(300, actions=(action,)))
    (path,) = tmp_path.glob("batches-*.json")
    fed = json.loads(path.read_text())
    assert (min(map(int, fed)), max(map(int, fed)), fed["299"]) == (100, 500, [299, 300])
