"""Detector of sudden changes of a symptom against its own recent past: loss, norms.

A moving baseline fits symptoms, which drift for good reasons while the run learns. What must not
be absorbed by a baseline is watched by `deviations.py`.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from stabmon.alarms.detectors.base import Detector, Score, one_sided
from stabmon.alarms.detectors.latch import ONCE, Patience


@dataclass
class Surge(Detector):
    """Alarms where z = (log x − mean)/sd is large, by exponential moving averages of log x.

    The logarithm, since symptoms vary by a factor; a value that is not positive is taken as 1e-30.
    Until `settle` samples were seen the averages are plain ones and nothing is judged. Values enter
    the baseline clipped to mean ± clip · sd, so one outlier does not blind it.

    Attributes:
        first: First step that is looked at, after the warm-up.
        side: "up", the harmful side of loss and norms; or "down".
        threshold: z that is too large. ZClip's 2.5 is for clipping: as an alarm it would go off
            every few hundred samples of a clean run.
        decay: Of the moving averages, per sample.
        settle: Samples before judging.
        clip: Bound on what enters the averages, in sd.
        floor: Smallest sd; of log x, hence relative.

    Raises:
        ValueError: `decay` outside (0, 1), or `settle` < 3.

    References:
        arXiv 2504.02507 (ZClip), decay 0.97 and one-sided z.
    """

    first: int = 0
    side: Literal["up", "down"] = "up"
    threshold: float | int = 6.0
    decay: float | int = 0.97
    settle: int = 20
    clip: float | int = 2.5
    floor: float | int = 0.02
    patience: Patience = field(default=ONCE, kw_only=True)

    def __post_init__(self):
        if not 0 < self.decay < 1:
            raise ValueError(f"decay: expected a number between 0 and 1, got {self.decay}")
        if self.settle < 3:
            raise ValueError(f"settle: expected at least 3 samples, got {self.settle}")
        super().__post_init__()

    def score(self, key: str, step: int, value: float) -> Score | None:
        """Distance from the baseline before this sample, and the baseline; then let it in."""
        if step < self.first:
            return None
        count, mean, variance = self.memory.get(key, (0, 0.0, 0.0))
        expected, z = math.exp(mean), 0.0
        y, sd = math.log(max(value, 1e-30)), max(math.sqrt(variance), self.floor)
        if count >= self.settle:
            z = (y - mean) / sd
            y = mean + min(max(z, -self.clip), self.clip) * sd
        weight = max(1 / (count + 1), 1 - self.decay)
        off = y - mean
        self.memory[key] = [
            count + 1,
            mean + weight * off,
            (1 - weight) * (variance + weight * off**2),
        ]
        return Score(one_sided(z, self.side) / self.threshold, expected, z)
