"""What the alarms made of a run with a known fault.

`judge` reads events, whether recorded or replayed. Which runs there are is `campaign.py`'s, tables
of many are `campaign_tables.py`'s.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from experiments.train import HELD_OUT
from stabmon.alarms.detector_set import LOSS
from stabmon.alarms.signatures import Fault

CLEAN, LOSSES = "clean", (LOSS, HELD_OUT)


@dataclass(frozen=True)
class Verdict:
    """What the alarms made of one run.

    Attributes:
        case: Name in `CASES`.
        seed: Of the run.
        truth: The right diagnosis.
        named: The diagnosis at the end, `CLEAN` without any alarm.
        first_named: The first that was not "unknown", likewise.
        first_alarm: Steps from the onset to the first alarm after it; None without.
        loss_alarm: The same for the first alarm of training or held-out loss.
        lead: Steps from the first alarm to the loss's, or to the end where there is none.
        false_alarms: Alarms before the onset, or in all of a clean run: "step rule key".
        clean_steps: Steps of a clean run in which an alarm was possible. 0 for a faulty run: up to
            its onset it repeats the clean run of its seed.
        false_actions: Actions advised before the onset, or in all of a clean run: "step action".
        steps: Length of the run.
    """

    case: str
    seed: int
    truth: str
    named: str
    first_named: str
    first_alarm: int | None
    loss_alarm: int | None
    lead: int | None
    false_alarms: tuple[str, ...]
    clean_steps: int
    false_actions: tuple[str, ...]
    steps: int

    @property
    def right(self) -> bool:
        """Whether the diagnosis at the end is the truth."""
        return self.named == self.truth

    def row(self) -> dict[str, Any]:
        """As a line of the results."""
        return {"kind": "verdict"} | asdict(self) | {"right": self.right}


def judge(
    events: Sequence[Mapping[str, Any]],
    case: str,
    seed: int,
    truth: str,
    onset: int,
    steps: int,
    judged_from: int,
) -> Verdict:
    """What the alarms made of a run, from its events.

    Args:
        events: Alarms, diagnoses and actions, in order.
        case: Name of its case.
        seed: Its seed.
        truth: The right diagnosis, `CLEAN` for none.
        onset: First step with the fault; of a clean run its length.
        steps: Length of the run.
        judged_from: First step that the alarms judge.
    """
    alarms = [x for x in events if x["kind"] == "alarm"]
    late = [x["step"] - onset for x in alarms if x["step"] >= onset]
    loss = [x["step"] - onset for x in alarms if x["step"] >= onset and x["key"] in LOSSES]
    silent = str(Fault.UNKNOWN) if alarms else CLEAN
    named = [x["fault"] for x in events if x["kind"] == "diagnosis"] or [silent]
    known = [x for x in named if x != Fault.UNKNOWN]
    first, first_loss = min(late, default=None), min(loss, default=None)
    end = steps - onset if first_loss is None else first_loss
    return Verdict(
        case,
        seed,
        str(truth),
        named[-1],
        known[0] if known else silent,
        first,
        first_loss,
        None if first is None else end - first,
        tuple(f"{x['step']} {x['rule']} {x['key']}" for x in alarms if x["step"] < onset),
        max(steps - judged_from, 0) if truth == CLEAN else 0,
        tuple(
            f"{x['step']} {x['action']}"
            for x in events
            if x["kind"] == "action" and x["step"] < onset
        ),
        steps,
    )
