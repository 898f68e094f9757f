"""What an update ΔW says beside the weight it moved: direction, coherence, noise.

The spectrum of ΔW itself is `spectrum.py`'s; its effect on attention is `qk.py`'s.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from stabmon.linalg.checks import all_finite, as_float, nan_unless, unit_scale
from stabmon.metrics.spectrum import singular_values


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NoiseOutliers:
    """Singular values that stand out of the noise, float32 scalars; unpacks like a pair.

    Attributes:
        count: How many exceed the edge, in [0, min(m, n)].
        excess: σ₁/edge − 1, in [−1, ∞): above 0 means that the top direction is signal.
    """

    count: Any
    excess: Any

    def __iter__(self) -> Iterator[Any]:
        return iter((self.count, self.excess))


def radial_alignment(delta: ArrayLike, w: ArrayLike) -> Float[Array, ""]:
    """Cosine between an update and the weight it moved, ⟨ΔW, W⟩/(‖ΔW‖‖W‖), in [−1, 1].

    Weight decay alone gives −1, a healthy run a small negative value; growth along W is positive.
    No decomposition, so it costs one pass over the entries. Either zero: 0. A non-finite entry:
    NaN.

    Args:
        delta: Update ΔW, any shape and float dtype.
        w: Weight at the base point, same shape.

    Raises:
        ValueError: Shapes differ, or a dtype is not floating.

    >>> import jax.numpy as jnp
    >>> print(radial_alignment(-0.1 * jnp.ones((3, 2)), jnp.ones((3, 2))).round(4))
    -1.0
    """
    delta, w = as_float(delta, "radial_alignment"), as_float(w, "radial_alignment")
    if delta.shape != w.shape:
        raise ValueError(f"radial_alignment: shapes differ, {delta.shape} and {w.shape}")
    finite = all_finite(delta, w)
    (delta, _), (w, _) = unit_scale(delta), unit_scale(w.astype(delta.dtype))
    lengths = jnp.linalg.norm(delta.ravel()) * jnp.linalg.norm(w.ravel())
    cosine = jnp.sum(delta * w) / jnp.where(lengths > 0, lengths, jnp.ones_like(lengths))
    return nan_unless(finite, jnp.clip(cosine, -1.0, 1.0))


def lag_exponent(
    short: ArrayLike, long: ArrayLike, lag_short: float | int, lag_long: float | int
) -> Float[Array, "..."]:
    """Growth exponent of a norm with the lag: ln(long/short)/ln(lag_long/lag_short).

    For σ₁ of ΔW over two lags: ½ where updates add up as noise, 1 where they drift coherently, a
    direct reading of arXiv 2606.28116, Eq. 1. Elementwise. NaN where either value is not positive.

    Args:
        short: σ₁ over the shorter lag, any shape.
        long: σ₁ over the longer lag, same shape.
        lag_short: Steps, positive.
        lag_long: Steps, above `lag_short`.

    Raises:
        ValueError: The lags are not 0 < lag_short < lag_long.

    >>> print(lag_exponent(1.0, 2.0, 50, 200).round(4))
    0.5
    """
    if not 0 < lag_short < lag_long:
        raise ValueError(f"lag_exponent: expected 0 < short < long, got {lag_short}, {lag_long}")
    short, long = as_float(short, "lag_exponent"), as_float(long, "lag_exponent")
    valid = (short > 0) & (long > 0)
    long, short = (jnp.where(valid, x, jnp.ones_like(x)) for x in (long, short))
    exponent = (jnp.log(long / short) / math.log(lag_long / lag_short)).astype(jnp.float32)
    return jnp.where(valid, exponent, jnp.full_like(exponent, jnp.nan))


def noise_outliers(w: ArrayLike) -> NoiseOutliers:
    """Singular values above the Marchenko–Pastur edge of the noise that the matrix itself shows.

    The noise level comes from the median singular value, s = median(σ)/√(n μ_β) with μ_β the
    median of the Marchenko–Pastur law of ratio β = m/n ≤ 1, and the edge is s(√m + √n): no
    threshold to choose. For pure Gaussian noise the excess is 0 ± O(n^(−2/3)). If more than half
    of the spectrum is zero the noise is 0: every non-zero value counts and the excess is ∞. Zero
    matrix: count 0, excess 0. A non-finite entry: NaN.

    Args:
        w: Matrix (m, n) of any float dtype, usually ΔW.

    Raises:
        ValueError: `w` is not a non-empty floating-point matrix.

    >>> import jax, jax.numpy as jnp
    >>> noise = jax.random.normal(jax.random.key(0), (64, 256))
    >>> spike = 64.0 * jnp.outer(jnp.eye(64)[0], jnp.eye(256)[0])
    >>> print(noise_outliers(noise + spike).count)
    1.0

    References:
        Gavish & Donoho 2014 (arXiv 1305.5870) for the noise level.
    """
    return outliers_of_spectrum(singular_values(w), jnp.shape(w))


def outliers_of_spectrum(sigma: Float[Array, " r"], shape: tuple[int, ...]) -> NoiseOutliers:
    """`noise_outliers` from given singular values, descending, of a matrix of this shape."""
    short, long = sorted(shape)
    level = jnp.median(sigma) / math.sqrt(long * marchenko_pastur_median(short / long))
    edge = level * (math.sqrt(short) + math.sqrt(long))
    # Rounding leaves an exactly low-rank matrix a tail of eps·σ₁, which is no noise level.
    edge = jnp.where(edge > 10 * jnp.finfo(sigma.dtype).eps * sigma[0], edge, jnp.zeros_like(edge))
    floor = jnp.maximum(edge, 10 * jnp.finfo(sigma.dtype).eps * sigma[0])
    count = jnp.sum(sigma > floor, dtype=jnp.float32)
    excess = jnp.where(sigma[0] > 0, sigma[0] / edge - 1.0, jnp.zeros_like(edge))
    valid = jnp.isfinite(sigma[0])
    return NoiseOutliers(nan_unless(valid, count), nan_unless(valid, excess))


@lru_cache
def marchenko_pastur_median(beta: float) -> float:
    """Median of the Marchenko–Pastur law with ratio β in (0, 1] and unit variance.

    >>> round(marchenko_pastur_median(1.0), 3)
    0.653
    """
    lower, upper = (1 - math.sqrt(beta)) ** 2, (1 + math.sqrt(beta)) ** 2
    # x = lower + (upper − lower) sin²θ removes the square-root ends of the density.
    theta = np.linspace(0.0, np.pi / 2, 20001)[1:]
    x = lower + (upper - lower) * np.sin(theta) ** 2
    density = (np.sin(theta) * np.cos(theta)) ** 2 / x
    mass = np.cumsum(density)
    return float(np.interp(0.5 * mass[-1], mass, x))
