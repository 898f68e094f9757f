"""What the alarms made of a run with a known fault, and tables of many such runs.

`judge` reads a run's own events, so it judges what was said while the run went on. Which runs there
are is `campaign.py`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.train import HELD_OUT
from stabmon.alarms.board import LOSS
from stabmon.alarms.signatures import Fault
from stabmon.output.runlog import Run

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
        false_alarms: Alarms before the onset, or in all of a clean run.
        clean_steps: Steps in which an alarm would have been one of these and was possible.
        false_actions: Actions advised in these steps.
    """

    case: str
    seed: int
    truth: str
    named: str
    first_named: str
    first_alarm: int | None
    loss_alarm: int | None
    lead: int | None
    false_alarms: int
    clean_steps: int
    false_actions: int

    @property
    def right(self) -> bool:
        """Whether the diagnosis at the end is the truth."""
        return self.named == self.truth


def judge(
    run: Run, case: str, seed: int, truth: str, onset: int, steps: int, judged_from: int
) -> Verdict:
    """What the alarms made of a run, from its events.

    Args:
        run: The run.
        case: Name of its case.
        seed: Its seed.
        truth: The right diagnosis, `CLEAN` for none.
        onset: First step with the fault; of a clean run its length.
        steps: Length of the run.
        judged_from: First step that the alarms judge.
    """
    alarms = [x for x in run.events if x["kind"] == "alarm"]
    late = [x["step"] - onset for x in alarms if x["step"] >= onset]
    loss = [x["step"] - onset for x in alarms if x["step"] >= onset and x["key"] in LOSSES]
    silent = str(Fault.UNKNOWN) if alarms else CLEAN
    named = [x["fault"] for x in run.events if x["kind"] == "diagnosis"] or [silent]
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
        sum(x["step"] < onset for x in alarms),
        max(onset - judged_from, 0),
        sum(x["kind"] == "action" and x["step"] < onset for x in run.events),
    )


def cases_markdown(verdicts: Sequence[Verdict]) -> str:
    """A line for each case: seeds, diagnoses, lags and leads, in the order of the seeds."""
    lines = [
        "| case | seeds | named at the end | first named | first alarm after onset "
        "| lead over loss | false alarms |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(x.case for x in verdicts):
        rows = [x for x in verdicts if x.case == name]
        lead = lambda x: (
            "–" if x.lead is None else f"{'> ' if x.loss_alarm is None else ''}{x.lead}"
        )
        cells = [
            ", ".join(str(x.seed) for x in rows),
            ", ".join(x.named + (" ✓" if x.right else " ✗") for x in rows),
            ", ".join(x.first_named for x in rows),
            ", ".join("–" if x.first_alarm is None else str(x.first_alarm) for x in rows),
            ", ".join(lead(x) for x in rows),
            ", ".join(str(x.false_alarms) for x in rows),
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def confusion_markdown(verdicts: Sequence[Verdict]) -> str:
    """Runs by what was wrong (rows) and what the alarms said at the end (columns)."""
    truths = list(dict.fromkeys(x.truth for x in verdicts))
    names = [*truths, *sorted({x.named for x in verdicts} - set(truths))]
    lines = ["| truth | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for truth in truths:
        counts = [sum(x.truth == truth and x.named == name for x in verdicts) for name in names]
        lines.append(f"| {truth} | " + " | ".join(str(n or "") for n in counts) + " |")
    return "\n".join(lines)


def summary(verdicts: Sequence[Verdict]) -> str:
    """The sentence with the rates."""
    faulty = [x for x in verdicts if x.truth != CLEAN]
    right = sum(x.right for x in faulty)
    alarms, steps = (sum(getattr(x, n) for x in verdicts) for n in ("false_alarms", "clean_steps"))
    actions = sum(x.false_actions for x in verdicts)
    return (
        f"{right} of {len(faulty)} faults named right ({right / max(len(faulty), 1):.0%}); "
        f"{alarms} false alarms in {steps} clean steps judged, "
        f"{alarms / max(steps, 1) * 10_000:.1f} per 10,000; {actions} actions advised in them"
    )


def rescue_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each rescued run."""
    lines = [
        "| fault | seed | clean | without the ladder | with it | above clean | actions |",
        "|---|---|---|---|---|---|---|",
    ]
    for x in rows:
        numbers = f"{x['clean']:.3f} | {x['faulty']:.3f} | {x['act']:.3f} | {x['excess']:+.1%}"
        lines.append(f"| {x['case']} | {x['seed']} | {numbers} | {', '.join(x['actions'])} |")
    return "\n".join(lines)
