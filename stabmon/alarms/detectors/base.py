"""Alarms, what every detector has in common, and the detector that judges by learned bands.

NumPy and the standard library only; each detector can be stopped and resumed. What is healthy is
`reference.py`'s; detectors that need no clean runs are in `deviations.py`, `surges.py`,
`limits.py` and `grades.py`; what the alarms mean together, `attribution.py`'s.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, runtime_checkable

from stabmon.alarms.reference import Reference, z_score


@dataclass(frozen=True)
class Alarm:
    """One detector has had enough.

    Attributes:
        step: Step of the sample that completed the evidence.
        rule: Which rule fired.
        key: Which metric.
        value: Its value at that step.
        reference: What was expected.
        z: Distance from it, in spreads; NaN for a non-finite value.
        layer: Layer that is worst, None where that is not known.
        head: Head that is worst, None where that is not known.
    """

    step: int
    rule: str
    key: str
    value: float
    reference: float
    z: float
    layer: int | None = None
    head: int | None = None

    @property
    def direction(self) -> str:
        """Where the value went: "up", "down", or "non-finite"."""
        if not math.isfinite(self.value):
            return "non-finite"
        return "down" if self.value < self.reference else "up"

    def event(self) -> dict[str, Any]:
        """The row of `events.jsonl`, less kind and step, and less a place that is not known."""
        row = asdict(self)
        row.pop("step")
        return {k: v for k, v in row.items() if k not in ("layer", "head") or v is not None}


@runtime_checkable
class Detector(Protocol):
    """What every detector is: a stream of samples in, alarms out, with a state that JSON holds."""

    def update(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        """Take one sample, any subset of the metrics; the alarms that it raises."""
        ...

    def active(self) -> tuple[str, ...]:
        """Metrics that are in alarm now, whether or not it was raised long ago."""
        ...

    def state(self) -> dict[str, Any]:
        """All that has been learned from the stream, as JSON can hold it."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        ...


@dataclass
class BandDetector:
    """Alarms where metrics leave their bands for several samples running.

    A non-finite value alarms at once. Values of metrics without a band are ignored. Metrics judged
    by the run's own level say nothing until the healthy window is over.

    Attributes:
        reference: The bands.
        threshold: Spreads that are too many.
        dwell: Samples running, on one side, that make an alarm.
        alarms: First alarm of each metric so far.
    """

    reference: Reference
    threshold: float = 5.0
    dwell: int = 2
    alarms: dict[str, Alarm] = field(default_factory=dict)
    _run: dict[str, int] = field(default_factory=dict)
    _offsets: dict[str, tuple[int, float]] = field(default_factory=dict)

    def update(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        """Take one sample; the alarms that it raises, each metric's first only."""
        raised = []
        for key, band in self.reference.bands.items():
            if key in values:
                expected, _ = band(step)
                z = self.score(key, step, values[key])
                alarm = Alarm(step, "band", key, values[key], expected, z)
                if self._dwells(key, values[key], z) and key not in self.alarms:
                    self.alarms[key] = alarm
                    raised.append(alarm)
        return raised

    def score(self, key: str, step: int, value: float) -> float:
        """Distance of `value` from its band in spreads; 0 while the run's own level is learned."""
        band = self.reference.bands[key]
        expected, sd = band(step)
        first, last = self.reference.window
        if band.judged == "after" and step <= last and math.isfinite(value):
            return 0.0
        if band.judged == "own":
            count, offset = self._offsets.get(key, (0, 0.0))
            if first <= step <= last and math.isfinite(value):
                offset = (count * offset + value - expected) / (count + 1)
                self._offsets[key] = (count + 1, offset)
            if step <= last or count == 0:
                return 0.0
            expected += offset
        return z_score(value, expected, sd)

    def active(self) -> tuple[str, ...]:
        """Metrics that are out of their band now, for as long as the dwell asks."""
        return tuple(key for key, run in self._run.items() if abs(run) >= self.dwell)

    def _dwells(self, key: str, value: float, z: float) -> bool:
        if not math.isfinite(value):
            return True
        side = (z > self.threshold) - (z < -self.threshold)
        run = self._run.get(key, 0)
        self._run[key] = run + side if side and run * side >= 0 else side
        return abs(self._run[key]) >= self.dwell

    def state(self) -> dict[str, Any]:
        """All that has been learned from the stream, as JSON can hold it."""
        return {
            "run": dict(self._run),
            "offsets": {key: list(pair) for key, pair in self._offsets.items()},
            "alarms": [asdict(alarm) for alarm in self.alarms.values()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        self._run = dict(state["run"])
        self._offsets = {key: (int(n), float(x)) for key, (n, x) in state["offsets"].items()}
        self.alarms = {row["key"]: Alarm(**row) for row in state["alarms"]}
