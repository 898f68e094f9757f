"""`stabmon rank`: the checkpoints of a run by health and loss.

What lives here: the three states of a grade, and `rank_checkpoints`. What does not: which
checkpoints there are (`stabmon.checkpoints`), raising alarms (`stabmon.alarms`).

A healthy checkpoint with a slightly higher loss is better than a collapsing one with a lower loss:
the loss of one in caution counts as if it were higher by a tolerance, and one in danger comes last.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from stabmon.runs.run import Run

State = Literal["healthy", "caution", "danger", "no grade"]
LOSSES = ("evaluation/global/loss/value", "symptoms/global/loss/value")
_THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
_WINDOW = 100
LEVEL = 5


@dataclass(frozen=True)
class Ranked:
    """One checkpoint.

    Attributes:
        step: Its step.
        state: healthy (grade 5 and up), caution, danger (grade 2 and below, two grades lost within
            100 steps, or a loss that is not finite); alarms make it caution at least.
        grade: Grade of the worst layer, 0…7; None without a sample.
        rank_ratio: Rank ratio of the worst layer; None without a sample.
        loss: Newest held-out loss, or else the median of the last five samples of the training
            loss; None without a sample.
        measured: Step of the newest of these samples, at or before `step`; None without any.
        alarms: Metric keys, or rules, of the alarms raised up to here and not undone by a rewind.
        score: What it is ranked by, lower is better: the loss, raised by the tolerance in caution;
            infinite in danger or without a loss.
    """

    step: int
    state: State
    grade: int | None
    rank_ratio: float | None
    loss: float | None
    measured: int | None
    alarms: tuple[str, ...]
    score: float


def rank_checkpoints(run: Run, steps: Iterable[int], tolerance: float | int = 0.1) -> list[Ranked]:
    """Returns checkpoints of a run, best first.

    Args:
        run: The run as it was read.
        steps: Steps of its checkpoints.
        tolerance: How much lower, as a fraction, the loss of a checkpoint in caution must be to
            come before a healthy one.

    Raises:
        ValueError: `tolerance` is negative.
    """
    if not tolerance >= 0:
        raise ValueError(f"tolerance: expected a fraction >= 0, got {tolerance}; 0.1 is 10 %")
    order = {"healthy": 0, "no grade": 0, "caution": 1, "danger": 2}
    ranked = [_judge(run, step, tolerance) for step in steps]
    return sorted(ranked, key=lambda x: (x.score, order[x.state], -x.step))


def grade_of(ratio: float | int) -> int:
    """Returns the grade of a rank ratio, 0…7; `stabmon.grade` on the host.

    Args:
        ratio: Rank ratio; 0 for one that is not finite.

    Example:
        >>> grade_of(0.05), grade_of(0.63), grade_of(0.9), grade_of(math.nan)
        (0, 6, 7, 0)
    """
    return sum(ratio > threshold for threshold in _THRESHOLDS) if math.isfinite(ratio) else 0


def state_of(grades: Mapping[int, float | int], step: int) -> State:
    """Returns the state that grades amount to at a step: from the last one, and from its fall.

    Args:
        grades: Step → grade of the worst layer.
        step: Where to judge; later samples do not count.

    Example:
        >>> state_of({100: 7, 150: 5}, 150), state_of({100: 7, 300: 5}, 300)
        ('danger', 'healthy')
    """
    past = {at: grade for at, grade in grades.items() if at <= step}
    if not past:
        return "no grade"
    newest = max(past)
    last, recent = past[newest], [x for at, x in past.items() if at >= newest - _WINDOW]
    if last <= 2 or max(recent) - last >= 2 or not math.isfinite(last):
        return "danger"
    return "healthy" if last >= 5 else "caution"


def _judge(run: Run, step: int, tolerance: float | int) -> Ranked:
    """One checkpoint by what was measured up to its step."""
    stem = "activations/global/rank_ratio"
    ratio_key = next((x for x in (f"{stem}/min", f"{stem}/mean") if x in run.metrics), stem)
    loss_key = next((key for key in LOSSES if _newest(run, key, step)), "")
    # Each training batch is another one; the held-out text is always the same.
    count = 1 if loss_key == LOSSES[0] else LEVEL
    ratio, loss = _newest(run, ratio_key, step), _newest(run, loss_key, step, count)
    grades = {at: float(grade_of(x)) for at, x in _series(run, ratio_key).items()}
    state = state_of(grades, step)
    alarms = active_alarms(run, step)
    if loss and not math.isfinite(loss[1]):
        state = "danger"
    elif alarms and state in ("healthy", "no grade"):
        state = "caution"
    score = loss[1] if loss and state != "danger" else math.inf
    return Ranked(
        step=step,
        state=state,
        grade=grade_of(ratio[1]) if ratio else None,
        rank_ratio=ratio[1] if ratio else None,
        loss=loss[1] if loss else None,
        measured=max((x[0] for x in (ratio, loss) if x), default=None),
        alarms=alarms,
        score=score * (1 + tolerance) if state == "caution" else score,
    )


def active_alarms(run: Run, step: int) -> tuple[str, ...]:
    """Returns what alarms were about, of those raised up to a step and not undone by a rewind.

    Args:
        run: The run as it was read.
        step: Where to look.
    """
    raised: dict[str, int] = {}
    for event in run.events:
        at = event.get("step")
        if not isinstance(at, int):
            continue
        if event.get("kind") == "rewind":
            raised = {name: first for name, first in raised.items() if first <= at}
        elif event.get("kind") == "alarm":
            raised.setdefault(str(event.get("key", event.get("rule", "alarm"))), at)
    return tuple(name for name, first in raised.items() if first <= step)


def _series(run: Run, key: str) -> dict[int, float]:
    """Step → value; nothing for a key that is not there."""
    if key not in run.metrics:
        return {}
    steps, values = run.metrics[key]
    return dict(zip(steps.tolist(), values.tolist(), strict=True))


def _newest(run: Run, key: str, step: int, count: int = 1) -> tuple[int, float] | None:
    """Step of the last sample up to a step, and the median of the last few; NaN if one is not."""
    past = sorted((at, x) for at, x in _series(run, key).items() if at <= step)[-count:]
    return (past[-1][0], float(np.median([x for _, x in past]))) if past else None
