"""The router of a mixture of experts: how alike its rows are, how even its softmax is.

Functions of router weights (E, D), rows are experts, or of router logits (..., E) over all experts
before any top-k mask. What the top-k choice does to the experts is in `expert_load.py`; the
spectrum of the router's update is `spectrum.py`'s, as for any matrix.
"""

import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from stabmon.linalg.checks import all_finite, as_float, as_matrix, nan_unless, unit_scale
from stabmon.metrics.symptoms import log_z_squared


def router_similarity(w: ArrayLike, *, experts: int | None = None) -> Float[Array, ""]:
    """Mean pairwise cosine of the router's rows, (E‖ū‖² − 1)/(E − 1), ū = mean_i w_i/‖w_i‖.

    In [−1/(E−1), 1]: 0 for orthogonal experts, 1 for identical ones. Invariant to the scale of
    each row, to the order of experts and to rotations of the model axis. A zero row counts as
    orthogonal to all. One expert: 0, there is no pair. A non-finite entry: NaN.

    Args:
        w: Router matrix (E, D), rows are experts, any float dtype.
        experts: Number of experts E, to be stated when E > D: otherwise such a matrix is taken
            for a transposed one.

    Returns:
        Float32 scalar.

    Raises:
        ValueError: `w` is not a matrix, has more rows than columns while `experts` is not given,
            or its rows are not `experts`.

    >>> import jax.numpy as jnp
    >>> print(router_similarity(jnp.array([[1.0, 0.0, 0.0], [3.0, 0.0, 0.0]])))
    1.0

    References:
        arXiv 2606.28116, Eq. 7.
    """
    w = _router(w, experts, "router_similarity")
    if w.shape[0] == 1:
        return nan_unless(all_finite(w), jnp.zeros(()))
    rows = jax.vmap(_unit_row)(w)
    # E²‖ū‖² − Σ‖u_i‖² counts each ordered pair once; with E in place of the sum, zero rows would
    # count as opposed to each other.
    total = jnp.sum(jnp.square(jnp.sum(rows, 0))) - jnp.sum(jnp.square(rows))
    return nan_unless(all_finite(w), total / (w.shape[0] * (w.shape[0] - 1)))


def router_conditioning(w: ArrayLike, *, experts: int | None = None) -> Float[Array, ""]:
    """Spread of the router's rows about their mean, ε = max_i ‖w_i − w̄‖/‖w̄‖, at least 0.

    Small ε means similar rows; `similarity_bound` makes that a cosine. Invariant to scale, to the
    order of experts and to rotations of the model axis. Zero matrix: 0. Where rows that are not all
    zero have a zero mean: ∞. A non-finite entry: NaN.

    Args:
        w: Router matrix (E, D), rows are experts, any float dtype.
        experts: As in `router_similarity`.

    Returns:
        Float32 scalar.

    Raises:
        ValueError: As `router_similarity`.

    >>> import jax.numpy as jnp
    >>> print(router_conditioning(jnp.array([[1.0, 0.5], [1.0, -0.5]])))
    0.5

    References:
        arXiv 2606.28116, router conditioning.
    """
    w = _router(w, experts, "router_conditioning")
    unit, _ = unit_scale(w)
    mean = jnp.mean(unit, 0)
    spread = jnp.max(jnp.linalg.norm(unit - mean[None], axis=1))
    ratio = jnp.where(spread == 0, jnp.zeros_like(spread), spread / jnp.linalg.norm(mean))
    return nan_unless(all_finite(w), ratio)


def similarity_bound(epsilon: ArrayLike) -> Float[Array, "..."]:
    """Least cosine that two router rows can have at conditioning ε: 1 − 2ε² for ε < 1, else −1.

    In [−1, 1], and tight. NaN for NaN.

    Args:
        epsilon: Conditioning from `router_conditioning`, at least 0, any shape.

    Raises:
        ValueError: `epsilon` is not of a floating dtype.

    >>> import jax.numpy as jnp
    >>> print(similarity_bound(jnp.array([0.0, 0.5, 2.0])))
    [ 1.   0.5 -1. ]

    References:
        arXiv 2606.28116 relates ε and cosine; the constant follows from sin θ <= ε for the angle
        θ between a row and the mean.
    """
    epsilon = as_float(epsilon, "similarity_bound")
    return (1.0 - 2.0 * jnp.square(jnp.minimum(epsilon, 1.0))).astype(jnp.float32)


