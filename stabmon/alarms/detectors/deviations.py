"""Detectors of departure from the run's own healthy window: at once, and slowly.

`RobustZ` sees what leaves the window's spread, `Cusum` what stays a little off for long. Both need
no clean sister runs; bands learned from those are judged by `detectors.BandDetector`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from stabmon.alarms.detectors.base import Alarm
from stabmon.alarms.detectors.latch import ONCE, TWICE, Latches, Patience, selected
from stabmon.alarms.detectors.window import HealthyWindow

Side = Literal["up", "down", "both"]


def one_sided(z: float, side: Side) -> float:
    """The distance z where it lies on `side`, else 0."""
    if side == "up":
        return max(z, 0.0)
    return min(z, 0.0) if side == "down" else z


@dataclass
class RobustZ:
    """Alarms where a metric is many robust spreads away from its healthy window.

    A value that is not finite alarms at once, before the window has ended too, and never enters it.

    Attributes:
        rule: Name of the rule.
        pattern: Regular expression of the metric keys it reads.
        window: What is healthy.
        side: Which departures are harmful.
        threshold: Spreads that are too many.
        patience: Dwell, hysteresis, cooldown.
    """

    rule: str
    pattern: str
    window: HealthyWindow
    side: Side = "both"
    threshold: float | int = 6.0
    patience: Patience = TWICE
    latches: Latches = field(init=False)

    def __post_init__(self):
        self.latches = Latches(self.patience)

    def update(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        """Take one sample; the alarms that it raises."""
        raised = []
        for key, value in selected(self.pattern, values):
            level = self.window.level(key, step, value)
            expected, spread = level or (math.nan, math.nan)
            if level is None and math.isfinite(value):
                continue
            z = (value - expected) / spread
            score = one_sided(z, self.side) / self.threshold
            if not math.isfinite(value):
                score = math.nan
            if self.latches.update(key, step, score):
                raised.append(Alarm(step, self.rule, key, value, expected, z))
        return raised

    def active(self) -> tuple[str, ...]:
        """Metrics that are in alarm now."""
        return self.latches.active()

    def state(self) -> dict[str, Any]:
        """All that has been learned from the stream, as JSON can hold it."""
        return {"window": self.window.state(), "latches": self.latches.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        self.window.restore(state["window"])
        self.latches.restore(state["latches"])


@dataclass
class Cusum:
    """Alarms where small departures on one side add up: a slow drift.

    C ← max(0, C + min(z, clip) − allowance), z counted in the harmful direction; an alarm at
    C > threshold. C stops at twice the threshold, so that the alarm can end.

    Attributes:
        rule: Name of the rule.
        pattern: Regular expression of the metric keys it reads.
        window: What is healthy.
        side: The harmful direction.
        threshold: Sum that is too large, in spreads.
        allowance: Departure in spreads that does not count.
        clip: Most that one sample adds, in spreads: a single outlier is no drift.
        patience: Dwell, hysteresis, cooldown.

    References:
        Page 1954, Continuous inspection schemes.
    """

    rule: str
    pattern: str
    window: HealthyWindow
    side: Literal["up", "down"]
    threshold: float | int = 15.0
    allowance: float | int = 1.0
    clip: float | int = 4.0
    patience: Patience = ONCE
    latches: Latches = field(init=False)
    _sums: dict[str, float] = field(default_factory=dict)

    def __post_init__(self):
        self.latches = Latches(self.patience)

    def update(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        """Take one sample; the alarms that it raises."""
        raised = []
        for key, value in selected(self.pattern, values):
            sign = 1 if self.side == "up" else -1
            level = self.window.level(key, step, value)
            expected, spread = level or (math.nan, math.nan)
            z, score = (value - expected) / spread, math.inf
            if math.isfinite(value):
                if level is None:
                    continue
                added = min(sign * z, self.clip) - self.allowance
                total = min(max(self._sums.get(key, 0.0) + added, 0.0), 2 * self.threshold)
                self._sums[key] = total
                score = sign * total / self.threshold
            if self.latches.update(key, step, score):
                raised.append(Alarm(step, self.rule, key, value, expected, z))
        return raised

    def active(self) -> tuple[str, ...]:
        """Metrics that are in alarm now."""
        return self.latches.active()

    def state(self) -> dict[str, Any]:
        """All that has been learned from the stream, as JSON can hold it."""
        latches = self.latches.state()
        return {"window": self.window.state(), "latches": latches, "sums": dict(self._sums)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        self.window.restore(state["window"])
        self.latches.restore(state["latches"])
        self._sums = dict(state["sums"])
