"""The healthy window of a run as a stream: each metric's median and spread, then frozen.

It is what the run is compared with where no clean sister run exists. It begins after the
learning-rate warm-up, and nothing is judged before it has ended. What is made of a deviation is
decided by the detectors.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

RECENT = 8
MOST = 200


def median_and_spread(
    values: Sequence[float] | np.ndarray, floor: float = 0.02
) -> tuple[float, float]:
    """Median of finite values in their order, and their robust spread about a straight line.

    Spread: 1.4826 · MAD · (1 + 5/n) of what is left beside the line with the median slope of all
    pairs (Theil–Sen), so that a course does not pass for noise; the last factor makes up for how
    far the MAD of a few values can fall short. At least `floor · |median|`, and positive.

    >>> median_and_spread([1.0, 2.0, 3.0, 4.0, 100.0], floor=0.1)
    (3.0, 0.3)
    """
    x = np.asarray(values, float)
    median = float(np.median(x))
    i, j = np.triu_indices(len(x), 1)
    rest = x - float(np.median((x[j] - x[i]) / (j - i))) * np.arange(len(x)) if len(x) > 1 else x
    deviation = float(np.median(np.abs(rest - np.median(rest))))
    spread = 1.4826 * deviation * (1 + 5 / len(x))
    return median, max(spread, floor * abs(median), 1e-6)


@dataclass
class HealthyWindow:
    """Learns each metric's level between two steps, and keeps to it.

    A metric that is sampled seldom is given longer: its window lasts until it has `least` samples.
    Of one that is sampled often the first 200 count.
    With a ratchet the level follows the run in the healthy direction, never in the harmful one, so
    that a metric which improves while the run learns is judged by the best it has been, and a slow
    collapse is not absorbed.

    A level learned in n steps says little about a step far away: what is healthy drifts as the run
    learns. With `widen` the spread grows with the age of the level, by √(1 + age/(widen · n)): a
    departure within the first few n steps is nearly as clear as at once, of a late one more is
    asked. With a ratchet the age counts from when the run was last as good as its level.

    Attributes:
        first: First healthy step, after the warm-up.
        last: Last healthy step.
        least: Finite samples that each metric needs.
        floor: Smallest spread, as a fraction of the level.
        ratchet: +1: the level may rise, to a spread below the median of the last 8 samples;
            −1: it may fall likewise; 0: it stays.
        widen: Lengths of the window after which the spread has grown by √2; infinite: never.

    Raises:
        ValueError: The window ends before it begins, `least` < 3, or `widen` is not positive.
    """

    first: int
    last: int
    least: int = 12
    floor: float | int = 0.02
    ratchet: int = 0
    widen: float | int = math.inf
    _rates: dict[str, float] = field(default_factory=dict)
    _samples: dict[str, list[float]] = field(default_factory=dict)
    _frozen: dict[str, tuple[float, float]] = field(default_factory=dict)
    _recent: dict[str, list[float]] = field(default_factory=dict)
    _since: dict[str, int] = field(default_factory=dict)

    def __post_init__(self):
        if self.last < self.first:
            raise ValueError(
                f"healthy window: expected first <= last, got {self.first} and {self.last}; "
                "begin it after the warm-up"
            )
        if self.least < 3:
            raise ValueError(f"healthy window: expected least >= 3 samples, got {self.least}")
        if not self.widen > 0:
            raise ValueError(f"healthy window: expected widen > 0, got {self.widen}")

    def relearn(self, step: int) -> None:
        """Learn every level anew, in a window as long as before that begins at `step`."""
        length = self.last - self.first
        self.first, self.last = max(step, self.first), max(step, self.first) + length
        for learned in (self._samples, self._frozen, self._recent, self._since, self._rates):
            learned.clear()

    def conditioned(
        self, key: str, level: tuple[float, float], rate: float | None
    ) -> tuple[float, float]:
        """The level for another ln rate than it was learned at: its spread times 1 + |Δ ln rate|.

        Spectra of what moves within a lag depend on the rate inside that lag. How is a matter of
        the optimizer; that it does so over a factor of e as much as the run scatters is what
        cosines to zero showed (development runs of `experiments.benign`).
        """
        if rate is None:
            return level
        learned = self._rates.setdefault(key, rate)
        return level[0], level[1] * (1 + abs(rate - learned))

    def level(self, key: str, step: int, value: float | int) -> tuple[float, float] | None:
        """Take a sample; level and spread to judge it by, None while they are being learned.

        A value that is not finite never enters.
        """
        if not math.isfinite(value):
            return self._aged(key, step) if key in self._frozen else None
        if key in self._frozen:
            before = self._aged(key, step)
            self._follow(key, step, value)
            return before
        samples = self._samples.setdefault(key, [])
        if step < self.first:
            return None
        if step > self.last and len(samples) >= self.least:
            self._frozen[key] = median_and_spread(samples, self.floor)
            self._since[key] = int(step)
            self._samples.pop(key)
            return self.level(key, step, value)
        if len(samples) < MOST:
            samples.append(value)
        return None

    def _aged(self, key: str, step: int) -> tuple[float, float]:
        """The level, and its spread as wide as it has become."""
        median, spread = self._frozen[key]
        age = max(step - self._since[key], 0)
        length = max(self.last - self.first, 1)
        return median, spread * math.sqrt(1 + age / (self.widen * length))

    def _follow(self, key: str, step: int, value: float) -> None:
        if not self.ratchet:
            return
        recent = [*self._recent.get(key, []), value][-RECENT:]
        self._recent[key] = recent
        median, spread = self._frozen[key]
        # A spread short of it: the best of many medians is a spread too good by chance.
        middle = float(np.median(recent))
        near = middle - self.ratchet * spread
        if len(recent) == RECENT and (middle - median) * self.ratchet >= 0:
            self._since[key] = int(step)
        if len(recent) == RECENT and (near - median) * self.ratchet > 0:
            self._frozen[key] = (near, max(spread, self.floor * abs(near)))

    def state(self) -> dict[str, Any]:
        """All that has been learned, as JSON can hold it."""
        return {
            "samples": {key: list(x) for key, x in self._samples.items()},
            "frozen": {key: list(x) for key, x in self._frozen.items()},
            "recent": {key: list(x) for key, x in self._recent.items()},
            "since": dict(self._since),
            "rates": dict(self._rates),
            "span": [self.first, self.last],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        self._samples = {key: list(x) for key, x in state["samples"].items()}
        self._frozen = {key: (x[0], x[1]) for key, x in state["frozen"].items()}
        self._recent = {key: list(x) for key, x in state["recent"].items()}
        self._since = dict(state["since"])
        self._rates = dict(state["rates"])
        self.first, self.last = state["span"]
