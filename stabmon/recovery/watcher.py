"""`Watcher`: detectors, diagnosis and ladder as one; samples in, what is to be said out, in order.

The same for a run that goes on and for one that is over (`replay.py`). It writes nothing and does
nothing to a run: that is the caller's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stabmon.alarms.detector_set import DetectorSet
from stabmon.alarms.detectors.base import Alarm
from stabmon.alarms.diagnosis import Diagnosis
from stabmon.alarms.signatures import Fault
from stabmon.recovery.ladder import Action
from stabmon.recovery.recovery import Recovery


@dataclass(frozen=True)
class Seen:
    """What one sample led to.

    Attributes:
        step: Its step.
        alarms: Those it raised.
        diagnosis: What the alarms say, where that is not what they said before; else None.
        actions: What the ladder asks for or advises.
    """

    step: int
    alarms: tuple[Alarm, ...] = ()
    diagnosis: Diagnosis | None = None
    actions: tuple[Action, ...] = ()

    def events(self) -> list[dict[str, Any]]:
        """The rows of `events.jsonl`: alarms, diagnosis, actions."""
        rows = [{"kind": "alarm", "step": self.step} | x.event() for x in self.alarms]
        if self.diagnosis is not None:
            rows.append({"kind": "diagnosis", "step": self.step} | self.diagnosis.event())
        rows += [{"kind": "action", "step": self.step} | x.event() for x in self.actions]
        return rows


@dataclass
class Watcher:
    """What watches one run.

    Attributes:
        board: The detectors.
        recovery: The ladder.
        named: The diagnosis that was said last.

    >>> from stabmon.alarms.detector_set import LOSS
    >>> from stabmon.alarms.standard import standard_detectors
    >>> watcher = Watcher(standard_detectors(), Recovery())
    >>> [row["kind"] for row in watcher.observe(10, {LOSS: float("nan")}).events()]
    ['alarm', 'diagnosis', 'action']
    """

    board: DetectorSet
    recovery: Recovery
    named: Fault = Fault.UNKNOWN

    def observe(self, step: int, values: Mapping[str, float]) -> Seen:
        """Take a sample, any subset of the metrics."""
        alarms = self.board.update(step, values)
        diagnosis = self.board.diagnose() if self.board.recent else None
        new = diagnosis is not None and diagnosis.fault is not self.named
        if diagnosis is not None:
            self.named = diagnosis.fault
        actions = self.recovery.update(
            step,
            alarms,
            self.board.grade,
            healthy=self.board.healthy,
            health=self.board.health,
            diagnosis=diagnosis,
        )
        return Seen(step, tuple(alarms), diagnosis if new else None, tuple(actions))
