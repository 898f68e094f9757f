"""What top-k routing does to the experts: load, margins, balance against the task, overflow.

Functions of what the choice is made on, logits (..., E) over all experts. Entropy of the softmax
and geometry of the router's weights are in `router.py`; collecting logits is the model's work.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from stabmon.linalg.checks import all_finite, as_float, nan_unless, unit_scale
from stabmon.metrics.router import masked_logits, masked_mean


class ExpertLoad(NamedTuple):
    """How top-k routing spreads assignments over E experts, float32.

    Attributes:
        fraction: Share of all assignments that goes to each expert (E,), summing to 1.
        max_violation: (largest load − mean)/mean, in [0, E/k − 1]: 0.04 is well balanced, 0.5 to
            0.7 usual with an auxiliary loss (arXiv 2408.15664).
        dead: Number of experts that no token chose.
        effective_experts: exp of the entropy of `fraction`, in [k, E].
        margin: Mean over tokens of the k-th less the (k+1)-th logit; 0 if k = E.
    """

    fraction: Float[Array, " E"]
    max_violation: Float[Array, ""]
    dead: Float[Array, ""]
    effective_experts: Float[Array, ""]
    margin: Float[Array, ""]


class Margin(NamedTuple):
    """Top-k margins over tokens, float32 scalars.

    Attributes:
        mean: Mean margin.
        p10: 10th percentile.
        p01: 1st percentile: the tokens that the least noise sends elsewhere.
    """

    mean: Float[Array, ""]
    p10: Float[Array, ""]
    p01: Float[Array, ""]


class MarginTrend(NamedTuple):
    """The straight line through a window of margins, float32 scalars.

    Attributes:
        growth: Least-squares slope per step: the coherent part.
        noise: Standard deviation around the line: what a small batch adds.
    """

    growth: Float[Array, ""]
    noise: Float[Array, ""]


def expert_load(logits: ArrayLike, top_k: int, mask: ArrayLike | None = None) -> ExpertLoad:
    """How the top-k choice spreads tokens over experts, from one pass over the router's output.

    Invariant to a shift of each token's logits; permutes with the experts. Of equal logits the
    lower index wins, as in `jax.lax.top_k`, so constant logits put everything on the first k
    experts. A non-finite logit: all NaN.

    Args:
        logits: What the choice is made on (..., E): router logits, plus a balancing bias if the
            model has one. Any float dtype.
        top_k: Experts per token, from 1 to E.
        mask: Which tokens count (...), boolean, False for padding; None: all. Without any: 0 each.

    Returns:
        ExpertLoad.

    Raises:
        ValueError: `top_k` is not in 1…E, or `logits` is not a non-empty float array (..., E).

    >>> import jax.numpy as jnp
    >>> load = expert_load(jnp.array([[2.0, 1.0, 0.0, 0.0], [0.0, 4.0, 0.0, 0.0]]), top_k=1)
    >>> print(load.fraction, load.max_violation, load.dead, load.margin)
    [0.5 0.5 0.  0. ] 1.0 2.0 2.5

    References:
        arXiv 2408.15664, MaxVio.
    """
    z, counted = masked_logits(logits, mask, "expert_load")
    fraction = _fractions(z, counted, top_k, "expert_load")
    stats = ExpertLoad(
        fraction=fraction,
        max_violation=jnp.max(fraction) * z.shape[-1] - 1.0,
        dead=jnp.sum((fraction == 0).astype(jnp.float32)),
        effective_experts=jnp.exp(jnp.sum(jax.scipy.special.entr(fraction))),
        margin=masked_mean(_margins(z, top_k, "expert_load"), counted),
    )
    return ExpertLoad(*(nan_unless(all_finite(z), value) for value in stats))


def topk_margin(logits: ArrayLike, top_k: int, mask: ArrayLike | None = None) -> Margin:
    """Margin z_(k) − z_(k+1) between the last chosen expert and the next, over tokens.

    At least 0, in units of the logits; 0 if k = E. Invariant to a shift of each token's logits and
    to the order of experts. A non-finite logit: NaN.

    Args:
        logits: Router logits (..., E) of any float dtype.
        top_k: Experts per token, from 1 to E.
        mask: As in `expert_load`.

    Raises:
        ValueError: As `expert_load`.

    >>> import jax.numpy as jnp
    >>> print(topk_margin(jnp.array([[3.0, 1.0, 0.5]]), top_k=1).p01)
    2.0
    """
    z, counted = masked_logits(logits, mask, "topk_margin")
    margins = _margins(z, top_k, "topk_margin")
    finite = all_finite(z)
    if mask is None:
        low = jnp.quantile(margins, jnp.asarray([0.1, 0.01], margins.dtype))
    else:
        seen = jnp.where(counted, margins, jnp.full_like(margins, jnp.nan))
        low = jnp.nanquantile(seen, jnp.asarray([0.1, 0.01], margins.dtype))
        low = jnp.where(jnp.any(counted), low, jnp.zeros_like(low))
    return Margin(
        mean=nan_unless(finite, masked_mean(margins, counted)),
        p10=nan_unless(finite, low[0]),
        p01=nan_unless(finite, low[1]),
    )


def margin_growth(margins: ArrayLike, every: float | int = 1.0) -> MarginTrend:
    """Growth and noise of a margin over a window of samples: the stable-winner quantities.

    A larger learning rate speeds up coherent growth of the winner's margin, a smaller batch adds
    noise; both bring expert collapse nearer. Growth is invariant to an offset of the margins and
    scales with them, and so does noise. Constant margins: both 0. A non-finite one: NaN.

    Args:
        margins: Window (W,) of one margin statistic, oldest first, W >= 3.
        every: Steps between samples, positive.

    Returns:
        MarginTrend; growth per step, noise with W − 2 degrees of freedom.

    Raises:
        ValueError: Less than 3 samples, another rank, or `every` is not positive.

    >>> import jax.numpy as jnp
    >>> print(margin_growth(jnp.array([1.0, 2.0, 3.0, 4.0]), every=10).growth.round(4))
    0.1

    References:
        arXiv 2606.28116, stable-winner analysis (growth and noise are our estimators).
    """
    margins = as_float(margins, "margin_growth")
    if margins.ndim != 1 or margins.shape[0] < 3:
        raise ValueError(
            f"margin_growth: expected a window (W,) of W >= 3 margins, got shape {margins.shape}"
        )
    if not every > 0:
        raise ValueError(f"margin_growth: expected every > 0 steps, got {every}")
    window = margins.shape[0]
    time = jnp.arange(window, dtype=margins.dtype) - (window - 1) / 2
    centred = margins - margins[:1]
    centred = centred - jnp.mean(centred)
    slope = jnp.sum(time * centred) / jnp.sum(jnp.square(time))
    noise = jnp.linalg.norm(centred - slope * time) / math.sqrt(window - 2)
    finite = all_finite(margins)
    return MarginTrend(nan_unless(finite, slope / every), nan_unless(finite, noise))


def balance_gradient_ratio(
    logits: ArrayLike,
    top_k: int,
    lm_grad_wrt_mean_probs: ArrayLike,
    coefficient: float | int,
    mask: ArrayLike | None = None,
) -> Float[Array, ""]:
    """Size of the balancing gradient against the language model's, ‖∇αL_LB‖/‖∇L_LM‖.

    Both with respect to the mean expert probabilities P̄ (E,), where L_LB = E Σ_e f_e P̄_e has the
    gradient E·f and f is the share of assignments of `expert_load`, summing to 1. At least 0; keep
    it below 0.1, or balance overrules the task. Zero language-model gradient: 0, there is nothing
    to compare with. A non-finite entry: NaN.

    Args:
        logits: Router logits (..., E) of any float dtype.
        top_k: Experts per token, from 1 to E.
        lm_grad_wrt_mean_probs: ∂L_LM/∂P̄, (E,).
        coefficient: α, the weight of L_LB in the loss, at least 0.
        mask: As in `expert_load`.

    Raises:
        ValueError: `coefficient` is negative, the gradient is not (E,), or as `expert_load`.

    >>> import jax.numpy as jnp
    >>> logits = jnp.array([[1.0, 0.0], [0.0, 1.0]])
    >>> print(balance_gradient_ratio(logits, 1, jnp.array([0.3, 0.4]), 1e-2).round(4))
    0.0283

    References:
        LongCat-Flash technical report (arXiv 2509.01322), choice of the balance coefficient.
    """
    z, counted = masked_logits(logits, mask, "balance_gradient_ratio")
    grad = as_float(lm_grad_wrt_mean_probs, "balance_gradient_ratio")
    if grad.shape != z.shape[-1:]:
        raise ValueError(
            f"balance_gradient_ratio: expected a gradient {z.shape[-1:]}, one entry an expert,"
            f" got {grad.shape}"
        )
    if not coefficient >= 0:
        raise ValueError(f"balance_gradient_ratio: expected coefficient >= 0, got {coefficient}")
    fraction = _fractions(z, counted, top_k, "balance_gradient_ratio")
    unit, scale = unit_scale(grad)
    length = jnp.linalg.norm(unit) * scale
    ratio = coefficient * z.shape[-1] * jnp.linalg.norm(fraction) / length
    ratio = jnp.where(length == 0, jnp.zeros_like(ratio), ratio)
    return nan_unless(all_finite(z, grad), ratio)


def capacity_overflow(logits: ArrayLike, top_k: int, capacity: float | int) -> Float[Array, ""]:
    """Share of assignments that find their expert full, Σ_e max(n_e − C, 0)/Σ_e n_e, in [0, 1).

    A non-finite logit: NaN. For capacity by group or device, `jax.vmap` over the groups.

    Args:
        logits: Router logits (..., E) of the tokens that share the capacity.
        top_k: Experts per token, from 1 to E.
        capacity: Slots per expert C, positive: capacity factor × tokens × k/E.

    Raises:
        ValueError: `capacity` is not positive, or as `expert_load`.

    >>> import jax.numpy as jnp
    >>> print(capacity_overflow(jnp.array([[1.0, 0.0]] * 4), top_k=1, capacity=3))
    0.25
    """
    if not capacity > 0:
        raise ValueError(f"capacity_overflow: expected capacity > 0 slots, got {capacity}")
    z, counted = masked_logits(logits, None, "capacity_overflow")
    fraction = _fractions(z, counted, top_k, "capacity_overflow")
    room = capacity / (z.size // z.shape[-1] * top_k)
    return nan_unless(all_finite(z), jnp.sum(jnp.maximum(fraction - room, 0.0)))


def _fractions(
    z: Float[Array, "tokens E"], counted: Bool[Array, " tokens"], top_k: int, name: str
) -> Float[Array, " E"]:
    """Share of the assignments that each expert gets."""
    experts = z.shape[-1]
    _check_top_k(experts, top_k, name)
    _, chosen = jax.lax.top_k(z, top_k)
    # A sum of comparisons rather than a scatter: it fuses, and shards over tokens.
    places = jax.nn.one_hot(chosen, experts, dtype=jnp.float32)
    count = jnp.sum(jnp.where(counted[:, None, None], places, jnp.zeros_like(places)), (0, 1))
    return count / jnp.maximum(jnp.sum(counted) * top_k, 1).astype(jnp.float32)


def _margins(z: Float[Array, "tokens E"], top_k: int, name: str) -> Float[Array, " tokens"]:
    """Top-k margin of each token."""
    experts = z.shape[-1]
    _check_top_k(experts, top_k, name)
    if top_k == experts:
        return jnp.zeros_like(z[:, 0])
    best, _ = jax.lax.top_k(z, top_k + 1)
    return best[:, -2] - best[:, -1]


def _check_top_k(experts: int, top_k: int, name: str) -> None:
    if not 1 <= top_k <= experts:
        raise ValueError(
            f"{name}: expected top_k in 1…{experts}, the number of experts, got {top_k}"
        )
