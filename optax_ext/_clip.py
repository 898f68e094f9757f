"""`qk_clip`: shrinks the query and key weights of heads whose attention logits grow too large.

Clipping of updates is Optax's own: `optax.clip_by_global_norm`, and `optax.clip_by_block_rms`
after `optax.scale_by_adam` bounds each update's root mean square.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from optax_ext._matrix_view import MatrixView
from optax_ext._patterns import rules_for
from optax_ext._selection import find_matrices
from stabmon.layout import Layout, find_layout


class QKClipState(NamedTuple):
    """State of `qk_clip`.

    Attributes:
        qk_clip_count: How often each head was clipped.
        qk_clip_last: γ of each head at the last step, 1 where it was not clipped.
    """

    qk_clip_count: Int[Array, "layers heads"]
    qk_clip_last: Float[Array, "layers heads"]


def qk_clip(
    threshold: float = 100.0, *, layout: Layout | None = None
) -> optax.GradientTransformationExtraArgs:
    """Scales W_q and W_k of a head so that its largest attention logit falls to the threshold.

    For each head, with S its largest logit of the step that gave the gradients,

        γ = min(1, threshold/S),    W_q ← √γ W_q,    W_k ← √γ W_k,

    as updates target − params, after the base optimizer's update. With shared kv heads the key
    takes √γ of the group's smallest γ and each query γ/√γ_min, so each pair is scaled by its own γ
    and a healthy head keeps its product. A logit that is zero, negative or not finite clips
    nothing. While no head is above the threshold, updates pass through bit for bit. Without effect
    where queries and keys are normalised.

    Place in the chain: after the base optimizer, before `msign` and `track_delta`. The largest
    logits come as an extra argument:

        tx.update(grads, state, params, max_attention_logits=logits)    float32, layers × heads

    Args:
        threshold: Largest logit allowed, > 0.
        layout: Where queries and keys lie. None: `stabmon.find_layout(params)`.

    Returns:
        A transform whose state is `QKClipState`.

    Raises:
        ValueError: `threshold` is not positive; the layout finds no queries and keys of their own;
            in `update`, `params` or the logits are missing or of another shape.

    >>> kernel = {"kernel": jnp.ones((1, 4, 2, 2))}
    >>> params = {"layers": {"attn": {"q": kernel, "k": kernel}}}
    >>> tx = qk_clip(threshold=50.0)
    >>> zero = jax.tree.map(jnp.zeros_like, params)
    >>> logits = jnp.array([[200.0, 10.0]])
    >>> updates, state = tx.update(zero, tx.init(params), params, max_attention_logits=logits)
    >>> updates["layers"]["attn"]["q"]["kernel"][0, 0, :, 0].tolist()
    [-0.5, 0.0]

    References:
        arXiv 2507.20534 (MuonClip, section 2.1).
    """
    if not threshold > 0:
        raise ValueError(f"qk_clip: expected threshold > 0, got {threshold}")

    def init_fn(params):
        shape = _shape(params, layout)
        state: Any = QKClipState(jnp.zeros(shape, jnp.int32), jnp.ones(shape, jnp.float32))
        return state

    def update_fn(updates, state, params=None, max_attention_logits=None, **extra_args):
        del extra_args
        if params is None or max_attention_logits is None:
            raise ValueError(
                "qk_clip: call update(updates, state, params, max_attention_logits=…) with the "
                "largest logit of each head, layers × heads"
            )
        shape = state.qk_clip_last.shape
        if max_attention_logits.shape != shape:
            raise ValueError(
                f"qk_clip: max_attention_logits has shape {max_attention_logits.shape}, expected "
                f"(layers, heads) = {shape}"
            )
        logits = max_attention_logits.astype(jnp.float32)
        above = jnp.isfinite(logits) & (logits > threshold)
        gamma = jnp.where(above, threshold / jnp.where(above, logits, 1), 1)
        leaves, structure = jax.tree.flatten(updates)
        weights = structure.flatten_up_to(params)
        factors = _factors(params, layout, gamma)
        held = [leaves[view.index] for view, _ in factors]

        def clip(held):
            clipped = []
            for (view, factor), u in zip(factors, held, strict=True):
                p = weights[view.index]
                exact = jnp.promote_types(p.dtype, jnp.float32)
                p, u32 = view.split(p).astype(exact), view.split(u).astype(exact)
                scale = factor.astype(exact)[:, None, None]
                new = jnp.where(scale == 1, u32, scale * (p + u32) - p)
                clipped.append(view.join(new).astype(u.dtype))
            return clipped

        held = jax.lax.cond(jnp.any(above), clip, lambda held: held, held)
        for (view, _), leaf in zip(factors, held, strict=True):
            leaves[view.index] = leaf
        new_state: Any = QKClipState(state.qk_clip_count + above, gamma)
        return jax.tree.unflatten(structure, leaves), new_state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _heads(params: PyTree, layout: Layout | None, role: str) -> list[tuple[MatrixView, int | None]]:
    """The heads of queries or keys, with the layer of a leaf that holds one layer."""
    layout = find_layout(params) if layout is None else layout
    found = []
    for view in find_matrices(params, role, layout, per_head=True):
        rule = rules_for(view.path, layout)[0]
        found.append((view, rule.layer(view.path) if "*" in rule.path else None))
    return found


def _shape(params: PyTree, layout: Layout | None) -> tuple[int, int]:
    """Number of layers and of query heads; (0, 0) without leaves."""
    if not jax.tree.leaves(params):
        return 0, 0
    heads = _heads(params, layout, "q")
    (view, layer), *_ = heads
    if layer is None:
        return view.stack[0], view.count // view.stack[0]
    return len(heads), view.count


def _factors(
    params: PyTree, layout: Layout | None, gamma: Float[Array, "layers heads"]
) -> list[tuple[MatrixView, Float[Array, " matrices"]]]:
    """What each head of each query and key leaf is multiplied by."""
    layers, heads = gamma.shape
    keys = _heads(params, layout, "k")
    shared = sum(view.count for view, _ in keys) // layers
    least = jnp.min(gamma.reshape(layers, shared, heads // shared), axis=-1)
    by_key = jnp.sqrt(least)
    by_query = gamma / jnp.repeat(by_key, heads // shared, axis=1)
    factors = []
    for role, factor in ((_heads(params, layout, "q"), by_query), (keys, by_key)):
        numbers = sorted(layer for _, layer in role if layer is not None)
        for view, layer in role:
            own = factor if layer is None else factor[numbers.index(layer)]
            factors.append((view, own.reshape(-1)))
    return factors
