"""`Watcher`: detectors, diagnosis, incidents and ladder as one; samples in, what is said out.

The same for a run that goes on and for one that is over (`replay.py`). It writes nothing and does
nothing to a run: that is the caller's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stabmon.alarms.detector_set import DetectorSet
from stabmon.alarms.detectors.base import Alarm
from stabmon.alarms.diagnosis import Diagnosis
from stabmon.alarms.incidents import Change, Incident, Incidents
from stabmon.alarms.signatures import Fault
from stabmon.contracts import Contracts
from stabmon.recovery.ladder import Action
from stabmon.recovery.recovery import Recovery


@dataclass(frozen=True)
class Seen:
    """What one sample led to.

    Attributes:
        step: Its step.
        alarms: Those it raised.
        diagnosis: What the alarms say, where that is not what they said before; else None.
        incidents: What became of an incident.
        actions: What the ladder asks for or advises.
    """

    step: int
    alarms: tuple[Alarm, ...] = ()
    diagnosis: Diagnosis | None = None
    incidents: tuple[tuple[Change, Incident], ...] = ()
    actions: tuple[Action, ...] = ()

    def events(self) -> list[dict[str, Any]]:
        """The rows of `events.jsonl`: alarms, diagnosis, incidents, actions."""
        rows = [{"kind": "alarm", "step": self.step} | x.event() for x in self.alarms]
        if self.diagnosis is not None:
            rows.append({"kind": "diagnosis", "step": self.step} | self.diagnosis.event())
        for change, incident in self.incidents:
            row = {"kind": "incident", "step": self.step, "change": change.value}
            rows.append(row | incident.event())
        rows += [{"kind": "action", "step": self.step} | x.event() for x in self.actions]
        return rows


@dataclass
class Watcher:
    """What watches one run.

    Attributes:
        detectors: The detectors.
        recovery: The ladder.
        incidents: What happened, grouped.
        contracts: What must hold exactly.
        named: The diagnosis that was said last.

    >>> from stabmon.alarms.standard import standard_detectors
    >>> watcher = Watcher(standard_detectors(), Recovery())
    >>> sample = {"symptoms/global/loss/value": float("nan")}
    >>> [row["kind"] for row in watcher.observe(10, sample).events()]
    ['alarm', 'diagnosis', 'incident', 'action']
    """

    detectors: DetectorSet
    recovery: Recovery
    incidents: Incidents = field(default_factory=Incidents)
    contracts: Contracts = field(default_factory=Contracts)
    named: Fault = Fault.UNKNOWN

    def observe(self, step: int, values: Mapping[str, float]) -> Seen:
        """Take a sample, any subset of the metrics."""
        alarms = self.detectors.update(step, values)
        healthy = self.detectors.healthy
        diagnosis = self.detectors.diagnose() if self.detectors.recent else None
        new = diagnosis is not None and diagnosis.fault is not self.named
        if diagnosis is not None:
            self.named = diagnosis.fault
        changes = self.incidents.update(step, alarms, not healthy, diagnosis)
        actions = self.recovery.update(
            step,
            alarms,
            self.detectors.grade,
            healthy=healthy,
            health=self.detectors.health,
            diagnosis=diagnosis,
        )
        said = diagnosis if new else None
        return Seen(step, tuple(alarms), said, tuple(changes), tuple(actions))

    def begin_again(self, incidents: int) -> None:
        """Forget what is under way, the run has gone back; `incidents` were counted so far."""
        self.named = Fault.UNKNOWN
        self.incidents.current, self.incidents.count = None, incidents
        self.contracts.begin_again()

    def state(self) -> dict[str, Any]:
        """All that has been learned, as JSON can hold it."""
        return {
            "detectors": self.detectors.state(),
            "recovery": self.recovery.state(),
            "incidents": self.incidents.state(),
            "contracts": self.contracts.state(),
            "named": self.named.value,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        self.detectors.restore(state["detectors"])
        self.recovery.restore(state["recovery"])
        self.incidents.restore(state["incidents"])
        self.contracts.restore(state["contracts"])
        self.named = Fault(state["named"])
