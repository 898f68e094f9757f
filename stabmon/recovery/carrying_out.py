"""Carrying out what the recovery ladder asks for, on the state of any trainer.

`CarryingOut` stands between a training loop and `recovery.py`: it restores, cuts the learning rate,
renews the optimizer's moments and keeps the detectors' state with each checkpoint. What is asked
for is decided in `ladder.py`; saving and restoring are two functions of the caller.

A rollback is journalled in `recovery.json` before anything is undone, and each of its steps may be
taken twice; so a run that was killed in the midst of one finishes it at the next start.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from stabmon.hosts import agree, leads
from stabmon.recovery.ladder import Action, Kind, Phase
from stabmon.recovery.watcher import Watcher
from stabmon.runs.jsonl import floats, plain

Save = Callable[[int, Any], None]
Restore = Callable[[int], Any]
# Steps after a sample at which what it asks for is done: by then it has reached the host in every
# case, in an interrupted run as in an uninterrupted one.
DELAY = 2


@dataclass
class CarryingOut:
    """What is done to a training state, and the files that make it survive a kill.

    Attributes:
        folder: The run's folder.
        watcher: Detectors and ladder.
        save: Writes a state: (step, state); None: there are no checkpoints.
        restore: Returns the state that was saved at a step.
        change: Applies a kind of action to a state: (kind, state, factor) -> state.
        rewind: Tells the log that training goes on from a step.
        delete: Removes the checkpoint at a step; None: checkpoints are never removed.
        data_shift: Steps by which the data are ahead of the counter, where some were skipped.
    """

    folder: Path
    watcher: Watcher
    save: Save | None
    restore: Restore | None
    change: Callable[[Kind, PyTree, float], PyTree]
    rewind: Callable[[int, int], None]
    delete: Callable[[int], None] | None = None
    data_shift: int = 0
    _waiting: list[tuple[int, str, float]] = field(default_factory=list)

    @property
    def rolling_back(self) -> bool:
        """Whether `roll_back` is to be called before the next step."""
        return self.watcher.recovery.phase is Phase.ROLLING_BACK

    def take(self, step: int, actions: Sequence[Action]) -> None:
        """Note what a sample asks for; it is done `DELAY` steps later."""
        for action in actions:
            if not action.dry and action.kind in (Kind.SCALE_LEARNING_RATE, Kind.MSIGN):
                amount = float(action.fields.get("scale", 1.0))
                self._waiting.append((step + DELAY, action.kind.value, amount))

    def apply(self, step: int, state: PyTree) -> PyTree:
        """Returns the state that `step` starts from: what is due by now is done to it."""
        due = [item for item in self._waiting if item[0] <= step]
        self._waiting = [item for item in self._waiting if item[0] > step]
        for _, kind, amount in due:
            state = self.change(Kind(kind), state, amount)
        return state

    def checkpoint(self, step: int, state: PyTree, loss: float) -> None:
        """Enter a checkpoint in the ledger, write it, and delete those that may go.

        The detectors' state is written last: a checkpoint without it does not count, so a kill in
        between costs the steps since the one before.
        """
        save = self.save
        if save is None:
            raise ValueError("a checkpoint needs save=(step, state) -> None: give it to Watch")
        ledger = self.watcher.recovery.ledger
        ledger.saved(step, self.watcher.detectors.grade, loss, is_finite(state))
        save(step, state)
        if leads():
            write_json(self._notes(step), self._state())
        for old in ledger.deletable() if self.delete is not None else ():
            self._remove(old)
            ledger.forget([old])

    def steps(self) -> list[int]:
        """Steps of the checkpoints that have notes, ascending."""
        found = (self.folder / "watch").glob("*.json")
        return sorted(int(path.stem) for path in found)

    def resume(self, step: int) -> tuple[int, PyTree]:
        """Go on from the checkpoint at `step`; finishes a rollback that was begun.

        Returns:
            The step to go on from, and the state.
        """
        state = self._restored(step)
        self._recall(step)
        journal = self._journal()
        if journal is not None and journal["number"] > self.watcher.recovery.standing.rollbacks:
            return self._undo(journal)
        return step, state

    def roll_back(self) -> tuple[int, PyTree]:
        """Carry out the pending rollback.

        Returns:
            The step to go on from, and the state.
        """
        recovery = self.watcher.recovery
        number, target = recovery.standing.rollbacks, recovery.standing.target
        skip = [a.fields for a in recovery.pending if a.kind is Kind.SKIP_DATA]
        shift = self.data_shift + (skip[0]["last"] - skip[0]["first"] if skip else 0)
        journal = {"number": number, "target": target, "data_shift": shift}
        journal |= {"recovery": recovery.state(), "incidents": self.watcher.incidents.count}
        if leads():
            write_json(self.folder / "recovery.json", journal)
        agree("the rollback", [number, target, shift])
        return self._undo(journal)

    def _undo(self, journal: Mapping[str, Any]) -> tuple[int, PyTree]:
        """Go back as the journal says: restore, smaller learning rate, renewed moments."""
        target, recovery = int(journal["target"]), self.watcher.recovery
        later = [step for step in self.steps() if step > target]
        agree("the checkpoints to remove", later)  # before one process has removed any
        state = self._restored(target)
        self._recall(target)
        recovery.restore(journal["recovery"])
        recovery.rolled_back()
        self._waiting = []
        self.watcher.begin_again(int(journal["incidents"]))
        self.data_shift = int(journal["data_shift"])
        state = self.change(Kind.RESET_OPTIMIZER, state, 1.0)
        state = self.change(Kind.SCALE_LEARNING_RATE, state, recovery.standing.scale)
        self.rewind(target, int(journal["number"]))
        for later in [step for step in self.steps() if step > target]:
            if self.delete is not None:
                self.delete(later)
            if leads():
                self._notes(later).unlink(missing_ok=True)
        return target, state

    def _restored(self, step: int) -> PyTree:
        if self.restore is None:
            raise ValueError("going back needs restore=(step) -> state: give it to Watch")
        return self.restore(step)

    def _remove(self, step: int) -> None:
        """Delete a checkpoint, its notes first."""
        if leads():
            self._notes(step).unlink(missing_ok=True)
        if self.delete is not None:
            self.delete(step)

    def _notes(self, step: int) -> Path:
        return self.folder / "watch" / f"{step:08d}.json"

    def _state(self) -> dict[str, Any]:
        return {
            "watcher": self.watcher.state(),
            "waiting": self._waiting,
            "data_shift": self.data_shift,
        }

    def _recall(self, step: int) -> None:
        """Take up what was noted with the checkpoint at `step`."""
        path = self._notes(step)
        if not path.exists():
            raise ValueError(
                f"{path} is not there: the checkpoint at step {step} was saved without Watch; "
                "begin a new run from it in another folder"
            )
        notes = floats(json.loads(path.read_text(encoding="utf-8")))
        self.watcher.restore(notes["watcher"])
        self._waiting = [(int(at), kind, float(x)) for at, kind, x in notes["waiting"]]
        self.data_shift = int(notes["data_shift"])
        # The ledger was written before the deletions that followed it.
        ledger, there = self.watcher.recovery.ledger, self.steps()
        ledger.forget([step for step in ledger.entries if step not in there])

    def _journal(self) -> dict[str, Any] | None:
        path = self.folder / "recovery.json"
        return floats(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def is_finite(state: PyTree) -> bool:
    """Whether every floating-point array of a state is finite; waits for the device."""
    floating = [x for x in jax.tree.leaves(state) if _is_floating(x)]
    flags = [jnp.all(jnp.isfinite(x)) for x in floating]
    return all(math.isfinite(x) and bool(x) for x in jax.device_get(flags))


def _is_floating(x: Any) -> bool:
    kind = getattr(x, "dtype", None)
    return kind is not None and jnp.issubdtype(kind, np.inexact)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON so that a kill leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".part")
    half.write_text(json.dumps(plain(content)) + "\n", encoding="utf-8")
    half.replace(path)
