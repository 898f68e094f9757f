"""How much of its width a layer's output uses: rank ratio, grade, likeness of consecutive layers.

Functions of one activation array. Choosing layers, sampling cadence and what a falling grade
means for the run belong to `stabmon.monitor` and `stabmon.alarms`; spectra of weights live in
`spectrum.py`.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from stabmon.linalg.checks import all_finite, as_float, nan_unless, unit_scale
from stabmon.linalg.factor import triangular_factor
from stabmon.metrics.spectrum import entropy_of_spectrum, singular_values

GRADE_THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)


def sample_tokens(activations: ArrayLike, limit: int) -> Float[Array, "rows D"]:
    """At most `limit` tokens, evenly spaced over all leading axes in row-major order.

    The same positions at every call, so samples of different steps compare. Each token is the
    middle one of its share, hence position 0, the usual attention sink, is left out once `limit`
    is at most half the number of tokens. Up to `limit` tokens come back unchanged.

    Args:
        activations: Array (..., D) of any float dtype.
        limit: Largest number of rows to return, at least 1.

    Returns:
        Matrix (min(tokens, limit), D), in at least float32.

    Raises:
        ValueError: `limit` < 1, or `activations` is not a non-empty float array (..., D).

    >>> import jax.numpy as jnp
    >>> print(sample_tokens(jnp.arange(8.0).reshape(2, 4, 1), limit=2).ravel())
    [2. 6.]
    """
    if limit < 1:
        raise ValueError(f"sample_tokens: expected limit >= 1, got {limit}")
    rows = _tokens(activations, "sample_tokens")
    tokens = rows.shape[0]
    if tokens <= limit:
        return rows
    x = jnp.asarray(activations)
    sequences = tokens // x.shape[-2]
    if limit % sequences == 0:
        # The same positions in each sequence: nothing crosses the axes over which these lie apart.
        each, length = limit // sequences, x.shape[-2]
        return _tokens(x[..., _middles(each, length), :], "sample_tokens")
    return rows[_middles(limit, tokens)]


def _middles(shares: int, length: int) -> Int[np.ndarray, " shares"]:
    """The middle of each of so many equal shares of 0…length − 1."""
    return (2 * np.arange(shares) + 1) * length // (2 * shares)


def rank_ratio(activations: ArrayLike, k: int = 32) -> Float[Array, ""]:
    """Effective rank of the first k singular values over its largest possible value.

    All leading axes are flattened to tokens: exp(−Σ p_i ln p_i)/r with p_i = σ_i/Σ_j σ_j over the
    r = min(tokens, D, k) largest singular values. In [1/r, 1]: 1 when these are equal, 1/r for
    rank one. Invariant to scale, to the order of tokens and to rotations of the model axis; not
    centred, so a large common mean lowers it. Zero activations: 1/r. A non-finite entry: NaN.

    Of tokens and D the longer axis is seen by two Gram matrices only (`factor.py`), so
    it may be sharded; the cost beyond is an SVD of min(tokens, D)²: bound the rows with
    `sample_tokens`.

    Args:
        activations: Array (..., D) of any float dtype.
        k: Singular values kept, at least 1; 20 to 32 are usual.

    Returns:
        Float32 scalar; `grade` turns it into 0…7.

    Raises:
        ValueError: `k` < 1, or `activations` is not a non-empty float array (..., D).

    >>> import jax.numpy as jnp
    >>> print(rank_ratio(jnp.eye(8).reshape(2, 4, 8)).round(4))
    1.0

    References:
        Roy & Vetterli 2007, effective rank; the truncation to k and the ratio follow practice.
    """
    if k < 1:
        raise ValueError(f"rank_ratio: expected k >= 1, got {k}; 20 to 32 are usual")
    rows = _tokens(activations, "rank_ratio")
    finite = all_finite(rows)
    rows, _ = unit_scale(jnp.where(finite, rows, jnp.zeros_like(rows)))
    short = rows if rows.shape[0] <= rows.shape[1] else rows.T
    sigma = singular_values(triangular_factor(short))[:k]
    ratio = jnp.exp(entropy_of_spectrum(sigma, 1.0)) / sigma.shape[0]
    return nan_unless(finite, jnp.minimum(ratio, 1.0))


def segment_rank_ratio(
    activations: ArrayLike, segments: int = 2, k: int = 32
) -> Float[Array, " segments"]:
    """`rank_ratio` of each stretch of the context, front to back.

    With two segments, the front and the back half: a back that falls alone points at long-range
    attention. Where `segments` does not divide T, stretches differ by one position.

    Args:
        activations: Array (B, T, D) of any float dtype.
        segments: Number of stretches, from 1 to T.
        k: Singular values kept, at least 1.

    Returns:
        Float32 vector (segments,), each in [1/r, 1] as in `rank_ratio`; NaN only in a stretch that
        holds a non-finite entry.

    Raises:
        ValueError: The rank is not 3, `segments` is not in 1…T, or as in `rank_ratio`.

    >>> import jax.numpy as jnp
    >>> x = jnp.concatenate([jnp.eye(4), jnp.ones((4, 4))])
    >>> print(segment_rank_ratio(x[None]).round(4))
    [1.   0.25]
    """
    x = as_float(activations, "segment_rank_ratio")
    if x.ndim != 3:
        raise ValueError(
            f"segment_rank_ratio: expected activations (B, T, D), got shape {x.shape};"
            " add the batch axis with x[None]"
        )
    length = x.shape[1]
    if not 1 <= segments <= length:
        raise ValueError(
            f"segment_rank_ratio: expected segments in 1…{length}, the context length,"
            f" got {segments}"
        )
    edges = [length * i // segments for i in range(segments + 1)]
    return jnp.stack([rank_ratio(x[:, start:stop], k) for start, stop in itertools.pairwise(edges)])


def grade(ratio: ArrayLike) -> Int[Array, "..."]:
    """Stability grade of a rank ratio: how many of 0.1, 0.2 … 0.7 it exceeds.

    7 above 0.7, then one less per tenth, 0 at 0.1 and below. Healthy is 5 and up, 2 and below is
    danger. NaN and ±∞ get 0: an activation that cannot be measured is the worst there is.

    Args:
        ratio: Rank ratio, a scalar or an array of them.

    Returns:
        Int32 array of the same shape, in 0…7.

    Raises:
        ValueError: `ratio` is not of a floating dtype.

    >>> import jax.numpy as jnp
    >>> print(grade(jnp.array([0.05, 0.63, 0.9, jnp.nan])))
    [0 6 7 0]
    """
    ratio = as_float(ratio, "grade").astype(jnp.float32)
    exceeded = sum((ratio > t).astype(jnp.int32) for t in GRADE_THRESHOLDS)
    return jnp.where(jnp.isfinite(ratio), exceeded, jnp.zeros_like(exceeded))


def layer_correlation(residuals: ArrayLike) -> Float[Array, " pairs"]:
    """Pearson correlation of consecutive layers' outputs, over all tokens and channels.

    In [−1, 1]; near 1 where a layer changes its input little. Invariant to scale and to a constant
    added to a layer. A layer without variance: 0. NaN for the pairs that touch a non-finite layer.

    Args:
        residuals: Array (L, ..., D) of any float dtype, L >= 2 layers' outputs in order.

    Returns:
        Float32 vector (L − 1,), entry l for layers l and l + 1.

    Raises:
        ValueError: Fewer than 2 layers, no token axis, or not a float array.

    >>> import jax.numpy as jnp
    >>> x = jnp.arange(6.0).reshape(3, 2)
    >>> print(layer_correlation(jnp.stack([x, 2 * x + 1, -x])).round(4))
    [ 1. -1.]
    """
    x = as_float(residuals, "layer_correlation")
    if x.ndim < 3 or x.shape[0] < 2 or x.size == 0:
        raise ValueError(
            f"layer_correlation: expected residuals (L, tokens, D) with L >= 2, got shape"
            f" {x.shape}; stack the layers' outputs with jnp.stack"
        )
    # Tokens and D are not merged: the one or the other may be sharded.
    unit = jax.vmap(_standardised)(x)
    product = jnp.sum(unit[:-1] * unit[1:], axis=tuple(range(1, x.ndim)))
    return jnp.clip(product, -1.0, 1.0).astype(jnp.float32)


def _tokens(activations: ArrayLike, name: str) -> Float[Array, "tokens D"]:
    """(..., D) as a matrix tokens × D."""
    x = as_float(activations, name)
    if x.ndim < 2 or x.size == 0:
        raise ValueError(
            f"{name}: expected non-empty activations (..., D), got shape {x.shape};"
            " a single token is x[None]"
        )
    return x.reshape(-1, x.shape[-1])


def _standardised(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """`x` centred, at unit length; zero where its variance is below rounding."""
    x, _ = unit_scale(x)
    x = x - jnp.mean(x)
    length = jnp.sqrt(jnp.sum(jnp.square(x)))
    flat = length <= 8 * jnp.finfo(x.dtype).eps * x.size**0.5
    return jnp.where(flat, jnp.zeros_like(x), x / jnp.where(flat, jnp.ones_like(length), length))
