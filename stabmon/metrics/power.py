"""σ₁ by matrix products alone, where an SVD would cost too much: an estimate with a flag.

Exact spectra are `spectrum.py`'s; the leading triple of a Jacobian, `krylov.py`'s.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from stabmon.metrics.checks import all_finite, as_matrix, nan_unless, unit_scale
from stabmon.metrics.lapack import orthonormal, singular_values

# Products with WᵀW between orthogonalisations. Directions that fall below rounding in that time are
# no rivals of σ₁.
_ROUND = 4


class PowerNorm(NamedTuple):
    """A σ₁ estimate from below, and whether it settled.

    Attributes:
        value: Estimate of σ₁, float32.
        converged: Whether the last round moved the estimate by less than the tolerance.
    """

    value: Float[Array, ""]
    converged: Bool[Array, ""]


def power_norm(w: ArrayLike, iterations: int = 32, tolerance: float = 1e-4) -> PowerNorm:
    """Estimate σ₁ by block power iteration on WᵀW: matrix products only, no SVD.

    Four columns iterate together, so the error falls as (σ₅/σ₁)^(2·iterations) and a repeated σ₁
    does no harm. The start is fixed, hence so is the result. The estimate never exceeds σ₁ beyond
    rounding. Zero matrix: 0, converged. A non-finite entry: NaN, not converged.

    Args:
        w: Matrix (m, n) of any float dtype.
        iterations: Products with WᵀW, at least 1; taken in rounds of four.
        tolerance: Relative change in the last round that counts as settled.

    Raises:
        ValueError: `w` is not a non-empty floating-point matrix, or `iterations` is below 1.

    >>> import jax.numpy as jnp
    >>> print(power_norm(jnp.diag(jnp.array([5.0, 1.0, 0.5]))).value.round(4))
    5.0
    """
    if iterations < 1:
        raise ValueError(f"power_norm: expected iterations >= 1, got {iterations}")
    w = as_matrix(w, "power_norm")
    finite = all_finite(w)
    w, largest = unit_scale(jnp.where(finite, w, jnp.zeros_like(w)))
    length = jnp.linalg.norm(w)
    w = w / jnp.where(length > 0, length, jnp.ones_like(length))
    product = lambda a, b: jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    # The vectors iterate as rows: products then run along contiguous memory.
    transposed = w.T
    image = lambda rows: product(orthonormal(rows.T).T, transposed)
    # With ‖W‖_F = 1, σ₁ is in [n^-½, 1]: a round neither overflows nor underflows.
    multiply = lambda _, rows: product(product(rows, transposed), w)
    one_round = lambda _, rows: jax.lax.fori_loop(1, _ROUND, multiply, product(image(rows), w))
    largest_of = lambda rows: singular_values(image(rows))[0]

    n = w.shape[1]
    start = jax.random.normal(jax.random.key(0), (min(4, n), n), w.dtype)
    rows = jax.lax.fori_loop(1, -(-iterations // _ROUND), one_round, start)
    previous, value = largest_of(rows), largest_of(one_round(0, rows))
    converged = jnp.abs(value - previous) <= tolerance * value
    return PowerNorm(nan_unless(finite, value * length * largest), converged & finite)
