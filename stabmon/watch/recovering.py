"""The part of `Watch` that acts on the training state: checkpoints, resuming, the ladder's actions.

How an action is carried out is `stabmon.recovery`'s.
"""

import logging
from pathlib import Path

import jax
from jaxtyping import PyTree

from stabmon.hosts import agree
from stabmon.monitor.snapshots import TrackDeltaState
from stabmon.recovery.carrying_out import CarryingOut
from stabmon.recovery.checkpoints import OrbaxCheckpoints
from stabmon.recovery.ladder import EXIT_UNRECOVERED
from stabmon.recovery.watcher import Watcher
from stabmon.watch.journal import Journal
from stabmon.watch.restores import Restores

EXIT_LOST = 74
_LOGGER = logging.getLogger("stabmon")


class Recovering:
    """What a training loop calls to save, to resume, and to do what the ladder asks for.

    Attributes:
        step: The next step: one more than was observed last, or where a rollback went back to.
        watcher: Detectors and ladder.
        recovery: Carries out what the ladder asks for.
        journal: Writes the samples.
        restores: Compares what is loaded with what was saved.
    """

    folder: Path
    step: int
    watcher: Watcher
    recovery: CarryingOut
    journal: Journal
    restores: Restores
    _act: bool

    def flush(self) -> None:
        """Writes every sample that waits; waits for the device."""
        for seen in self.journal.flush():
            self.recovery.take(seen.step, seen.actions)

    def resume(self, state: PyTree) -> PyTree:
        """Returns the state to go on with: of the newest checkpoint, or `state` without one.

        `watch.step` is then the step to go on from. A rollback that a kill interrupted is finished.
        A checkpoint that is gone (`restore` raises FileNotFoundError) is passed over.

        Args:
            state: A fresh state.

        Raises:
            ImportError: Watch has no `save` and `restore`, and Orbax is not installed.
        """
        steps = self.recovery.steps()
        agree("the checkpoint to go on from", steps)
        if steps:
            self._by_orbax(state)
        for step in reversed(steps):
            try:
                self.step, state = self.recovery.resume(step)
            except FileNotFoundError as error:
                _LOGGER.warning("step %d is not gone on from: %s", step, error)
            else:
                self._say_conflict(state)
                break
        return state

    def _say_conflict(self, state: PyTree) -> None:
        """Journal that the snapshots of a restored state are another configuration's."""
        is_ring = lambda x: isinstance(x, TrackDeltaState)
        rings = [x for x in jax.tree.leaves(state, is_leaf=is_ring) if is_ring(x)]
        for why in filter(None, (ring.conflict() for ring in rings)):
            _LOGGER.warning("step %d: %s", self.step, why)
            self.journal.event("warning", self.step, reason=why)

    def apply(self, state: PyTree) -> PyTree:
        """Returns the state that the next step starts from, with what the ladder asks for done.

        Where a rollback is due it is carried out, and `watch.step` goes back.

        Args:
            state: The training state.
        """
        if not self._act:
            return state
        if self.recovery.rolling_back:
            self.journal.drop()
            self.step, state = self.recovery.roll_back()
        return self.recovery.apply(self.step, state)

    def checkpoint(self, state: PyTree) -> None:
        """Saves `state`, of step `watch.step`, and what watches it.

        Args:
            state: The training state; whether it is finite is checked here.

        Raises:
            ImportError: Watch has no `save` and `restore`, and Orbax is not installed.
        """
        self._by_orbax(state)
        self.flush()
        if not self.recovery.rolling_back:
            self.recovery.checkpoint(self.step, state, self.journal.loss)
            self.restores.keep(self.step, state)

    def _by_orbax(self, like: PyTree) -> None:
        """Use Orbax in the run's folder, unless the caller gave functions of its own."""
        if self.recovery.save is None:
            ours = OrbaxCheckpoints(self.folder / "checkpoints", like)
            self.recovery.save = ours.save
            self.recovery.restore = self.restores.audited(ours.restore)
            self.recovery.delete = ours.delete

    @property
    def data_step(self) -> int:
        """Index of the batch to train on next: the step, and what was skipped after rollbacks."""
        return self.step + self.recovery.data_shift

    @property
    def stopped(self) -> bool:
        """Whether the ladder has stopped the run; always False where it only advises."""
        return self.watcher.recovery.stop

    @property
    def exit_code(self) -> int:
        """Exit code for the process: 70 where the ladder stopped it, 74 where samples were lost."""
        if self.stopped:
            return EXIT_UNRECOVERED
        return EXIT_LOST if self.journal.lost else 0
