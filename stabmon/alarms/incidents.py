"""Incidents: everything that one thing that happens raises, told as one.

An incident is opened by the first alarm, gathers the alarms that follow, and ends once the run has
been quiet for a while. A diagnosis may sharpen while it is open; it does not disappear when its
evidence grows old. What raises alarms is in `detectors/`, what they say together in `diagnosis.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from stabmon.alarms.detectors.base import Alarm
from stabmon.alarms.diagnosis import Diagnosis
from stabmon.alarms.signatures import Fault
from stabmon.quantities import split_key, title_of

QUIET = 200


class Change(StrEnum):
    """What has become of an incident at a sample."""

    OPENED = "opened"
    NAMED = "named"
    CLOSED = "closed"


@dataclass
class Incident:
    """One thing that happens to a run.

    Attributes:
        number: Counted from 1 in each run.
        opened: Step of its first alarm.
        last: Step of the newest sample at which a metric was in alarm.
        fault: What it is diagnosed as; "unknown" until something fits.
        confidence: Of that diagnosis, in [0, 1].
        layer: Worst layer, None where that is not known.
        head: Worst head, None where that is not known.
        quantities: Quantities that have alarmed, in their order.
        worst: The alarm that is furthest from what was expected.
        alarms: Alarms so far.
        closed: Step at which it ended; None while it is open.
    """

    number: int
    opened: int
    last: int
    fault: Fault = Fault.UNKNOWN
    confidence: float = 0.0
    layer: int | None = None
    head: int | None = None
    quantities: list[str] = field(default_factory=list)
    worst: Alarm | None = None
    alarms: int = 0
    closed: int | None = None

    def sentence(self) -> str:
        """The incident in a sentence, for people.

        >>> Incident(1, 600, 620, Fault.ATTENTION, 0.65, layer=3, alarms=1).sentence()
        'attention numerics (confidence 0.65), layer 3, since step 600: 1 alarm'
        """
        sure = f" (confidence {self.confidence:.2f})" if self.fault is not Fault.UNKNOWN else ""
        names = (("layer", self.layer), ("head", self.head))
        where = "".join(f", {name} {place}" for name, place in names if place is not None)
        what = self.fault.value if sure else "something unknown"
        ended = "" if self.closed is None else f", ended at step {self.closed:,}"
        many = f"{self.alarms} alarm{'s' if self.alarms != 1 else ''}"
        first = f" on {title_of(self.quantities[0])}" if self.quantities else ""
        return f"{what}{sure}{where}, since step {self.opened:,}: {many}{first}{ended}"

    def event(self) -> dict[str, Any]:
        """The row of `events.jsonl`, less kind and step, and less what is not known."""
        row = asdict(self) | {"fault": self.fault.value, "quantities": list(self.quantities)}
        row["worst"] = None if self.worst is None else self.worst.key
        return {key: value for key, value in row.items() if value is not None}


@dataclass
class Incidents:
    """The incidents of one run.

    Attributes:
        quiet: Steps without a metric in alarm after which an incident is over.
        current: The open one, None without one.
        count: Incidents so far.

    >>> incidents, alarm = Incidents(), Alarm(600, "z", "m/global/x/mean", 3.0, 8.0, -9.0)
    >>> [(change.value, found.number) for change, found in incidents.update(600, [alarm], True)]
    [('opened', 1)]
    >>> [(change.value, found.number) for change, found in incidents.update(900, [], False)]
    [('closed', 1)]
    """

    quiet: int = QUIET
    current: Incident | None = None
    count: int = 0

    def update(
        self, step: int, alarms: Sequence[Alarm], active: bool, diagnosis: Diagnosis | None = None
    ) -> list[tuple[Change, Incident]]:
        """Take a sample; what became of the open incident, or of a new one.

        Args:
            step: Its step.
            alarms: Those it raised.
            active: Whether a metric is in alarm now.
            diagnosis: What the alarms say together.
        """
        changes = []
        if alarms and self.current is None:
            self.count += 1
            self.current = Incident(self.count, step, step)
            changes.append(Change.OPENED)
        if (found := self.current) is None:
            return []
        for alarm in alarms:
            _gather(found, alarm)
        if active or alarms:
            found.last = step
        if alarms and diagnosis is not None and _sharper(diagnosis, found):
            changes += [] if changes else [Change.NAMED]
            found.fault, found.confidence = diagnosis.fault, diagnosis.confidence
            found.layer, found.head = diagnosis.layer, diagnosis.head
        if step - found.last >= self.quiet:
            found.closed = step
            self.current = None
            changes.append(Change.CLOSED)
        return [(change, found) for change in changes]

    def state(self) -> dict[str, Any]:
        """What is open, as JSON can hold it."""
        found = self.current
        row = None if found is None else asdict(found) | {"fault": found.fault.value}
        return {"count": self.count, "current": row}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        self.count, row = int(state["count"]), state["current"]
        if row is None:
            self.current = None
            return
        worst = None if row["worst"] is None else Alarm(**row["worst"])
        self.current = Incident(**{**row, "fault": Fault(row["fault"]), "worst": worst})


def _gather(incident: Incident, alarm: Alarm) -> None:
    """Add an alarm to an incident."""
    incident.alarms += 1
    parts = split_key(alarm.key)
    quantity = parts.quantity if parts else alarm.key
    if quantity not in incident.quantities:
        incident.quantities.append(quantity)
    if incident.worst is None or alarm.strength > incident.worst.strength:
        incident.worst = alarm


def _sharper(diagnosis: Diagnosis, incident: Incident) -> bool:
    """Whether a diagnosis says more than the incident's own: another fault, and more surely."""
    if diagnosis.fault in (Fault.UNKNOWN, incident.fault):
        return False
    return incident.fault is Fault.UNKNOWN or diagnosis.confidence > incident.confidence
