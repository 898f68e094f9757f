"""What the tiers measure on a forward pass: attention, activations, routing, by layer and head.

Each function takes checked intermediates (`intermediates.py`) and returns {metric: (L, N), (L,) or
scalar}. Formulas live in `metrics/`; what is measured on parameters alone is in `tiers.py`.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, PyTree

from stabmon.layout import Layout
from stabmon.linalg.checks import as_float
from stabmon.linalg.mesh import divided_along
from stabmon.metrics.activations import grade, layer_correlation, rank_ratio, sample_tokens
from stabmon.metrics.attention import sharp_head_fraction
from stabmon.metrics.expert_load import balance_gradient_ratio, expert_load, topk_margin
from stabmon.metrics.router import router_conditioning, router_similarity, router_z, routing_entropy
from stabmon.monitor.tiers import Metrics

_LARGEST_RANK = 32  # `rank_ratio`'s own k


def activation_tier(
    intermediates: Mapping[str, Array], tokens: int, sharp: float | int
) -> dict[str, Metrics]:
    """The attention and the activation monitor, each as far as its arrays are there.

    Attention: entropy in nats, largest logit, sink mass and repeated maxima of every head, and the
    fraction of heads with less than `sharp` nats. Activations: rank ratio and grade of the
    residual stream after every layer, on at most `tokens` tokens of those that count.
    """
    names = {
        "attention_entropy": "entropy",
        "max_attention_logit": "max_logit",
        "sink_mass": "sink_mass",
        "repeated_maximum": "repeated_maximum",
    }
    attention = {new: intermediates[old] for old, new in names.items() if old in intermediates}
    if "entropy" in attention:
        fraction = jax.vmap(lambda entropy: sharp_head_fraction(entropy, sharp))
        attention["sharp_heads"] = fraction(attention["entropy"])
    activations, mask = {}, intermediates.get("mask")
    if "residual" in intermediates:
        residual = intermediates["residual"]
        streams = _streams(residual, mask, tokens)
        ratio = _rank_ratios(streams, mask)
        activations = {"rank_ratio": ratio, "grade": grade(ratio).astype(jnp.float32)}
        if residual.ndim == 4:
            activations["context"] = jnp.asarray(float(residual.shape[2]))
            activations |= segment_metrics(residual, tokens, mask)
        if residual.shape[0] > 1:
            activations["layer_correlation"] = layer_correlation(_for_correlation(streams, mask))
        activations |= repeated_tokens(intermediates)
    return {"attention": attention, "activations": activations}


def repeated_tokens(intermediates: Mapping[str, Array]) -> Metrics:
    """The share of the most frequent token id, in [0, 1]: padding, where it is most of a batch.

    Nothing where a mask is given, or no token ids: how alike activations are does not tell it,
    since a young model's tokens are alike.
    """
    if "mask" in intermediates or "tokens" not in intermediates:
        return {}
    ids = jnp.sort(intermediates["tokens"].reshape(-1))
    last = jnp.searchsorted(ids, ids, side="right") - jnp.searchsorted(ids, ids, side="left")
    return {"repeated_tokens": (jnp.max(last) / ids.size).astype(jnp.float32)}


def _streams(
    residual: Float[Array, "L ... D"], mask: Bool[Array, "B T"] | None, limit: int
) -> Float[Array, "L rows D"]:
    """At most `limit` tokens of each layer, evenly spaced over those that the mask counts.

    Where fewer count, the rows that are left over are zero: they change no singular value.
    """
    if mask is None:
        return jax.vmap(lambda x: sample_tokens(x, limit))(residual)
    rows = rearrange(as_float(residual, "residual"), "l ... d -> l (...) d")
    flat = mask.reshape(-1)
    count, most = jnp.sum(flat, dtype=jnp.int32), min(limit, flat.size)
    place = jnp.arange(most, dtype=jnp.int32)
    spread = jnp.where(count > most, (2 * place + 1) * count // (2 * most), place)
    chosen = jnp.argsort(~flat, stable=True)[spread]
    there = (place < count)[None, :, None]
    return jnp.where(there, rows[:, chosen], jnp.zeros((), rows.dtype))


def _rank_ratios(
    streams: Float[Array, "L rows D"], mask: Bool[Array, "..."] | None = None
) -> Float[Array, " L"]:
    """Rank ratio of each layer; of rows and D the longer axis is divided over the devices.

    Over the largest rank that the tokens which count can have; 1 where none does.
    """
    _, rows, width = streams.shape
    ratio = jax.vmap(rank_ratio)(divided_along(streams, 1 if rows > width else 2))
    if mask is None:
        return ratio
    most = min(rows, width, _LARGEST_RANK)
    count = jnp.clip(jnp.sum(mask, dtype=jnp.int32), 1, most)
    return jnp.minimum(ratio * (most / count).astype(ratio.dtype), jnp.ones_like(ratio))


def _for_correlation(
    streams: Float[Array, "L rows D"], mask: Bool[Array, "B T"] | None
) -> Float[Array, "L rows D"]:
    """The same with the layer's mean in the rows that are left over: they then weigh nothing."""
    if mask is None:
        return streams
    _, rows, width = streams.shape
    count = jnp.minimum(jnp.sum(mask, dtype=jnp.int32), rows)
    total = jnp.sum(streams, axis=(1, 2), keepdims=True)
    mean = total / jnp.maximum(count * width, 1).astype(streams.dtype)
    there = jnp.arange(rows, dtype=count.dtype) < count
    return jnp.where(there[None, :, None], streams, mean)


