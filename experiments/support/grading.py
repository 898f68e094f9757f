"""The runs behind `grades.py`: their arms, what became of grade, alarms and loss, and the claims.

Not here: tables; checkpoints that are continued (`continuing.py`).
"""

from dataclasses import replace
from typing import Any

from experiments.support.arms import ARMS as HARMS
from experiments.support.arms import Arm
from experiments.support.continuing import disputed, orders, rank_correlation
from experiments.support.figures import curve
from experiments.support.judging import LOSSES, Claim, alarm_events, first_step
from experiments.support.recorded import Row
from experiments.support.tables import grouped, listed
from stabmon.alarms.detectors.grades import grade_of
from stabmon.quantities import HELD_OUT
from stabmon.runs.run import Run

RATIO = "activations/global/rank_ratio/min"
ENTROPY = "attention/global/entropy/mean"
FAULT = "learning rate ×40"
LADDER, NORMED = f"{FAULT}, ladder", f"{FAULT}, QK-norm"
# A rescued run's loss is within this of the clean run's.
NEAR = 0.05
FALLS = "The grade falls by two or more"
EARLY = "Its alarm comes before the loss's"
HEALED = "The ladder brings the loss within 5 % of clean"
WINS = "Healthy beats collapsing in disputed pairs"
_QK_NORM, _LARGE = {"qk_norm": True}, {"std": 1.0}
ARMS = {
    "clean": Arm(),
    FAULT: HARMS[FAULT],
    LADDER: replace(HARMS[FAULT], run={"act": True}),
    "clean, QK-norm": Arm(model=_QK_NORM),
    NORMED: replace(HARMS[FAULT], model=_QK_NORM),
    "attention": HARMS["attention"],
    "initialisation": Arm(model=_LARGE),
    "initialisation, QK-norm": Arm(model=_LARGE | _QK_NORM),
}


def acts(arm: str) -> bool:
    """Whether the recovery ladder acts on the runs of an arm."""
    return ARMS[arm].run.get("act", False)


def story(run: Run, arm: str, onset: int, warmup: int) -> dict[str, Any]:
    """What became of grade, alarms and loss in one run.

    Args:
        run: With the events of its alarms.
        arm: Of `ARMS`.
        onset: First step with a fault; a large initialisation is one from the first step on.
        warmup: Steps that say nothing yet of either.
    """
    onset = 0 if "std" in ARMS[arm].model else onset
    alarms = alarm_events(run, onset)
    steps, ratios = run.metrics[RATIO]
    later = ratios[(steps > onset) & (steps > warmup)]
    before = ratios[(steps <= onset) & (steps > warmup)]
    actions = [x for x in run.events if x["kind"] == "action" and acts(arm)]
    return {
        "onset": onset,
        "before": float(before[-4:].mean()) if len(before) else None,
        "lowest": float(later.min()),
        "late": float(ratios[-4:].mean()),
        "attention_entropy": float(run.metrics[ENTROPY][1][-4:].mean()),
        "grade_alarm": first_step((x for x in alarms if x["key"] == RATIO), onset),
        "first_alarm": first_step(alarms, onset),
        "first_key": min(alarms, key=lambda x: x["step"])["key"] if alarms else None,
        "loss_alarm": first_step((x for x in alarms if x["key"] in LOSSES), onset),
        "actions": [f"{x['action']} {x['step']}" for x in actions if not x["dry"]],
        "stopped": any(x["kind"] == "stopped" for x in run.events),
        "curves": {
            "rank ratio of the worst layer": curve(run, RATIO, 25),
            "attention entropy": curve(run, ENTROPY, 50),
            "held-out loss": curve(run, HELD_OUT, 50),
        },
    }


def claims(rows: list[Row]) -> list[Claim]:
    """Each claim that the rows can speak to."""
    kinds = grouped(rows, "kind")
    of = lambda arm, kind="story": {
        row["seed"]: row for row in kinds.get(kind, ()) if row["arm"] == arm
    }
    clean, faulty, ladder, normed = (of(x) for x in ("clean", FAULT, LADDER, NORMED))
    large, healed = of("initialisation"), of("initialisation, QK-norm")
    rankings = kinds.get("ranking", [])

    def paired(of: dict, other: dict, holds: Any) -> list[bool]:
        return [holds(of[seed], other[seed]) for seed in of if seed in other]

    near = lambda a, b: a["held_out"] <= b["held_out"] * (1 + NEAR)
    lower = lambda a, b: a["held_out"] <= b["held_out"] * (1 - NEAR)
    less = lambda a, b: grade_of(a["late"]) < grade_of(b["late"])
    ratio = lambda row: row["texts"][row["arm"]]["ratio"]
    text = lambda a, b: ratio(a) < ratio(b)
    slope = lambda row: row["texts"]["code"]["segments"][-1] - row["texts"]["code"]["segments"][0]
    sooner = lambda row: (
        row["grade_alarm"] is not None
        and (row["loss_alarm"] is None or row["grade_alarm"] < row["loss_alarm"])
    )
    fell = [grade_of(x["before"]) - grade_of(x["lowest"]) >= 2 for x in faulty.values()]
    mixes = [of(x, "mixes") for x in ("repeated prose", "prose")]
    backs = [
        x
        for arm in (faulty, of("attention"))
        for x in paired(arm, clean, lambda a, b: slope(a) < slope(b))
    ]
    found = {
        FALLS: fell,
        "Its alarm comes": [x["grade_alarm"] is not None for x in faulty.values()],
        EARLY: [sooner(x) for x in faulty.values()],
        HEALED: paired(ladder, clean, near),
        "The ladder brings the grade back to S5": [x["late"] > 0.5 for x in ladder.values()],
        "With QK-norm the grade stays at S5 or above": [x["lowest"] > 0.5 for x in normed.values()],
        "With QK-norm the loss stays within 5 % of clean": paired(
            normed, of("clean, QK-norm"), near
        ),
        "A large initialisation has the lower grade in the end": paired(large, clean, less),
        "QK-norm lowers the loss of a large initialisation by 5 %": paired(healed, large, lower),
        "Prose over and over has the lower rank ratio": paired(mixes[0], mixes[1], text),
        "A fault lowers the back of the context more than the front": backs,
        WINS: [x for row in rankings for x in wins_of(row)],
        "Health ranks better than loss, where they differ": [
            correlations(row)["health"] > correlations(row)["loss"]
            for row in rankings
            if wins_of(row)
        ],
    }
    return [Claim(words, tuple(held)) for words, held in found.items() if held]


def correlations(row: Row) -> dict[str, float]:
    """ρ of the health and of the loss ranking with the order after continuing."""
    found = orders(row["checkpoints"])
    return {name: rank_correlation(found[name], found["continued"]) for name in ("health", "loss")}


def wins_of(row: Row) -> list[bool]:
    """For each disputed pair whether the healthier one has the lower loss after continuing."""
    return [a["continued"] < b["continued"] for a, b in disputed(row["checkpoints"])]


def firsts(row: Row) -> str:
    """Loss after continuing the checkpoint that is first by health, and the one first by loss."""
    after = {x["step"]: float(x["continued"]) for x in row["checkpoints"]}
    found = orders(row["checkpoints"])
    return listed((after[found[name][0]] for name in ("health", "loss")), ".2f")


def actions_of(row: Row) -> str:
    """How often the ladder rolled back, and how it ended."""
    back = sum(x.startswith("roll back") for x in row["actions"])
    ends = ["stopped"] if row["stopped"] else [x for x in row["actions"] if "resume" in x][-1:]
    return ", ".join([f"{back} rollbacks", *ends]) if row["actions"] else ""
