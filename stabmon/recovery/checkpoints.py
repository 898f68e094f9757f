"""Checkpoints by Orbax of any training state, the monitors' past apart from it.

What lives here: `OrbaxCheckpoints`, the shipped pair of save and restore for `stabmon.Watch`. What
does not: which checkpoints are kept (`ledger.py`), reading foreign ones (`stabmon.checkpoints`).

Adding or dropping a stage of an optimizer chain breaks an Orbax restore, and a run must be able to
switch its monitors on or off. So the snapshot ring is taken out of the state and stored as an item
of its own; what else the state has at its top level (params, opt_state, …) is an item each.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from stabmon.monitor.snapshots import TrackDeltaState

FORMAT = 2
_RING = "snapshots"


class NoRing(NamedTuple):
    """Stands where the snapshot ring was taken out."""


class OrbaxCheckpoints:
    """Saves and restores training states under a folder.

    Attributes:
        folder: Where they lie.
    """

    def __init__(self, folder: str | Path, like: PyTree):
        """Opens or makes the folder.

        Args:
            folder: Such as "runs/a/checkpoints".
            like: A state of the run, real or abstract: restored ones get its structure, dtypes and
                shardings.

        Raises:
            ImportError: Orbax is not installed.
        """
        try:
            self._ocp: Any = import_module("orbax.checkpoint")
        except ImportError as error:
            raise ImportError('checkpoints need Orbax: pip install "stabmon[cli]"') from error
        self.folder = Path(folder).resolve()
        self._like = jax.tree.map(_abstract, like)
        options = self._ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
        self._manager = self._ocp.CheckpointManager(self.folder, options=options)

    def steps(self) -> list[int]:
        """Steps of all whole checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def delete(self, step: int) -> None:
        """Remove the checkpoint at `step`."""
        self._manager.delete(step)

    def save(self, step: int, state: PyTree) -> None:
        """Write `state`; returns when it is on disk, so that its buffers may then be donated.

        Args:
            step: Updates applied so far; a step that is there already is not written again.
            state: What to save.
        """
        if step in self._manager.all_steps():
            return
        rest, ring = detach(state)
        save = self._ocp.args.StandardSave
        items = {name: save(part) for name, part in _items(rest).items()}
        if ring is not None:
            items[_RING] = save(_plain(ring))
        meta = {"format": FORMAT, "ring": ring is not None}
        items["meta"] = self._ocp.args.JsonSave(meta)
        self._manager.save(step, args=self._ocp.args.Composite(**items))

    def restore(self, step: int | None = None) -> PyTree:
        """Returns the state at `step` (the newest by default), shaped and placed like `like`.

        A checkpoint without the snapshot ring that the state needs gives an empty ring: its
        monitors begin anew.

        Raises:
            FileNotFoundError: There is no checkpoint.
            ValueError: It cannot be read, or was written by a newer format.
        """
        steps = self.steps()
        step = step if step is not None else max(steps, default=None)
        if step not in steps:
            which = "" if step is None else f" of step {step}"
            raise FileNotFoundError(f"no checkpoint{which} in {self.folder}")
        meta = self._read(step, {"meta": self._ocp.args.JsonRestore()})["meta"]
        if meta["format"] > FORMAT:
            raise ValueError(
                f"checkpoint {step} has format {meta['format']}, this code reads up to {FORMAT}"
            )
        rest, ring = detach(self._like)
        shaped = self._ocp.args.StandardRestore
        items = {name: shaped(part) for name, part in _items(rest).items()}
        if ring is not None and meta["ring"]:
            items[_RING] = shaped(_plain(ring))
        got = self._read(step, items)
        whole = _whole(rest, got)
        if ring is None:
            return whole
        leaves = jax.tree.leaves(got[_RING]) if meta["ring"] else _zeros(ring)
        return attach(whole, jax.tree.unflatten(jax.tree.structure(ring), leaves))

    def close(self) -> None:
        """Release the folder."""
        self._manager.close()

    def _read(self, step: int, items: dict[str, Any]) -> Any:
        """What is asked for of the checkpoint at `step`."""
        try:
            return self._manager.restore(step, args=self._ocp.args.Composite(**items))
        except (OSError, ValueError, KeyError) as error:
            earlier = [x for x in self.steps() if x < step]
            remedy = f"move it away to go on from step {earlier[-1]}" if earlier else "begin anew"
            raise ValueError(
                f"checkpoint {self.folder / str(step)} cannot be read: it was cut short, or is of "
                f"another model; {remedy}. {type(error).__name__}: {str(error)[:300]}"
            ) from error


