"""Which checkpoints are healthy, and which may be deleted.

A checkpoint is trusted only when the run has stayed healthy for some time before and after it: an
alarm comes later than the fault, so what was saved just before one is suspect. Trust decides which
checkpoint is preferred, never whether one survives: one that is known to be finite is always kept.
Saving and deleting themselves are the caller's.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class CheckpointHealth:
    """What is known of one checkpoint.

    Attributes:
        step: Its step.
        grade: Stability grade when it was saved, None where none is measured.
        loss: Loss when it was saved, nats per token.
        finite: Whether parameters, optimizer state and loss were finite then.
        suspect: Whether the run was in alarm within the dwell before or after it.
        trusted: Whether it has been healthy for the dwell on both sides.
    """

    step: int
    grade: int | None
    loss: float
    finite: bool
    suspect: bool = False
    trusted: bool = False


@dataclass
class CheckpointLedger:
    """The checkpoints of a run, in order of step.

    Attributes:
        dwell: Steps without an alarm, before and after a checkpoint, that make it trusted.
        min_grade: Lowest grade of a healthy checkpoint; one without a grade passes.
        keep: Newest checkpoints that are kept whatever their health.
        entries: By step.

    Raises:
        ValueError: A negative dwell, or `keep` < 1.

    >>> ledger = CheckpointLedger(dwell=100, keep=1)
    >>> ledger.saved(500, grade=6, loss=2.0)
    >>> ledger.note(550, healthy=True); ledger.last_healthy() is None
    True
    >>> ledger.note(600, healthy=True); ledger.last_healthy()
    500
    """

    dwell: int = 500
    min_grade: int = 4
    keep: int = 3
    entries: dict[int, CheckpointHealth] = field(default_factory=dict)
    _unhealthy: int | None = None

    def __post_init__(self):
        if self.dwell < 0 or self.keep < 1:
            raise ValueError(
                f"expected dwell >= 0 steps and keep >= 1, got {self.dwell} and {self.keep}"
            )

    def saved(self, step: int, grade: int | None, loss: float, finite: bool = True) -> None:
        """Enter a checkpoint that was written; one that is there already stays as it is.

        One with a loss or a state that is not finite, or of a low grade, never becomes healthy.
        """
        if step in self.entries:
            return
        finite = finite and math.isfinite(loss)
        late = self._unhealthy is not None and step - self._unhealthy < self.dwell
        self.entries[step] = CheckpointHealth(step, grade, loss, finite, suspect=late)

    def note(self, step: int, healthy: bool) -> None:
        """Take the health of the run at `step`; checkpoints gain trust, or lose all hope of it."""
        if not healthy:
            self._unhealthy = step
        for entry in tuple(self.entries.values()):
            age = step - entry.step
            if entry.trusted or entry.suspect or age < 0:
                continue
            if not healthy:
                self.entries[entry.step] = replace(entry, suspect=age <= self.dwell)
            elif age >= self.dwell and self._fit(entry):
                self.entries[entry.step] = replace(entry, trusted=True)

    def last_healthy(self, before: int | None = None) -> int | None:
        """Step of the newest trusted checkpoint, earlier than `before`; None without one."""
        steps = [e.step for e in self.entries.values() if e.trusted]
        return max((s for s in steps if before is None or s < before), default=None)

    def target(self, before: int | None = None) -> int | None:
        """Step of the checkpoint to go back to, earlier than `before`; None without a finite one.

        The newest that is trusted; else the newest that is finite, not suspect and of a healthy
        grade; else not suspect; else finite.
        """
        finite = [
            entry
            for entry in self.entries.values()
            if entry.finite and (before is None or entry.step < before)
        ]
        order = lambda x: (x.trusted, not x.suspect, not x.suspect and self._fit(x), x.step)
        return max(finite, key=order).step if finite else None

    def best(self) -> int | None:
        """Step of the trusted checkpoint with the lowest loss.

        A healthy one with a slightly higher loss beats a collapsing one with a lower.
        """
        trusted = [entry for entry in self.entries.values() if entry.trusted]
        return min(trusted, key=lambda entry: entry.loss).step if trusted else None

    def deletable(self) -> tuple[int, ...]:
        """Steps of checkpoints that may be deleted.

        Never the newest `keep`, the last two that are trusted, the best, the newest that is finite,
        the one to go back to, nor the oldest that can still become trusted: else none would live
        long enough.
        """
        steps = sorted(self.entries)
        trusted = [step for step in steps if self.entries[step].trusted]
        pending = [
            entry.step
            for entry in self.entries.values()
            if not entry.trusted and not entry.suspect and self._fit(entry)
        ]
        kept = {*steps[-self.keep :], *trusted[-2:], *sorted(pending)[:1]}
        finite = [step for step in steps if self.entries[step].finite]
        kept |= {step for step in (*finite[-1:], self.best(), self.target()) if step is not None}
        return tuple(step for step in steps if step not in kept)

    def forget(self, steps: Collection[int]) -> None:
        """Drop checkpoints that were deleted."""
        for step in steps:
            self.entries.pop(step, None)

    def rewind(self, step: int) -> None:
        """Go back to `step`: what was saved later is gone, and so is the alarm that came later."""
        self.forget([later for later in self.entries if later > step])
        if self._unhealthy is not None and self._unhealthy > step:
            self._unhealthy = None

    def _fit(self, entry: CheckpointHealth) -> bool:
        return entry.finite and (entry.grade is None or entry.grade >= self.min_grade)

    def state(self) -> dict[str, Any]:
        """The ledger, as JSON can hold it."""
        rows = [asdict(entry) for entry in self.entries.values()]
        for row in rows:
            row["loss"] = row["loss"] if math.isfinite(row["loss"]) else None
        return {"entries": rows, "unhealthy": self._unhealthy}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        rows = [
            row | {"loss": math.nan if row["loss"] is None else row["loss"]}
            for row in state["entries"]
        ]
        self.entries = {row["step"]: CheckpointHealth(**row) for row in rows}
        self._unhealthy = state["unhealthy"]
