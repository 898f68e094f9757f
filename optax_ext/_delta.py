"""`track_delta`: a transform that keeps a few past parameters in optimizer state.

It changes no update. Reading the differences is `stabmon.read_delta`; measuring them is
`stabmon.Monitor`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from stabmon.layout import Select, leaves_with_paths, selection
from stabmon.monitor.snapshots import TrackDeltaState


def track_delta(
    every: int = 50,
    keep: int = 4,
    select: Select = None,
    source: str = "params",
    *,
    memory_kind: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Keep snapshots of the parameters, one each `every` steps, the newest `keep` of them.

    Updates pass through untouched. With the default, lags of 50, 100, 150 and 200 steps can be
    read at each multiple of 50: a long lag, looked at often. Memory: `keep` copies of the selected
    leaves, sharded like them. Between snapshots nothing is computed or copied.

    Place in the chain: last, after everything that changes the update, `msign` included. Inside
    `optax.MultiSteps` steps are counted by applied updates. A state restored into a chain with
    another `every`, `keep`, `select` or `source` is not misread: the ring starts anew (see
    `TrackDeltaState.conflict`).

    Args:
        every: Steps between snapshots, at least 1.
        keep: Snapshots kept, at least 1; the longest lag is keep·every.
        select: Which leaves: None for all real floating-point leaves, a regular expression on the
            path, a predicate (path, leaf), or a tree of booleans. See `stabmon.layout.selection`.
        source: "params" snapshots the parameters as they are before the update. "updates" sums the
            updates in float32 instead: bfloat16 parameters swallow changes below 2⁻⁹|w|, the sum
            does not (one more float32 copy of the selected leaves and one addition a step).
        memory_kind: "pinned_host" keeps the ring in host memory, where the backend has that: it is
            written once in `every` steps, and a place is fetched when its lag is read. None: beside
            the parameters.

    Returns:
        A transform whose state is `stabmon.monitor.snapshots.TrackDeltaState`.

    Raises:
        ValueError: `every` or `keep` is below 1, `source` or `memory_kind` is unknown; in `init`,
            `select` matches nothing or a leaf that is not floating-point, or the backend has no
            such memory; in `update`, `params` is None or the state is of another transform.

    >>> import jax.numpy as jnp, optax
    >>> tx = optax.chain(optax.adamw(1e-3), track_delta(every=10, keep=2, select="attn"))
    >>> state = tx.init({"attn": jnp.ones((4, 4)), "norm": jnp.ones(4)})
    >>> state[-1].lags
    (10, 20)

    References:
        arXiv 2606.28116 watches the accumulated update over a lag (Eq. 1).
    """
    for name, value in (("every", every), ("keep", keep)):
        if value < 1:
            raise ValueError(f"track_delta: expected {name} >= 1, got {value}")
    if source not in ("params", "updates"):
        raise ValueError(f"track_delta: source is 'params' or 'updates', got {source!r}")

    if memory_kind not in (None, "pinned_host"):
        raise ValueError(f"track_delta: memory_kind is None or 'pinned_host', got {memory_kind!r}")

    def held(tree):
        """The tree in the memory of the ring."""
        return tree if memory_kind is None else jax.device_put(tree, jax.memory.Space.Host)

    def pick(tree, like):
        """The selected leaves of `tree`, `optax.MaskedNode` elsewhere."""
        mask = selection(like, select)
        return jax.tree.map(lambda keep_it, x: x if keep_it else optax.MaskedNode(), mask, tree)

    def init_fn(params):
        _check_memory(memory_kind)
        chosen = pick(params, params)
        _check_leaves(chosen)
        zeros = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.result_type(x)), chosen)
        total = None
        if source == "updates":
            zeros = jax.tree.map(lambda x: x.astype(jnp.float32), zeros)
            total = zeros
        count = jnp.zeros((), jnp.int32)
        state = TrackDeltaState(
            delta_step=count,
            delta_start=jnp.copy(count),
            delta_setup=count,
            delta_ring=tuple(held(jax.tree.map(jnp.copy, zeros)) for _ in range(keep)),
            delta_total=total,
            every=every,
            memory_kind=memory_kind,
        )
        begun: Any = dataclasses.replace(state, delta_setup=jnp.asarray(state.expected_setup()))
        return begun

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        if params is None:
            raise ValueError(
                "track_delta: `update` got params=None; call tx.update(grads, state, params)"
            )
        _check_form(state, keep, source)
        # What was pickled brings the cadence of its own chain.
        state = dataclasses.replace(state, every=every, memory_kind=memory_kind)
        now = pick(params, params) if source == "params" else state.delta_total
        cast = lambda x, like: jnp.asarray(x, like.dtype)
        taken = lambda old: held(jax.tree.map(cast, now, old))
        boundary = state.delta_step % every == 0
        place = state.delta_step // every % keep
        # One conditional for each place of the ring: XLA then hands the untouched places through.
        # A single one that shifted the ring would copy all of it on every step.
        ring = tuple(
            jax.lax.cond(boundary & (place == i), taken, lambda old: old, old)
            for i, old in enumerate(state.delta_ring)
        )
        total = state.delta_total
        if total is not None:
            total = jax.tree.map(
                lambda u, sum_: sum_ + u.astype(jnp.float32), pick(updates, params), total
            )
        new_state: Any = dataclasses.replace(
            state,
            delta_step=optax.safe_increment(state.delta_step),
            delta_start=state.started(),
            delta_setup=jnp.asarray(state.expected_setup()),
            delta_ring=ring,
            delta_total=total,
        )
        return updates, new_state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_leaves(chosen: PyTree) -> None:
    """Raises ValueError for a selected leaf of which there is no difference in float32."""
    for path, leaf in leaves_with_paths(chosen):
        if not jnp.issubdtype(leaf.dtype if hasattr(leaf, "dtype") else type(leaf), jnp.floating):
            kind = getattr(leaf, "dtype", type(leaf).__name__)
            raise ValueError(
                f"track_delta: {path} is {kind}, only real floating-point leaves have snapshots; "
                "leave it out with select="
            )


def _check_form(state: TrackDeltaState, keep: int, source: str) -> None:
    """Raises ValueError for a state of another transform, as a pickled one may be."""
    there = len(state.delta_ring), "params" if state.delta_total is None else "updates"
    if there != (keep, source):
        raise ValueError(
            f"track_delta: the state is of keep={there[0]}, source={there[1]!r}, the transform of "
            f"keep={keep}, source={source!r}; make a state of its own with `tx.init`"
        )


def _check_memory(kind: str | None) -> None:
    """Raises ValueError where the default backend has no memory of this kind."""
    if kind is None:
        return
    there = [memory.kind for memory in jax.local_devices()[0].addressable_memories()]
    if kind not in there:
        raise ValueError(
            f"track_delta: backend {jax.default_backend()!r} has no memory {kind!r}, it has "
            f"{there}; leave memory_kind out"
        )
