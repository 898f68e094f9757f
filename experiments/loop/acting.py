"""The recovery ladder at work in a training run: alarms, diagnoses and actions, carried out.

`Acting` stands between `train.py`'s loop and `stabmon.alarms`: it feeds samples to the detectors,
journals what they say in order, and does to the training state what the ladder asks for. With
`act=False` it only writes down what it would do. Which rules there are is not decided here.

A rollback is journalled in `recovery.json` before anything is undone, and each of its steps may be
taken twice; so a run killed in the midst of one finishes it on `--resume`. The checkpoint itself
carries the state of detectors and ladder.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from grain import MapDataset

import optax_ext
from experiments.loop.checkpoints import Checkpoints, TrainState
from experiments.loop.cluster import agree, leads
from stabmon.alarms.detectors.base import Alarm
from stabmon.alarms.reference import Reference
from stabmon.alarms.signatures import Fault
from stabmon.alarms.standard import standard_detectors
from stabmon.recovery.ladder import Action, Kind, Phase, Policy
from stabmon.recovery.ledger import CheckpointLedger
from stabmon.recovery.recovery import Recovery
from stabmon.recovery.watcher import Watcher
from stabmon.runs.jsonl import floats, plain, read_jsonl
from stabmon.runs.runlog import RunLog


@dataclass(frozen=True)
class AlarmConfig:
    """Watching by `stabmon.alarms.standard`, and how the recovery ladder is climbed.

    Attributes:
        on: Whether the run is watched at all; `--act` implies it.
        window: Steps of the healthy window after the warm-up.
        watch: Steps to watch after the learning rate was halved.
        verify: Steps of verification after a rollback.
        dwell: Healthy steps before and after a checkpoint that make it trusted.
        min_grade: Lowest grade of a trusted checkpoint.
        max_rollbacks: Rollbacks before the run is stopped.
        joint: Different quantities that must have alarmed before the learning rate is touched.
        skip_data: Whether the data between checkpoint and alarm are passed over after a rollback.
        msign: Whether a fault in the attention is first met by one MSign restoration of its
            matrices.
    """

    on: bool = False
    window: int = 200
    watch: int = 500
    verify: int = 1000
    dwell: int = 500
    min_grade: int = 4
    max_rollbacks: int = 3
    joint: int = 2
    skip_data: bool = False
    msign: bool = False


@dataclass
class Acting:
    """Detectors, diagnosis and ladder of one run.

    Attributes:
        folder: The run's folder.
        log: Where events go.
        saved: The run's checkpoints.
        watcher: Detectors and ladder.
        data_shift: Steps by which the data run ahead of the counter, where some were passed over.
    """

    folder: Path
    log: RunLog
    saved: Checkpoints
    watcher: Watcher
    data_shift: int = 0
    _scale: tuple[int, float] | None = None
    _restore_at: int | None = None
    _windows: MapDataset | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        config: AlarmConfig,
        act: bool,
        warmup: int,
        folder: Path,
        log: RunLog,
        saved: Checkpoints,
        windows: MapDataset,
        reference: Reference | None = None,
        qk_norm: bool = False,
    ) -> "Acting":
        """As configured; `windows` are the indices of the data of each step."""
        policy = Policy(
            act=act,
            watch=config.watch,
            verify=config.verify,
            max_rollbacks=config.max_rollbacks,
            joint=config.joint,
            skip_data=config.skip_data,
            msign=config.msign,
        )
        recovery = Recovery(policy, CheckpointLedger(config.dwell, config.min_grade))
        board = standard_detectors(warmup, config.window, reference, qk_norm=qk_norm)
        return cls(folder, log, saved, Watcher(board, recovery), _windows=windows)

    @property
    def recovery(self) -> Recovery:
        """The ladder."""
        return self.watcher.recovery

    @property
    def wants_rollback(self) -> bool:
        """Whether `roll_back` is to be called before the next step."""
        return self.recovery.phase is Phase.ROLLING_BACK

    def observe(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        """Take a sample; journal its alarms, a diagnosis that is new, and actions, in this order.

        A learning-rate factor takes effect two steps later, when the sample has reached the host
        in every case, interrupted or not.
        """
        seen = self.watcher.observe(step, values)
        for row in seen.events():
            self.log.event(**row)
        for action in seen.actions:
            if action.kind is Kind.KEEP_BATCHES:
                self._keep_batches(action)
            elif action.kind is Kind.SCALE_LEARNING_RATE and not action.dry:
                self._scale = (step + 2, action.fields["scale"])
            elif action.kind is Kind.MSIGN and not action.dry:
                self._restore_at = step + 2
        return list(seen.alarms)

    def before(self, step: int, state: TrainState) -> TrainState:
        """The state that `step` starts from: what was asked for two steps ago is done to it."""
        if self._restore_at is not None and step >= self._restore_at:
            self._restore_at = None
            state = state._replace(params=restored(state.params))
        if self._scale is None or step < self._scale[0]:
            return state
        scale, self._scale = self._scale[1], None
        return state._replace(opt_state=optax_ext.scale_learning_rate(state.opt_state, scale))

    def save(self, state: TrainState, loss: float) -> None:
        """Enter a checkpoint in the ledger, write it, and delete those that may go."""
        step = int(state.step)
        if step in self.saved.steps():
            return
        trees = jax.tree.leaves((state.params, state.opt_state))
        finite = all(bool(jnp.all(jnp.isfinite(x))) for x in trees)
        self.recovery.ledger.saved(step, self.watcher.detectors.grade, loss, finite)
        self.saved.save(state, self._state())
        for old in self.recovery.ledger.deletable():
            self.saved.delete(old)
            self.recovery.ledger.forget([old])

    def resume(self, state: TrainState, fresh: Callable[[], TrainState]) -> TrainState:
        """Go on from the newest checkpoint, of which `state` is; finishes a rollback first."""
        step = self.saved.latest()
        if step is None:
            return state
        self._restore(self.saved.notes(step))
        journal = self._journal()
        if journal is not None and journal["number"] > self.recovery.standing.rollbacks:
            return self._undo(journal, fresh)
        return state

    def roll_back(self, fresh: Callable[[], TrainState]) -> TrainState:
        """Carry out the pending rollback; the state to go on from."""
        number, target = self.recovery.standing.rollbacks, self.recovery.standing.target
        skip = [a.fields for a in self.recovery.pending if a.kind is Kind.SKIP_DATA]
        shift = self.data_shift + (skip[0]["last"] - skip[0]["first"] if skip else 0)
        journal = {"number": number, "target": target, "data_shift": shift}
        journal["recovery"] = self.recovery.state()
        if leads():
            half = self.folder / "recovery.json.part"
            half.write_text(json.dumps(plain(journal)) + "\n", encoding="utf-8")
            half.replace(self.folder / "recovery.json")
        agree("the rollback", [number, target, shift])
        return self._undo(journal, fresh)

    def _undo(self, journal: Mapping[str, Any], fresh: Callable[[], TrainState]) -> TrainState:
        """Go back as the journal says: restore, smaller learning rate, fresh moments."""
        target = journal["target"]
        begun = fresh()
        state = self.saved.restore(begun, target)
        self._restore(self.saved.notes(target))
        self.recovery.restore(journal["recovery"])
        self.recovery.rolled_back()
        self._forget_deleted()
        self._scale, self._restore_at, self.watcher.named = None, None, Fault.UNKNOWN
        self.data_shift = journal["data_shift"]
        opt_state = optax_ext.reset_moments(state.opt_state, begun.opt_state)
        opt_state = optax_ext.scale_learning_rate(opt_state, self.recovery.standing.scale)
        done = [row for row in read_jsonl(self.folder / "events.jsonl") if row["kind"] == "rewind"]
        if len(done) < journal["number"]:
            self.log.rewind(target)
        for later in [step for step in self.saved.steps() if step > target]:
            self.saved.delete(later)
        return state._replace(opt_state=opt_state)

    def _journal(self) -> dict[str, Any] | None:
        path = self.folder / "recovery.json"
        return floats(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None

    def _state(self) -> dict[str, Any]:
        return plain(
            {
                "board": self.watcher.detectors.state(),
                "recovery": self.recovery.state(),
                "named": self.watcher.named.value,
                "scale": self._scale,
                "restore_at": self._restore_at,
                "data_shift": self.data_shift,
            }
        )

    def _restore(self, notes: Mapping[str, Any]) -> None:
        if not notes:
            raise ValueError(
                f"the checkpoint in {self.folder} was saved without alarms: resume it as it was "
                "begun, or begin a new run with them"
            )
        notes = floats(dict(notes))
        self.watcher.detectors.restore(notes["board"])
        self.recovery.restore(notes["recovery"])
        self._forget_deleted()
        self.watcher.named = Fault(notes["named"])
        self._scale = None if notes["scale"] is None else tuple(notes["scale"])
        self._restore_at = notes.get("restore_at")
        self.data_shift = notes["data_shift"]

    def _forget_deleted(self) -> None:
        """The ledger was written before the deletions that followed it."""
        ledger, there = self.recovery.ledger, self.saved.steps()
        ledger.forget([step for step in ledger.entries if step not in there])

    def _keep_batches(self, action: Action) -> None:
        """Write which windows of the data the steps around an S0 were fed."""
        order, shift = self._windows, self.data_shift
        if order is None or not leads():
            return
        steps = range(action.fields["first"], action.fields["last"] + 1)
        fed = {step: np.asarray(order[step + shift]).tolist() for step in steps}
        path = self.folder / f"batches-{action.step:08d}.json"
        path.write_text(json.dumps(fed) + "\n", encoding="utf-8")


@jax.jit
def restored(params: Any) -> Any:
    """Parameters with every attention matrix replaced by its rescaled sign, as MSign does it."""
    once = optax_ext.msign(1, "attention")
    still = jax.tree.map(jnp.zeros_like, params)
    updates, _ = once.update(still, once.init(params), params)
    return optax.apply_updates(params, updates)
