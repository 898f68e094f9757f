"""Detector that judges by bands learned from clean runs, or frozen from the run itself.

The bands are `stabmon.alarms.reference`'s.
"""

import math
from dataclasses import dataclass, field

from stabmon.alarms.detectors.base import Detector, Score
from stabmon.alarms.detectors.latch import Patience
from stabmon.alarms.reference import Reference


@dataclass
class BandDetector(Detector):
    """Alarms where metrics leave their bands for several samples running, once a metric.

    Values of metrics without a band are ignored. Metrics judged by the run's own level say nothing
    until the healthy window is over.

    Attributes:
        reference: The bands.
        threshold: Spreads that are too many.
        dwell: Samples running, on one side, that make an alarm.
    """

    rule: str = field(default="band", init=False)
    pattern: str = field(default=".*", init=False)
    reference: Reference
    threshold: float | int = 5.0
    dwell: int = 2

    def __post_init__(self):
        self.patience = Patience(self.dwell, 1.0, math.inf)
        super().__post_init__()

    def reads(self, key: str) -> bool:
        """Whether a metric has a band."""
        return key in self.reference.bands

    def relearn(self, step: int) -> None:
        """Bands of other runs stay what they are."""

    def score(self, key: str, step: int, value: float) -> Score | None:
        """Distance from the band; None while the run's own level is being learned."""
        band = self.reference.bands[key]
        expected, sd = band(step)
        first, last = self.reference.window
        if band.judged != "reference" and step <= last:
            if band.judged == "own" and step >= first:
                count, offset = self.memory.get(key, (0, 0.0))
                offset = (count * offset + value - expected) / (count + 1)
                self.memory[key] = [count + 1, offset]
            return None
        if band.judged == "own":
            if key not in self.memory:
                return None
            expected += self.memory[key][1]
        z = (value - expected) / sd
        return Score(z / self.threshold, expected, z)
