"""Means of recovery that act on a running, already compiled step, through optimizer state.

`scale_by_control` is a learning-rate factor that the host changes, `reset_moments` starts the
optimizer's averages afresh. When to use them is decided by `stabmon.alarms`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree

# Fields of Optax's states that hold averages of gradients: of Adam and its kin, momentum,
# Adafactor, `optax.ema`, and in `optax.contrib` AdEMAMix, D-Adaptation, Prodigy and Momo.
MOMENTS = frozenset(
    {"mu", "nu", "nu_max", "trace", "v_row", "v_col", "ema", "m1", "m2", "exp_avg", "exp_avg_sq"}
)
# What belongs to the averages where it stands beside one: step counts for bias correction, and
# Adafactor's averages of leaves that it does not factor.
COMPANIONS = frozenset({"count", "count_m2", "v"})


class ControlState(NamedTuple):
    """State of `scale_by_control`: the factor in force."""

    control_scale: Float[Array, ""]


def scale_by_control() -> optax.GradientTransformationExtraArgs:
    """Multiplies updates by a factor kept in state, 1 at first, which the host may change.

    Place in the chain: right after the base optimizer, before transforms that set the parameters
    to a target (`msign`, `qk_clip`). A factor of 1 changes no bit.

    Returns:
        A transform whose state is `ControlState`; see `scale_learning_rate`.

    >>> tx = optax.chain(optax.sgd(1.0), scale_by_control())
    >>> state = scale_learning_rate(tx.init(jnp.zeros(2)), 0.5)
    >>> updates, state = tx.update(jnp.ones(2), state)
    >>> updates.tolist()
    [-0.5, -0.5]
    """

    def init_fn(params):
        del params
        state: Any = ControlState(jnp.ones((), jnp.float32))
        return state

    def update_fn(updates, state, params=None, **extra_args):
        del params, extra_args
        scaled = jax.tree.map(lambda u: u * state.control_scale.astype(u.dtype), updates)
        return scaled, state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def scale_learning_rate(opt_state: PyTree, scale: float) -> PyTree:
    """The optimizer state with the factor of `scale_by_control` at `scale`, whatever it was.

    Same structure, shapes, dtypes and placement: a compiled step takes it as it is.

    Args:
        opt_state: State of an optimizer with one `scale_by_control` in it.
        scale: Of the optimizer's own learning rate, 1 for what its schedule says.

    Raises:
        ValueError: There is no `scale_by_control` in the chain, or several, or `scale` is negative
            or not finite.
    """
    if not 0 <= scale < float("inf"):
        raise ValueError(f"scale_learning_rate: expected a finite scale >= 0, got {scale}")
    found = []

    def renew(node):
        if not isinstance(node, ControlState):
            return node
        found.append(node)
        return jax.tree.map(lambda old: _placed(jnp.float32(scale), old), node)

    renewed = jax.tree.map(renew, opt_state, is_leaf=lambda x: isinstance(x, ControlState))
    if len(found) != 1:
        raise ValueError(
            f"scale_learning_rate: found {len(found)} scale_by_control states, expected one; write "
            "optax.chain(optimizer, optax_ext.scale_by_control(), …)"
        )
    return renewed


def reset_moments(opt_state: PyTree, fresh: PyTree) -> PyTree:
    """The optimizer state with the averages of gradients, and their step counts, as fresh ones.

    Averages are the fields `MOMENTS` of NamedTuples, however deep: Adam, Lion, momentum, Adafactor,
    Muon, schedule-free's base, `optax.masked`, `optax.partition`. Schedules, schedule-free's z,
    estimates of a learning rate, snapshots, `msign` and everything else go on as they were.
    Structure, shapes, dtypes and placement stay, so a compiled step takes the result as it is.

    Args:
        opt_state: State of the running optimizer.
        fresh: `tx.init(params)` of the same optimizer.

    Raises:
        ValueError: `fresh` is of another structure, or there is no state with averages.

    >>> tx = optax.adam(1e-3)
    >>> state = tx.init(jnp.zeros(2))
    >>> _, used = tx.update(jnp.ones(2), state)
    >>> int(used[0].count), int(reset_moments(used, state)[0].count)
    (1, 0)
    """
    if jax.tree.structure(opt_state) != jax.tree.structure(fresh):
        raise ValueError(
            "reset_moments: the second argument is of another structure; write "
            "reset_moments(opt_state, tx.init(params)) with the optimizer that made opt_state"
        )
    found = []

    def averages(x: Any) -> bool:
        return bool(MOMENTS.intersection(getattr(x, "_fields", ())))

    def renew(old, new):
        if not averages(old):
            return old
        found.append(old)
        fields = [name for name in old._fields if name in MOMENTS | COMPANIONS]
        pick = lambda name: jax.tree.map(
            lambda a, b: _placed(b, a), getattr(old, name), getattr(new, name)
        )
        return old._replace(**{name: pick(name) for name in fields})

    renewed = jax.tree.map(renew, opt_state, fresh, is_leaf=averages)
    if not found:
        raise ValueError(
            f"reset_moments: no state has a field {', '.join(sorted(MOMENTS))}; make the optimizer "
            "state anew with `tx.init`"
        )
    return renewed


def _placed(new: Array, old: Array) -> Array:
    """`new` with the dtype of `old`, and outside of jit where `old` lies.

    An array that was left to JAX to place is left so: pinning it would compile the step again.
    """
    new = jnp.asarray(new).astype(old.dtype)
    if isinstance(old, Tracer) or not old.committed:
        return new
    return jax.device_put(new, old.sharding)
