"""Detectors with fixed limits: a value too large, a value that is no number, all heads at once.

Limits that hold for every run; those learned from the run are in `deviations.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stabmon.alarms.detectors.base import Alarm
from stabmon.alarms.detectors.latch import ONCE, Latches, Patience, selected
from stabmon.alarms.detectors.window import HealthyWindow

# Entropy counts as calm again at two thirds of its level: 0.75 of the limit of one half.
_HEADS = Patience(rearm=0.75)


@dataclass
class Threshold:
    """Alarms where a metric is above a limit, or not finite.

    With an infinite limit only what is not finite alarms.

    Attributes:
        rule: Name of the rule.
        pattern: Regular expression of the metric keys it reads.
        limit: Largest value allowed, at least 0.
        patience: Dwell, hysteresis, cooldown.
        first: First step at which the limit holds; before it only what is not finite alarms.

    Raises:
        ValueError: A negative limit.

    >>> detector = Threshold("max logit", "attention/global/max_logit/max", limit=1e4)
    >>> [alarm.value for alarm in detector.update(10, {"attention/global/max_logit/max": 2e4})]
    [20000.0]

    References:
        arXiv 2309.14322: every run whose logits passed 1e4 diverged.
    """

    rule: str
    pattern: str
    limit: float | int
    patience: Patience = ONCE
    first: int = 0
    latches: Latches = field(init=False)

    def __post_init__(self):
        if not self.limit >= 0:
            raise ValueError(f"limit: expected a number >= 0, got {self.limit}")
        self.latches = Latches(self.patience)

    def update(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        """Take one sample; the alarms that it raises."""
        raised = []
        for key, value in selected(self.pattern, values):
            score = math.nan
            if math.isfinite(value):
                if step < self.first:
                    continue
                score = 2.0 if value > self.limit else max(value, 0.0) / max(self.limit, 1e-30)
            if self.latches.update(key, step, score):
                z = math.inf if math.isfinite(value) else math.nan
                limit = float(self.limit) if math.isfinite(self.limit) else math.nan
                raised.append(Alarm(step, self.rule, key, value, limit, z))
        return raised

    def active(self) -> tuple[str, ...]:
        """Metrics that are in alarm now."""
        return self.latches.active()

    def state(self) -> dict[str, Any]:
        """All that has been learned from the stream, as JSON can hold it."""
        return {"latches": self.latches.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        self.latches.restore(state["latches"])


@dataclass
class AllHeads:
    """Alarms where the attention entropy of all heads is low together.

    The mean over all heads falls to `fraction` of its healthy level; or the share of sharp heads
    passes one half, having been under a quarter; or it is `most` or more, whatever it was: a run
    that began with collapsed attention has no healthy level. One sharp head alone is no alarm.

    Attributes:
        window: What is healthy.
        fraction: Of the healthy mean entropy that is too little.
        most: Share of sharp heads that is too much for any run; above what attention sinks take.
        rule: Name of the rule.
        entropy: Key of the mean entropy, nats.
        sharp: Key of the share of sharp heads.
        patience: Dwell, hysteresis, cooldown.
    """

    window: HealthyWindow
    fraction: float | int = 0.5
    most: float | int = 0.9
    rule: str = "all heads"
    entropy: str = "attention/global/entropy/mean"
    sharp: str = "attention/global/sharp_heads/mean"
    patience: Patience = _HEADS
    latches: Latches = field(init=False)

    def __post_init__(self):
        if not 0 < self.fraction < 1:
            raise ValueError(f"fraction: expected a number between 0 and 1, got {self.fraction}")
        if not 0.5 <= self.most <= 1:
            raise ValueError(f"most: expected a share from 0.5 to 1, got {self.most}")
        self.latches = Latches(self.patience)

    def update(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        """Take one sample; the alarms that it raises."""
        raised = []
        for key in (k for k in (self.entropy, self.sharp) if k in values):
            value = float(values[key])
            level = self.window.level(key, step, value)
            expected, spread = level or (math.nan, math.nan)
            score = math.nan
            if math.isfinite(value):
                if level is None:
                    continue
                score = self._score(key, value, expected)
            if self.latches.update(key, step, score):
                # A share of heads may have sat at 0 all along: a spread for it nevertheless.
                z = (value - expected) / max(spread, 0.02)
                if key == self.sharp and expected >= 0.25:
                    expected, z = float(self.most), math.inf
                raised.append(Alarm(step, self.rule, key, value, expected, z))
        return raised

    def _score(self, key: str, value: float, expected: float) -> float:
        """How far it has gone, 1 at the limit; a little beyond 1 counts, so that equality does."""
        if key == self.entropy:
            return self.fraction * expected / max(value, 1e-30) * (1 + 1e-9)
        return value / (0.5 if expected < 0.25 else self.most) * (1 + 1e-9)

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
