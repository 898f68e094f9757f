"""`skip_spikes`: leaves out steps whose gradient spikes or is not finite.

For non-finite gradients alone there is `optax.apply_if_finite`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree


class SkipSpikesState(NamedTuple):
    """State of `skip_spikes`.

    Attributes:
        skip_seen: Accepted steps.
        skip_mean: Moving average of the gradient norm over accepted steps.
        skip_variance: Moving average of its squared deviation.
        skip_consecutive: Steps skipped in a row up to now.
        skip_total: Steps skipped in all.
        skip_inner: State of the wrapped optimizer.
    """

    skip_seen: Int[Array, ""]
    skip_mean: Float[Array, ""]
    skip_variance: Float[Array, ""]
    skip_consecutive: Int[Array, ""]
    skip_total: Int[Array, ""]
    skip_inner: PyTree


def skip_spikes(
    inner: optax.GradientTransformation,
    threshold: float = 6.0,
    *,
    decay: float = 0.97,
    warmup: int = 100,
    max_consecutive: int = 5,
) -> optax.GradientTransformationExtraArgs:
    """Leaves out steps whose gradient norm spikes or is not finite.

    A step is a spike if z = (norm − mean)/√variance > threshold, mean and variance being moving
    averages over accepted steps, and `warmup` of those have been seen. A skipped step emits zero
    updates and leaves the optimizer's state as it was. After `max_consecutive` skips in a row a
    finite gradient is accepted whatever its norm, and enters the averages; one that is not finite
    never is, so watch `skip_consecutive` and stop. For non-finite gradients alone Optax has
    `optax.apply_if_finite`; note that it lets them in after its limit.

    Args:
        inner: Optimizer to wrap, the whole chain.
        threshold: Largest z accepted, > 0.
        decay: Of the moving averages, in (0, 1).
        warmup: Accepted steps before spikes are looked for, at least 1.
        max_consecutive: Spikes skipped in a row at most, at least 0.

    Returns:
        A transform whose state is `SkipSpikesState`.

    Raises:
        ValueError: An argument is out of range.

    >>> tx = skip_spikes(optax.sgd(1.0))
    >>> updates, state = tx.update(jnp.array([jnp.nan]), tx.init(jnp.zeros(1)))
    >>> updates.tolist(), int(state.skip_total)
    ([0.0], 1)

    References:
        ZClip, arXiv 2504.02507 (z-score of the gradient norm against moving averages).
    """
    if not threshold > 0 or not 0 < decay < 1:
        raise ValueError(
            f"skip_spikes: expected threshold > 0 and decay in (0, 1), got {threshold} and {decay}"
        )
    if warmup < 1 or max_consecutive < 0:
        raise ValueError(
            "skip_spikes: expected warmup >= 1 and max_consecutive >= 0, got "
            f"{warmup} and {max_consecutive}"
        )
    inner = optax.with_extra_args_support(inner)

    def init_fn(params):
        count, number = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
        fresh = lambda x: jnp.copy(x)
        state: Any = SkipSpikesState(
            count, number, fresh(number), fresh(count), fresh(count), inner.init(params)
        )
        return state

    def update_fn(updates, state, params=None, **extra_args):
        norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), updates))
        accepted = _accepts(norm, state, threshold, warmup, max_consecutive)
        new_updates, new_inner = inner.update(updates, state.skip_inner, params, **extra_args)
        pick = lambda new, old: jnp.where(accepted, new, old)
        new_updates = jax.tree.map(lambda u: pick(u, jnp.zeros_like(u)), new_updates)
        first = state.skip_seen == 0
        mean = jnp.where(first, norm, decay * state.skip_mean + (1 - decay) * norm)
        square = jnp.square(norm - state.skip_mean)
        variance = jnp.where(first, 0, decay * state.skip_variance + (1 - decay) * square)
        skipped = (~accepted).astype(jnp.int32)
        new_state: Any = SkipSpikesState(
            skip_seen=pick(optax.safe_increment(state.skip_seen), state.skip_seen),
            skip_mean=pick(mean, state.skip_mean),
            skip_variance=pick(variance, state.skip_variance),
            skip_consecutive=jnp.where(accepted, 0, state.skip_consecutive + 1),
            skip_total=state.skip_total + skipped,
            skip_inner=jax.tree.map(pick, new_inner, state.skip_inner),
        )
        return new_updates, new_state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _accepts(
    norm: Float[Array, ""],
    state: SkipSpikesState,
    threshold: float,
    warmup: int,
    max_consecutive: int,
) -> Bool[Array, ""]:
    """Whether a step is taken."""
    spread = jnp.sqrt(jnp.maximum(state.skip_variance, 0))
    spike = norm - state.skip_mean > threshold * spread
    spike = spike & (state.skip_seen >= warmup) & (state.skip_consecutive < max_consecutive)
    return jnp.isfinite(norm) & ~spike
