"""`Journal`: samples that wait for the device, and what is written once they have arrived.

It hands each sample to the run's log, to the sinks and to the watcher, and tells what happened.
What a training loop calls is `watch.py`'s.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from stabmon.alarms.incidents import Change, Incident
from stabmon.hosts import agree
from stabmon.monitor import Readings
from stabmon.output.sinks.fanout import Fanout
from stabmon.output.sinks.writers import Writer
from stabmon.quantities import CHANGED, GRAD_NORM, HELD_OUT, LEARNING_RATE, LOSS
from stabmon.recovery.watcher import Seen, Watcher
from stabmon.runs.jsonl import read_jsonl
from stabmon.runs.runlog import RunLog
from stabmon.watch.schedule import Schedule, rate_at

OnIncident = Callable[[Change, Incident], None]
OnEvents = Callable[[Seen], None]
SCALARS = {
    "loss": LOSS,
    "held_out": HELD_OUT,
    "grad_norm": GRAD_NORM,
    "learning_rate": LEARNING_RATE,
}
# Samples that may wait for the device; beyond it the host is far ahead and waits for the oldest.
_AHEAD = 64
# Lines that wait for a disk that is full.
_UNWRITTEN = 100_000
_LOGGER = logging.getLogger("stabmon")


class Sample(NamedTuple):
    """What was measured at a step and may still be on its way from the device."""

    step: int
    readings: Readings | None
    scalars: Mapping[str, Any]

    def arrived(self) -> bool:
        """Whether all of it can be read without waiting."""
        leaves: list[Any] = jax.tree.leaves((self.readings, dict(self.scalars)))
        waits = (getattr(leaf, "is_ready", None) for leaf in leaves)
        return all(ready() for ready in waits if ready is not None)


class Journal:
    """Writes the samples of a run in their order.

    Attributes:
        watcher: Detectors, incidents and ladder.
        loss: The newest loss that was written, NaN before.
        changed: Step of the last change that was declared; None without one.
    """

    def __init__(
        self,
        log: RunLog | None,
        sinks: Sequence[Writer],
        watcher: Watcher,
        schedule: Schedule,
        on_incident: Sequence[OnIncident],
        on_events: Sequence[OnEvents],
    ) -> None:
        """Nothing is written before the first sample; `log` is None but on the first process."""
        self.watcher, self.loss = watcher, math.nan
        self._log, self._sinks, self._schedule = log, Fanout(sinks), schedule
        self._on_incident, self._on_events = on_incident, on_events
        self._waiting: deque[Sample] = deque()
        self._unwritten: deque[Callable[[RunLog], None]] = deque(maxlen=_UNWRITTEN)
        self._broken = False
        self._said: set[str] = set()
        self.changed: int | None = None

    def add(
        self, step: int, readings: Readings | None, scalars: Mapping[str, Any], due: bool
    ) -> None:
        """Takes a sample; it is written by a later call.

        Args:
            step: Its step.
            readings: What the monitor measured.
            scalars: The trainer's own, by name; arrays of the device only where something is `due`.
            due: Whether a tier is sampled at this step.
        """
        known = {name: x for name, x in scalars.items() if x is not None}
        always = lambda name, x: name == "held_out" or not isinstance(x, jax.Array)
        kept = {name: x for name, x in known.items() if due or always(name, x)}
        if (readings is not None and readings.valid) or kept.keys() - {"tokens"}:
            self._waiting.append(Sample(step, readings, kept))

    def write(self, before: int | None = None) -> list[Seen]:
        """Writes the samples that have arrived; what they led to.

        Args:
            before: Waits for the samples of earlier steps, and writes no others: what is done then
                depends on steps alone.
        """
        seen = []
        while self._waiting:
            first = self._waiting[0]
            full = len(self._waiting) > _AHEAD
            ready = first.step < before if before is not None else first.arrived()
            if not ready and not full:
                break
            seen.append(self._write(self._waiting.popleft()))
        return seen

    def flush(self) -> list[Seen]:
        """Writes every sample; waits for the device."""
        return [self._write(self._waiting.popleft()) for _ in range(len(self._waiting))]

    def drop(self) -> None:
        """Forgets what waits: the run goes back to an earlier step."""
        self._waiting.clear()

    def event(self, kind: str, step: int, **fields: Any) -> None:
        """Writes what happened."""
        self._safely(lambda log: log.event(kind, step, **fields))

    def rewind(self, step: int, number: int) -> None:
        """Writes that training goes on from `step`, for the `number`th time."""
        if self._log is None:
            return
        events = read_jsonl(self._log.folder / "events.jsonl")
        if sum(row.get("kind") == "rewind" for row in events) < number:
            self._safely(lambda log: log.rewind(step))
            self._sinks.rewind(step)

    def fault(self, **fields: Any) -> None:
        """Writes the truth about an injected fault."""
        self._safely(lambda log: log.fault(**fields))

    def close(self) -> None:
        """Closes log and sinks."""
        self._sinks.close()
        if self._log is not None:
            self._safely(lambda log: None)
            self._log.close()

    def _write(self, sample: Sample) -> Seen:
        step, readings, scalars = sample
        values = {} if readings is None else readings.flatten()
        numbers = {name: float(x) for name, x in jax.device_get(dict(scalars)).items()}
        tokens = numbers.pop("tokens", None)
        if not values and not numbers:  # no tier was due
            return Seen(step)
        values |= {SCALARS.get(k, f"scalars/global/{k}/value"): x for k, x in numbers.items()}
        if self.changed is not None and step >= self.changed:
            values[CHANGED] = float(self.changed)
        rate = rate_at(self._schedule, step)
        if rate is not None:
            values.setdefault(LEARNING_RATE, rate)
        values |= self._ask(step, readings, values)
        self.loss = values.get(LOSS, self.loss)
        count = None if tokens is None else int(tokens)
        self._safely(lambda log: log.sample(step, values, tokens=count))
        self._sinks.write(step, values)
        seen = self.watcher.observe(step, values)
        for row in seen.events():
            self.event(**row)
        self._name_leaf(step, readings)
        self._say(step, {} if readings is None else readings.notes(values))
        agree(f"what step {step} led to", [values, seen.events()])
        if self._log is not None:
            for found in seen.incidents:
                self._call(self._on_incident, *found)
        if seen.alarms or seen.incidents or seen.actions:
            self._call(self._on_events, seen)
        return seen

    def _ask(
        self, step: int, readings: Readings | None, values: Mapping[str, float]
    ) -> dict[str, float]:
        """What contracts say of a sample: how many leaves break each; verdicts are written."""
        if HELD_OUT in values:
            self.watcher.contracts.held_out(step, values[HELD_OUT])
        if readings is None or not bool(readings.valid.get("contracts", False)):
            return {}
        rates = rate_at(self._schedule, step), rate_at(self._schedule, max(step - 1, 0))
        row = readings.values["contracts"]
        counts, verdicts = self.watcher.contracts.observe(step, row, readings.form, *rates)
        for verdict in verdicts:
            self.event("contract", **verdict.event())
        return counts

    def _name_leaf(self, step: int, readings: Readings | None) -> None:
        """Write the first leaf that is not finite, once until all are finite again."""
        if readings is None or not readings.valid.get("symptoms", False):
            return
        path = readings.offender()
        if path is not None and not self._broken:
            self.event("nonfinite", step, path=path)
        self._broken = path is not None

    def _say(self, step: int, notes: Mapping[str, str]) -> None:
        """Tell what is wrong with how the monitors are called, each kind once."""
        for kind in notes.keys() - self._said:
            self._said.add(kind)
            _LOGGER.warning("step %d: %s", step, notes[kind])
            self.event("note", step, text=notes[kind])

    def _safely(self, write: Callable[[RunLog], None]) -> None:
        """Write to the log; what the disk refuses waits, in order, until it can be written."""
        if self._log is None:
            return
        self._unwritten.append(write)
        try:
            while self._unwritten:
                self._unwritten[0](self._log)
                self._unwritten.popleft()
        except OSError as error:
            if len(self._unwritten) == 1:
                _LOGGER.error(
                    "%s cannot be written (%s); training goes on, and what is to be written waits",
                    self._log.folder,
                    error,
                )

    @property
    def lost(self) -> int:
        """Lines that the disk has refused so far and that are not written yet."""
        return len(self._unwritten)

    def _call(self, functions: Sequence[Callable[..., None]], *arguments: Any) -> None:
        """Call functions of the user; one that fails is told and does not stop the run."""
        for function in functions:
            try:
                function(*arguments)
            except Exception as error:
                _LOGGER.warning("%r failed: %s: %s", function, type(error).__name__, error)
