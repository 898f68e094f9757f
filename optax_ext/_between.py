"""`track_worst`: a transform that remembers the worst of the steps between two samples.

It changes no update. What it remembers is in the next sample of the monitor's symptoms
(`stabmon.monitor.between`).
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from stabmon.monitor.between import TrackWorstState
from stabmon.monitor.tiers import numbers, squares_by_leaf


def track_worst(
    every: int = 10, *, of: str = "update", loss: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Remembers the largest norm since the last sample, and counts the steps that are not finite.

    The monitor looks at one step in `every`; a spike or a NaN that a skipped step swallows in
    between is then in no sample. With this in the chain it is in the next one, as
    `symptoms/global/worst_grad_norm` (or `worst_update_norm`), `nonfinite_steps`, `worst_loss`.
    Updates pass through untouched. Costs one norm a step, which XLA shares with a clipping by it.

    Place in the chain: first for gradients, last for updates. A wrapper that skips steps, such as
    `skip_spikes`, hides from what it wraps the steps that it skips: chain it outside of that, or
    rely on the wrapper's own count, which the monitor reads as `skipped`.

    Args:
        every: Steps between samples, at least the monitor's `symptoms`.
        of: What it sees in its place of the chain, "grad" or "update".
        loss: Whether to track the loss too, given as `tx.update(…, value=loss)`.

    Returns:
        A transform whose state is `stabmon.monitor.between.TrackWorstState`.

    Raises:
        ValueError: `every` is below 1, `of` is unknown; in `update`, `loss` without a `value`.

    >>> import jax.numpy as jnp, optax
    >>> tx = optax.chain(track_worst(every=10, of="grad"), optax.sgd(0.1))
    >>> state = tx.init(jnp.zeros(2))
    >>> for g in (1.0, 8.0, jnp.nan, 2.0):
    ...     _, state = tx.update(jnp.array([g, 0.0]), state)
    >>> print(state[0].worst_norm, state[0].worst_broken)
    [8. 0.] 1
    """
    if every < 1:
        raise ValueError(f"track_worst: expected every >= 1, got {every}")
    if of not in ("grad", "update"):
        raise ValueError(f"track_worst: of is 'grad' or 'update', got {of!r}")

    def init_fn(params):
        del params
        state: Any = TrackWorstState(
            worst_step=jnp.zeros((), jnp.int32),
            worst_broken=jnp.zeros((), jnp.int32),
            worst_norm=jnp.zeros(2, jnp.float32),
            worst_loss=jnp.zeros(2, jnp.float32) if loss else None,
            every=every,
            of=of,
        )
        return state

    def update_fn(updates, state, params=None, *, value=None, **extra_args):
        del params, extra_args
        if loss and value is None:
            raise ValueError(
                "track_worst: loss=True, but `update` got no value; call "
                "tx.update(grads, state, params, value=loss)"
            )
        norm = jnp.sqrt(jnp.sum(squares_by_leaf(numbers(updates))))
        begins = state.worst_step % every == 0
        finite, worst_loss = jnp.isfinite(norm), None
        if loss:
            now = jnp.asarray(value, jnp.float32).reshape(())
            finite = finite & jnp.isfinite(now)
            worst_loss = _worst(state.worst_loss, now, begins)
        new_state: Any = replace(
            state,
            worst_step=optax.safe_increment(state.worst_step),
            worst_broken=state.worst_broken + (~finite).astype(jnp.int32),
            worst_norm=_worst(state.worst_norm, norm, begins),
            worst_loss=worst_loss,
        )
        return updates, new_state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _worst(held: jax.Array, now: jax.Array, begins: jax.Array) -> jax.Array:
    """The largest finite value of this window and of the one before it."""
    finite = jnp.isfinite(now)
    seen = jnp.where(finite, now, jnp.zeros_like(now))
    window = jnp.where(begins, seen, jnp.maximum(held[0], seen))
    return jnp.stack([window, jnp.where(begins, held[0], held[1])])
