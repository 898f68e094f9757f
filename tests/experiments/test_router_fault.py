"""Router faults and combined faults at toy size, and how their rows are judged."""

import dataclasses

import numpy as np
import pytest

from experiments import combined_fault
from experiments.combined_fault import right, signs
from experiments.data import load_corpus
from experiments.router_fault import Config, claims, headline, main, tables
from experiments.support import recorded
from experiments.support.arms import ARMS, faults_of
from experiments.support.moe import AFTER, LATE, MONITORS, first_alarms, judged_row, train_config
from experiments.support.router_growth import Branch, exponents, margins, measure, slope
from stabmon.runs.jsonl import read_jsonl
from stabmon.runs.run import Run, load_run


@pytest.fixture(scope="module")
def toy(moe):
    config = Config(
        arms=("clean", "learning rate ×10"),
        seeds=(5,),
        moe=moe,
        branches=(Branch(), Branch(rate=10.0), Branch(batch=4.0)),
        marks=(1, 2),
        replicas=2,
    )
    return config, main(config)


def test_a_row_says_what_alarms_bands_and_the_router_made_of_a_run(moe):
    row = judged_row(moe, "learning rate ×40", 5)
    assert (row["faults"], row["verdict"]["truth"]) == (["learning rate"], "learning rate")
    assert row["bands"].keys() == row["directions"].keys() == MONITORS.keys()
    assert (row["after"].keys(), row["late"].keys()) == (AFTER.keys(), LATE.keys())
    assert row["verdict"]["first_alarm"] == row["first"][0][0]
    assert row["bands"]["update ratio"] is not None
    assert row["directions"]["update ratio"] == "up"
    assert 0 < row["text"]["entropy"] < np.log(4)
    assert row["held_out"] > 0
    assert load_run(moe.base.runs / "moe-clean-seed6").events[-1]["kind"] == "finished"


@pytest.mark.slow
def test_rows_are_written_once_and_give_tables_and_a_headline(toy, monkeypatch):
    config, result = toy
    monkeypatch.setattr(recorded, "train", lambda _: pytest.fail("was run again"))
    again = main(config)
    assert read_jsonl(result.file) == again.rows
    assert [row["kind"] for row in again.rows] == ["run"] * 2 + ["growth"] * 3
    text = tables(again.rows)
    assert text.startswith("*")
    assert "| learning rate ×10 | 5 |" in text
    assert "| ×10 | ÷1 | on |" in text
    assert headline(again.rows).startswith(("reproduces", "partly", "not at this size"))
    assert result.figure.exists()


@pytest.mark.slow
def test_judging_anew_adds_rows_and_the_last_counts(toy):
    config, result = toy
    before = len(read_jsonl(result.file))
    again = main(dataclasses.replace(config, rejudge=True))
    assert len(read_jsonl(result.file)) == before + 2
    assert again.rows[0] == result.rows[0]


@pytest.mark.slow
def test_a_combined_run_shares_the_recorded_runs(toy, moe, monkeypatch):
    trained, train = [], recorded.train
    monkeypatch.setattr(recorded, "train", lambda x: trained.append(x.name) or train(x))
    arms = ("clean", "attention", "learning rate ×10", "attention, learning rate ×10")
    result = combined_fault.main(combined_fault.Config(arms=arms, seeds=(5,), moe=moe))
    assert trained == ["moe-attention-seed5", "moe-attention-learning-rate-x10-seed5"]
    assert [row["arm"] for row in result.rows] == list(arms)
    assert "| attention, learning rate ×10 |" in combined_fault.tables(result.rows)
    assert combined_fault.headline(result.rows).startswith(("reproduces", "partly", "not at"))


def test_arms_differ_from_clean_by_their_fault_alone(moe):
    clean = train_config(moe, "clean", 5)
    for arm in ARMS:
        one = train_config(moe, arm, 5)
        healed = dataclasses.replace(
            one, armed=False, disturbances=(), name=clean.name, fault=clean.fault
        )
        assert healed == clean
    assert len({train_config(moe, arm, 5).name for arm in ARMS}) == len(ARMS)


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
    rate, batch = exponents(rows, "10").values()
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
    (found,) = [x for x in claims(runs) if "batch lowers" in x.words]
    assert (found.verdict, found.count) == ("partly", "1 of 2: batch ÷8: -0.10, +0.10")


def test_a_sign_has_left_its_band_to_its_side_after_the_onset():
    names = ("Δ2 spectrum", "ΔW_q spectrum", "router entropy", "radial alignment of W_q")
    directions = dict(zip(names, ("up", "down", "down", "down"), strict=True))
    bands = dict(zip(names, (50, 75, -10, 60), strict=True))
    row = {"bands": bands, "directions": directions}
    assert signs(row, "spectra and router") == {"attention"}
    assert signs(row, "alignment and update size") == set()
    both = {"bands": bands | {"router entropy": 0}, "directions": directions}
    assert signs(both, "spectra and router") == {"attention", "learning rate"}


def test_two_faults_are_named_right_only_by_their_names():
    faults = [str(x) for x in faults_of(ARMS["attention, learning rate ×10"])]
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


def test_seeds_of_the_reference_do_not_judge_themselves(moe):
    with pytest.raises(ValueError, match=r"seeds \[6\] are in the reference"):
        main(Config(seeds=(6,), moe=moe))


def test_one_replica_has_no_noise(moe):
    settings, corpus = train_config(moe, "clean", 5), load_corpus(limit=1000)
    with pytest.raises(ValueError, match="at least 2, got 1"):
        measure(settings, None, Branch(), corpus, (1,), 1)
