"""What happened at the steps between two samples, as optimizer state holds it.

The state that `optax_ext.track_worst` fills lives here, so that the monitor can read it without
depending on the transform; so does the reading of what optimizers that skip steps count themselves.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

# Where wrappers that leave out steps keep their number: ours, and Optax's `apply_if_finite`.
_SKIPPED = ("skip_total", "total_notfinite")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrackWorstState:
    """State of `optax_ext.track_worst`.

    Attributes:
        worst_step: Updates seen so far, int32 scalar.
        worst_broken: Those among them that were not finite, int32 scalar.
        worst_norm: Largest finite norm since the last multiple of `every`, and in the `every` steps
            before it, float32 (2,).
        worst_loss: The same of the loss, None where it is not tracked.
        every: Steps between samples; static.
        of: What is seen, "grad" or "update"; static.

    The fields are annotated loosely: JAX rebuilds the state around shapes and placeholders too.
    """

    worst_step: Any
    worst_broken: Any
    worst_norm: Any
    worst_loss: Any
    every: int = dataclasses.field(metadata={"static": True})
    of: str = dataclasses.field(metadata={"static": True})


def between_metrics(opt_state: PyTree, every: int) -> dict[str, Float[Array, ""]]:
    """What optimizer state tells of the steps since the last sample, as far as it tells.

    `skipped` and `nonfinite_steps` count from the beginning of the run; `worst_…` is the largest
    value of at least the last `every` steps, and of at most twice as many, so that steps which an
    optimizer skips open no gap. It is left out where the transform looks back less far.

    Raises:
        ValueError: Two `track_worst` see the same.
    """
    is_state = lambda x: isinstance(x, TrackWorstState)
    out: dict[str, Any] = {}
    nodes, _ = jax.tree_util.tree_flatten(opt_state, is_leaf=is_state)
    for state in filter(is_state, nodes):
        if (name := f"worst_{state.of}_norm") in out:
            raise ValueError(f"two track_worst(of={state.of!r}) in the optimizer state; keep one")
        broken = _array(state.worst_broken)
        out["nonfinite_steps"] = jnp.maximum(out.get("nonfinite_steps", broken), broken)
        if state.every < every:
            continue
        out[name] = jnp.max(_array(state.worst_norm))
        if state.worst_loss is not None:
            out["worst_loss"] = jnp.max(_array(state.worst_loss))
    skipped = list(_skipped(opt_state))
    if skipped:
        out["skipped"] = jnp.sum(jnp.stack(skipped))
    return {name: x.astype(jnp.float32) for name, x in out.items()}


def _array(x: Any) -> Array:
    """An array of the state; Flax NNX keeps each in a variable."""
    return jax.tree.leaves(x)[0]


def _skipped(opt_state: PyTree) -> list[Array]:
    """The numbers of skipped steps that the state's wrappers keep."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(opt_state)
    named = lambda path: {getattr(step, "name", None) for step in path}
    return [x for path, x in leaves if named(path) & {*_SKIPPED}]
