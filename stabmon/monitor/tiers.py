"""What each tier of the monitor measures on a whole tree, as arrays over layers and heads.

Each function takes matrices already collected onto canonical axes (`layout.py`) and returns
{metric: (L, N), (L,) or scalar}. Formulas live in `metrics/`; cadence and gating in `monitor.py`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PyTree

from stabmon.layout import CANONICAL, Layout
from stabmon.linalg.mesh import divided_along
from stabmon.linalg.power import power_norms
from stabmon.metrics.activations import (
    grade,
    layer_correlation,
    rank_ratio,
    sample_tokens,
)
from stabmon.metrics.attention import sharp_head_fraction
from stabmon.metrics.expert_load import balance_gradient_ratio, expert_load, topk_margin
from stabmon.metrics.jacobian import JacobianStats
from stabmon.metrics.qk import increment_spectra
from stabmon.metrics.router import (
    router_conditioning,
    router_similarity,
    router_z,
    routing_entropy,
)
from stabmon.metrics.spectrum import gaussian_stable_rank, singular_values, spectrum_stats
from stabmon.metrics.symptoms import norm
from stabmon.metrics.updates import lag_exponent, outliers_of_spectrum, radial_alignment

Metrics = dict[str, Array]

_STATS = ("modes", "effective_rank", "stable_rank", "norm", "spectral_norm")
# Roles as matrices with the model axis, or the latent, first; the others are so already.
_FLAT = {
    **dict.fromkeys(("q", "k", "v", "o"), "l d (n h)"),
    "q_up": "l r (n h)",
    "k_up": "l c (n h)",
    "v_up": "l c (n h)",
    "mlp_down": "l d f",
    "router": "l d e",
    "expert_down": "l e d f",
}


def delta_metrics(
    layout: Layout, params: PyTree, deltas: Mapping[int, PyTree]
) -> dict[int, Metrics]:
    """For each lag, spectra of Δ1, Δ2, Δ3, dW_q and dW_k of every head, and radial alignments.

    `deltas` holds the difference over each lag, structured like `params`. All lags go through the
    decompositions as one batch. Entropies are divided by ln(rank bound), so that they compare
    across head sizes. The longest of several lags also gets the lag exponents of σ₁(dW_q) and
    σ₁(dW_k) against the shortest.
    """
    per_lag = [layout.difference(params, x, ("q", "k", "router")) for x in deltas.values()]
    now, moved = per_lag[0]
    for role in ("q", "k"):
        if role not in moved:
            raise ValueError(
                f"the delta tier needs ΔW of role {role!r}, which track_delta does not keep; "
                "select it: track_delta(select=layout.selects('qk', 'router'))"
            )
    moves = {role: jnp.stack([x[role].astype(jnp.float32) for _, x in per_lag]) for role in moved}
    heads, groups = now["q"].shape[1], now["k"].shape[1]
    if heads % groups:
        raise ValueError(f"{heads} query heads do not divide over {groups} kv heads")
    q, k = (now[role].astype(jnp.float32)[None] for role in "qk")
    dq, dk = moves["q"], moves["k"]
    q0, k0 = q - dq, k - dk
    # Query heads beside the key head that they share, which is factored once.
    grouped = partial(rearrange, pattern="t l (k g) d h -> t l k g d h", k=groups)
    spectra = increment_spectra(grouped(q0), k0[:, :, :, None], grouped(dq), dk[:, :, :, None])
    spectra = jax.tree.map(partial(rearrange, pattern="t l k g r -> t l (k g) r"), spectra)
    over = lambda f: partial(_over, f, 3)
    bound = {"delta1": 2, "delta2": 2, "delta3": 1, "query": 1, "key": 1}
    out = {}
    for name, sigma in spectra._asdict().items():
        stats = over(spectrum_stats)(sigma)
        rank = min(bound[name] * q.shape[4], q.shape[3])
        out[f"{name}/entropy"] = stats.entropy / jnp.log(float(max(rank, 2)))
        out |= {f"{name}/{stat}": getattr(stats, stat) for stat in _STATS}
    outliers = lambda sigma: tuple(outliers_of_spectrum(sigma, q.shape[3:]))
    for name in ("query", "key"):
        found = over(outliers)(getattr(spectra, name))
        out[f"{name}/outliers"], out[f"{name}/excess"] = found
    by_head = jax.vmap(jax.vmap(jax.vmap(radial_alignment)))  # nested: no axes are merged
    out["q/radial_alignment"], out["k/radial_alignment"] = by_head(dq, q0), by_head(dk, k0)
    if "router" in moves:
        of_router = lambda w: spectrum_stats(singular_values(w))
        stats = _over(of_router, 2, moves["router"])
        out |= {f"router/{stat}": getattr(stats, stat) for stat in _STATS}
    lags = list(deltas)
    result = {lag: {name: x[i] for name, x in out.items()} for i, lag in enumerate(lags)}
    short, long = min(lags), max(lags)
    if short < long:
        for name in ("query", "key"):
            sigma = f"{name}/spectral_norm"
            exponent = lag_exponent(result[short][sigma], result[long][sigma], short, long)
            result[long][f"{name}/lag_exponent"] = exponent
    return result


def _over(f: Callable[..., Any], axes: int, *stacks: Array) -> Any:
    """`f` of every element of stacks with as many common leading axes, in one flat batch."""
    leading = jnp.broadcast_shapes(*(x.shape[:axes] for x in stacks))
    flat = [jnp.broadcast_to(x, (*leading, *x.shape[axes:])) for x in stacks]
    flat = [x.reshape(-1, *x.shape[axes:]) for x in flat]
    return jax.tree.map(lambda x: x.reshape(*leading, *x.shape[1:]), jax.vmap(f)(*flat))


def weight_metrics(layout: Layout, params: PyTree) -> Metrics:
    """‖W‖_F, σ₁ and stable rank of every matrix as it is stored, by layer.

    The stable rank also over that of a Gaussian matrix of the same shape, mn/(√m + √n)². Matrices
    are the leaves: factors of latent attention one by one, without norm scales. σ₁ by power
    iteration, so that the same code serves 64 and 8,192 columns, with all matrices of one shape in
    one batch. Experts count as a head axis.
    """
    stored = layout.collect(params, fold=False)
    flat = {role: flat_matrices(role, w) for role, w in stored.items()}
    batches: dict[tuple[int, ...], list[str]] = {}
    for role, w in flat.items():
        batches.setdefault(w.shape[1:], []).append(role)
    out = {}
    for shape, roles in batches.items():
        w = jnp.concatenate([flat[role].astype(jnp.float32) for role in roles])
        each = jax.vmap(jax.vmap(norm)) if w.ndim == 4 else jax.vmap(norm)
        length, sigma = each(w), power_norms(w).value
        ratio = jnp.where(sigma > 0, length / sigma, jnp.zeros_like(sigma)) ** 2
        columns = jnp.stack([length, sigma, ratio, ratio / gaussian_stable_rank(*shape[-2:])])
        ends = list(accumulate(len(flat[role]) for role in roles))
        for role, part in zip(roles, jnp.split(columns, ends[:-1], axis=1), strict=True):
            names = ("norm", "spectral_norm", "stable_rank", "relative_stable_rank")
            out |= {f"{role}/{name}": x for name, x in zip(names, part, strict=True)}
    return out


def flat_matrices(role: str, w: Float[Array, "..."]) -> Float[Array, "L ... m n"]:
    """The matrices of a role with the model axis D first, heads side by side.

    One orientation for those that read the stream and those that write into it, so that equal
    shapes mean equal axes, however they are sharded.
    """
    axes = CANONICAL[role]
    return rearrange(w, f"l {axes} -> {_FLAT.get(role, f'l {axes}')}")


def activation_tier(
    intermediates: Mapping[str, Array], tokens: int, sharp: float | int
) -> dict[str, Metrics]:
    """The attention and the activation monitor, each as far as its arrays are there.

    Attention: entropy in nats, largest logit, sink mass and repeated maxima of every head, and the
    fraction of heads with less than `sharp` nats. Activations: rank ratio and grade of the
    residual stream after every layer, on at most `tokens` tokens.
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
    activations = {}
    if "residual" in intermediates:
        residual = intermediates["residual"]
        streams = jax.vmap(lambda x: sample_tokens(x, tokens))(residual)
        ratio = _rank_ratios(streams)
        activations = {"rank_ratio": ratio, "grade": grade(ratio).astype(jnp.float32)}
        if residual.ndim == 4:
            activations |= segment_metrics(residual, tokens)
        if residual.shape[0] > 1:
            activations["layer_correlation"] = layer_correlation(streams)
    return {"attention": attention, "activations": activations}


