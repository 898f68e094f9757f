"""What the tiers measure on parameters, gradients and updates, as arrays over layers and heads.

Each function takes matrices already collected onto canonical axes (`layout.py`) and returns
{metric: (L, N), (L,) or scalar}. Formulas live in `metrics/`; cadence and gating in `sampling.py`,
what is measured on a forward pass in `forward.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PyTree

from stabmon.layout import CANONICAL, Layout, leaves_with_paths
from stabmon.linalg.checks import as_float
from stabmon.linalg.power import power_norms
from stabmon.metrics.jacobian import JacobianStats
from stabmon.metrics.qk import increment_spectra
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
    σ₁(dW_k) against the shortest. Where the ring holds v and o too, q and k are held against them.
    """
    roles = ("q", "k", "router", *_tracked(layout, params, next(iter(deltas.values()))))
    per_lag = [layout.difference(params, x, roles) for x in deltas.values()]
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
    if "v" in moves and "o" in moves:
        out["qk_over_vo/modes"] = _qk_over_vo(out, moves)
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


def _tracked(layout: Layout, params: PyTree, delta: PyTree) -> tuple[str, ...]:
    """Those of v and o of which the ring holds every leaf."""
    held = {path for path, _ in leaves_with_paths(delta)}
    leaves = leaves_with_paths(params)
    wanted = {r: {p for p, x in leaves if layout.selects(r)(p, x)} for r in ("v", "o")}
    return tuple(role for role, paths in wanted.items() if paths and paths <= held)


def _qk_over_vo(spectra: Mapping[str, Array], moves: Mapping[str, Array]) -> Float[Array, " t"]:
    """p10 over heads of modes(ΔW_q, ΔW_k), over that of modes(ΔW_v, ΔW_o), for each lag."""
    low = lambda *x: jnp.quantile(
        jnp.concatenate([jnp.log(jnp.maximum(y, 1.0)).reshape(len(y), -1) for y in x], axis=1),
        0.1,
        axis=1,
    )
    modes = lambda w: spectrum_stats(singular_values(w)).modes
    control = low(*(_over(modes, 3, moves[role]) for role in ("v", "o")))
    return jnp.exp(low(spectra["query/modes"], spectra["key/modes"]) - control)


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


def jacobian_metrics(stats: JacobianStats) -> Metrics:
    """Norms of the layers' Jacobians, alignment of neighbours, and whether their product grows."""
    scalars = ("growth", "danger", "converged")
    out = {"norm": stats.norms, "forward": stats.forward, "reversed": stats.reversed}
    out |= {name: getattr(stats, name).astype(jnp.float32) for name in scalars}
    return {name: x for name, x in out.items() if x.size}


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
    out, broken, where = {}, [], []
    index = {path: i for i, (path, _) in enumerate(leaves_with_paths(params))}
    for name, tree in (("param_norm", params), ("grad_norm", grads), ("update_norm", updates)):
        if tree is None:
            continue
        leaves = numbers(tree)
        squares = squares_by_leaf(leaves)
        out[name] = jnp.sqrt(jnp.sum(squares))
        if name != "param_norm":
            # Gradients first: clipping by the global norm spreads one NaN over all updates.
            broken.append(~jnp.isfinite(squares))
            where += [index[path] for path, _ in leaves]
            for role, w in layout.collect(tree, fold=False).items():
                out[f"{role}/{name}"] = jax.vmap(norm)(w)
    if loss is not None:
        out["loss"] = as_float(loss, "loss")
    if updates is not None:
        out["update_ratio"] = out["update_norm"] / jnp.maximum(out["param_norm"], 1e-30)
    if where:
        bad = jnp.concatenate(broken)
        out["nonfinite"] = jnp.sum(bad, dtype=jnp.float32)
        first = jnp.asarray(where, jnp.float32)[jnp.argmax(bad)]
        out["first_nonfinite"] = jnp.where(out["nonfinite"] > 0, first, -jnp.ones_like(first))
    return out


def numbers(tree: PyTree) -> list[tuple[str, Any]]:
    """The leaves that have a norm, by path: floating or complex, Python floats among them.

    Counters, keys of random numbers, booleans and what JAX gives as their gradients are none.
    """
    kind = lambda x: getattr(x, "dtype", type(x))
    return [(p, x) for p, x in leaves_with_paths(tree) if jnp.issubdtype(kind(x), jnp.inexact)]


def squares_by_leaf(leaves: Sequence[tuple[str, Any]]) -> Float[Array, " leaves"]:
    """Σ|x|² of each leaf in float32, in one pass; not finite where an entry is not or overflows."""
    real = lambda x: jnp.abs(x) if jnp.iscomplexobj(x) else x
    wide = [real(jnp.asarray(x)).astype(jnp.float32) for _, x in leaves]
    return jnp.stack([jnp.zeros((), jnp.float32), *(jnp.sum(jnp.square(x)) for x in wide)])[1:]
