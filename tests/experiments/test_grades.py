"""The grades experiment at toy size, its texts, and how rankings are judged by continuing."""

import dataclasses

import numpy as np
import pytest

from experiments.data import load_corpus
from experiments.grades import BASE, Config, headline, main, tables, train_config
from experiments.loop.alarms import AlarmConfig
from experiments.loop.optimizer import OptimizerConfig
from experiments.loop.step import MonitorConfig
from experiments.support import recorded
from experiments.support.continuing import continued, disputed, orders, rank_correlation
from experiments.support.grading import ARMS, acts, claims, correlations, story, wins_of
from experiments.support.moe import train_config as toy_run
from experiments.support.states import grades_of_texts
from experiments.support.text_mixes import MIXES, write_mixes
from models.config import GPTConfig
from stabmon.runs.jsonl import read_jsonl
from stabmon.runs.run import Run

TOY = Config(
    arms=("clean", "learning rate ×40"),
    ranked=("learning rate ×40",),
    seeds=(5,),
    onset=40,
    ranked_at=(20, 40, 60),
    continued=3,
    mix_steps=20,
    base=dataclasses.replace(
        BASE,
        steps=60,
        batch=4,
        model=GPTConfig(layers=1, model=16, heads=2, context=16, backend="flash"),
        optimizer=OptimizerConfig(warmup=5, every=5, keep=2, control=True),
        monitor=MonitorConfig(lags=(5,), delta=5, activations=5, weights=0, symptoms=5),
    ),
    alarms=AlarmConfig(on=True, window=10, watch=10, verify=10, dwell=10),
)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    base = dataclasses.replace(TOY.base, runs=tmp_path_factory.mktemp("grades"))
    config = dataclasses.replace(TOY, base=base)
    return config, main(config)


@pytest.mark.slow
def test_rows_of_all_parts_are_written_once(toy, monkeypatch):
    config, result = toy
    monkeypatch.setattr(recorded, "train", lambda _: pytest.fail("was run again"))
    again = main(config)
    assert read_jsonl(result.file) == again.rows
    assert [row["kind"] for row in again.rows] == ["story"] * 2 + ["ranking"] + ["mixes"] * 4
    assert set(again.rows[-1]["texts"]) == set(MIXES)
    assert len(again.rows[0]["texts"]["code"]["segments"]) == 4
    text = tables(again.rows)
    assert text.startswith("*")
    for arm in ("clean", "learning rate ×40", "repeated prose"):
        assert f"| {arm} | 5 |" in text
    assert headline(again.rows).startswith(("reproduces", "partly", "not at this size"))
    assert "\n" not in headline(again.rows)
    assert result.figure.exists()


@pytest.mark.slow
def test_judging_anew_adds_rows_and_continues_nothing_again(toy, monkeypatch):
    config, result = toy
    before = len(read_jsonl(result.file))
    monkeypatch.setattr(
        "experiments.support.continuing.continued", lambda *_: pytest.fail("went on")
    )
    again = main(dataclasses.replace(config, rejudge=True))
    assert len(read_jsonl(result.file)) == before + 3
    assert again.rows == result.rows


@pytest.mark.slow
def test_no_step_more_is_the_checkpoint_itself(toy):
    config, _ = toy
    settings = train_config(config, "story", "learning rate ×40", 5, {})
    saved = settings.runs / settings.name / "checkpoints"
    assert sorted(int(x.name) for x in saved.iterdir()) == [20, 40, 60]
    (same,) = continued(settings, [60], 0)
    (more,) = continued(settings, [60], 3)
    ends = [x for x in read_jsonl(settings.runs / settings.name / "events.jsonl")]
    assert same == pytest.approx(ends[-1]["held_out"], rel=1e-6)
    assert more != same


def test_continuing_is_what_the_run_itself_would_have_been(moe):
    longer = dataclasses.replace(toy_run(moe, "clean", 5), name="longer", checkpoint_every=20)
    run = recorded.recorded(longer)
    (after,) = continued(longer, [20], 40)
    assert after == pytest.approx(run.events[-1]["held_out"], rel=1e-5)


def test_the_rank_of_a_trained_model_is_that_of_its_worst_layer(moe, tmp_path):
    settings = toy_run(moe, "clean", 5)
    recorded.recorded(settings)
    text = tmp_path / "text.txt"
    text.write_text("a text of some length, over and over. " * 4000)
    (found,) = grades_of_texts(settings, {"text": text}).values()
    assert found["layer"] == 0
    assert len(found["segments"]) == 4
    assert 0 < found["ratio"] <= 1


