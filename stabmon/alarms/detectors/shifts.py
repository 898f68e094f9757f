"""Detector of a change of level that stays, against the course that the metric was on.

For metrics that move for good reasons in a healthy run and all the while: a router sharpens, a
gradient norm grows. A level learned once would call that a fault, and a jump of one sample is none.
A collapse slow enough to be a course of its own is not seen here: `deviations.py`.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from stabmon.alarms.detectors.base import Detector, Score, Side, one_sided
from stabmon.alarms.detectors.latch import ONCE, Patience


@dataclass
class Shift(Detector):
    """Alarms where the last samples lie off the line through those before them.

    The line has the median slope of all pairs (Theil–Sen) of log x, and σ is the robust spread
    about it, 1.4826 · MAD, at least `floor`. z = median over the last `recent` samples of
    (log x − line)/σ. Samples beyond `before + recent` are forgotten, so what stays becomes the
    new course after a while and the alarm ends.

    Attributes:
        first: First step that is looked at, after the warm-up.
        side: Which departures are harmful.
        threshold: z that is too large.
        before: Samples that make the line.
        recent: Samples that are held against it.
        floor: Smallest σ; of log x, hence relative.

    Raises:
        ValueError: Fewer than 8 samples before, or none to judge.
    """

    first: int = 0
    side: Side = "up"
    threshold: float | int = 4.0
    before: int = 30
    recent: int = 8
    floor: float | int = 0.02
    patience: Patience = field(default=ONCE, kw_only=True)

    def __post_init__(self):
        if self.before < 8 or self.recent < 1:
            raise ValueError(
                f"expected before >= 8 and recent >= 1 samples, got {self.before} and {self.recent}"
            )
        super().__post_init__()

    def score(self, key: str, step: int, value: float) -> Score | None:
        """Distance of the last samples from the line, and where the line is now."""
        if step < self.first:
            return None
        past = [*self.memory.get(key, []), math.log(max(value, 1e-30))]
        self.memory[key] = past[-(self.before + self.recent) :]
        if len(past) < self.before + self.recent:
            return None
        y = np.asarray(self.memory[key])
        at = np.arange(len(y))
        i, j = np.triu_indices(self.before, 1)
        line = float(np.median((y[j] - y[i]) / (j - i))) * at
        line += float(np.median((y - line)[: self.before]))
        rest = y - line
        sigma = 1.4826 * float(np.median(np.abs(rest[: self.before])))
        z = float(np.median(rest[self.before :])) / max(sigma, self.floor)
        return Score(one_sided(z, self.side) / self.threshold, math.exp(float(line[-1])), z)
