"""The stability grades S0…S7 of a rank ratio: table, course, states, and their detector.

The ratio itself is measured on the device (`stabmon.metrics.activations`, whose `grade` is this
table). What is done about a state is `stabmon.recovery.ladder`'s.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from stabmon.alarms.detectors.base import Alarm, Detector, Score
from stabmon.alarms.detectors.latch import ONCE, Patience

THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
RATIO = "activations/global/rank_ratio/min"
# End of the default warm-up and healthy window: the rank moves for good reasons before it.
FIRST = 300
_SPAN, _WITHIN, _BLOCK = 200, 100, 50
_FALL = 0.02
# Within 100 steps the ratio must be down by so much too, so that noise about a threshold is none.
_DROP = {1: 0.1, 2: 0.15}


class Health(StrEnum):
    """What a grade and its course say, the mildest first."""

    HEALTHY = "healthy"
    FALLING = "falling"
    CAUTION = "caution"
    DANGER = "danger"


def grade_of(ratio: float | int) -> int:
    """Stability grade 0…7: above 0.7 is S7, above 0.6 S6, … above 0.1 S1, else S0.

    Compared in float32, as on the device. A ratio that is not finite is S0.

    >>> [grade_of(x) for x in (0.71, 0.7, 0.35, 0.05, math.nan)]
    [7, 6, 3, 0, 0]
    """
    if not math.isfinite(ratio):
        return 0
    return int(np.sum(np.float32(ratio) > np.asarray(THRESHOLDS, np.float32)))


@dataclass
class Course:
    """The rank ratio of a run as it goes, and the state that it amounts to.

    The course is the median of the samples of the last 50 steps, at least three, at their median
    step, since one odd batch moves the ratio too. Between its points it is a straight line, so that
    a fall is a rate per step whatever the cadence. With L its last value and B its best:

    - danger: two grades and 0.15 of ratio lost within 100 steps; or L < 0.3, a grade below B;
    - caution: L ≤ 0.5, a grade below B, and falling: by 0.02 in 200 steps, by the median slope of
      all pairs over the last 200 steps, or as far back as three samples reach;
    - falling: one grade and 0.1 of ratio lost within 100 steps, by the last four samples too: the
      layer is to be located.

    A grade below B: by the table, and by more than 0.05 of ratio. So a run that has been low from
    the start (a small model, a stream with a large mean) is healthy.

    >>> course = Course()
    >>> for step in range(0, 1000, 100):
    ...     course.add(step, 0.63 if step < 500 else 0.25)
    >>> course.health.value, course.grade
    ('danger', 2)
    """

    samples: list[tuple[float, float]] = field(default_factory=list)
    line: list[tuple[float, float]] = field(default_factory=list)
    best: float = 0.0
    grade: int | None = None
    health: Health = Health.HEALTHY

    def add(self, step: int, ratio: float | int) -> None:
        """Take a sample; one that is not finite, or not later than the last, is passed over."""
        if not math.isfinite(ratio) or (self.samples and step <= self.samples[-1][0]):
            return
        self.grade = grade_of(ratio)
        kept = [*self.samples, (float(step), float(ratio))]
        self.samples = kept[min(_from(kept, step - _SPAN), max(len(kept) - 3, 0)) :]
        if len(self.samples) < 3:
            return
        block = [x for x in self.samples if x[0] >= step - _BLOCK]
        block = block if len(block) >= 3 else self.samples[-3:]
        at, level = (float(np.median(x)) for x in zip(*block, strict=True))
        line = [*self.line, (at, level)]
        self.line = line[_from(line, at - _WITHIN) :]
        self.best = max(self.best, level)
        self.health = self._health(level)

    def _health(self, level: float) -> Health:
        end = self.line[-1][0]
        steps, ratios = (np.asarray(x, float) for x in zip(*self.line, strict=True))
        before = float(np.interp(end - _WITHIN, steps, ratios))
        high = max(before, *ratios[steps >= end - _WITHIN])
        within = grade_of(high) - grade_of(level)
        lost = lambda grades: within >= grades and high - level > _DROP[grades] - 1e-6
        below = grade_of(self.best) > grade_of(level) and self.best - level > 0.05
        if lost(2) or (level < 0.3 and below):
            return Health.DANGER
        if level <= 0.5 and below and self._falls():
            return Health.CAUTION
        # Two odd batches of three are not rare: the last four samples have to be down as well.
        four = float(np.median([ratio for _, ratio in self.samples[-4:]]))
        clear = high - four > _DROP[1] - 1e-6
        return Health.FALLING if lost(1) and clear else Health.HEALTHY

    def _falls(self) -> bool:
        """Whether the samples of the span fall, by the median slope of all pairs."""
        last = self.samples[-1][0]
        inside = [x for x in self.samples if x[0] >= last - _SPAN]
        past = np.asarray(inside if len(inside) >= 3 else self.samples[-3:], float)
        steps, ratios = past[:, 0], past[:, 1]
        if steps[-1] - steps[0] < 0.75 * _SPAN:
            return False
        i, j = np.triu_indices(len(past), 1)
        slope = float(np.median((ratios[j] - ratios[i]) / (steps[j] - steps[i])))
        return -slope * _SPAN >= _FALL


def _from(course: Sequence[tuple[float, float]], step: float | int) -> int:
    """Index of the last entry at or before a step; 0 without one."""
    return max(sum(at <= step for at, _ in course) - 1, 0)


def health_of(ratios: Mapping[int, float | int], step: int, first: int = FIRST) -> Health:
    """The state of a recorded ratio at a step, as `GradeWatch` had it then.

    Args:
        ratios: {step: rank ratio of the worst layer}.
        step: Where to judge; later samples do not count.
        first: First step that is looked at.

    >>> health_of({step: 0.25 for step in range(0, 2000, 100)}, 1900).value
    'healthy'
    """
    course = Course()
    for at in sorted(at for at in ratios if first <= at <= step):
        course.add(at, ratios[at])
    return course.health


@dataclass
class GradeWatch(Detector):
    """Alarms by the grade table, one rule a state: "falling", "caution", "danger".

    A ratio that is not finite is passed over: it says nothing about the rank.

    Attributes:
        first: First step that is looked at, after the warm-up.
        course: The ratio so far.
    """

    rule: str = field(default="grade", init=False)
    pattern: str = field(default=RATIO, init=False)
    first: int = FIRST
    patience: Patience = field(default=ONCE, kw_only=True)
    course: Course = field(init=False, default_factory=Course)

    @property
    def health(self) -> Health:
        """The state."""
        return self.course.health

    @property
    def grade(self) -> int | None:
        """The grade of the last sample, None without any."""
        return self.course.grade

    def relearn(self, step: int) -> None:
        """Begin a new course."""
        super().relearn(step)
        self.course = Course()

    def score(self, key: str, step: int, value: float) -> Score | None:
        """Take a ratio; 2 where the state is not healthy, z being unknown."""
        if step < self.first:
            return None
        self.course.add(step, value)
        return Score(2.0 * (self.health is not Health.HEALTHY), self.course.best, None)

    def update(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        """Take one sample; the alarm of a state that is entered."""
        ratio = float(values.get(self.pattern, math.nan))
        found = self.score(self.pattern, step, ratio) if math.isfinite(ratio) else None
        if found is None:
            return []
        raised = []
        order = list(Health)
        for health in order[1:]:
            # A milder state is neither entered nor over while a worse one lasts.
            above = order.index(self.health) - order.index(health)
            score = 2.0 if above == 0 else 1.0 if above > 0 else 0.0
            if self.latches.update(health, step, score):
                raised.append(
                    Alarm(step, health.value, self.pattern, ratio, found.expected, found.z)
                )
        return raised

    def active(self) -> tuple[str, ...]:
        """The ratio's key while the state is not healthy."""
        return () if self.health is Health.HEALTHY else (self.pattern,)

    def state(self) -> dict[str, Any]:
        """All that has been learned from the stream, as JSON can hold it."""
        course = asdict(self.course) | {"health": self.health.value}
        return super().state() | {"course": course}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        super().restore(state)
        course = state["course"]
        self.course = Course(
            [(float(at), float(ratio)) for at, ratio in course["samples"]],
            [(float(at), float(level)) for at, level in course["line"]],
            float(course["best"]),
            course["grade"],
            Health(course["health"]),
        )
