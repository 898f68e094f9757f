"""Detector of a change of level that stays, against the course that the metric was on.

For metrics that move for good reasons in a healthy run and all the while: a router sharpens, a
gradient norm grows. A level learned once would call that a fault, and a jump of one sample is none.
A collapse slow enough to be a course of its own is not seen here: `deviations.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stabmon.alarms.detectors.base import Alarm
from stabmon.alarms.detectors.deviations import Side, one_sided
from stabmon.alarms.detectors.latch import ONCE, Latches, Patience, selected


@dataclass
class Shift:
    """Alarms where the last samples lie off the line through those before them.

    The line has the median slope of all pairs (Theil–Sen) of log x, and σ is the robust spread
    about it, 1.4826 · MAD, at least `floor`. z = median over the last `recent` samples of
    (log x − line)/σ. Samples beyond `before + recent` are forgotten, so what stays becomes the
    new course after a while and the alarm ends. A value that is not finite alarms and never enters.

    Attributes:
        rule: Name of the rule.
        pattern: Regular expression of the metric keys it reads; their values are positive.
        first: First step that is looked at, after the warm-up.
        side: Which departures are harmful.
        threshold: z that is too large.
        before: Samples that make the line.
        recent: Samples that are held against it.
        floor: Smallest σ; of log x, hence relative.
        patience: Dwell, hysteresis, cooldown.

    Raises:
        ValueError: Fewer than 8 samples before, or none to judge.
    """

    rule: str
    pattern: str
    first: int = 0
    side: Side = "up"
    threshold: float | int = 4.0
    before: int = 30
    recent: int = 8
    floor: float | int = 0.02
    patience: Patience = ONCE
    latches: Latches = field(init=False)
    _past: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self):
        if self.before < 8 or self.recent < 1:
            raise ValueError(
                f"expected before >= 8 and recent >= 1 samples, got {self.before} and {self.recent}"
            )
        self.latches = Latches(self.patience)

    def update(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        """Take one sample; the alarms that it raises."""
        raised = []
        for key, value in selected(self.pattern, values):
            z, expected = self._z(key, step, value)
            score = one_sided(z, self.side) / self.threshold if math.isfinite(value) else math.nan
            if self.latches.update(key, step, score):
                raised.append(Alarm(step, self.rule, key, value, expected, z))
        return raised

    def _z(self, key: str, step: int, value: float) -> tuple[float, float]:
        """Distance of the last samples from the line, and where the line is now."""
        if not math.isfinite(value):
            return math.nan, math.nan
        if step < self.first:
            return 0.0, math.nan
        past = [*self._past.get(key, []), math.log(max(value, 1e-30))]
        self._past[key] = past[-(self.before + self.recent) :]
        if len(past) < self.before + self.recent:
            return 0.0, math.nan
        y = np.asarray(self._past[key])
        at = np.arange(len(y))
        i, j = np.triu_indices(self.before, 1)
        line = float(np.median((y[j] - y[i]) / (j - i))) * at
        line += float(np.median((y - line)[: self.before]))
        rest = y - line
        sigma = 1.4826 * float(np.median(np.abs(rest[: self.before])))
        z = float(np.median(rest[self.before :])) / max(sigma, self.floor)
        return z, math.exp(float(line[-1]))

    def active(self) -> tuple[str, ...]:
        """Metrics that are in alarm now."""
        return self.latches.active()

    def state(self) -> dict[str, Any]:
        """All that has been learned from the stream, as JSON can hold it."""
        past = {key: list(x) for key, x in self._past.items()}
        return {"latches": self.latches.state(), "past": past}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        self.latches.restore(state["latches"])
        self._past = {key: list(x) for key, x in state["past"].items()}
