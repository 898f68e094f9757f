"""What is known of a measured quantity: its key, title, unit, bad side, and what is made of it.

The quantities themselves are in `table.py`. A key is `{monitor}/{scope}/{metric}/{aggregate}`, such
as `delta50/layer_03/delta2/modes/p10`; the scope is `global` or a layer.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

Side = Literal["up", "down"]
Places = Literal["none", "layer", "head"]
Rule = Literal[
    "z",
    "drift",
    "surge",
    "spike",
    "shift",
    "limit",
    "count",
    "low",
    "level",
    "impossible",
    "all heads",
    "grade",
]

_KEY = re.compile(r"([^/]+)/(global|layer_\d+)/(.+)/([^/]+)")


class Key(NamedTuple):
    """A metric key by its parts: `delta50/layer_03/delta2/modes/p10`.

    Attributes:
        monitor: `delta50`.
        scope: `layer_03`, or `global`.
        metric: `delta2/modes`.
        aggregate: `p10`.
    """

    monitor: str
    scope: str
    metric: str
    aggregate: str

    @property
    def quantity(self) -> str:
        """What is measured, wherever and however aggregated: `delta50/delta2/modes`."""
        return f"{self.monitor}/{self.metric}"


@lru_cache(maxsize=4096)
def split_key(key: str) -> Key | None:
    """Returns the parts of a metric key, None if it does not have the form.

    Args:
        key: Such as `delta50/global/delta2/modes/mean`.

    Example:
        >>> split_key("delta50/layer_03/delta2/modes/p10").quantity
        'delta50/delta2/modes'
        >>> split_key("loss") is None
        True
    """
    match = _KEY.fullmatch(key)
    return Key(*match.groups()) if match else None


class Judged(NamedTuple):
    """One default judgement of a quantity by the run's own past.

    Attributes:
        rule: Which detector; `alarms/standard.py` builds it.
        at: Aggregates that are judged, each by itself.
        side: Which departures are harmful.
        threshold: Spreads that are too many; for "limit" the largest value allowed, for "count" the
            largest growth from one sample to the next, for "low" the smallest share of the healthy
            level.
        floor: Smallest spread, relative to the level.
        ratchet: Whether the level follows the run in its healthy direction.
        dwell: Samples running that make an alarm.
        from_start: Whether a limit holds during the warm-up too.
        before: Samples that make the course, for "shift".
        recent: Samples that are held against the course, for "shift".
        evidence: Sign that the alarm is in a diagnosis, where not the quantity's own.
        unless: Key that is judged instead in samples that have it.
    """

    rule: Rule
    at: tuple[str, ...]
    side: Side
    threshold: float = 6.0
    floor: float = 0.02
    ratchet: bool = False
    dwell: int = 2
    from_start: bool = False
    before: int = 30
    recent: int = 8
    evidence: str = ""
    unless: str = ""


@dataclass(frozen=True)
class Quantity:
    """One measured quantity.

    Attributes:
        monitor: First part of its keys; "delta" stands for `delta50`, `delta100` and so on.
        metric: The part between scope and aggregate.
        title: What a person calls it.
        places: Whether it has one value, one for each layer, or one for each head.
        bad: Its bad side. The worst place and the extreme are taken there.
        unit: Unit, empty for a plain number.
        brief: Aggregates that `detail="brief"` keeps.
        judged: Default judgements.
        evidence: Sign in a diagnosis, such as "Δ2"; empty: no signature speaks of it.
        panel: Title of the chart that shows it; of several quantities with one panel the first
            that a run has is drawn.
        log: Whether the chart's axis is logarithmic.
        own_level: Whether it sits at another level for every seed, so that a comparison with other
            runs takes off the run's own level first.
    """

    monitor: str
    metric: str
    title: str
    places: Places
    bad: Side
    unit: str = ""
    brief: tuple[str, ...] = ()
    judged: tuple[Judged, ...] = ()
    evidence: str = ""
    panel: str = ""
    log: bool = False
    own_level: bool = False

    @property
    def name(self) -> str:
        """`monitor/metric`, such as "delta/delta2/modes"."""
        return f"{self.monitor}/{self.metric}"

    @property
    def extreme(self) -> str:
        """Name of the aggregate on the bad side: "min" or "max"."""
        return "max" if self.bad == "up" else "min"

    @property
    def low(self) -> str:
        """Aggregate by which runs are compared: low heads of spectra of changes, else the mean."""
        if self.places == "none":
            return "value"
        return "p10" if self.monitor == "delta" and self.bad == "down" else "mean"

    def pattern(self, aggregates: tuple[str, ...]) -> str:
        """Regular expression of its keys over everything, of any lag."""
        lag = r"\d+" if self.monitor == "delta" else ""
        return f"{self.monitor}{lag}/global/{self.metric}/({'|'.join(aggregates)})"
