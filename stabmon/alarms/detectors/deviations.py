"""Detectors of departure from the run's own healthy window: at once, slowly, all heads together.

`RobustZ` sees what leaves the window's spread, `Cusum` what stays a little off for long, `AllHeads`
what halves. They need no clean sister runs; bands learned from those are judged by `bands.py`.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from stabmon.alarms.detectors.base import Score, Side, WindowDetector, one_sided
from stabmon.alarms.detectors.latch import ONCE, Patience


@dataclass
class RobustZ(WindowDetector):
    """Alarms where a metric is many robust spreads away from its healthy window.

    Attributes:
        side: Which departures are harmful.
        threshold: Spreads that are too many.
    """

    side: Side = "both"
    threshold: float | int = 6.0

    def score(self, key: str, step: int, value: float) -> Score | None:
        """Distance from the window's level on the harmful side."""
        level = self._level(key, step, value)
        if level is None:
            return None
        z = (value - level[0]) / level[1]
        return Score(one_sided(z, self.side) / self.threshold, level[0], z)


@dataclass
class Cusum(WindowDetector):
    """Alarms where small departures on one side add up: a slow drift.

    C ← max(0, C + min(z, clip) − allowance), z counted in the harmful direction; an alarm at
    C > threshold. C stops at twice the threshold, so that the alarm can end.

    Attributes:
        side: The harmful direction.
        threshold: Sum that is too large, in spreads.
        allowance: Departure in spreads that does not count.
        clip: Most that one sample adds, in spreads: a single outlier is no drift.

    References:
        Page 1954, Continuous inspection schemes.
    """

    side: Literal["up", "down"]
    threshold: float | int = 15.0
    allowance: float | int = 1.0
    clip: float | int = 4.0
    patience: Patience = field(default=ONCE, kw_only=True)

    def score(self, key: str, step: int, value: float) -> Score | None:
        """The sum so far, on the harmful side."""
        level = self._level(key, step, value)
        if level is None:
            return None
        sign = 1 if self.side == "up" else -1
        z = (value - level[0]) / level[1]
        total = self.memory.get(key, 0.0) + min(sign * z, self.clip) - self.allowance
        self.memory[key] = total = min(max(total, 0.0), 2 * self.threshold)
        return Score(sign * total / self.threshold, level[0], z)


@dataclass
class Collapse(WindowDetector):
    """Alarms where a positive metric falls under a small share of its healthy level.

    Attributes:
        share: Of the healthy level that is too little, in (0, 1).
    """

    share: float = 0.05

    def score(self, key: str, step: int, value: float) -> Score | None:
        """−1 at the share; the same in the logarithm beyond."""
        level = self._level(key, step, value)
        if level is None or level[0] <= 0:
            return None
        fallen = math.log(max(value / level[0], 1e-30)) / math.log(self.share)
        return Score(-max(fallen, 0.0), level[0], None)


@dataclass
class AllHeads(WindowDetector):
    """Alarms where the attention entropy of all heads is low together.

    The mean over all heads falls to `fraction` of its healthy level; or the share of sharp heads
    passes one half, having been under a quarter; or it is `most` or more, whatever it was: a run
    that began with collapsed attention has no healthy level. One sharp head alone is no alarm.

    Attributes:
        fraction: Of the healthy mean entropy that is too little.
        most: Share of sharp heads that is too much for any run; above what attention sinks take.

    Raises:
        ValueError: A fraction outside (0, 1), or a share outside [0.5, 1].
    """

    rule: str = field(default="all heads", init=False)
    pattern: str = field(default="attention/global/(entropy|sharp_heads)/mean", init=False)
    fraction: float | int = 0.5
    most: float | int = 0.9
    # Entropy counts as calm again at two thirds of its level: 0.75 of the limit of one half.
    patience: Patience = field(default=Patience(rearm=0.75), kw_only=True)

    def __post_init__(self):
        if not 0 < self.fraction < 1:
            raise ValueError(f"fraction: expected a number between 0 and 1, got {self.fraction}")
        if not 0.5 <= self.most <= 1:
            raise ValueError(f"most: expected a share from 0.5 to 1, got {self.most}")
        super().__post_init__()

    def score(self, key: str, step: int, value: float) -> Score | None:
        """How far it has gone, 1 at the limit; a little beyond 1 counts, so that equality does."""
        level = self.window.level(key, step, value)
        if level is None:
            return None
        expected = level[0]
        # A share of heads may have sat at 0 all along: a spread for it nevertheless.
        z = (value - expected) / max(level[1], 0.02)
        if "/sharp_heads/" in key:
            self.memory["sharp"] = value
        # Half the entropy is learning, as long as hardly any head is sharp.
        if "/entropy/" in key and self.memory.get("sharp", 1.0) < 0.25:
            return None
        if "/entropy/" in key:
            return Score(self.fraction * expected / max(value, 1e-30) * (1 + 1e-9), expected, z)
        if expected < 0.25:
            return Score(value / 0.5 * (1 + 1e-9), expected, z)
        return Score(value / self.most * (1 + 1e-9), float(self.most), None)
