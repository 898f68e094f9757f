"""The attention-fault experiment at toy size: every command, and a fault that must be seen."""

import dataclasses

import pytest

from experiments.attention_fault import (
    DRAWN,
    Config,
    figure,
    headline,
    learn_reference,
    main,
    tables,
)
from experiments.support.attention import KEYS
from models.config import GPTConfig
from stabmon.runs.jsonl import read_jsonl

TOY = Config(
    command="reference",
    seeds=(0,),
    reference_seeds=(10, 11),
    steps=300,
    onset=100,
    model=GPTConfig(layers=1, model=16, heads=2, context=16, backend="flash"),
    window=(25, 100),
)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    config = dataclasses.replace(TOY, runs=folder / "runs", reference=folder / "reference.json")
    main(config)
    return config


@pytest.mark.slow
def test_the_reference_covers_every_monitor(toy):
    reference = learn_reference(toy)
    assert set(reference.bands) == set(KEYS.values())
    assert toy.reference.exists()


@pytest.mark.slow
def test_demo_judges_a_faulty_and_a_clean_run_and_writes_a_report(toy, capsys):
    (result,) = main(dataclasses.replace(toy, command="demo"))
    printed = capsys.readouterr().out
    assert "Δ2 spectrum" in printed
    report = result.faulty.folder / "report.html"
    assert report.stat().st_size > 1_000_000
    assert [row["onset"] for row in result.faulty.faults] == [100]
    assert result.clean.faults == ()
    assert {row.monitor for row in result.table} == set(KEYS)
    alarms = [r for r in read_jsonl(result.faulty.folder / "events.jsonl") if r["kind"] == "alarm"]
    fired = {row.key: row.first for row in result.table if row.first is not None}
    assert {row["key"]: row["step"] for row in alarms} == fired


@pytest.mark.slow
def test_before_the_onset_both_runs_are_the_same(toy):
    (result,) = main(dataclasses.replace(toy, command="demo"))
    steps, faulty = result.faulty.metrics["symptoms/global/loss/value"]
    _, clean = result.clean.metrics["symptoms/global/loss/value"]
    assert (faulty[steps <= 100] == clean[steps <= 100]).all()
    assert (faulty[steps > 110] != clean[steps > 110]).any()


@pytest.mark.slow
def test_a_seed_of_the_reference_is_refused(toy):
    with pytest.raises(ValueError, match="seed 10 is in the reference: it would judge itself"):
        main(dataclasses.replace(toy, command="demo", seeds=(10,)))


@pytest.mark.slow
def test_a_row_is_written_once_and_makes_the_table(toy):
    for command in ("demo", "seeds"):
        main(dataclasses.replace(toy, command=command))
    (row,) = read_jsonl(toy.runs / "attention_fault.jsonl")
    assert tuple(row["firsts"]) == tuple(KEYS)
    assert row["settings"]["judged_by"] == ["attention-clean-seed10", "attention-clean-seed11"]
    table = tables([row])
    assert table.splitlines()[0] == "| monitor | seed 0 |"
    assert len(table.splitlines()) == 3 + len(KEYS)
    drawn = figure([row]).to_dict()
    lines = [x["name"] for x in drawn["data"] if x["mode"] == "lines"]
    assert lines == len(DRAWN) * ["without the fault", "with it, seed 0"]
    dots = [x["x"][0] for x in drawn["data"] if x["mode"] == "markers"]
    assert dots == [row["firsts"][name] for name in DRAWN if row["firsts"][name] is not None]
    assert dots
    assert [x["x0"] for x in drawn["layout"]["shapes"]] == [100] * len(DRAWN)


def test_the_headline_counts_what_is_ahead_of_what():
    firsts = {"Δ2 spectrum": 100, "gradient norm": 120, "held-out loss": None, "training loss": 400}
    row = {"firsts": firsts, "clean": [], "settings": {"steps": 500, "seed": 0}}
    late = row | {"firsts": firsts | {"Δ2 spectrum": 125}, "clean": ["gradient norm"]}
    assert headline([row]).startswith(
        "reproduces: Δ2 alarms 20 (20 to 20) before the gradient norm"
    )
    text = headline([row, late])
    assert text.startswith("partly: Δ2 alarms 7.5 (-5 to 20) before the gradient norm, 387.5 (375")
    assert text.endswith("1 of 2 matched clean runs without any alarm")
