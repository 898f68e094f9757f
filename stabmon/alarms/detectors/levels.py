"""Detector of a level that stands where it should not: a loss above the run's own best.

For harm that comes slowly, or that stays: a surge is over once its baseline has followed. What is
sudden is `surges.py`'s, what leaves its course `shifts.py`'s.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from stabmon.alarms.detectors.base import Detector, Score
from stabmon.alarms.detectors.latch import ONCE, Patience

_SIZES = (5, 20, 50)


@dataclass
class Level(Detector):
    """Alarms where the median of the last samples is above the best such median so far.

    A block of the last k samples, k = 5, 20 and 50, has the median m. It is too high where m − best
    exceeds `threshold` standard errors of the two medians, σ·√(2·1.57/k), and `least` of the best.
    σ is the robust spread of neighbouring samples' differences, over √2, so a course is no noise.
    Short blocks see a jump soon, long ones a small harm. Levels below 0.02 nats are not judged:
    there a factor of two is nothing.

    Attributes:
        first: First step that is looked at, after the warm-up.
        threshold: Standard errors that are too many.
        least: Share of the best that is too much.
    """

    first: int = 0
    threshold: float | int = 6.0
    least: float = 0.03
    patience: Patience = field(default=ONCE, kw_only=True)

    def score(self, key: str, step: int, value: float) -> Score | None:
        """How far the level is above the best, 1 at the limit."""
        if step < self.first:
            return None
        recent, best = self.memory.get(key, ([], {}))
        recent, best = [*recent, float(value)][-_SIZES[-1] :], dict(best)
        self.memory[key] = [recent, best]
        if len(recent) < 2 * _SIZES[0]:
            return None
        change = np.diff(recent)
        sigma = 1.4826 * float(np.median(np.abs(change - np.median(change)))) / math.sqrt(2)
        found = Score(0.0, math.nan, None)
        for size in (x for x in _SIZES if x <= len(recent)):
            median = float(np.median(recent[-size:]))
            usual = best.get(str(size), median)
            error = max(sigma * math.sqrt(2 * 1.57 / size), 1e-9)
            far, share = (median - usual) / error, (median - usual) / max(usual, 0.02)
            score = min(far / self.threshold, share / self.least)
            if score > found.score:
                found = Score(score, usual, far)
            best[str(size)] = min(usual, median)
        return found
