"""Past parameters kept in optimizer state, and how to read differences from them.

The state that `optax_ext.track_delta` fills lives here, so that the monitors can read it without
depending on the transform. It knows nothing of what is measured on the differences.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int, PyTree

from stabmon.linalg.checks import as_float


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrackDeltaState:
    """State of `optax_ext.track_delta`; structure, shapes and dtypes are fixed by `init`.

    Attributes:
        delta_step: Updates applied so far, int32 scalar.
        delta_ring: `keep` trees like the parameters, with `optax.MaskedNode` where not selected.
            The parameters of step m·every lie in place m mod keep.
        delta_total: Sum of all updates in float32 for source="updates", else None.
        every: Steps between snapshots; static.
        memory_kind: Memory that the ring lies in; None is the device's own; static.

    The fields are annotated loosely: JAX rebuilds the state around shapes and placeholders too.
    """

    delta_step: Any
    delta_ring: tuple[Any, ...]
    delta_total: Any
    every: int = field(metadata={"static": True})
    memory_kind: str | None = field(default=None, metadata={"static": True})

    @property
    def lags(self) -> tuple[int, ...]:
        """The lags that can be read: every, 2·every, … keep·every."""
        return tuple(self.every * (i + 1) for i in range(len(self.delta_ring)))

    def age(self, lag: int) -> Int[Array, ""]:
        """Steps back to the snapshot that stands for `lag`, int32; 0 if there is none yet."""
        age = self.delta_step - self.every * self._number(lag)
        return jnp.where(self._number(lag) >= 0, age, jnp.zeros_like(age))

    def snapshot(self, lag: int) -> PyTree:
        """The parameters `age(lag)` steps ago; zeros if there is no such snapshot yet."""
        place = jnp.mod(self._number(lag), len(self.delta_ring))
        if self.memory_kind is not None:
            # Of the places in host memory only the one that is wanted comes to the device.
            fetch = lambda tree: lambda: jax.device_put(tree, jax.memory.Space.Device)
            return jax.lax.switch(place, [fetch(tree) for tree in self.delta_ring])
        return jax.tree.map(lambda *places: jax.lax.select_n(place, *places), *self.delta_ring)

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

    Raises:
        ValueError: There is none, or there are several.
    """
    is_state = lambda x: isinstance(x, TrackDeltaState)
    found = [x for x in jax.tree.leaves(opt_state, is_leaf=is_state) if is_state(x)]
    if len(found) != 1:
        raise ValueError(
            f"expected one track_delta state in the optimizer state, found {len(found)}; "
            + (
                "pass the part that holds the one you mean"
                if found
                else "end the chain with it: optax.chain(optimizer, optax_ext.track_delta())"
            )
        )
    return found[0]


def read_delta(opt_state: PyTree, params: PyTree) -> dict[int, Delta]:
    """ΔW = params − snapshot for every tracked lag: {lag: Delta(tree, age)}.

    Read it before `tx.update`: then at a step that is a multiple of `every` the entry for each lag
    is W_t − W_{t−lag} exactly and its age is the lag. At other steps, with r steps since the last
    multiple, the entry's age is lag − every + r. Jit-able; lags that are not used cost nothing.

    Args:
        opt_state: Optimizer state with one `track_delta` in it.
        params: Current parameters; with source="updates" only the state is read.

    Raises:
        ValueError: `opt_state` holds no `track_delta` state, or several.

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
    now = params if state.delta_total is None else state.delta_total
    return {
        lag: Delta(_subtract(now, state.snapshot(lag), state.age(lag) > 0), state.age(lag))
        for lag in state.lags
    }


def _subtract(now: PyTree, past: PyTree, valid: Bool[Array, ""]) -> PyTree:
    """Now − past in float32, zero unless `valid`, masked like `past`."""

    def difference(old, new):
        if isinstance(old, optax.MaskedNode):
            return old
        new, old = as_float(new, "read_delta"), as_float(old, "read_delta")
        return jnp.where(valid, new - old, jnp.zeros_like(old))

    is_masked = lambda x: isinstance(x, optax.MaskedNode)
    return jax.tree.map(difference, past, now, is_leaf=is_masked)
