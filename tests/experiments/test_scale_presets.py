"""The papers' configurations: their numbers, two steps of a small one, a pod's run, the tables."""

import dataclasses

import pytest

from experiments import scale_presets
from experiments.scale_presets import Config, figure, headline, main, nanogpt, pod_config, tables
from experiments.support import recorded
from experiments.support.scale import PAPERS, REDUCED, paper_config, two_steps
from experiments.train import Result
from models.presets import PRESETS
from stabmon.runs.jsonl import read_jsonl

TINY = dataclasses.replace(
    PRESETS["nanogpt-5m"], vocabulary=256, layers=2, model=16, heads=2, context=16
)


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    monkeypatch.setitem(PRESETS, "nanogpt-5m", TINY)
    return Config(steps=60, batch=2, warmup=5, layers=2, runs=tmp_path)


def test_every_preset_has_the_papers_numbers_and_a_reduction():
    assert set(PRESETS) == set(PAPERS) == set(REDUCED)
    for name, (layers, context) in REDUCED.items():
        assert layers <= PRESETS[name].layers
        assert context <= PRESETS[name].context


def test_nanogpt_is_trained_by_mup():
    config = paper_config("nanogpt-5m")
    assert config.batch * config.model.context == 122_880
    assert config.optimizer.learning_rate == pytest.approx(4 * 6e-4)
    assert dict(config.optimizer.rates)["all"] == pytest.approx(16 * 6e-4)
    assert config.model.zero_query
    assert config.model.std == 0.08
    assert paper_config("llama-1b").batch == 32


@pytest.mark.slow
def test_two_steps_of_a_reduced_one_move_it(tiny):
    row = two_steps("nanogpt-5m", 1, 8, seed=0)
    assert row["moved"]
    assert row["losses"] == pytest.approx([row["uniform"]] * 2, abs=0.3)
    assert row["reduced"] == {"layers": 1, "context": 8, "batch": 1}
    assert row["reduced_parameters"] < row["parameters"]
    assert row["full_bytes"] > 4 * row["parameters"]


@pytest.mark.slow
def test_the_table_holds_what_was_measured_and_nothing_is_measured_twice(tiny, monkeypatch):
    step = two_steps("nanogpt-5m", 1, 8, seed=0)
    monkeypatch.setattr(scale_presets, "_apart", lambda name, seed: step)
    config = dataclasses.replace(tiny, presets=("nanogpt-5m",))
    result = main(config)
    assert result is not None
    rows = result.rows
    monkeypatch.setattr(scale_presets, "_apart", None)
    monkeypatch.setattr(scale_presets, "nanogpt", None)
    assert main(config) == result
    assert rows == read_jsonl(tiny.runs / "scale_presets.jsonl")
    text = tables(rows)
    assert "| 2, 16, 122,880, 0.0006 |" in text
    assert "60 steps, 1,920 tokens" in text
    assert "| held-out loss | " in text
    line = headline(rows)
    assert line.startswith("not at this size: 1 of 1 presets compile in full and take two reduced")
    assert f"held-out loss {rows[1]['curves']['held-out loss'][1][0]:.2f} → " in line
    assert result.figure == tiny.runs / "scale_presets.html"
    assert len(figure(rows).to_dict()["data"]) == len(rows[1]["curves"])
    assert figure(rows[:1]).to_dict()["data"] == []
    diverged = [rows[0], rows[1] | {"held_out": float("nan")}]
    assert headline(diverged).startswith("partly: ")
    assert "NanoGPT-5M fails within" in headline(diverged)


def test_an_interrupted_run_is_no_row(tiny, monkeypatch):
    stopped = Result(tiny.runs, step=59, loss=1.0, held_out=1.0)
    monkeypatch.setattr(recorded, "train", lambda settings: stopped)
    with pytest.raises(SystemExit, match="nanogpt-5m-seed0: interrupted"):
        nanogpt(tiny)


def test_a_pod_trains_the_whole_preset_in_bfloat16(tiny):
    settings = pod_config(dataclasses.replace(tiny, preset="llama-1b", parallelism="mixed"))
    assert settings.model.layers == 16
    assert settings.model.dtype == "bfloat16"
    assert settings.batch == 32
    assert settings.placement.parallelism == "mixed"


def test_the_command_of_a_pod_trains_that(tiny, monkeypatch, capsys):
    seen = []
    ended = Result(tiny.runs, step=2, loss=1.5, held_out=1.5)
    monkeypatch.setattr(scale_presets, "train", lambda settings: seen.append(settings) or ended)
    config = dataclasses.replace(tiny, command="pod", steps=2, resume=True)
    assert main(config) is None
    assert seen == [pod_config(config)]
    assert seen[0].resume
    assert seen[0].steps == 2
    assert "step 2, loss 1.500" in capsys.readouterr().out
