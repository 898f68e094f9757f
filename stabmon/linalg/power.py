"""σ₁ by matrix products alone, where an SVD would cost too much: an estimate with a flag.

Exact spectra are `spectrum.py`'s; the leading triple of a Jacobian, `krylov.py`'s.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from stabmon.linalg.checks import as_matrix
from stabmon.linalg.decompositions import cholesky_with_inverse, on_stack, singular_values, turned

# Products with WᵀW between orthogonalisations. Directions that fall below rounding in that time are
# no rivals of σ₁.
_ROUND = 4


class PowerNorm(NamedTuple):
    """A σ₁ estimate from below, and whether it settled.

    Attributes:
        value: Estimate of σ₁, float32.
        converged: Whether the last round moved the estimate by less than the tolerance.
    """

    value: Float[Array, "*stack"]
    converged: Bool[Array, "*stack"]


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
    return power_norms(as_matrix(w, "power_norm"), iterations, tolerance)


def power_norms(
    w: Float[Array, "*stack m n"], iterations: int = 32, tolerance: float | int = 1e-4
) -> PowerNorm:
    """`power_norm` of each matrix of a stack; nothing merges its axes, so any may be sharded."""
    product = lambda a, b: jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    positive = lambda x: jnp.where(x > 0, x, jnp.ones_like(x))
    norms = lambda x, axes: jnp.sqrt(jnp.sum(jnp.square(x), axis=axes, keepdims=True))

    largest = jnp.max(jnp.abs(w), axis=(-2, -1), keepdims=True)
    finite = jnp.isfinite(largest)  # a maximum keeps NaN and ∞
    w = jnp.where(finite, w, jnp.zeros_like(w)) / positive(jnp.where(finite, largest, 1))
    length = norms(w, (-2, -1))
    w = w / positive(length)
    # The vectors iterate as rows: products then run along contiguous memory.
    transposed = turned(w)
    b, n = min(4, w.shape[-1]), w.shape[-1]

    def orthonormal(rows):
        # Through the small Gram matrix. Rows that depend on others come out shorter than 1, never
        # longer, so no estimate exceeds σ₁.
        rows = rows / positive(norms(rows, -1))
        cosines = product(rows, turned(rows))
        _, inverse = on_stack(cholesky_with_inverse)(cosines)
        return product(inverse, rows)

    # With ‖W‖_F = 1, σ₁ is in [n^-½, 1]: a round neither overflows nor underflows.
    image = lambda rows: product(orthonormal(rows), transposed)
    multiply = lambda _, rows: product(product(rows, transposed), w)
    one_round = lambda _, rows: jax.lax.fori_loop(1, _ROUND, multiply, product(image(rows), w))

    def largest_of(rows):
        seen = image(rows)
        return jnp.sqrt(on_stack(singular_values)(product(seen, turned(seen)))[..., 0])

    start = jax.random.normal(jax.random.key(0), (b, n), w.dtype)
    rows = jnp.broadcast_to(start, (*w.shape[:-2], b, n))
    rows = jax.lax.fori_loop(1, -(-iterations // _ROUND), one_round, rows)
    previous, value = largest_of(rows), largest_of(one_round(0, rows))
    finite = finite[..., 0, 0]
    converged = (jnp.abs(value - previous) <= tolerance * value) & finite
    value = value * (length * largest)[..., 0, 0]
    return PowerNorm(jnp.where(finite, value, jnp.full_like(value, jnp.nan)), converged)
