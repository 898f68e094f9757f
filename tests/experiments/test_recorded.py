"""Runs and rows: found again by their settings, trained and measured once."""

from dataclasses import dataclass
from math import inf, isnan, nan
from pathlib import Path

import numpy as np
import pytest

from experiments.support import recorded as module
from experiments.support.recorded import (
    append_row,
    held_out,
    key,
    largest,
    latest,
    mean_from,
    measured,
    recorded,
    rows_there,
    settings_row,
)
from experiments.train import Config
from stabmon.runs.jsonl import read_jsonl
from stabmon.runs.run import Run
from stabmon.runs.runlog import RunLog


@dataclass(frozen=True)
class Settings:
    seed: int
    runs: Path
    rates: tuple[tuple[str, float], ...] = (("all", 1e-3),)


def test_settings_are_the_same_in_a_row_and_in_a_dataclass_wherever_runs_lie(tmp_path):
    file = tmp_path / "deep" / "x.jsonl"
    measured(file, Settings(1, tmp_path), lambda: {"loss": 2.0})
    (row,) = read_jsonl(file)
    assert key(row["settings"]) == key(Settings(1, Path("elsewhere")))
    assert "runs" not in row["settings"]


def test_what_is_there_is_not_measured_again(tmp_path):
    file, calls = tmp_path / "x.jsonl", []
    for seed in (0, 1, 0):
        settings = Settings(seed, tmp_path)
        row = measured(file, settings, lambda seed=seed: calls.append(seed) or {"seed": seed})
        assert row["seed"] == seed
    assert calls == [0, 1]


def test_other_settings_are_measured(tmp_path):
    file = tmp_path / "x.jsonl"
    measured(file, {"seed": 0}, lambda: {"loss": 1.0})
    measured(file, {"seed": 0, "steps": 5}, lambda: {"loss": 2.0})
    assert [row["loss"] for row in read_jsonl(file)] == [1.0, 2.0]


def test_a_torn_line_goes_when_the_next_is_written(tmp_path):
    file = tmp_path / "x.jsonl"
    append_row(file, {"a": 1})
    with file.open("a") as torn:
        torn.write('{"a": 2')
    append_row(file, {"a": float("inf")})
    assert read_jsonl(file) == [{"a": 1}, {"a": float("inf")}]


def test_rows_come_in_the_order_of_the_settings_and_the_last_measurement_counts(tmp_path):
    file = tmp_path / "x.jsonl"
    for seed, loss in ((0, 1.0), (1, 2.0), (0, 3.0), (2, 4.0)):
        append_row(file, {"loss": loss, "settings": {"seed": seed}})
    append_row(file, {"note": "without settings"})
    found = rows_there(file, [{"seed": 1}, {"seed": 0}, {"seed": 7}])
    assert [row["loss"] for row in found] == [2.0, 3.0]
    kept = [row.get("loss") for row in latest(read_jsonl(file))]
    assert kept == [2.0, 3.0, 4.0, None]


def test_settings_that_are_none_are_refused():
    with pytest.raises(TypeError, match="a dataclass or a mapping, got int"):
        key(3)


def test_a_row_that_is_measured_again_counts_from_then_on(tmp_path):
    file = tmp_path / "x.jsonl"
    measured(file, {"seed": 0}, lambda: {"loss": 1.0})
    assert measured(file, {"seed": 0}, lambda: {"loss": 2.0}, again=True)["loss"] == 2.0
    assert [row["loss"] for row in rows_there(file, [{"seed": 0}])] == [2.0]


class Trained:
    """Stands for `train`: writes a run of the steps that are left, or ends otherwise."""

    def __init__(self, kind="finished", short=0):
        self.kind, self.short, self.calls = kind, short, 0

    def __call__(self, settings):
        self.calls += 1
        with RunLog.open(settings.runs / settings.name, {"seed": 0}, resume=True) as log:
            if not self.short:
                log.event(self.kind, settings.steps, loss=1.0, held_out=2.0)


@pytest.mark.parametrize("kind", ["finished", "stopped"])
def test_a_run_that_is_over_is_not_trained_again(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(module, "train", train := Trained(kind))
    settings = Config(name="x", runs=tmp_path, steps=50)
    run = recorded(settings)
    assert recorded(settings).events == run.events
    assert train.calls == 1
    assert held_out(run) == 2.0 if kind == "finished" else isnan(held_out(run))


def test_a_longer_run_goes_on_with_what_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "train", train := Trained())
    for steps in (50, 60, 50):
        recorded(Config(name="x", runs=tmp_path, steps=steps))
    assert train.calls == 2


def test_an_interrupted_run_ends_the_experiment(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "train", Trained(short=1))
    with pytest.raises(SystemExit, match="x: interrupted, the same command goes on with it"):
        recorded(Config(name="x", runs=tmp_path, steps=50))


def test_a_run_is_told_by_its_length_and_not_by_its_place(tmp_path):
    one = settings_row(Config(runs=tmp_path, steps=5), window=3)
    assert (one["steps"], one["window"]) == (5, 3)
    assert key(one) == key(settings_row(Config(name="other", steps=5), window=3))
    assert key(one) != key(settings_row(Config(steps=6), window=3))


def test_numbers_of_a_run_say_where_one_is_not_finite(tmp_path):
    metrics = {"m": (np.array([0, 10, 20]), np.array([1.0, 3.0, 5.0]))}
    metrics["n"] = (np.array([0, 10]), np.array([nan, 1.0]))
    run = Run("r", tmp_path, {}, metrics, (), ())
    assert (mean_from(run, "m", 10), largest(run, "m")) == (4.0, 5.0)
    assert isnan(mean_from(run, "n", 0))
    assert largest(run, "n") == inf
