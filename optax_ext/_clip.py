"""`qk_clip`: shrinks the query and key weights of heads whose attention logits grow too large.

Clipping of updates is Optax's own: `optax.clip_by_global_norm`, and `optax.clip_by_block_rms`
after `optax.scale_by_adam` bounds each update's root mean square.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from stabmon.layout import Layout, find_layout, leaves_with_paths
from stabmon.linalg.checks import as_float
from stabmon.linalg.mesh import in_auto_mode


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
        ValueError: `threshold` is not positive; the layout finds no queries and keys of their own
            (with latent attention they are products); in `update`, `params` or the logits are
            missing or of another shape.

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
        # Without leaves these are the placeholders of `optax.tree.map_params`.
        shape = _shapes(params, layout)["q"][:2] if jax.tree.leaves(params) else (0, 0)
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
        if jnp.shape(max_attention_logits) != shape:
            raise ValueError(
                f"qk_clip: max_attention_logits has shape {jnp.shape(max_attention_logits)}, "
                f"expected (layers, heads) = {shape}"
            )
        logits = jnp.asarray(max_attention_logits, jnp.float32)
        above = jnp.isfinite(logits) & (logits > threshold)
        gamma = jnp.where(above, threshold / jnp.where(above, logits, 1), 1)
        leaves, structure = jax.tree.flatten(updates)
        weights = structure.flatten_up_to(params)
        is_held = (layout or find_layout(params)).selects("q", "k")
        named = enumerate(leaves_with_paths(params))
        held = {i: leaves[i] for i, (path, p) in named if is_held(path, p)}

        base = {i: jnp.asarray(weights[i]) for i in held}

        def clip(held, base, gamma):
            factors = jax.tree.leaves(_factors(params, layout, gamma))
            return {i: _scaled(factors[i], base[i], u) for i, u in held.items()}

        keep = lambda held, base, gamma: held
        clip = in_auto_mode(clip, held)
        held = jax.lax.cond(jnp.any(above), clip, keep, held, base, gamma)
        for i, leaf in held.items():
            leaves[i] = leaf
        new_state: Any = QKClipState(state.qk_clip_count + above.astype(jnp.int32), gamma)
        return jax.tree.unflatten(structure, leaves), new_state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _collect(params: PyTree, layout: Layout | None) -> tuple[Callable[[PyTree], Any], PyTree]:
    """The map from leaves to the heads of queries and keys, and what it takes."""
    found = find_layout(params) if layout is None else layout
    like = jax.tree.map(lambda p: jax.ShapeDtypeStruct(jnp.shape(p), jnp.float32), params)
    return lambda tree: found.collect(tree, ("q", "k"), fold=False), like


def _shapes(params: PyTree, layout: Layout | None) -> dict[str, tuple[int, ...]]:
    """Shapes of the queries (L, N, D, H) and keys (L, K, D, H)."""
    heads = jax.eval_shape(*_collect(params, layout))
    if heads.keys() != {"q", "k"}:
        raise ValueError(
            "qk_clip: the layout finds no queries and keys of their own, but only "
            f"{[*heads] or 'other matrices'}; pass layout= with rules for 'q' and 'k'"
        )
    return {role: x.shape for role, x in heads.items()}


def _factors(
    params: PyTree, layout: Layout | None, gamma: Float[Array, "layers heads"]
) -> PyTree[Float[Array, "..."]]:
    """What each entry of each leaf is multiplied by: 1 outside of queries and keys."""
    shapes = _shapes(params, layout)
    layers, shared = shapes["k"][:2]
    group = gamma.shape[1] // shared
    by_key = jnp.sqrt(jnp.min(gamma.reshape(layers, shared, group), axis=-1))
    by_query = gamma / jnp.repeat(by_key, group, axis=1)
    # Heads are taken from leaves by a linear map that only moves entries; its transpose puts what
    # belongs to a head, here the factor's distance from 1, back where the head lies.
    excess = {"q": by_query - 1, "k": by_key - 1}
    spread = {role: jnp.broadcast_to(excess[role][..., None, None], shapes[role]) for role in "qk"}
    (placed,) = jax.linear_transpose(*_collect(params, layout))(spread)
    return jax.tree.map(lambda x: 1 + x, placed)


def _scaled(
    factor: Float[Array, "*shape"], p: Float[Array, "*shape"], u: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """The update that leads to factor·(p + u), `u` itself where the factor is 1."""
    p = as_float(p, "qk_clip")
    factor, moved = factor.astype(p.dtype), u.astype(p.dtype)
    return jnp.where(factor == 1, u, (factor * (p + moved) - p).astype(u.dtype))