def test_arms_are_one_program_but_for_what_they_say(tmp_path):
    config = dataclasses.replace(TOY, base=dataclasses.replace(TOY.base, runs=tmp_path))
    clean = train_config(config, "story", "clean", 5, {})
    for name, arm in ARMS.items():
        one = train_config(config, "story", name, 5, {})
        assert one.optimizer == clean.optimizer
        assert (one.model == clean.model) == (not arm.model)
        assert one.act == acts(name)
    assert train_config(config, "story", "learning rate ×40, ladder", 5, {}).checkpoint_every == 5
    assert len({train_config(config, "story", name, 5, {}).name for name in ARMS}) == len(ARMS)


def test_the_story_counts_from_the_onset(tmp_path):
    key = "activations/global/rank_ratio/min"
    steps = np.arange(0, 60, 5)
    ratios = np.where(steps <= 40, 0.65, 0.25)
    flat = {
        name: (steps, np.ones(12))
        for name in ("attention/global/entropy/mean", "evaluation/global/loss/value")
    }
    alarm = lambda step, key: {"kind": "alarm", "step": step, "key": key}
    acted = {"kind": "action", "step": 50, "action": "roll back", "dry": False}
    dry = acted | {"action": "stop", "dry": True}
    events = (alarm(30, key), alarm(45, "other"), alarm(50, key), acted, dry)
    run = Run("r", tmp_path, {}, flat | {key: (steps, ratios)}, events, ())
    row = story(run, "learning rate ×40, ladder", 40, 5)
    assert (row["before"], row["lowest"], row["late"]) == pytest.approx((0.65, 0.25, 0.25 + 0.1))
    assert (row["grade_alarm"], row["first_alarm"], row["loss_alarm"]) == (10, 5, None)
    assert row["first_key"] == "other"
    assert row["actions"] == ["roll back 50"]
    assert story(run, "learning rate ×40", 40, 5)["actions"] == []


CHECKPOINTS = [
    {"step": 300, "state": "healthy", "loss": 2.0, "continued": 1.5},
    {"step": 400, "state": "caution", "loss": 1.9, "continued": 1.6},
    {"step": 500, "state": "danger", "loss": float("nan"), "continued": float("nan")},
]


def test_only_pairs_that_the_rankings_judge_otherwise_are_disputed():
    pairs = [(a["step"], b["step"]) for a, b in disputed(CHECKPOINTS)]
    assert pairs == [(300, 400)]
    row = {"checkpoints": CHECKPOINTS}
    assert wins_of(row) == [True]
    assert orders(CHECKPOINTS) == {
        "health": [300, 400, 500],
        "loss": [400, 300, 500],
        "continued": [300, 400, 500],
    }
    assert correlations(row) == {"health": 1.0, "loss": 0.5}


def test_rank_correlation_of_two_orders():
    assert rank_correlation([1, 2, 3, 4], [2, 1, 4, 3]) == pytest.approx(0.6)
    assert np.isnan(rank_correlation([1], [1]))


def test_a_claim_counts_its_runs():
    row = {"kind": "story", "arm": "learning rate ×40", "loss_alarm": 30, "held_out": 2.0}
    row["texts"] = {"code": {"segments": [0.5, 0.4]}}
    fell = row | {"seed": 1, "before": 0.65, "lowest": 0.25, "grade_alarm": 20}
    stayed = row | {"seed": 2, "before": 0.65, "lowest": 0.62, "grade_alarm": None}
    found = {x.words: (x.verdict, x.count) for x in claims([fell, stayed])}
    assert found["The grade falls by two or more"] == ("partly", "1 of 2")
    assert found["Its alarm comes before the loss's"] == ("partly", "1 of 2")
    clean = fell | {"arm": "clean", "texts": {"code": {"segments": [0.5, 0.5]}}}
    back = "A fault lowers the back of the context more than the front"
    (found,) = [x for x in claims([fell, stayed, clean]) if x.words == back]
    assert (found.verdict, found.count) == ("reproduces", "1 of 1")


def test_texts_are_of_their_kinds(tmp_path):
    paths = write_mixes(tmp_path, 50_000)
    texts = {name: path.read_bytes() for name, path in paths.items()}
    assert b"\nimport " in texts["code"]
    assert b"\nimport " not in texts["prose"]
    first = texts["repeated prose"][:4000]
    assert texts["repeated prose"][4000:8000] == first
    assert texts["prose"].startswith(first)
    assert texts["half code, half repeated prose"][:2000] == texts["code"][:2000]
    assert texts["half code, half repeated prose"][2000:4000] == first[:2000]
    assert load_corpus(paths["prose"]).vocabulary == 256
