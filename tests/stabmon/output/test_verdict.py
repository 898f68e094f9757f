"""The table and the sentence follow from the events and faults of the runs."""

from pathlib import Path

from stabmon.output.verdict import alarm_table, default_verdict, named, story
from stabmon.runs.run import Run, load_run


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
        "ΔW_q modes, lag 50",
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
        "monitor": "Δ2 modes, lag 50",
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
        "r: first alarm at step 680 from Δ2 modes, lag 50, 380 steps after the fault set in "
        "and 1,100 steps before the loss."
    )


def test_the_verdict_says_when_the_loss_was_silent_or_the_alarm_came_too_soon():
    assert default_verdict([made(alarms=[DELTA])]).endswith("lag 50; the loss raised none.")
    early = default_verdict([made(alarms=[(DELTA[0], 100)], faults=FAULT)])
    assert "200 steps before the fault set in" in early


def test_the_verdict_without_alarms_depends_on_the_faults():
    assert default_verdict([made()]) == "No alarm."
    assert default_verdict([made(faults=FAULT)]) == "No alarm, although r had a fault."


def found(fault, step, **more):
    return {"kind": "diagnosis", "step": step, "fault": fault, "confidence": 0.8} | more


ACTIONS = (
    found("unknown", 600, evidence=[]),
    found("attention numerics", 700, layer=3, head=1, evidence=["Δ2 went down", "so did ΔW"]),
    {"kind": "action", "step": 700, "action": "scale learning rate", "scale": 0.5, "dry": True}
    | {"reason": "attention numerics"},
    {"kind": "action", "step": 800, "action": "roll back", "target": 400, "dry": False},
    {"kind": "rewind", "step": 400},
)


def test_the_diagnosis_in_force_is_the_last_that_no_rewind_undid():
    assert named(ACTIONS[:1]) == ACTIONS[0]
    assert named(ACTIONS[:4]) == ACTIONS[1]
    assert named((*ACTIONS[:2], found("unknown", 900))) == ACTIONS[1]
    assert named(ACTIONS) is None


def test_the_verdict_opens_with_what_it_is():
    alarm = {"kind": "alarm", "key": DELTA[0], "step": 680}
    run = Run("r", Path("r"), {}, {}, (alarm, *ACTIONS[:2]), ())
    assert default_verdict([run]) == (
        "r: attention numerics, layer 3, head 1, confidence 0.80. First alarm at step 680 from "
        "Δ2 modes, lag 50; the loss raised none."
    )


def test_the_story_has_diagnoses_and_actions_in_order_with_their_reasons():
    run = Run("r", Path("r"), {}, {}, ACTIONS, ())
    assert [(row["step"], row["what"], row["why"]) for row in story([run])] == [
        (600, "unknown, confidence 0.80", ""),
        (700, "attention numerics, layer 3, head 1, confidence 0.80", "Δ2 went down"),
        (700, "advised: scale learning rate to 0.5", "attention numerics"),
        (800, "roll back to step 400", ""),
        (400, "rewind", ""),
    ]
    other = Run("s", Path("s"), {}, {}, ACTIONS[:1], ())
    assert [row["run"] for row in story([run, other])] == ["r"] * 5 + ["s"]
    assert "run" not in story([run])[0]


def test_several_faults_are_all_named():
    parts = ["attention numerics", "learning rate"]
    (row,) = story([Run("r", Path("r"), {}, {}, (found("several at once", 9, parts=parts),), ())])
    assert row["what"] == ("several at once (attention numerics, learning rate), confidence 0.80")
