"""The table and the sentence follow from the events and faults of the runs."""

from pathlib import Path

from stabmon.output.runlog import Run, load_run
from stabmon.output.verdict import alarm_table, default_verdict


def made(name="r", alarms=(), faults=()):
    events = tuple({"kind": "alarm", "key": key, "step": step} for key, step in alarms)
    return Run(name, Path(name), {}, {}, events, faults)


FAULT = ({"kind": "attention", "onset": 300, "end": None},)
LOSS = ("symptoms/global/loss/value", 1780)
DELTA = ("delta50/layer_03/delta2/modes/p10", 680)


def test_the_demo_is_told_in_order_of_the_alarms(demo_runs):
    table = alarm_table([load_run(folder) for folder in demo_runs])
    assert [row["monitor"] for row in table] == [
        "Δ2 modes, lag 50",
        "ΔW modes, lag 50",
        "Gradient norm",
        "Attention entropy",
        "Loss",
    ]
    first = {"monitor": "Δ2 modes, lag 50", "first": 680, "after": 380, "lead": 1100}
    assert table[0] == first | {"lead_is_bound": False}
    assert table[-1]["lead"] == 0


def test_without_fault_and_alarm_on_the_loss_the_lead_is_a_bound():
    row, _ = alarm_table([made(alarms=[DELTA, (DELTA[0], 700), ("other", 1000)])])
    assert row == {
        "monitor": "delta50/delta2/modes",
        "first": 680,
        "after": None,
        "lead": 320,
        "lead_is_bound": True,
    }


def test_runs_are_named_where_several_have_alarms():
    rows = alarm_table([made("a", [DELTA]), made("b", [LOSS])])
    assert [row["run"] for row in rows] == ["a", "b"]


def test_the_verdict_names_the_first_alarm_and_both_distances():
    assert default_verdict([made(alarms=[LOSS, DELTA], faults=FAULT)]) == (
        "r: first alarm at step 680 from delta50/delta2/modes, 380 steps after the fault set in "
        "and 1,100 steps before the loss."
    )


def test_the_verdict_says_when_the_loss_was_silent_or_the_alarm_came_too_soon():
    assert default_verdict([made(alarms=[DELTA])]).endswith("modes; the loss raised none.")
    early = default_verdict([made(alarms=[(DELTA[0], 100)], faults=FAULT)])
    assert "200 steps before the fault set in" in early


def test_the_verdict_without_alarms_depends_on_the_faults():
    assert default_verdict([made()]) == "No alarm."
    assert default_verdict([made(faults=FAULT)]) == "No alarm, although r had a fault."