def segment_metrics(
    residual: Float[Array, "L B T D"], tokens: int, mask: Bool[Array, "B T"] | None = None
) -> Metrics:
    """Rank ratio of the residual stream in the front and the back half of the context, (L,)."""
    _, batch, context, _ = residual.shape
    if context < 2:
        return {}
    stride = min(max(1, batch * context // tokens), context // 2)
    half = -(-context // stride) // 2
    halves = jnp.split(residual[:, :, ::stride], [half], axis=2)
    counted = (None, None) if mask is None else jnp.split(mask[:, ::stride], [half], axis=1)
    front, back = (
        _rank_ratios(_streams(x, part, batch * context), part)
        for x, part in zip(halves, counted, strict=True)
    )
    return {"rank_ratio_front": front, "rank_ratio_back": back}


def router_metrics(
    layout: Layout,
    params: PyTree,
    intermediates: Mapping[str, Array],
    top_k: int,
    balance_weight: float | int,
) -> Metrics:
    """Router geometry from the weights; entropy, load and margins from the logits if given.

    With the language-model gradient of the mean expert probabilities, also how much of it the
    load-balance loss, at its weight, comes to. Probabilities serve for logits, but for the z-loss.
    """
    out = {}
    weights = layout.collect(params, ("router",)).get("router")
    if weights is not None:
        experts = weights.shape[1]
        out["similarity"] = jax.vmap(lambda w: router_similarity(w, experts=experts))(weights)
        out["conditioning"] = jax.vmap(lambda w: router_conditioning(w, experts=experts))(weights)
    if "dropped" in intermediates:
        out["dropped"] = intermediates["dropped"]
    logits = _logits(intermediates)
    if logits is None:
        return out
    mask = intermediates.get("mask")
    counted = None if mask is None else mask.reshape(-1)
    out["entropy"] = jax.vmap(lambda z: routing_entropy(z, counted))(logits)
    if "router_logits" in intermediates:
        out["z"] = jax.vmap(lambda z: router_z(z, counted))(logits)
    load = jax.vmap(lambda z: expert_load(z, top_k, counted))(logits)
    out |= {
        name: jnp.asarray(getattr(load, name), jnp.float32)
        for name in ("max_violation", "dead", "effective_experts", "margin")
    }
    margin = jax.vmap(lambda z: topk_margin(z, top_k, counted))(logits)
    out |= {"margin_p10": margin.p10, "margin_p01": margin.p01}
    if "router_lm_gradient" in intermediates:
        ratio = lambda z, grad: balance_gradient_ratio(z, top_k, grad, balance_weight, counted)
        out["balance_ratio"] = jax.vmap(ratio)(logits, intermediates["router_lm_gradient"])
    return out | repeated_tokens(intermediates)


def _logits(intermediates: Mapping[str, Array]) -> Float[Array, "L tokens E"] | None:
    """Router logits, or the logarithms of the probabilities, which differ by a shift a token.

    A probability of 0 counts as the smallest number that there is.
    """
    if "router_logits" in intermediates:
        logits = intermediates["router_logits"]
    elif "router_probabilities" in intermediates:
        p = as_float(intermediates["router_probabilities"], "router_probabilities")
        logits = jnp.log(jnp.maximum(p, jnp.finfo(p.dtype).tiny))
    else:
        return None
    return rearrange(logits, "l ... e -> l (...) e")
