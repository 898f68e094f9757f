"""The campaign at toy size, the disturbances that it injects, and how runs are judged."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.campaign import CASES, Config, main, verdict
from experiments.loop.acting import AlarmConfig
from experiments.loop.faults import Disturbance, Scales, disturbed, scales
from experiments.loop.optimizer import OptimizerConfig
from experiments.loop.step import MonitorConfig
from experiments.support.campaign_tables import headline, tables
from experiments.support.verdicts import CLEAN, Verdict, judge
from models.config import GPTConfig
from stabmon.alarms.signatures import Fault
from stabmon.runs.jsonl import plain, read_jsonl
from stabmon.runs.run import load_run

DENSE = GPTConfig(layers=1, model=16, heads=2, context=16, backend="flash")
TOY = Config(
    seeds=(5,),
    clean_seeds=(5,),
    steps=60,
    clean_steps=60,
    onset=40,
    batch=8,
    dense=DENSE,
    optimizer=OptimizerConfig(warmup=5, every=5, keep=2),
    monitor=MonitorConfig(lags=(5,), delta=0, activations=0, weights=0, symptoms=1),
    alarms=AlarmConfig(on=True, window=10),
    cases=("clean", "learning rate ×10", "NaN in the gradient"),
)
BATCHES = [np.full((8, 5), step, np.int32) + 10 * np.arange(8)[:, None] for step in range(50)]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    runs = tmp_path_factory.mktemp("campaign")
    config = dataclasses.replace(TOY, runs=runs, results=runs / "campaign.jsonl")
    return config, main(config).rows


def test_each_run_is_judged_and_the_faults_are_named(toy):
    config, rows = toy
    assert [x["case"] for x in rows] == list(config.cases)
    assert [x["named"] for x in rows] == [CLEAN, Fault.LEARNING_RATE, Fault.NONFINITE]
    assert [x["false_alarms"] for x in rows] == [(), (), ()]
    assert [x["clean_steps"] for x in rows] == [45, 0, 0]
    written = read_jsonl(config.results)
    assert [(row["seed"], row["right"]) for row in written] == [(5, True)] * 3
    assert tables(written) == tables(rows)
    assert (config.runs / "campaign.html").stat().st_size > 1e6


def test_a_fault_is_journalled_and_changes_nothing_before_its_onset(toy):
    config, _ = toy
    (row,) = read_jsonl(config.runs / "learning-rate-×10-5" / "faults.jsonl")
    assert row == {"kind": "learning rate", "amount": 10, "onset": 40, "end": None}
    key = "symptoms/global/update_norm/value"
    clean, faulty = (
        dict(zip(*map(np.ndarray.tolist, load_run(config.runs / name).metrics[key]), strict=True))
        for name in ("clean-5", "learning-rate-×10-5")
    )
    assert [clean[step] for step in range(1, 40)] == [faulty[step] for step in range(1, 40)]
    assert faulty[40] == pytest.approx(10 * clean[40], rel=1e-4)


def test_a_run_that_is_there_is_not_run_again_nor_a_row_measured_again(toy, monkeypatch):
    config, rows = toy
    monkeypatch.setattr("experiments.campaign.train", lambda _: pytest.fail("was run again"))
    moved = dataclasses.replace(config, runs=config.runs / "nowhere")
    assert tables(main(moved).rows) == tables(rows)
    config.results.rename(config.runs / "aside.jsonl")
    assert main(config).rows == rows


def test_a_replay_says_what_was_said_while_the_run_went_on(toy, monkeypatch):
    config, rows = toy
    replayed = []
    monkeypatch.setattr("experiments.campaign.judge", lambda events, *_: replayed.append(events))
    for row in rows:
        with pytest.raises(AttributeError):
            verdict(config, row["case"], 5, 60)
    for name, events in zip(("clean-5", "learning-rate-×10-5"), replayed, strict=False):
        live = [
            {k: v for k, v in x.items() if k != "time"}
            for x in read_jsonl(config.runs / name / "events.jsonl")
            if x["kind"] in ("alarm", "diagnosis", "action")
        ]
        assert plain(events) == plain(live)
        assert bool(live) == (name != "clean-5")


def test_recorded_runs_are_judged_anew_where_that_is_asked_for(toy, monkeypatch):
    config, rows = toy
    monkeypatch.setattr("experiments.campaign.train", lambda _: pytest.fail("was run again"))
    assert main(dataclasses.replace(config, again=True)).rows == rows


def test_an_interruption_ends_the_campaign(toy, tmp_path, monkeypatch):
    config, _ = toy
    config = dataclasses.replace(config, runs=tmp_path, results=tmp_path / "campaign.jsonl")
    half = SimpleNamespace(step=30, code=0)
    monkeypatch.setattr("experiments.campaign.train", lambda _: half)
    with pytest.raises(KeyboardInterrupt, match="clean-5 was interrupted at step 30"):
        main(config)
    assert not config.results.exists()


def test_the_factors_hold_from_the_onset_to_the_end():
    wrong = (Disturbance("learning rate", 10, 5), Disturbance("gradient", math.nan, 7, 8))
    assert scales(wrong, 4) == Scales(1, 1, 1)
    assert scales(wrong, 6) == Scales(10, 1, 1)
    assert math.isnan(scales(wrong, 7).gradient)
    assert scales(wrong, 8) == Scales(10, 1, 1)


def test_a_small_batch_is_fed_as_often_as_shapes_need():
    tokens = disturbed([Disturbance("batch", 4, 3)], BATCHES, 3, 0, 256)
    np.testing.assert_array_equal(tokens, np.concatenate([BATCHES[3][:2]] * 4))


def test_repeated_data_begin_anew():
    again = [Disturbance("repeated data", 3, 10)]
    places = [int(disturbed(again, BATCHES, step, 0, 256)[0, 0]) for step in range(8, 17)]
    assert places == [8, 9, 10, 11, 12, 10, 11, 12, 10]


def test_a_dirty_batch_is_the_same_noise_each_time():
    dirty = [Disturbance("dirty batch", 1.0, 3, 4)]
    first, second = (disturbed(dirty, BATCHES, 3, 0, 256) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert len(np.unique(first)) > 20
    np.testing.assert_array_equal(disturbed(dirty, BATCHES, 4, 0, 256), BATCHES[4])


def test_alarms_before_the_onset_are_false_and_those_without_a_name_unknown():
    alarms = [{"kind": "alarm", "step": step, "key": "k", "rule": "z"} for step in (30, 70)]
    found = judge(alarms, "c", 0, "x", 50, 100, 20)
    assert (found.false_alarms, found.named) == (("30 z k",), Fault.UNKNOWN)
    assert (found.first_alarm, found.lead, found.clean_steps) == (20, 30, 0)


def made_up(case, seed, truth, named, false=(), actions=()):
    clean = 0 if truth != CLEAN else 20_000
    return Verdict(
        case, seed, truth, named, named, 20, None, 680, false, clean, actions, 1200
    ).row()


def test_tables_and_headline_come_from_the_rows_alone():
    rows = [
        made_up("clean", 1, CLEAN, CLEAN, ("330 spike k",)),
        made_up("clean", 2, CLEAN, CLEAN),
        *(made_up("x", i, "batch", "batch" if i else "unknown") for i in range(5)),
        {"kind": "rescue", "case": "x", "seed": 1, "steps": 9, "clean": 2.0, "faulty": 3.0}
        | {"act": 2.1, "excess": 0.05, "actions": ["roll back 550"]},
    ]
    assert headline(rows) == (
        "met: 4 of 5 faults named right, 1 false alarms and 0 actions advised in 40,000 clean "
        "steps (0.2 per 10,000, 95 % upper bound 1.2); `--act` ends +5.0% from the clean loss at "
        "worst in 1 runs"
    )
    assert headline([*rows, made_up("clean", 3, CLEAN, "x", (), ("9 stop",))]).startswith("not met")
    text = tables(rows)
    assert "| batch |  | 4 | 1 |" in text
    assert "| clean | 1 | 330 spike k | – |" in text
    assert "| x | 1 | 2.000 | 3.000 | 2.100 | +5.0% | roll back 550 |" in text
    assert text.count("unknown ✗") == 1
    assert headline([made_up("x", 1, "batch", "unknown")]).startswith("not met: 0 of 1")


def test_every_kind_of_fault_has_a_case():
    assert {case.truth for case in CASES.values()} >= set(Fault) - {
        Fault.UNKNOWN,
        Fault.NO_QK_NORM,
        Fault.LOW_RANK,
    }


def test_an_end_before_the_onset_is_refused():
    with pytest.raises(ValueError, match="gradient: ends at 3, before its onset 5"):
        Disturbance("gradient", 0, 5, 3)
