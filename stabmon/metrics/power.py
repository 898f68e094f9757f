"""σ₁ by matrix products alone, where an SVD would cost too much: an estimate with a flag.

Exact spectra are `spectrum.py`'s; the leading triple of a Jacobian, `krylov.py`'s.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from stabmon.metrics.checks import all_finite, as_matrix, nan_unless, unit_scale

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
    w, scale = unit_scale(jnp.where(finite, w, jnp.zeros_like(w)))
    n = w.shape[1]
    start = jax.random.normal(jax.random.key(0), (n, min(4, n)), w.dtype)
    product = lambda a, b: jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)

    def multiply(_, basis):
        # Re-scaled, since σ₁ to the eighth may overflow; each image is at most √(m n) at start.
        return unit_scale(product(w.T, product(w, basis)))[0]

    def body(_, carry):
        basis, value, _ = carry
        basis = jnp.linalg.qr(basis)[0]
        image = product(w, basis)
        gram = product(image.T, image)
        sigma = jnp.sqrt(jnp.maximum(jnp.linalg.eigvalsh(gram)[-1], jnp.zeros((), w.dtype)))
        basis = unit_scale(product(w.T, image))[0]
        return jax.lax.fori_loop(1, _ROUND, multiply, basis), sigma, value

    zero = jnp.zeros((), w.dtype)
    rounds = 1 + -(-(iterations - 1) // _ROUND)
    _, value, previous = jax.lax.fori_loop(0, rounds, body, (start, zero, zero))
    converged = jnp.abs(value - previous) <= tolerance * value
    return PowerNorm(nan_unless(finite, value * scale), converged & finite)
