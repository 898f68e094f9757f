"""What each tier of the monitor measures on a whole tree, as arrays over layers and heads.

Each function takes matrices already collected onto canonical axes (`layout.py`) and returns
{metric: (L, N), (L,) or scalar}. Formulas live in `metrics/`; cadence and gating in `monitor.py`.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax
from einops import rearrange
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PyTree

from stabmon.layout import CANONICAL, Layout
from stabmon.metrics.activations import (
    grade,
    layer_correlation,
    rank_ratio,
    sample_tokens,
    segment_rank_ratio,
)
from stabmon.metrics.expert_load import expert_load, topk_margin
from stabmon.metrics.jacobian import JacobianStats
from stabmon.metrics.power import power_norm
from stabmon.metrics.qk import increment_spectra
from stabmon.metrics.router import (
    router_conditioning,
    router_similarity,
    router_z,
    routing_entropy,
)
from stabmon.metrics.spectrum import singular_values, spectrum_stats
from stabmon.metrics.symptoms import norm
from stabmon.metrics.updates import outliers_of_spectrum, radial_alignment

Metrics = dict[str, Array]

WORST_IS_HIGH = frozenset(
    {
        "similarity",
        "layer_correlation",
        "norm",
        "forward",
        "reversed",
        "query/outliers",
        "query/excess",
        "key/outliers",
        "key/excess",
        "max_violation",
        "dead",
        "z",
        "max_logit",
        *(f"{role}/norm" for role in CANONICAL),
        *(f"{role}/spectral_norm" for role in CANONICAL),
        *(f"{role}/{tree}_norm" for role in CANONICAL for tree in ("grad", "update")),
        *(f"{role}/radial_alignment" for role in "qk"),
        *(f"{name}/norm" for name in ("delta1", "delta2", "delta3", "query", "key")),
        *(f"{name}/spectral_norm" for name in ("delta1", "delta2", "delta3", "query", "key")),
    }
)
_STATS = ("modes", "effective_rank", "stable_rank", "norm", "spectral_norm")


def delta_metrics(layout: Layout, params: PyTree, delta: PyTree) -> Metrics:
    """Spectra of Δ1, Δ2, Δ3, dW_q and dW_k of every head, and the radial alignment of q and k.

    `delta` is the difference over one lag, structured like `params`. Entropies are divided by
    ln(rank bound), so that they compare across head sizes.
    """
    now, moved = layout.difference(params, delta, ("q", "k", "router"))
    for role in ("q", "k"):
        if role not in moved:
            raise ValueError(
                f"the delta tier needs ΔW of role {role!r}, which track_delta does not keep; "
                "select it: track_delta(select=layout.selects('qk', 'router'))"
            )
    q, k, dq, dk = now["q"], now["k"], moved["q"], moved["k"]
    heads, groups = q.shape[1], k.shape[1]
    if heads % groups:
        raise ValueError(f"{heads} query heads do not divide over {groups} kv heads")
    share = lambda x: jnp.repeat(x.astype(jnp.float32), heads // groups, axis=1)
    q, k, dk = q.astype(jnp.float32), share(k), share(dk)
    spectra = jax.vmap(jax.vmap(increment_spectra))(q - dq, k - dk, dq, dk)
    bound = {"delta1": 2, "delta2": 2, "delta3": 1, "query": 1, "key": 1}
    out = {}
    for name, sigma in spectra._asdict().items():
        stats = jax.vmap(jax.vmap(spectrum_stats))(sigma)
        rank = min(bound[name] * q.shape[3], q.shape[2])
        out[f"{name}/entropy"] = stats.entropy / jnp.log(float(max(rank, 2)))
        out |= {f"{name}/{stat}": getattr(stats, stat) for stat in _STATS}
    by_head = jax.vmap(jax.vmap(radial_alignment))
    outliers = lambda sigma: tuple(outliers_of_spectrum(sigma, q.shape[2:]))
    for name in ("query", "key"):
        found = jax.vmap(jax.vmap(outliers))(getattr(spectra, name))
        out[f"{name}/outliers"], out[f"{name}/excess"] = found
    out["q/radial_alignment"] = by_head(dq, q - dq)
    out["k/radial_alignment"] = by_head(dk, k - dk)
    if "router" in moved:
        stats = jax.vmap(lambda w: spectrum_stats(singular_values(w)))(moved["router"])
        out |= {f"router/{stat}": getattr(stats, stat) for stat in _STATS}
    return out


def weight_metrics(layout: Layout, params: PyTree) -> Metrics:
    """‖W‖_F, σ₁ and stable rank of every attention, MLP and router matrix, by layer.

    σ₁ by power iteration, so that the same code serves 64 and 8,192 columns. Experts count as a
    head axis.
    """
    grouped = {
        "q": "l n d h -> l d (n h)",
        "k": "l n d h -> l d (n h)",
        "v": "l n d h -> l d (n h)",
        "o": "l n h d -> l (n h) d",
    }
    out = {}
    for role, w in layout.collect(params).items():
        w = rearrange(w, grouped[role]) if role in grouped else w
        over = lambda f, w=w: jax.vmap(jax.vmap(f)) if w.ndim == 4 else jax.vmap(f)
        length = over(norm)(w)
        sigma = over(lambda x: power_norm(x).value)(w)
        out[f"{role}/norm"] = length
        out[f"{role}/spectral_norm"] = sigma
        ratio = jnp.where(sigma > 0, length / sigma, jnp.zeros_like(sigma))
        out[f"{role}/stable_rank"] = ratio**2
    return out


def activation_tier(intermediates: Mapping[str, Array], tokens: int) -> dict[str, Metrics]:
    """The attention and the activation monitor, each as far as its arrays are there.

    Attention: entropy in nats and largest logit of every head. Activations: rank ratio and grade
    of the residual stream after every layer, on at most `tokens` tokens.
    """
    names = {"attention_entropy": "entropy", "max_attention_logit": "max_logit"}
    attention = {new: intermediates[old] for old, new in names.items() if old in intermediates}
    activations = {}
    if "residual" in intermediates:
        sample = lambda x: rank_ratio(sample_tokens(x, tokens))
        ratio = jax.vmap(sample)(intermediates["residual"])
        activations = {"rank_ratio": ratio, "grade": grade(ratio).astype(jnp.float32)}
        residual = intermediates["residual"]
        if residual.ndim == 4:
            activations |= segment_metrics(residual, tokens)
        if residual.shape[0] > 1:
            streams = jax.vmap(lambda x: sample_tokens(x, tokens))(residual)
            activations["layer_correlation"] = layer_correlation(streams)
    return {"attention": attention, "activations": activations}


def segment_metrics(residual: Float[Array, "L B T D"], tokens: int) -> Metrics:
    """Rank ratio of the residual stream in the front and the back half of the context, (L,)."""
    _, batch, context, _ = residual.shape
    if context < 2:
        return {}
    stride = min(max(1, batch * context // tokens), context // 2)
    ratio = jax.vmap(segment_rank_ratio)(residual[:, :, ::stride])
    return {"rank_ratio_front": ratio[:, 0], "rank_ratio_back": ratio[:, 1]}


def jacobian_metrics(stats: JacobianStats) -> Metrics:
    """Norms of the layers' Jacobians, alignment of neighbours, and whether their product grows."""
    scalars = ("growth", "danger", "converged")
    out = {"norm": stats.norms, "forward": stats.forward, "reversed": stats.reversed}
    out |= {name: getattr(stats, name).astype(jnp.float32) for name in scalars}
    return {name: x for name, x in out.items() if x.size}


