"""`stabmon rank`: the checkpoints of a run by loss, those that are finite and free of alarms first.

What lives here: `rank_checkpoints`. What does not: which checkpoints there are
(`stabmon.checkpoints`), raising alarms (`stabmon.alarms`).

The grade of the activations is shown and decides nothing: in this project's own runs a ranking by
grade chose worse checkpoints to go on from than the loss alone did (`experiments/README.md`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from stabmon.alarms.detectors.grades import grade_of
from stabmon.output.terminal import show_json, table
from stabmon.quantities import HELD_OUT, LOSS
from stabmon.runs.run import Run

_RATIOS = ("activations/global/rank_ratio/min", "activations/global/rank_ratio/mean")
_BROKEN = "symptoms/global/nonfinite/value"
_LEVEL = 5
# Rules of what comes and goes, and for how many steps such an alarm is held against a checkpoint.
_PASSING = ("spike", "surge", "shift", "falling", "non-finite")
_PASSES = 1000


@dataclass(frozen=True)
class Ranked:
    """One checkpoint.

    Attributes:
        step: Its step.
        against: Why it is not ranked: "not finite", "alarms" or "no loss"; empty: it is.
        loss: The loss that it is ranked by; None without a sample.
        grade: Grade of the worst layer, 0…7; None without a sample.
        rank_ratio: Rank ratio of the worst layer; None without a sample.
        measured: Step of the newest of these samples, at or before `step`; None without any.
        alarms: Metric keys, or rules, of the alarms that are held against it.
    """

    step: int
    against: str
    loss: float | None
    grade: int | None
    rank_ratio: float | None
    measured: int | None
    alarms: tuple[str, ...]


def heading(run: Run) -> str:
    """Returns what a ranking of this run's checkpoints is by, in words.

    Args:
        run: The run as it was read.
    """
    kind = "held-out" if HELD_OUT in run.metrics else "training"
    return f"Checkpoints of {run.name} by {kind} loss, of those finite and free of alarms"


def show_ranking(
    console: Console, run: Run, ranked: Sequence[Ranked], paths: Mapping[int, Path], as_json: bool
) -> None:
    """Prints it.

    Args:
        console: Where to.
        run: The run.
        ranked: As of `rank_checkpoints`.
        paths: Step → checkpoint.
        as_json: JSON instead of a table.
    """
    if as_json:
        show_json(console, [{**asdict(x), "path": paths[x.step]} for x in ranked])
        return
    rows = [
        (
            *("–" if x.against else str(i), x.step, x.loss, x.against or None),
            *(len(x.alarms) or None, None if x.grade is None else f"S{x.grade}"),
            *(x.rank_ratio, x.measured),
        )
        for i, x in enumerate(ranked, 1)
    ]
    columns = ("", "step", "loss", "against", "alarms", "grade", "rank ratio", "measured at")
    console.print(table(heading(run), rows, columns, words=1))


def rank_checkpoints(run: Run, steps: Iterable[int]) -> list[Ranked]:
    """Returns checkpoints of a run, best first: by loss, those with something against them last.

    The loss is the newest held-out loss, which is always of the same text, or else the median of
    the last five samples of the training loss.

    Args:
        run: The run as it was read.
        steps: Steps of its checkpoints.
    """
    last = {"": 0, "alarms": 1, "no loss": 2, "not finite": 3}
    score = lambda x: math.inf if x.loss is None or not math.isfinite(x.loss) else x.loss
    ranked = [_judge(run, step) for step in steps]
    return sorted(ranked, key=lambda x: (last[x.against], score(x), -x.step))


def alarms_against(run: Run, step: int) -> tuple[str, ...]:
    """Returns what alarms were about, of those raised up to a step and not undone by a rewind.

    A spike or the like counts for 1,000 steps, what departs from the healthy level for good, and a
    metric that could not be read not at all.

    Args:
        run: The run as it was read.
        step: Where to look.
    """
    raised: list[tuple[int, str, str]] = []
    for event in run.events:
        at = event.get("step")
        if not isinstance(at, int):
            continue
        if event.get("kind") == "rewind":
            raised = [x for x in raised if x[0] <= at]
        elif event.get("kind") == "alarm":
            rule = str(event.get("rule", "alarm"))
            raised.append((at, rule, str(event.get("key", rule))))
    found = (
        name
        for at, rule, name in raised
        if at <= step and rule != "unreadable" and (rule not in _PASSING or step - at <= _PASSES)
    )
    return tuple(dict.fromkeys(found))


def _judge(run: Run, step: int) -> Ranked:
    """One checkpoint by what was measured up to its step."""
    held_out = HELD_OUT in run.metrics
    loss = _newest(run, *((HELD_OUT, step, 1) if held_out else (LOSS, step, _LEVEL)))
    ratio = next((x for x in (_newest(run, key, step) for key in _RATIOS) if x), None)
    broken = _newest(run, _BROKEN, step)
    alarms = alarms_against(run, step)
    if (loss and not math.isfinite(loss[1])) or (broken and broken[1] > 0):
        against = "not finite"
    else:
        against = "no loss" if loss is None else "alarms" if alarms else ""
    return Ranked(
        step=step,
        against=against,
        loss=loss[1] if loss else None,
        grade=grade_of(ratio[1]) if ratio else None,
        rank_ratio=ratio[1] if ratio else None,
        measured=max((x[0] for x in (ratio, loss) if x), default=None),
        alarms=alarms,
    )


def _newest(run: Run, key: str, step: int, count: int = 1) -> tuple[int, float] | None:
    """Step of the last sample up to a step, and the median of the last few; NaN if one is not."""
    if key not in run.metrics:
        return None
    past = sorted((at, x) for at, x in zip(*run.metrics[key], strict=True) if at <= step)[-count:]
    return (int(past[-1][0]), float(np.median([x for _, x in past]))) if past else None
