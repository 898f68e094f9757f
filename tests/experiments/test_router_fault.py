"""Router faults and combined faults at toy size, and how their rows are judged."""

import dataclasses

import numpy as np
import pytest

import experiments.support.moe_faults as moe_faults
from experiments import combined_fault
from experiments.combined_fault import right, signatures
from experiments.loop.data import load_corpus
from experiments.loop.optimizer import OptimizerConfig
from experiments.loop.step import MonitorConfig
from experiments.router_fault import Config, main
from experiments.support.moe_faults import (
    ARMS,
    MoEConfig,
    first_alarms,
    judged,
    run_one,
    settings_of,
)
from experiments.support.moe_judging import faults_of
from experiments.support.router_claims import claims, exponents
from experiments.support.router_growth import Branch, margins, measure, slope
from experiments.support.router_tables import headline, tables
from models.config import GPTConfig
from stabmon.runs.jsonl import read_jsonl
from stabmon.runs.run import Run, load_run

MOE = MoEConfig(
    steps=60,
    onset=40,
    batch=8,
    model=GPTConfig(
        layers=1, model=16, heads=2, context=16, backend="flash", experts=4, feedforward=16
    ),
    optimizer=OptimizerConfig(warmup=5, every=5, keep=2),
    monitor=MonitorConfig(lags=(5,), router=5, delta=5, activations=5, weights=0, symptoms=5),
    window=10,
)
TOY = Config(
    arms=("clean", "learning rate ×10"),
    seeds=(5,),
    reference_seeds=(6, 7),
    moe=MOE,
    branches=(Branch(), Branch(rate=10.0), Branch(batch=4.0)),
    marks=(1, 2),
    replicas=2,
)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    config = dataclasses.replace(TOY, runs=tmp_path_factory.mktemp("router"))
    return config, main(config)


def test_rows_are_written_once_and_give_tables_and_a_headline(toy, monkeypatch):
    config, result = toy
    monkeypatch.setattr(moe_faults, "train", lambda _: pytest.fail("was run again"))
    again = main(config)
    assert read_jsonl(result.file) == again.rows
    assert [row["kind"] for row in again.rows] == ["run"] * 2 + ["growth"] * 3
    text = tables(again.rows)
    assert text.startswith("*")
    assert "| learning rate ×10 | 5 |" in text
    assert "| ×10 | ÷1 | on |" in text
    assert headline(again.rows).startswith(("reproduces", "partly", "not at this size"))
    assert result.figure.exists()


def test_judging_anew_adds_rows_and_the_last_counts(toy):
    config, result = toy
    before = len(read_jsonl(result.file))
    again = main(dataclasses.replace(config, rejudge=True))
    assert len(read_jsonl(result.file)) == before + 2
    assert again.rows[0] == result.rows[0]


def test_a_combined_run_shares_the_recorded_runs(toy, monkeypatch):
    config, _ = toy
    trained = []
    monkeypatch.setattr(
        moe_faults, "train", lambda x, train=moe_faults.train: trained.append(x.name) or train(x)
    )
    arms = ("clean", "attention", "learning rate ×10", "attention, learning rate ×10")
    combined = combined_fault.Config(
        arms=arms, seeds=(5,), reference_seeds=(6, 7), moe=MOE, runs=config.runs
    )
    result = combined_fault.main(combined)
    assert trained == ["moe-attention-seed5", "moe-attention-learning-rate-x10-seed5"]
    assert [row["arm"] for row in result.rows] == list(arms)
    assert "| attention, learning rate ×10 |" in combined_fault.tables(result.rows)
    assert combined_fault.headline(result.rows).startswith(("reproduces", "partly", "not at"))


def test_alarms_are_replayed_as_they_were_raised(tmp_path):
    settings = settings_of(MOE, "learning rate ×40", 5, tmp_path)
    watched = dataclasses.replace(
        settings,
        name="watched",
        alarms=dataclasses.replace(settings.alarms, on=True, window=MOE.window),
    )
    replayed = judged(run_one(settings), MOE.optimizer.warmup, MOE.window)
    raised = run_one(watched)
    plain = lambda run: [
        {k: v for k, v in x.items() if k != "time"}
        for x in run.events
        if x["kind"] in ("alarm", "diagnosis")
    ]
    assert plain(replayed) == plain(raised)
    assert plain(replayed)


def test_arms_differ_from_clean_by_their_fault_alone(tmp_path):
    clean = settings_of(MOE, "clean", 5, tmp_path)
    for arm in ARMS:
        one = settings_of(MOE, arm, 5, tmp_path)
        healed = dataclasses.replace(one, armed=False, disturbances=(), name=clean.name)
        assert healed == clean
    assert len({settings_of(MOE, arm, 5, tmp_path).name for arm in ARMS}) == len(ARMS)


