"""Checkpoints of a training run, by Orbax: parameters, optimizer state, and the monitors' past.

Three items of one step: `params`, `optimizer`, and `monitor` (the snapshot ring, taken out of the
optimizer state). Adding or dropping a stage of an optimizer chain breaks an Orbax restore, and a
run must be able to switch its monitors on or off; so their state is an item of its own.
"""

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jaxtyping import Array, Int

from stabmon.monitor.snapshots import TrackDeltaState

FORMAT = 1


class TrainState(NamedTuple):
    """All that a step reads and writes.

    Attributes:
        step: Updates applied so far, int32.
        params: Parameters, a nested dict.
        opt_state: Optimizer state, the snapshot ring included.
    """

    step: Int[Array, ""]
    params: Any
    opt_state: Any


class Checkpoints:
    """Saves and restores a `TrainState` under `folder`, the newest `keep` of them (None: all)."""

    def __init__(self, folder: Path, keep: int | None = 3):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    def latest(self) -> int | None:
        """Step of the newest whole checkpoint, None without one."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Steps of all whole checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def delete(self, step: int) -> None:
        """Remove the checkpoint at `step`."""
        self._manager.delete(step)

    def notes(self, step: int) -> dict[str, Any]:
        """What was saved beside the state at `step`."""
        return self._meta(step).get("notes", {})

    def save(self, state: TrainState, notes: dict[str, Any] | None = None) -> None:
        """Write `state`; returns when it is on disk, so that its buffers may then be donated.

        Args:
            state: What to save; a step that is there already is not written again.
            notes: Kept beside it, as JSON can hold it.
        """
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        optimizer, ring = detach(state.opt_state)
        items = {
            "params": ocp.args.StandardSave(state.params),
            "optimizer": ocp.args.StandardSave(optimizer),
            "meta": ocp.args.JsonSave(
                {"format": FORMAT, "step": step, "ring": ring is not None, "notes": notes or {}}
            ),
        }
        if ring is not None:
            items["monitor"] = ocp.args.StandardSave(_plain(ring))
        self._manager.save(step, args=ocp.args.Composite(**items))

    def restore(self, like: TrainState, step: int | None = None) -> TrainState:
        """The state at `step` (the newest by default), shaped and placed like `like`.

        Raises:
            FileNotFoundError: There is no checkpoint.
            ValueError: It cannot be read, was written by a newer format, or without the snapshot
                ring that `like` has.
        """
        step = self.latest() if step is None else step
        if step is None:
            raise FileNotFoundError(f"no checkpoint in {self._manager.directory}")
        meta = self._meta(step)
        if meta["format"] > FORMAT:
            raise ValueError(
                f"checkpoint {step} has format {meta['format']}, this code reads up to {FORMAT}"
            )
        optimizer, ring = detach(like.opt_state)
        items = {
            "params": ocp.args.StandardRestore(like.params),
            "optimizer": ocp.args.StandardRestore(optimizer),
        }
        if ring is not None:
            if not meta["ring"]:
                raise ValueError(
                    f"checkpoint {step} holds no snapshot ring; restore it into a chain without "
                    "track_delta, or begin the ring anew with `Checkpoints.restore(…)` and "
                    "`attach(opt_state, ring)` of a fresh state"
                )
            items["monitor"] = ocp.args.StandardRestore(_plain(ring))
        got = self._read(step, items)
        if ring is not None:
            ring = jax.tree.unflatten(jax.tree.structure(ring), jax.tree.leaves(got["monitor"]))
            if conflict := ring.conflict():
                warnings.warn(f"checkpoint {step}: {conflict}", stacklevel=2)
        count = jax.device_put(np.asarray(step, like.step.dtype), like.step.sharding)
        return TrainState(count, got["params"], attach(got["optimizer"], ring))

    def _meta(self, step: int) -> dict[str, Any]:
        return self._read(step, {"meta": ocp.args.JsonRestore()})["meta"]

    def _read(self, step: int, items: dict[str, Any]) -> Any:
        """What is asked for of the checkpoint at `step`."""
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except (OSError, ValueError, KeyError) as error:
            folder, earlier = self._manager.directory, [x for x in self.steps() if x < step]
            remedy = f"move it away to go on from step {earlier[-1]}" if earlier else "begin anew"
            raise ValueError(
                f"checkpoint {folder / str(step)} cannot be read: it was cut short, or is of "
                f"another model; {remedy}. {type(error).__name__}: {str(error)[:300]}"
            ) from error

    def close(self) -> None:
        """Release the folder."""
        self._manager.close()


def detach(opt_state: Any) -> tuple[Any, TrackDeltaState | None]:
    """The optimizer state with an empty place where the ring was, and the ring (or None)."""
    is_ring = lambda x: isinstance(x, TrackDeltaState)
    rings = [x for x in jax.tree.leaves(opt_state, is_leaf=is_ring) if is_ring(x)]
    if len(rings) > 1:
        raise ValueError(f"expected at most one track_delta in the chain, found {len(rings)}")
    without = jax.tree.map(
        lambda x: optax.EmptyState() if is_ring(x) else x, opt_state, is_leaf=is_ring
    )
    return without, rings[0] if rings else None


def attach(opt_state: Any, ring: TrackDeltaState | None) -> Any:
    """The inverse of `detach`; the ring's place is the last empty state."""
    if ring is None:
        return opt_state
    is_empty = lambda x: isinstance(x, optax.EmptyState)
    leaves, structure = jax.tree.flatten(opt_state, is_leaf=is_empty)
    place = max(i for i, leaf in enumerate(leaves) if is_empty(leaf))
    leaves[place] = ring
    return jax.tree.unflatten(structure, leaves)


def _plain(ring: TrackDeltaState) -> dict[str, Any]:
    """The ring as a list of arrays under stable names, which Orbax stores as it is."""
    return {f"leaf_{i:04d}": leaf for i, leaf in enumerate(jax.tree.leaves(ring))}
