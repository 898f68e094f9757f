"""Detector of counters, which only rise: how much one grew since the last sample."""

from dataclasses import dataclass, field

from stabmon.alarms.detectors.base import Detector, Score
from stabmon.alarms.detectors.latch import ONCE, Patience


@dataclass
class Rise(Detector):
    """Alarms where a counter grew by more than a limit from one sample to the next.

    A counter that fell was restored with a checkpoint: it begins anew there.

    Attributes:
        limit: Largest growth allowed, at least 0.

    Raises:
        ValueError: A negative limit.

    >>> detector = Rise("count", "symptoms/global/skipped/value", limit=2)
    >>> look = lambda step, total: detector.update(step, {"symptoms/global/skipped/value": total})
    >>> [len(look(step, total)) for step, total in ((0, 0.0), (10, 1.0), (20, 1.0), (30, 11.0))]
    [0, 0, 0, 1]
    """

    limit: float | int
    patience: Patience = field(default=ONCE, kw_only=True)

    def __post_init__(self):
        if not self.limit >= 0:
            raise ValueError(f"limit: expected a number >= 0, got {self.limit}")
        super().__post_init__()

    def score(self, key: str, step: int, value: float) -> Score | None:
        """2 where it grew by more than the limit, else the fraction of it."""
        before = self.memory.get(key, 0.0)
        self.memory[key] = value
        grown = max(value - before, 0.0)
        score = 2.0 if grown > self.limit else grown / max(self.limit, 1e-30)
        return Score(score, before + self.limit, None)