def _abstract(x: Any) -> Any:
    """An array as its shape, dtype and sharding, so that no buffer is kept."""
    if not hasattr(x, "shape"):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))


def _zeros(ring: TrackDeltaState) -> list[Any]:
    """Leaves of an empty ring, placed like it."""
    zero = lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding)
    return [zero(leaf) for leaf in jax.tree.leaves(ring)]


def _items(state: PyTree) -> dict[str, Any]:
    """The parts of a state at its top level, by name; the state itself where it has none.

    Nested dicts are stored as they are. Of any other part each array is stored under its path, so
    that a link which is added behind the others moves none of them.
    """
    return {name: part if _is_nested(part) else _flat(part) for name, part in _parts(state).items()}


def _parts(state: PyTree) -> dict[str, Any]:
    """The parts that hold arrays."""
    if isinstance(state, Mapping) and all(isinstance(key, str) for key in state):
        parts = dict(state)
    elif fields := getattr(state, "_fields", ()):
        parts = {name: getattr(state, name) for name in fields}
    else:
        parts = {"state": state}
    return {name: part for name, part in parts.items() if jax.tree.leaves(part)}


def _is_nested(part: Any) -> bool:
    """Whether a part is a dict of dicts of arrays."""
    if not isinstance(part, dict):
        return False
    return all(_is_nested(x) or jax.tree_util.all_leaves([x]) for x in part.values())


def _flat(part: PyTree) -> dict[str, Any]:
    """{path: array} of a part; "value" for a part that is an array."""
    paths, _ = jax.tree_util.tree_flatten_with_path(part)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".") or "value"
    return {name(path): leaf for path, leaf in paths}


def _whole(like: PyTree, items: Any) -> PyTree:
    """The inverse of `_items`."""
    parts = {}
    for name, part in _parts(like).items():
        got = items[name]
        if not _is_nested(part):
            leaves = [got[path] for path in _flat(part)]
            got = jax.tree.unflatten(jax.tree.structure(part), leaves)
        parts[name] = got
    if isinstance(like, Mapping):
        return {**like, **parts}
    return like._replace(**parts) if hasattr(like, "_replace") else parts["state"]


def detach(state: PyTree) -> tuple[PyTree, TrackDeltaState | None]:
    """The state with an empty place where the snapshot ring was, and the ring (or None)."""
    is_ring = lambda x: isinstance(x, TrackDeltaState)
    rings = [x for x in jax.tree.leaves(state, is_leaf=is_ring) if is_ring(x)]
    if len(rings) > 1:
        raise ValueError(f"expected at most one track_delta in the chain, found {len(rings)}")
    without = jax.tree.map(lambda x: NoRing() if is_ring(x) else x, state, is_leaf=is_ring)
    return without, rings[0] if rings else None


def attach(state: PyTree, ring: TrackDeltaState) -> PyTree:
    """The inverse of `detach`."""
    is_place = lambda x: isinstance(x, NoRing)
    return jax.tree.map(lambda x: ring if is_place(x) else x, state, is_leaf=is_place)


def _plain(ring: TrackDeltaState) -> dict[str, Any]:
    """The ring as arrays under stable names, which Orbax stores as they are."""
    return {f"leaf_{i:04d}": leaf for i, leaf in enumerate(jax.tree.leaves(ring))}
