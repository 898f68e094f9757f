"""Alarms, and what all detectors share: which keys they read, latches, alarms, saved state.

A concrete detector says what one finite value is worth (`Detector.score`). NumPy and the standard
library only. What the alarms mean together is `stabmon.alarms.diagnosis`'.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from stabmon.alarms.detectors.conditions import Conditions
from stabmon.alarms.detectors.latch import TWICE, Latches, Patience
from stabmon.alarms.detectors.window import HealthyWindow

Side = Literal["up", "down", "both"]
NON_FINITE, UNREADABLE, IMPOSSIBLE = "non-finite", "unreadable", "impossible"
_LAG = re.compile(r"delta(\d+)/")
# Of the run's own tensors. Any other metric may be unreadable by a fault of the metric itself.
_OF_THE_RUN = ("symptoms/", "evaluation/", "train/")


def rule_of(key: str) -> str:
    """The rule that a value of this metric breaks by not being finite.

    Of a loss, a norm or a count of broken leaves "non-finite": tensors of the run are broken. Of
    any other metric "unreadable", which is no reason to stop a run.

    >>> rule_of("symptoms/global/loss/value"), rule_of("activations/global/rank_ratio/min")
    ('non-finite', 'unreadable')
    """
    return NON_FINITE if key.startswith(_OF_THE_RUN) else UNREADABLE


@dataclass(frozen=True)
class Alarm:
    """What one detector says of one metric.

    Attributes:
        step: Step of the sample that completed the evidence.
        rule: Which rule fired.
        key: Which metric.
        value: Its value at that step.
        reference: What was expected; None for a value that is not finite.
        z: Distance from it in spreads; None where there is no spread (a fixed limit), and for a
            value that is not finite.
        layer: Layer that is worst, None where that is not known.
        head: Head that is worst, None where that is not known.
    """

    step: int
    rule: str
    key: str
    value: float
    reference: float | None = None
    z: float | None = None
    layer: int | None = None
    head: int | None = None

    @property
    def direction(self) -> str:
        """Where the value went: "up", "down", or "non-finite"."""
        if not math.isfinite(self.value):
            return "non-finite"
        return "down" if self.reference is not None and self.value < self.reference else "up"

    @property
    def strength(self) -> float:
        """|z|; infinite where there is none."""
        return math.inf if self.z is None else abs(self.z)

    def event(self) -> dict[str, Any]:
        """The row of `events.jsonl`, less kind and step, and less a place that is not known."""
        row = asdict(self)
        row.pop("step")
        return {k: v for k, v in row.items() if k not in ("layer", "head") or v is not None}


class Score(NamedTuple):
    """What a detector makes of one value.

    Attributes:
        score: Signed distance as a fraction of the threshold: beyond ±1 counts for an alarm.
        expected: What was expected.
        z: Distance in spreads, None where there is no spread.
    """

    score: float
    expected: float
    z: float | None


_CALM = Score(0.0, math.nan, None)


def one_sided(z: float, side: Side) -> float:
    """The distance z where it lies on `side`, else 0."""
    if side == "up":
        return max(z, 0.0)
    return min(z, 0.0) if side == "down" else z


@dataclass
class Detector(ABC):
    """A stream of samples in, alarms out, with a state that JSON holds.

    A value that is not finite alarms at once, without dwell, and is never learned from; its rule is
    `rule_of` its key.

    Attributes:
        rule: Name of the rule.
        pattern: Regular expression of the metric keys it reads.
        patience: Dwell, hysteresis, cooldown.
        latches: Which metrics are in alarm.
        memory: What was learned of each metric, as JSON can hold it.
        unless: Samples with this metric are passed over.
    """

    rule: str
    pattern: str
    patience: Patience = field(default=TWICE, kw_only=True)
    latches: Latches = field(init=False)
    memory: dict[str, Any] = field(init=False, default_factory=dict)
    unless: str = field(default="", kw_only=True)
    _reads: dict[str, bool] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self):
        self.latches = Latches(self.patience)

    @abstractmethod
    def score(self, key: str, step: int, value: float) -> Score | None:
        """Take a finite value of a metric that is read; None while it cannot be judged."""

    def reads(self, key: str) -> bool:
        """Whether a metric is one of those that are judged."""
        if key not in self._reads:
            self._reads[key] = re.fullmatch(self.pattern, key) is not None
        return self._reads[key]

    def update(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        """Take one sample, any subset of the metrics; the alarms that it raises."""
        raised = []
        if self.unless in values:
            return raised
        for key in filter(self.reads, values):
            value = float(values[key])
            if not math.isfinite(value):
                if self.latches.update(key, step, math.nan):
                    raised.append(Alarm(step, rule_of(key), key, value))
                continue
            found = self.score(key, step, value) or _CALM
            if self.latches.update(key, step, found.score):
                raised.append(Alarm(step, self.rule, key, value, found.expected, found.z))
        return raised

    def relearn(self, step: int) -> None:
        """Forget what is no longer comparable: the run was changed at `step`. Limits stay."""
        self.memory, self.latches = {}, Latches(self.patience)

    def active(self) -> tuple[str, ...]:
        """Metrics that are in alarm now, whether or not it was raised long ago."""
        return self.latches.active()

    def state(self) -> dict[str, Any]:
        """All that has been learned from the stream, as JSON can hold it."""
        memory = {key: list(x) if isinstance(x, list) else x for key, x in self.memory.items()}
        return {"latches": self.latches.state(), "memory": memory}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        self.latches.restore(state["latches"])
        self.memory = {k: list(x) if isinstance(x, list) else x for k, x in state["memory"].items()}


@dataclass
class WindowDetector(Detector):
    """A detector that judges by a healthy window of the run itself.

    Attributes:
        window: What is healthy.
        conditions: What the run does meanwhile; None: nothing is known of it.
    """

    window: HealthyWindow

    conditions: Conditions | None = field(default=None, kw_only=True, repr=False, compare=False)

    def _level(self, key: str, step: int, value: float) -> tuple[float, float] | None:
        """The window's level; of what moves within a lag for the rate inside that lag.

        Where q and k did not move otherwise than v and o the value itself: nothing is wrong.
        """
        level = self.window.level(key, step, value)
        lag = _LAG.match(key)
        if level is None or lag is None or self.conditions is None:
            return level
        if "/qk_over_vo/" not in key and not self.conditions.corroborated(f"delta{lag[1]}"):
            return value, level[1]
        return self.window.conditioned(key, level, self.conditions.rate(step, int(lag[1])))

    def relearn(self, step: int) -> None:
        """Learn the healthy window anew from `step` on."""
        super().relearn(step)
        self.window.relearn(step)

    def state(self) -> dict[str, Any]:
        """All that has been learned from the stream, as JSON can hold it."""
        return super().state() | {"window": self.window.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        super().restore(state)
        self.window.restore(state["window"])