def routing_entropy(logits: ArrayLike, mask: ArrayLike | None = None) -> Float[Array, ""]:
    """Entropy of the full softmax over experts, mean over tokens, in nats.

    logsumexp(z) − Σ_e p_e z_e, in [0, ln E]. Over all experts: entropy of top-k masked scores
    never exceeds ln k and hides collapse. Invariant to a shift of each token's logits. A
    non-finite logit: NaN.

    Args:
        logits: Router logits (..., E) of any float dtype, before top-k.
        mask: Which tokens count (...), boolean, False for padding; None: all. Without any: 0.

    Raises:
        ValueError: `logits` has no axis, is empty, or is not of a floating dtype; `mask` does not
            fit.

    >>> import jax.numpy as jnp
    >>> print(routing_entropy(jnp.zeros((5, 8))).round(4))
    2.0794

    References:
        arXiv 2606.28116, Eq. 8.
    """
    z, counted = masked_logits(logits, mask, "routing_entropy")
    z = z - jnp.max(z, -1, keepdims=True)
    weight = jnp.exp(z)
    total = jnp.sum(weight, -1)
    entropy = jnp.log(total) - jnp.sum(weight * z, -1) / total
    return nan_unless(all_finite(z), masked_mean(entropy, counted))


def routing_entropy_proxy(w: ArrayLike, *, experts: int | None = None) -> Float[Array, ""]:
    """Routing entropy guessed from the weights alone, ln E − ‖W_c‖_F²/(2E), in nats.

    W_c is W less its mean row. Second order in the logits: good while ‖W_c‖_F²/E, their variance
    over experts, is well below 1, for inputs of unit variance and no preferred direction. At most
    ln E; negative where the guess no longer holds. A non-finite entry: NaN.

    Args:
        w: Router matrix (E, D), rows are experts, in units of logits per unit-variance input.
        experts: As in `router_similarity`.

    Raises:
        ValueError: As `router_similarity`.

    >>> import jax.numpy as jnp
    >>> print(routing_entropy_proxy(jnp.zeros((8, 16))).round(4))
    2.0794
    """
    w = _router(w, experts, "routing_entropy_proxy")
    centred = w - jnp.mean(w, 0)[None]
    drop = jnp.sum(jnp.square(centred)) / (2 * w.shape[0])
    return nan_unless(all_finite(w), math.log(w.shape[0]) - drop)


def router_z(logits: ArrayLike, mask: ArrayLike | None = None) -> Float[Array, ""]:
    """Router z-loss, unweighted: mean over tokens of logsumexp(z)²; see `log_z_squared`.

    At least 0; (ln E)² for zero logits. A non-finite logit: NaN.

    Args:
        logits: Router logits (..., E) of any float dtype.
        mask: As in `routing_entropy`.

    Raises:
        ValueError: As `routing_entropy`.

    >>> import jax.numpy as jnp
    >>> print(router_z(jnp.full((4, 1), -2.0)))
    4.0

    References:
        arXiv 2202.08906 (ST-MoE), router z-loss.
    """
    z, counted = masked_logits(logits, mask, "router_z")
    return nan_unless(all_finite(z), masked_mean(jax.vmap(log_z_squared)(z), counted))


def masked_logits(
    logits: ArrayLike, mask: ArrayLike | None, name: str
) -> tuple[Float[Array, "tokens E"], Bool[Array, " tokens"]]:
    """Logits in at least float32, zero where a token does not count, and which tokens count."""
    z = as_float(logits, name)
    if z.ndim == 0 or z.size == 0:
        raise ValueError(f"{name}: expected non-empty router logits (..., E), got shape {z.shape}")
    rows = z.reshape(-1, z.shape[-1])
    if mask is None:
        return rows, jnp.ones(rows.shape[0], bool)
    mask = jnp.asarray(mask)
    if mask.dtype != jnp.bool_ or mask.shape != z.shape[:-1]:
        raise ValueError(
            f"{name}: expected a boolean mask {z.shape[:-1]}, True where a token counts, got "
            f"{mask.dtype} {mask.shape}"
        )
    counted = mask.reshape(-1)
    return jnp.where(counted[:, None], rows, jnp.zeros_like(rows)), counted


def masked_mean(
    values: Float[Array, " tokens"], counted: Bool[Array, " tokens"]
) -> Float[Array, ""]:
    """Mean over the tokens that count; 0 without any."""
    total = jnp.sum(jnp.where(counted, values, jnp.zeros_like(values)))
    return total / jnp.maximum(jnp.sum(counted), 1).astype(values.dtype)


def _router(w: ArrayLike, experts: int | None, name: str) -> Float[Array, "E D"]:
    """A router matrix whose rows are experts, or a ValueError if it looks transposed."""
    w = as_matrix(w, name)
    rows, columns = w.shape
    if experts is None and rows > columns:
        raise ValueError(
            f"{name}: expected (experts, model), rows are experts, got shape {w.shape}, which looks"
            f" transposed; pass w.T, or experts={rows} if there are more experts than model axes"
        )
    if experts is not None and rows != experts:
        raise ValueError(
            f"{name}: expected (experts, model) with {experts} rows, got shape {w.shape};"
            + (" pass w.T" if columns == experts else " check `experts`")
        )
    return w


def _unit_row(row: Float[Array, " D"]) -> Float[Array, " D"]:
    """`row` at unit length; a zero row stays zero."""
    row, scale = unit_scale(row)
    return row / jnp.where(scale > 0, jnp.linalg.norm(row), jnp.ones_like(scale))
