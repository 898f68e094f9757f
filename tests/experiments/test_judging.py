"""What alarms make of runs: replayed as they were raised, counted, and claims of many runs."""

import dataclasses

import pytest

from experiments.loop.alarms import AlarmConfig
from experiments.support.arms import ARMS, CLEAN, truth_of
from experiments.support.judging import (
    Claim,
    alarm_events,
    claim,
    claims_table,
    first_step,
    judge,
    overall,
    replayed,
)
from experiments.support.moe import train_config
from experiments.support.recorded import recorded
from stabmon.alarms.signatures import Fault
from stabmon.runs.run import Run


def said(run):
    return [
        {k: v for k, v in x.items() if k not in ("time", "dry")}
        for x in run.events
        if x["kind"] in ("alarm", "diagnosis", "action")
    ]


def test_alarms_are_replayed_as_they_were_raised(moe):
    alarms = AlarmConfig(on=True, window=moe.window)
    settings = train_config(moe, "learning rate ×40", 5)
    watched = recorded(dataclasses.replace(settings, name="watched", alarms=alarms))
    silent = replayed(recorded(settings), moe.base.optimizer.warmup, alarms)
    assert said(silent)
    assert said(silent) == said(watched)


def run_of_events(tmp_path, *events):
    return Run("r", tmp_path, {}, {}, events, ())


def alarm(step, key="k"):
    return {"kind": "alarm", "step": step, "key": key, "rule": "z"}


def test_alarms_before_the_onset_are_false_and_those_without_a_name_unknown(tmp_path):
    action = {"kind": "action", "step": 40, "action": "stop"}
    run = run_of_events(tmp_path, alarm(30), action, alarm(70))
    found = judge(run, "c", 0, "x", 50, 100, 20)
    assert (found["false_alarms"], found["named"]) == (["30 z k"], Fault.UNKNOWN)
    assert found["false_actions"] == ["40 stop"]
    assert (found["first_alarm"], found["lead"], found["clean_steps"]) == (20, 30, 0)


def test_the_lead_is_over_the_first_alarm_of_a_loss(tmp_path):
    loss = alarm(90, "symptoms/global/loss/value")
    unknown, named = ({"kind": "diagnosis", "step": 70, "fault": x} for x in ("unknown", "x"))
    run = run_of_events(tmp_path, alarm(70), unknown, named, loss)
    found = judge(run, "c", 0, "x", 50, 100, 20)
    assert (found["loss_alarm"], found["lead"]) == (40, 20)
    assert (found["named"], found["first_named"]) == ("x", "x")


def test_a_clean_run_is_judged_to_its_end(tmp_path):
    found = judge(run_of_events(tmp_path, alarm(70)), CLEAN, 0, CLEAN, 100, 100, 20)
    assert (found["clean_steps"], found["false_alarms"]) == (80, ["70 z k"])
    quiet = judge(run_of_events(tmp_path), CLEAN, 0, CLEAN, 100, 100, 20)
    assert (quiet["named"], quiet["first_alarm"], quiet["lead"]) == (CLEAN, None, None)


def test_first_steps_are_counted_from_the_onset(tmp_path):
    run = run_of_events(tmp_path, alarm(30), alarm(60))
    assert first_step(alarm_events(run, 40), 40) == 20
    assert first_step(alarm_events(run, 61)) is None


@pytest.mark.parametrize(
    ("arm", "truth"),
    [
        ("clean", CLEAN),
        ("attention, learning rate ×10", Fault.SEVERAL),
        ("batch ÷8, balance loss off", Fault.BALANCE),
    ],
)
def test_two_disturbances_of_one_fault_are_one_fault(arm, truth):
    assert truth_of(ARMS[arm]) == truth


def test_a_claim_holds_in_all_runs_in_some_or_in_none():
    rises = lambda x: x > 0
    found = [
        claim("x", {"a": values, "none": []}, rises) for values in ([1.0], [-1.0, 2.0], [-1.0])
    ]
    assert [x.verdict for x in found] == ["reproduces", "partly", "not at this size"]
    assert found[1].count == "1 of 2: a: -1.00, +2.00"
    assert overall(found) == "partly"
    assert overall(found[:1]) == "reproduces"
    assert claims_table([Claim("y", (True,))]).endswith("| y | reproduces | 1 of 1 |")