def _rank_ratios(streams: Float[Array, "L tokens D"]) -> Float[Array, " L"]:
    """Rank ratio of each layer; of tokens and D the longer axis is divided over the devices."""
    longer = 1 if streams.shape[1] > streams.shape[2] else 2
    return jax.vmap(rank_ratio)(divided_along(streams, longer))


def segment_metrics(residual: Float[Array, "L B T D"], tokens: int) -> Metrics:
    """Rank ratio of the residual stream in the front and the back half of the context, (L,)."""
    _, batch, context, _ = residual.shape
    if context < 2:
        return {}
    stride = min(max(1, batch * context // tokens), context // 2)
    halves = jnp.split(residual[:, :, ::stride], [-(-context // stride) // 2], axis=2)
    front, back = (_rank_ratios(rearrange(x, "l b t d -> l (b t) d")) for x in halves)
    return {"rank_ratio_front": front, "rank_ratio_back": back}


def jacobian_metrics(stats: JacobianStats) -> Metrics:
    """Norms of the layers' Jacobians, alignment of neighbours, and whether their product grows."""
    scalars = ("growth", "danger", "converged")
    out = {"norm": stats.norms, "forward": stats.forward, "reversed": stats.reversed}
    out |= {name: getattr(stats, name).astype(jnp.float32) for name in scalars}
    return {name: x for name, x in out.items() if x.size}


def router_metrics(
    layout: Layout,
    params: PyTree,
    intermediates: Mapping[str, Array],
    top_k: int,
    balance_weight: float | int,
) -> Metrics:
    """Router geometry from the weights; entropy, load and margins from the logits if given.

    With the language-model gradient of the mean expert probabilities, also how much of it the
    load-balance loss, at its weight, comes to.
    """
    out = {}
    weights = layout.collect(params, ("router",)).get("router")
    if weights is not None:
        experts = weights.shape[1]
        out["similarity"] = jax.vmap(lambda w: router_similarity(w, experts=experts))(weights)
        out["conditioning"] = jax.vmap(lambda w: router_conditioning(w, experts=experts))(weights)
    if "dropped" in intermediates:
        out["dropped"] = intermediates["dropped"]
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
        if "router_lm_gradient" in intermediates:
            ratio = lambda z, grad: balance_gradient_ratio(z, top_k, grad, balance_weight)
            out["balance_ratio"] = jax.vmap(ratio)(logits, intermediates["router_lm_gradient"])
    return out


def symptom_metrics(
    layout: Layout,
    params: PyTree,
    grads: PyTree | None,
    updates: PyTree | None,
    loss: ArrayLike | None,
) -> Metrics:
    """The loss; norms of parameters, gradients and updates, globally and by family and layer.

    `nonfinite` counts the leaves of gradients and updates that have a non-finite entry, or squares
    that overflow; `first_nonfinite` is the index of the first such leaf of the gradients, or of the
    updates if all gradients are finite, −1 if there is none. Both follow from the sums of squares,
    so that each array is read once.
    """
    trees = {"param_norm": params, "grad_norm": grads, "update_norm": updates}
    trees = {name: tree for name, tree in trees.items() if tree is not None}
    squares = {name: squares_by_leaf(tree) for name, tree in trees.items()}
    out = {name: jnp.sqrt(jnp.sum(x)) for name, x in squares.items()}
    if loss is not None:
        out["loss"] = jnp.asarray(loss)
    if updates is not None:
        out["update_ratio"] = out["update_norm"] / jnp.maximum(out["param_norm"], 1e-30)
    moving = [name for name in trees if name != "param_norm"]
    if moving:
        broken = ~jnp.isfinite(jnp.stack([squares[name] for name in moving]))
        out["nonfinite"] = jnp.sum(broken, dtype=jnp.float32)
        # Row by row, gradients first: clipping by the global norm spreads one NaN over all updates.
        first = (jnp.argmax(broken) % broken.shape[1]).astype(jnp.float32)
        out["first_nonfinite"] = jnp.where(out["nonfinite"] > 0, first, -jnp.ones_like(first))
    for name in moving:
        for role, w in layout.collect(trees[name], fold=False).items():
            out[f"{role}/{name}"] = jax.vmap(norm)(w)
    return out


def squares_by_leaf(tree: PyTree) -> Float[Array, " leaves"]:
    """Σx² of each leaf in float32, in one pass; not finite where an entry is not, or overflows."""
    wide = [x.astype(jnp.float32) for x in jax.tree.leaves(tree)]
    return jnp.stack([jnp.sum(jnp.square(x)) for x in wide])
