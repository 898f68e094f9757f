"""Detector with a fixed limit, which holds for every run.

Limits that are learned from the run are in `deviations.py`.
"""

from dataclasses import dataclass, field

from stabmon.alarms.detectors.base import Detector, Score
from stabmon.alarms.detectors.latch import ONCE, Patience


@dataclass
class Threshold(Detector):
    """Alarms where a metric is above a limit.

    With an infinite limit only what is not finite alarms.

    Attributes:
        limit: Largest value allowed, at least 0.
        first: First step at which the limit holds; before it only what is not finite alarms.

    Raises:
        ValueError: A negative limit.

    >>> detector = Threshold("max logit", "attention/global/max_logit/max", limit=1e4)
    >>> [alarm.value for alarm in detector.update(10, {"attention/global/max_logit/max": 2e4})]
    [20000.0]

    References:
        arXiv 2309.14322: every run whose logits passed 1e4 diverged.
    """

    limit: float | int
    first: int = 0
    patience: Patience = field(default=ONCE, kw_only=True)

    def __post_init__(self):
        if not self.limit >= 0:
            raise ValueError(f"limit: expected a number >= 0, got {self.limit}")
        super().__post_init__()

    def relearn(self, step: int) -> None:
        """A fixed limit holds whatever was changed."""

    def score(self, key: str, step: int, value: float) -> Score | None:
        """Fraction of the limit; above it 2, also where the limit is 0."""
        if step < self.first:
            return None
        score = 2.0 if value > self.limit else max(value, 0.0) / max(self.limit, 1e-30)
        return Score(score, float(self.limit), None)
