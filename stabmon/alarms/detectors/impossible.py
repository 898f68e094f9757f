"""Detector of values that cannot be: a cross-entropy of 0 or less, one that is the same each time.

Values that are not finite are `nonfinite.py`'s.
"""

from dataclasses import dataclass, field

from stabmon.alarms.detectors.base import IMPOSSIBLE, Detector, Score
from stabmon.alarms.detectors.latch import ONCE, Patience


@dataclass
class Impossible(Detector):
    """Alarms where a loss is 0 or less, or the same to the bit in several samples running.

    Attributes:
        same: Samples running that make an alarm.

    >>> detector = Impossible("symptoms/global/loss/value")
    >>> [alarm.rule for alarm in detector.update(10, {"symptoms/global/loss/value": 0.0})]
    ['impossible']
    """

    rule: str = field(default=IMPOSSIBLE, init=False)
    same: int = 5
    patience: Patience = field(default=ONCE, kw_only=True)

    def score(self, key: str, step: int, value: float) -> Score | None:
        """2 where the value cannot be."""
        last, count = self.memory.get(key, (None, 0))
        count = count + 1 if value == last else 1
        self.memory[key] = [value, count]
        # Held-out text is the same each time: where nothing is learned, so is its loss.
        same = count >= self.same and not key.startswith("evaluation/")
        return Score(2.0 * (value <= 0 or same), abs(value) + 1.0, None)
