"""`DetectorSet`: all detectors of a run as one, with what they say together.

It feeds each sample to every detector, adds layer and head to the alarms, and keeps those of the
last steps for a diagnosis. Which detectors a run has by default is in `standard.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from stabmon.alarms.detectors.base import Alarm, Detector, WindowDetector
from stabmon.alarms.detectors.conditions import Conditions
from stabmon.alarms.detectors.grades import GradeWatch, Health
from stabmon.alarms.detectors.nonfinite import Incidents
from stabmon.alarms.diagnosis import Diagnosis, diagnose
from stabmon.quantities import LOSS

_VOTES = 5


@dataclass
class DetectorSet:
    """The detectors of one run.

    Attributes:
        detectors: {name: detector}; the names are part of the state.
        span: Steps for which an alarm counts as evidence.
        recent: Alarms of the last `span` steps, and older ones that have not ended.

    >>> from stabmon.alarms.detectors.limits import Threshold
    >>> logit = "attention/global/max_logit/max"
    >>> board = DetectorSet({"limit": Threshold("limit", logit, 1e4)})
    >>> [alarm.rule for alarm in board.update(50, {logit: 2e4})], board.healthy
    (['limit'], False)
    """

    detectors: dict[str, Detector]
    span: int = 1000
    recent: list[Alarm] = field(default_factory=list)
    _incidents: Incidents = field(default_factory=Incidents)
    _conditions: Conditions = field(default_factory=Conditions)
    _step: int = 0
    _measured: set[str] = field(default_factory=set)
    _places: dict[str, list[int]] = field(default_factory=dict)
    _loss: tuple[int, float, float] = (0, 0.0, 0.0)

    def __post_init__(self):
        for detector in self.detectors.values():
            if isinstance(detector, WindowDetector):
                detector.conditions = self._conditions

    def update(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        """Take one sample, any subset of the metrics; the alarms that it raises.

        Of values that are not finite, one alarm an incident: a NaN in the loss is in all metrics
        one step later.
        """
        self._step = step
        self._measured.update(values)
        self._note(values)
        if self._conditions.note(step, values):
            self.relearn(step)
        judged = self._conditions.judged(values)
        every = [x for detector in self.detectors.values() for x in detector.update(step, judged)]
        raised = [self._located(alarm) for alarm in self._incidents.admitted(judged, every)]
        active = set(self.active())
        self.recent = [
            a for a in (*self.recent, *raised) if a.step > step - self.span or a.key in active
        ]
        return raised

    def relearn(self, step: int) -> None:
        """Learn every level anew: data, batch or context were changed at `step`."""
        for detector in self.detectors.values():
            detector.relearn(step)

    def diagnose(self) -> Diagnosis:
        """What the alarms of the last `span` steps say together."""
        count, fast, best = self._loss
        falling, risen = (count >= 20 and x for x in (fast <= 1.02 * best, fast > 1.05 * best))
        return diagnose(self._step, self.recent, self._measured, self.active(), falling, risen)

    def active(self) -> tuple[str, ...]:
        """Metrics that are in alarm now."""
        every = (key for detector in self.detectors.values() for key in detector.active())
        return tuple(dict.fromkeys(every))

    @property
    def healthy(self) -> bool:
        """Whether no metric is in alarm now."""
        return not self.active()

    @property
    def grade(self) -> int | None:
        """Stability grade of the last sample that had one, None where none is measured."""
        grades = [d.grade for d in self.detectors.values() if isinstance(d, GradeWatch)]
        return min((grade for grade in grades if grade is not None), default=None)

    @property
    def health(self) -> Health:
        """State of the grade table; healthy where no rank ratio is measured."""
        states = [d.health for d in self.detectors.values() if isinstance(d, GradeWatch)]
        return max(states, key=list(Health).index, default=Health.HEALTHY)

    def state(self) -> dict[str, Any]:
        """All that has been learned from the stream, as JSON can hold it."""
        return {
            "detectors": {name: detector.state() for name, detector in self.detectors.items()},
            "recent": [asdict(alarm) for alarm in self.recent],
            "broken": dict(self._incidents.broken),
            "conditions": self._conditions.state(),
            "step": self._step,
            "measured": sorted(self._measured),
            "places": {key: list(votes) for key, votes in self._places.items()},
            "loss": list(self._loss),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`.

        Raises:
            ValueError: It is that of other detectors.
        """
        if set(state["detectors"]) != set(self.detectors):
            raise ValueError(
                f"the state is of detectors {sorted(state['detectors'])}, this board has "
                f"{sorted(self.detectors)}: build it with the settings of the run that saved it"
            )
        for name, detector in self.detectors.items():
            detector.restore(state["detectors"][name])
        self.recent = [Alarm(**row) for row in state["recent"]]
        self._incidents = Incidents(dict(state["broken"]))
        self._conditions.restore(state["conditions"])
        self._step = int(state["step"])
        self._measured = set(state["measured"])
        self._places = {key: [int(x) for x in votes] for key, votes in state["places"].items()}
        count, fast, best = state["loss"]
        self._loss = (int(count), float(fast), float(best))

    def _note(self, values: Mapping[str, float]) -> None:
        """Remember where metrics were worst, and a mean of the last losses and its best."""
        for key, value in values.items():
            if key.endswith(("/worst_layer", "/worst_head")) and math.isfinite(value):
                self._places[key] = [*self._places.get(key, []), int(value)][-_VOTES:]
        loss = values.get(LOSS, math.nan)
        if math.isfinite(loss):
            count, fast, best = self._loss
            fast += max(0.1, 1 / (count + 1)) * (loss - fast)
            self._loss = (count + 1, fast, min(best, fast) if count > 10 else fast)

    def _located(self, alarm: Alarm) -> Alarm:
        """The alarm with its layer and head, from its key or from where its quantity was worst."""
        if not math.isfinite(alarm.value) or alarm.key.count("/") < 3:
            return alarm
        monitor, layer, *metric = alarm.key.split("/")
        if layer.startswith("layer_"):
            head = self._vote(f"{monitor}/{layer}/{'/'.join(metric[:-1])}/worst_head")
            return replace(alarm, layer=int(layer.removeprefix("layer_")), head=head)
        name = f"{monitor}/global/{'/'.join(metric[:-1])}"
        place = self._vote(f"{name}/worst_layer")
        if place is None:
            return alarm
        return replace(alarm, layer=place, head=self._vote(f"{name}/worst_head"))

    def _vote(self, key: str) -> int | None:
        """The place that the last two samples agree on, or else most of the last five."""
        votes = self._places.get(key, [])
        if len(votes) > 1 and votes[-1] == votes[-2]:
            return votes[-1]
        best = max(sorted(set(votes)), key=votes.count, default=None)
        return best if best is not None and 2 * votes.count(best) > len(votes) else None
