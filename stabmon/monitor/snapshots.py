"""Past parameters kept in optimizer state, and how to read differences from them.

The state that `optax_ext.track_delta` fills lives here, so that the monitors can read it without
depending on the transform. It knows nothing of what is measured on the differences.
"""

import dataclasses
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Int, PyTree

from stabmon.layout import leaves_with_paths
from stabmon.linalg.checks import as_float

_VERSION = 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrackDeltaState:
    """State of `optax_ext.track_delta`; structure, shapes and dtypes are fixed by `init`.

    A checkpoint brings arrays only. So that snapshots taken at another cadence or of other leaves
    are never read for this chain's, the arrays say what they were taken with: where `delta_setup`
    differs from `expected_setup()` every age is 0, and the next update starts the ring anew.

    Attributes:
        delta_step: Updates applied so far, int32 scalar.
        delta_start: Where this ring began: snapshots of earlier steps are none of its own, int32.
        delta_setup: What the snapshots were taken with; five int32, see `expected_setup`.
        delta_ring: `keep` trees like the parameters, with `optax.MaskedNode` where not selected.
            The parameters of step m·every lie in place m mod keep.
        delta_total: Sum of all updates in float32 for source="updates", else None.
        every: Steps between snapshots; static.
        memory_kind: Memory that the ring lies in; None is the device's own; static.

    The fields are annotated loosely: JAX rebuilds the state around shapes and placeholders too.
    """

    delta_step: Any
    delta_start: Any
    delta_setup: Any
    delta_ring: tuple[Any, ...]
    delta_total: Any
    every: int = dataclasses.field(metadata={"static": True})
    memory_kind: str | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def lags(self) -> tuple[int, ...]:
        """The lags that can be read: every, 2·every, … keep·every."""
        return tuple(self.every * (i + 1) for i in range(len(self.delta_ring)))

    def age(self, lag: int) -> Int[Array, ""]:
        """Steps back to the snapshot that stands for `lag`, int32; 0 if there is none yet."""
        taken = self.every * self._number(lag)
        age = self.delta_step - taken
        return jnp.where((taken >= 0) & (taken >= self.started()), age, jnp.zeros_like(age))

    def snapshot(self, lag: int) -> PyTree:
        """The parameters `age(lag)` steps ago; of no meaning where that is 0."""
        place = jnp.mod(self._number(lag), len(self.delta_ring))
        if self.memory_kind is not None:
            # Of the places in host memory only the one that is wanted comes to the device.
            fetch = lambda tree: lambda: jax.device_put(tree, jax.memory.Space.Device)
            return jax.lax.switch(place, [fetch(tree) for tree in self.delta_ring])
        return jax.tree.map(lambda *places: jax.lax.select_n(place, *places), *self.delta_ring)

    def started(self) -> Int[Array, ""]:
        """The step from which on snapshots are this chain's, int32; now, if they are another's."""
        same = jnp.all(jnp.asarray(self.delta_setup) == self.expected_setup())
        return jnp.where(same, self.delta_start, self.delta_step)

    def expected_setup(self) -> Int[np.ndarray, " 5"]:
        """What this chain takes snapshots with, as `delta_setup` holds it.

        Version of the format, `every`, `keep`, 0 or 1 for the source "params" or "updates", and a
        checksum of the paths of the selected leaves.
        """
        paths = "\n".join(path for path, _ in leaves_with_paths(self.delta_ring[0]))
        checksum = zlib.crc32(paths.encode()) & 0x7FFFFFFF
        source = int(self.delta_total is not None)
        return np.asarray([_VERSION, self.every, len(self.delta_ring), source, checksum], np.int32)

    def conflict(self) -> str | None:
        """Why the snapshots are another chain's, None if they are this one's. Waits for the device.

        For the host after a restore: training may go on, the ring starts anew by itself.
        """
        names = ("format", "every", "keep", "source (0 params, 1 updates)", "select (checksum)")
        setup = zip(names, np.asarray(self.delta_setup), self.expected_setup(), strict=True)
        other = [f"{name} {old}, now {new}" for name, old, new in setup if old != new]
        if not other:
            return None
        return (
            f"the snapshots were taken with another track_delta ({'; '.join(other)}) and are not "
            f"read; the ring starts anew at step {int(self.delta_step)}"
        )

    def _number(self, lag: int) -> Int[Array, ""]:
        """How many snapshots came before the one for `lag`; negative if there is none."""
        newest = jnp.maximum(self.delta_step - 1, -1) // self.every
        return newest - (lag // self.every - 1)


class Delta(NamedTuple):
    """How far the parameters moved.

    Attributes:
        tree: ΔW in float32, structured like the parameters, `optax.MaskedNode` where not tracked.
        age: Steps that ΔW spans, int32: the lag at a multiple of `every`; 0 (and a zero tree)
            until a snapshot that old exists.
    """

    tree: PyTree
    age: Int[Array, ""]


def find_state(opt_state: PyTree) -> TrackDeltaState:
    """The one `TrackDeltaState` inside an optimizer state, however deeply wrapped.

    Its `delta_step` is the number of updates applied, which a step counter of the caller's should
    equal: the ring knows no other.

    Raises:
        ValueError: There is none, or there are several.
    """
    is_state = lambda x: isinstance(x, TrackDeltaState)
    nodes = jax.tree.leaves(opt_state, is_leaf=is_state)
    found = [x for x in nodes if is_state(x)]
    if len(found) == 1:
        # Flax NNX keeps every array of an optimizer state in a variable.
        counters = ("delta_step", "delta_start", "delta_setup")
        plain = {name: jax.tree.leaves(getattr(found[0], name))[0] for name in counters}
        return dataclasses.replace(found[0], **plain)
    rings = ", ".join(f"every={x.every} keep={len(x.delta_ring)}" for x in found)
    raise ValueError(
        f"expected one track_delta state in the optimizer state, found {len(found)}"
        + (
            f" ({rings}); pass the part that holds the one you mean"
            if found
            else f" in {_described(opt_state)}; end the chain with it: optax.chain(optimizer, "
            "optax_ext.track_delta()), and pass the state that `tx.init` or `tx.update` returned"
        )
    )


def read_delta(opt_state: PyTree, params: PyTree) -> dict[int, Delta]:
    """ΔW = params − snapshot for every tracked lag: {lag: Delta(tree, age)}.

    Read it before `tx.update`: then at a step that is a multiple of `every` the entry for each lag
    is W_t − W_{t−lag} exactly and its age is the lag. At other steps, with r steps since the last
    multiple, the entry's age is lag − every + r. Jit-able; lags that are not used cost nothing.

    Args:
        opt_state: Optimizer state with one `track_delta` in it.
        params: Current parameters; with source="updates" only their structure is read.

    Raises:
        ValueError: `opt_state` holds no `track_delta` state, or several; a leaf that it tracks is
            not in `params`, or of another shape.

    >>> import jax.numpy as jnp, optax, optax_ext
    >>> tx = optax.chain(optax.sgd(1.0), optax_ext.track_delta(every=1, keep=2))
    >>> params = {"w": jnp.ones((2, 2))}
    >>> state = tx.init(params)
    >>> for _ in range(2):
    ...     updates, state = tx.update({"w": jnp.ones((2, 2))}, state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> deltas = read_delta(state, params)
    >>> {lag: (int(d.age), float(d.tree["w"][0, 0])) for lag, d in deltas.items()}
    {1: (1, -1.0), 2: (2, -2.0)}
    """
    state = find_state(opt_state)
    now = dict(leaves_with_paths(params if state.delta_total is None else state.delta_total))
    _check_leaves(state, dict(leaves_with_paths(params)))
    return {
        lag: Delta(_subtract(params, now, state.snapshot(lag), state.age(lag) > 0), state.age(lag))
        for lag in state.lags
    }


def _check_leaves(state: TrackDeltaState, params: dict[str, Any]) -> None:
    """Raises ValueError unless the parameters have every leaf that the ring holds."""
    for path, held in leaves_with_paths(state.delta_ring[0]):
        if path not in params:
            raise ValueError(
                f"read_delta: the ring holds {path!r} of shape {np.shape(held)}, which is not "
                f"among the parameters: {', '.join([*params][:12])}; pass the tree that `tx.init` "
                "saw, and chain track_delta outside of wrappers that reshape it, such as "
                "optax.flatten"
            )
        if np.shape(params[path]) != np.shape(held):
            raise ValueError(
                f"read_delta: {path} has shape {np.shape(params[path])}, its snapshots have "
                f"{np.shape(held)}; they are of another model, make the state anew with `tx.init`"
            )


def _subtract(params: PyTree, now: dict[str, Any], past: PyTree, valid: Bool[Array, ""]) -> PyTree:
    """Now − past in float32, zero unless `valid`, structured like `params`."""
    then = dict(leaves_with_paths(past))

    def difference(path: str) -> Any:
        if path not in then:
            return optax.MaskedNode()
        new, old = as_float(now[path], "read_delta"), as_float(then[path], "read_delta")
        return jnp.where(valid, new - old, jnp.zeros_like(old))

    paths = [path for path, _ in leaves_with_paths(params)]
    return jax.tree.unflatten(jax.tree.structure(params), [difference(path) for path in paths])


def _described(opt_state: PyTree) -> str:
    """The type of an optimizer state, and of its parts if it is a chain."""
    name = type(opt_state).__name__
    if type(opt_state) is not tuple:
        return name
    return f"a chain of {', '.join(_described(part) for part in opt_state) or 'nothing'}"