def router_metrics(
    layout: Layout, params: PyTree, intermediates: Mapping[str, Array], top_k: int
) -> Metrics:
    """Router geometry from the weights; entropy, load and margins from the logits if given."""
    out = {}
    weights = layout.collect(params, ("router",)).get("router")
    if weights is not None:
        experts = weights.shape[1]
        out["similarity"] = jax.vmap(lambda w: router_similarity(w, experts=experts))(weights)
        out["conditioning"] = jax.vmap(lambda w: router_conditioning(w, experts=experts))(weights)
    if "router_logits" in intermediates:
        logits = rearrange(intermediates["router_logits"], "l ... e -> l (...) e")
        out["entropy"] = jax.vmap(routing_entropy)(logits)
        out["z"] = jax.vmap(router_z)(logits)
        load = jax.vmap(lambda z: expert_load(z, top_k))(logits)
        out |= {
            name: jnp.asarray(getattr(load, name), jnp.float32)
            for name in ("max_violation", "dead", "effective_experts", "margin")
        }
        margin = jax.vmap(lambda z: topk_margin(z, top_k))(logits)
        out |= {"margin_p10": margin.p10, "margin_p01": margin.p01}
    return out


def symptom_metrics(
    layout: Layout,
    params: PyTree,
    grads: PyTree | None,
    updates: PyTree | None,
    loss: ArrayLike | None,
) -> Metrics:
    """The loss; norms of parameters, gradients and updates, globally and by family and layer.

    `first_nonfinite` is the index of the first leaf with a non-finite gradient or update, −1 if
    there is none; `nonfinite` counts such entries.
    """
    out = {"param_norm": optax.tree.norm(_wide(params))}
    if loss is not None:
        out["loss"] = jnp.asarray(loss)
    if grads is not None:
        out["grad_norm"] = optax.tree.norm(_wide(grads))
    if updates is not None:
        out["update_norm"] = optax.tree.norm(_wide(updates))
        out["update_ratio"] = out["update_norm"] / jnp.maximum(out["param_norm"], 1e-30)
    if grads is not None or updates is not None:
        counts = nonfinite_by_leaf(grads, updates)
        out["nonfinite"] = jnp.sum(counts)
        first = jnp.argmax(counts > 0).astype(jnp.float32)
        out["first_nonfinite"] = jnp.where(out["nonfinite"] > 0, first, -jnp.ones_like(first))
    for name, tree in (("grad_norm", grads), ("update_norm", updates)):
        if tree is not None:
            for role, w in layout.collect(tree, fold=False).items():
                out[f"{role}/{name}"] = jax.vmap(norm)(w)
    return out


def _wide(tree: PyTree) -> PyTree:
    """Leaves in float32: a sum of squares in bfloat16 would stop growing."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def nonfinite_by_leaf(*trees: PyTree | None) -> Float[Array, " leaves"]:
    """How many entries of each leaf are not finite, summed over the trees given."""
    count = lambda x: jnp.sum(~jnp.isfinite(x), dtype=jnp.float32)
    counts = [
        jnp.stack([count(x) for x in jax.tree.leaves(tree)]) for tree in trees if tree is not None
    ]
    return jnp.sum(jnp.stack(counts), axis=0)
