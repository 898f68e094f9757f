"""When a condition becomes an alarm: dwell, hysteresis, cooldown.

Every detector gives each of its metrics a signed score, ±1 at its threshold, and asks its latches.
What the score is made of is the detectors' own.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Patience:
    """How much it takes to raise an alarm, and to raise it again.

    Attributes:
        dwell: Samples running, on one side of the threshold, that make an alarm.
        rearm: Fraction of the threshold below which the metric is calm again; after `dwell` calm
            samples running the alarm is over and another can come.
        cooldown: Steps after an alarm in which the metric raises no other; infinite: one a run.

    Raises:
        ValueError: A dwell below 1, `rearm` outside (0, 1], or a negative cooldown.
    """

    dwell: int = 2
    rearm: float | int = 0.5
    cooldown: float | int = 500

    def __post_init__(self):
        if self.dwell < 1:
            raise ValueError(f"dwell: expected at least 1 sample, got {self.dwell}")
        if not 0 < self.rearm <= 1:
            raise ValueError(
                f"rearm: expected a fraction of the threshold in (0, 1], got {self.rearm}"
            )
        if self.cooldown < 0:
            raise ValueError(f"cooldown: expected steps >= 0, got {self.cooldown}")


TWICE = Patience()
ONCE = Patience(dwell=1)


@dataclass
class _Latch:
    """One metric's: `over` counts samples beyond the threshold, signed; `calm` those well below."""

    over: int = 0
    calm: int = 0
    raised: bool = False
    last: int | None = None


@dataclass
class Latches:
    """The latches of one detector, by metric key.

    >>> latches = Latches(Patience(dwell=2, cooldown=0))
    >>> [latches.update("m", step, score) for step, score in enumerate([2, 2, 2, 0, 0, 2, 2])]
    [False, True, False, False, False, False, True]
    """

    patience: Patience = TWICE
    _latches: dict[str, _Latch] = field(default_factory=dict)

    def update(self, key: str, step: int, score: float | int) -> bool:
        """Take the score of one sample; whether it raises an alarm.

        A score that is not finite raises at once, without dwell.
        """
        latch, step, score = self._latches.setdefault(key, _Latch()), int(step), float(score)
        broken = not math.isfinite(score)
        side = 1 if broken else (score > 1) - (score < -1)
        latch.over = latch.over + side if side and latch.over * side >= 0 else side
        latch.calm = latch.calm + 1 if abs(score) < self.patience.rearm else 0
        if latch.calm >= self.patience.dwell:
            latch.raised = False
        ready = broken or abs(latch.over) >= self.patience.dwell
        rested = latch.last is None or step - latch.last >= self.patience.cooldown
        if ready and rested and not latch.raised:
            latch.raised, latch.last = True, step
            return True
        return False

    def active(self) -> tuple[str, ...]:
        """Metrics whose alarm is not over, cooling down or not."""
        dwell = self.patience.dwell
        return tuple(k for k, x in self._latches.items() if x.raised or abs(x.over) >= dwell)

    def state(self) -> dict[str, Any]:
        """The latches, as JSON can hold them."""
        return {key: asdict(latch) for key, latch in self._latches.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        self._latches = {key: _Latch(**row) for key, row in state.items()}