def test_the_margin_of_experts_that_were_first_grows_in_common_or_apart():
    before = np.array([[3.0, 1.0, 0.0], [0.0, 1.0, 4.0]])
    common = np.stack([before + np.array([[2.0, 0.0, 0.0], [0.0, 0.0, 2.0]])] * 3)
    assert margins(before, common) == pytest.approx(
        {"growth": 2.0, "drift": 2.0, "noise": 0.0, "kept": 1.0}
    )
    noise = np.stack([before + x * np.array([[1.0, 0.0, 0.0]]) for x in (-3.0, 0.0, 3.0)])
    found = margins(before, noise)
    assert found["growth"] == pytest.approx(0.0)
    assert found["noise"] == pytest.approx(3.0 / 2**0.5)
    assert found["kept"] == pytest.approx(5 / 6)
    # The mean of three replicas, one of which moved by 3, is 1: no more than noise makes it.
    one = np.stack([before + x * np.array([[1.0, 0.0, 0.0]]) for x in (3.0, 0.0, 0.0)])
    assert margins(before, one)["drift"] == 0.0


def test_exponents_are_of_one_axis_each():
    row = lambda rate, batch: {
        "seed": 1,
        "rate": rate,
        "batch": batch,
        "auxiliary": 1.0,
        "after": {"10": {"drift": rate**2 * batch, "noise": batch**0.5 / rate}},
    }
    rows = [row(1.0, 1.0), row(10.0, 1.0), row(1.0, 4.0)]
    rows.append(row(100.0, 1.0) | {"auxiliary": 0.0, "after": {"10": {"drift": 1.0, "noise": 1.0}}})
    rate, batch = exponents(rows, "10")
    assert rate["drift"] == pytest.approx([2.0])
    assert batch["noise"] == pytest.approx([0.5])
    assert np.isnan(slope([1.0, 2.0], [0.0, 1.0]))


def test_a_claim_holds_partly_where_some_runs_do_not_show_it():
    text = {"margin": 0.0, "max_violation": 0.0, "similarity": 0.0, "conditioning": 0.0}
    row = lambda arm, seed, entropy: {
        "kind": "run",
        "arm": arm,
        "seed": seed,
        "text": text,
        "after": {"router entropy": entropy, "margin": 0.0},
        "late": {"Δ2 p10": 0.5},
    }
    runs = [row("clean", s, 1.0) for s in (1, 2)]
    runs += [row("batch ÷8", 1, 0.9), row("batch ÷8", 2, 1.1)]
    (found,) = [x for x in claims(runs) if "batch lowers" in x[0]]
    assert found[1:] == ("partly", "1 of 2: batch ÷8: -0.10, +0.10")


def test_a_signature_has_left_its_band_to_its_side_after_the_onset():
    names = ("Δ2 spectrum", "ΔW_q spectrum", "router entropy", "radial alignment of W_q")
    directions = dict(zip(names, ("up", "down", "down", "down"), strict=True))
    bands = dict(zip(names, (50, 75, -10, 60), strict=True))
    row = {"bands": bands, "directions": directions}
    assert signatures(row, "spectra and router") == {"attention"}
    assert signatures(row, "alignment and update size") == set()
    both = {"bands": bands | {"router entropy": 0}, "directions": directions}
    assert signatures(both, "spectra and router") == {"attention", "learning rate"}


def test_two_faults_are_named_right_only_by_their_names():
    faults = [str(x) for x in faults_of("attention, learning rate ×10")]
    row = {"faults": faults, "verdict": {"named": "several at once"}}
    assert right(row | {"parts": [["learning rate", "attention numerics"]]})
    assert not right(row | {"parts": [["learning rate", "batch or balance"]]})
    assert not right(row | {"verdict": {"named": "learning rate"}, "parts": [[]]})
    assert right({"faults": [], "verdict": {"named": "clean"}, "parts": []})


def test_first_alarms_are_those_after_the_onset(tmp_path):
    alarm = lambda step, key: {"kind": "alarm", "step": step, "key": key, "rule": "z"}
    events = (alarm(30, "a"), alarm(60, "b"), alarm(50, "a"), alarm(70, "a"))
    run = Run("r", tmp_path, {}, {}, events, ())
    assert first_alarms(run, 40) == [(10, "a", "z"), (20, "b", "z")]


def test_seeds_of_the_reference_do_not_judge_themselves():
    with pytest.raises(ValueError, match=r"seeds \[6\] are in the reference"):
        main(dataclasses.replace(TOY, seeds=(6,)))


def test_one_replica_has_no_noise(tmp_path):
    settings, corpus = settings_of(MOE, "clean", 5, tmp_path), load_corpus(limit=1000)
    with pytest.raises(ValueError, match="at least 2, got 1"):
        measure(settings, None, Branch(), corpus, (1,), 1)


def test_a_recorded_run_is_whole(toy):
    config, _ = toy
    run = load_run(config.runs / "moe-clean-seed5")
    assert run.events[-1]["kind"] == "finished"
