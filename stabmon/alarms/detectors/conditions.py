"""What a run legitimately does, as its samples tell: its rate, its context, declared changes.

Detectors read here whether a departure may be the schedule's, and when a level has to be learned
anew. What a departure is, is the detectors' own.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stabmon.quantities import CHANGED, CONTEXT, LEARNING_RATE, PER_RATE, UPDATE_NORM, UPDATE_RATIO

_CHANGES = (CHANGED, CONTEXT)
# The longest lag of a default ring, twice over.
_SPAN = 800
_CONTRAST = "/global/qk_over_vo/modes/value"
_PAST, _LEAST = 40, 8


@dataclass
class Conditions:
    """The rate so far, and what a change would be seen by.

    The rate is the schedule's where the samples hold it, else the size of the updates. With the
    schedule known the size of the updates is judged over it (`update_per_rate`).

    Attributes:
        rates: (step, ln rate) of the last 800 steps.
        seen: Last value of what tells of a change.
        contrast: {monitor: the last 40 values of q and k over v and o}.

    >>> conditions = Conditions()
    >>> key = "activations/global/context/value"
    >>> [conditions.note(step, {key: size}) for step, size in ((0, 32.0), (50, 32.0), (75, 64.0))]
    [False, False, True]
    """

    rates: list[tuple[int, float]] = field(default_factory=list)
    seen: dict[str, float] = field(default_factory=dict)
    contrast: dict[str, list[float]] = field(default_factory=dict)

    def note(self, step: int, values: Mapping[str, float]) -> bool:
        """Take a sample; whether something was changed since the last one."""
        rate = float(values.get(LEARNING_RATE, values.get(UPDATE_NORM, math.nan)))
        if math.isfinite(rate) and rate > 0:
            kept = [x for x in self.rates if x[0] > step - _SPAN]
            self.rates = [*kept, (int(step), math.log(rate))]
        for key in (key for key in values if key.endswith(_CONTRAST)):
            monitor, past = key.split("/")[0], self.contrast.get(key.split("/")[0], [])
            if math.isfinite(values[key]):
                self.contrast[monitor] = [*past, float(values[key])][-_PAST:]
        now = {key: float(values[key]) for key in _CHANGES if key in values}
        # A declared change is recorded from its step on: its first value is one.
        changed = any(x != self.seen.get(key, x) for key, x in now.items())
        changed |= self._raised(step, values)
        changed |= CHANGED in now and CHANGED not in self.seen and bool(self.seen or self.rates[1:])
        self.seen |= now
        if changed:
            self.contrast.clear()
        return changed

    def _raised(self, step: int, values: Mapping[str, float]) -> bool:
        """Whether the schedule raised the rate by half within 50 steps: a warm-up or a restart."""
        now = float(values.get(LEARNING_RATE, 0.0))
        before = [x for at, x in self.rates if step - 50 <= at]
        return bool(before) and now > 1.5 * math.exp(min(before))

    def corroborated(self, monitor: str) -> bool:
        """Whether q and k have fallen against v and o of the same lag, or that is not known.

        By a fifth of the median of the last 40 samples: what schedules, optimizers and data do,
        they do to all four.
        """
        past = self.contrast.get(monitor, [])
        return len(past) < _LEAST or past[-1] < 0.8 * sorted(past)[len(past) // 2]

    def rate(self, step: int, lag: int) -> float | None:
        """Mean ln rate within the last `lag` steps, None where it is not known."""
        inside = [x for at, x in self.rates if step - lag <= at <= step]
        return sum(inside) / len(inside) if inside else None

    def judged(self, values: Mapping[str, float]) -> dict[str, float]:
        """The sample with the size of updates over the rate, where that is known."""
        rate = values.get(LEARNING_RATE, 0.0)
        if UPDATE_RATIO not in values or not (rate > 0 and math.isfinite(rate)):
            return dict(values)
        return {**values, PER_RATE: values[UPDATE_RATIO] / rate}

    def state(self) -> dict[str, Any]:
        """What was noted, as JSON can hold it."""
        return {
            "rates": [list(x) for x in self.rates],
            "seen": dict(self.seen),
            "contrast": {k: list(x) for k, x in self.contrast.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        self.rates = [(int(at), float(x)) for at, x in state["rates"]]
        self.seen = dict(state["seen"])
        self.contrast = {k: list(x) for k, x in state["contrast"].items()}
