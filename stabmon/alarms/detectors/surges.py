"""Detector of sudden changes of a symptom against its own recent past: loss, norms.

A moving baseline fits symptoms, which drift for good reasons while the run learns. What must not
be absorbed by a baseline is watched by `deviations.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from stabmon.alarms.detectors.base import Alarm
from stabmon.alarms.detectors.deviations import one_sided
from stabmon.alarms.detectors.latch import ONCE, Latches, Patience, selected


@dataclass
class _Baseline:
    """Moving mean and variance of one metric, and how many samples they have seen."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0


@dataclass
class Surge:
    """Alarms where z = (log x − mean)/sd is large, by exponential moving averages of log x.

    The logarithm, since symptoms vary by a factor; a value that is not positive is taken as it is
    with `log=False` and otherwise as 1e-30. Until `settle` samples were seen the averages are
    plain ones and nothing is judged. Values enter the baseline clipped to mean ± clip · sd, so
    one outlier does not blind it; a value that is not finite alarms and never enters.

    Attributes:
        rule: Name of the rule.
        pattern: Regular expression of the metric keys it reads.
        first: First step that is looked at, after the warm-up.
        side: "up", the harmful side of loss and norms; or "down".
        threshold: z that is too large. ZClip's 2.5 is for clipping: as an alarm it would go off
            every few hundred samples of a clean run.
        decay: Of the moving averages, per sample.
        settle: Samples before judging.
        clip: Bound on what enters the averages, in sd.
        floor: Smallest sd; of log x, hence relative.
        log: Whether to take the logarithm.
        patience: Dwell, hysteresis, cooldown.

    Raises:
        ValueError: `decay` outside (0, 1), or `settle` < 3.

    References:
        arXiv 2504.02507 (ZClip), decay 0.97 and one-sided z.
    """

    rule: str
    pattern: str
    first: int = 0
    side: Literal["up", "down"] = "up"
    threshold: float | int = 6.0
    decay: float | int = 0.97
    settle: int = 20
    clip: float | int = 2.5
    floor: float | int = 0.02
    log: bool = True
    patience: Patience = ONCE
    latches: Latches = field(init=False)
    _baselines: dict[str, _Baseline] = field(default_factory=dict)

    def __post_init__(self):
        if not 0 < self.decay < 1:
            raise ValueError(f"decay: expected a number between 0 and 1, got {self.decay}")
        if self.settle < 3:
            raise ValueError(f"settle: expected at least 3 samples, got {self.settle}")
        self.latches = Latches(self.patience)

    def update(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        """Take one sample; the alarms that it raises."""
        raised = []
        for key, value in selected(self.pattern, values):
            z, expected = self._z(key, step, value)
            score = one_sided(z, self.side) / self.threshold if math.isfinite(value) else z
            if self.latches.update(key, step, score):
                raised.append(Alarm(step, self.rule, key, value, expected, z))
        return raised

    def _z(self, key: str, step: int, value: float) -> tuple[float, float]:
        """Distance from the baseline before this sample, and the baseline; then let it in."""
        base = self._baselines.setdefault(key, _Baseline())
        scale = math.exp if self.log else float
        expected = scale(base.mean) if base.count else math.nan
        if not math.isfinite(value):
            return math.nan, expected
        if step < self.first:
            return 0.0, expected
        y = math.log(max(value, 1e-30)) if self.log else value
        z, sd = 0.0, max(math.sqrt(base.variance), self.floor)
        if base.count >= self.settle:
            z = (y - base.mean) / sd
            y = base.mean + min(max(z, -self.clip), self.clip) * sd
        base.count += 1
        weight = max(1 / base.count, 1 - self.decay)
        off = y - base.mean
        base.mean += weight * off
        base.variance = (1 - weight) * (base.variance + weight * off**2)
        return z, expected

    def active(self) -> tuple[str, ...]:
        """Metrics that are in alarm now."""
        return self.latches.active()

    def state(self) -> dict[str, Any]:
        """All that has been learned from the stream, as JSON can hold it."""
        baselines = {key: asdict(base) for key, base in self._baselines.items()}
        return {"latches": self.latches.state(), "baselines": baselines}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        self.latches.restore(state["latches"])
        self._baselines = {key: _Baseline(**row) for key, row in state["baselines"].items()}
