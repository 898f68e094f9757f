"""The stability grades S0…S7 of a rank ratio, their three states, and the detector of them.

The ratio itself is measured on the device (`stabmon.metrics.activations`). What is done about a
state is `recovery.py`'s.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from stabmon.alarms.detectors.base import Alarm
from stabmon.alarms.detectors.latch import ONCE, Latches, Patience

THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)


class Health(StrEnum):
    """What a grade and its course say."""

    HEALTHY = "healthy"
    CAUTION = "caution"
    DANGER = "danger"


def grade_of(ratio: float) -> int:
    """Stability grade 0…7: above 0.7 is S7, above 0.6 S6, … above 0.1 S1, else S0; NaN is S0.

    >>> [grade_of(x) for x in (0.71, 0.7, 0.35, 0.05)]
    [7, 6, 3, 0]
    """
    return sum(ratio > x for x in THRESHOLDS)


@dataclass
class GradeWatch:
    """Alarms by the grade table: caution where the rank ratio sinks, danger where it is gone.

    Caution: a ratio of 0.5 or less that has been falling for `span` steps. Danger: a ratio under
    0.3, or two grades lost within `drop_within` steps. Each takes two samples running, since one
    odd batch moves the ratio too. A run that has been low from the warm-up on (a small model, a
    stream with a large mean) is judged by what it has lost: for caution and for the limit of 0.3
    it must be a grade below its best, the highest median of three samples so far.

    Attributes:
        first: First step that is looked at, after the warm-up.
        key: Metric with the ratio, in [0, 1]: the worst layer's.
        span: Steps that the ratio must have been falling.
        fall: Fall over `span`, by the median slope of all pairs, that counts as falling.
        drop_within: Steps within which a loss of two grades is danger.
        patience: Dwell, hysteresis, cooldown, of both rules.
    """

    first: int = 0
    key: str = "activations/global/rank_ratio/min"
    span: int = 200
    fall: float | int = 0.02
    drop_within: int = 100
    patience: Patience = ONCE
    latches: Latches = field(init=False)
    health: Health = Health.HEALTHY
    grade: int | None = None
    _past: list[tuple[int, float]] = field(default_factory=list)
    _best: float = 0.0

    def __post_init__(self):
        self.latches = Latches(self.patience)

    def update(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        """Take one sample; the alarms that it raises, of the rules "caution" and "danger"."""
        if self.key not in values:
            return []
        ratio = float(values[self.key])
        self.grade = grade_of(ratio)
        if math.isfinite(ratio):
            if step < self.first:
                return []
            reach = max(self.span, 2 * self.drop_within)
            old = [i for i, (s, _) in enumerate(self._past) if s <= step - reach]
            self._past = [*self._past[old[-1] if old else 0 :], (step, ratio)]
            if len(self._past) > 2:
                middle = float(np.median([r for _, r in self._past[-3:]]))
                self._best = max(self._best, middle)
        raised, self.health = [], Health.HEALTHY
        for health, holds in ((Health.CAUTION, self._caution), (Health.DANGER, self._danger)):
            score = 2.0 if math.isfinite(ratio) and holds(step, ratio) else 0.0
            if health is Health.DANGER and not math.isfinite(ratio):
                score = math.nan
            if self.latches.update(health, step, score):
                raised.append(Alarm(step, health.value, self.key, ratio, self._best, math.nan))
            if health in self.latches.active():
                self.health = health
        return raised

    def _caution(self, step: int, ratio: float) -> bool:
        past = np.asarray([x for x in self._past if x[0] >= step - self.span], float)
        steps, ratios = past[:, 0], past[:, 1]
        if len(past) < 3 or steps[-1] - steps[0] < 0.75 * self.span:
            return False
        low = float(np.max(ratios[-2:]))
        i, j = np.triu_indices(len(past), 1)
        slope = float(np.median((ratios[j] - ratios[i]) / (steps[j] - steps[i])))
        return low <= 0.5 and self._lost(low) and -slope * self.span >= self.fall

    def _danger(self, step: int, ratio: float) -> bool:
        if len(self._past) < 2:
            return False
        before = self._past[-2][0]
        low = max(ratio, self._past[-2][1])
        high = max(r for s, r in self._past if before - self.drop_within <= s <= before)
        dropped = grade_of(high) - grade_of(low) >= 2 and high - low > 0.1
        return dropped or (low < 0.3 and self._lost(low))

    def _lost(self, ratio: float) -> bool:
        return grade_of(self._best) > grade_of(ratio) and self._best - ratio > 0.05

    def active(self) -> tuple[str, ...]:
        """The ratio's key while the state is not healthy."""
        return () if self.health is Health.HEALTHY else (self.key,)

    def state(self) -> dict[str, Any]:
        """All that has been learned from the stream, as JSON can hold it."""
        return {
            "latches": self.latches.state(),
            "health": self.health.value,
            "grade": self.grade,
            "past": [list(x) for x in self._past],
            "best": self._best,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        self.latches.restore(state["latches"])
        self.health, self.grade = Health(state["health"]), state["grade"]
        self._past = [(int(s), float(r)) for s, r in state["past"]]
        self._best = float(state["best"])
