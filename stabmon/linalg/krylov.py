"""The leading singular triple of a linear map that is known by its products only.

Matrices that exist have `spectrum.py`; which maps to ask about is for `jacobian.py`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from stabmon.linalg.checks import unit_scale
from stabmon.linalg.decompositions import orthonormal, thin_svd


class LinearMap(NamedTuple):
    """A square linear map A, applied to the columns of float32 matrices (size, …).

    Attributes:
        size: Length of a column.
        product: x ↦ A x.
        transposed: y ↦ Aᵀ y.
    """

    size: int
    product: Callable[[Array], Array]
    transposed: Callable[[Array], Array]


class SingularTriple(NamedTuple):
    """Leading singular triple, and how well it is known; float32.

    Attributes:
        sigma: σ₁.
        u: Output direction, unit length.
        v: Input direction, unit length, A v = σ₁ u.
        residual: ‖Aᵀu − σ₁v‖/σ₁; 0 for σ₁ = 0.
        gap: 1 − σ₂/σ₁, or less while σ₂ is not settled; 1 for σ₁ = 0.
    """

    sigma: Float[Array, "*stack"]
    u: Float[Array, "*stack n"]
    v: Float[Array, "*stack n"]
    residual: Float[Array, "*stack"]
    gap: Float[Array, "*stack"]


def leading_triple(
    operator: LinearMap,
    tolerance: float | int = 5e-4,
    cycles: int = 32,
    block: int = 4,
    depth: int = 4,
) -> SingularTriple:
    """Largest singular value of a map and its vectors, by restarted block Krylov iteration.

    Each cycle spans `depth` blocks of AᵀA on the best `block` vectors of the one before, fully
    re-orthogonalised, and takes the Ritz triples of that space. The start is fixed, hence so is
    the result. σ never exceeds σ₁ beyond rounding. A map no larger than `block` · `depth` is solved
    exactly, in one cycle. Zero map: σ = 0, residual 0. A map that returns NaN: NaN.

    Args:
        operator: Square map of float32 columns.
        tolerance: Error angle in radians at which to stop, positive; float32 allows about 1e-5.
        cycles: Most cycles, at least 1.
        block: Vectors iterated together, at least 2; clustered σ want more.
        depth: Krylov blocks in a cycle, at least 2.

    Returns:
        SingularTriple; `error_angle` says how far to trust its vectors.

    Raises:
        ValueError: A parameter out of range.

    >>> import jax.numpy as jnp
    >>> diagonal = lambda x: jnp.array([[1.0], [5.0], [2.0]]) * x
    >>> triple = leading_triple(LinearMap(3, diagonal, diagonal))
    >>> print(triple.sigma.round(4), jnp.abs(triple.v).round(3))
    5.0 [0. 1. 0.]

    References:
        arXiv 1504.05477 (Musco & Musco), block Krylov iteration.
    """
    if not tolerance > 0 or cycles < 1 or block < 2 or depth < 2:
        raise ValueError(
            "leading_triple: expected tolerance > 0, cycles >= 1, block >= 2, depth >= 2, got"
            f" {tolerance}, {cycles}, {block}, {depth}"
        )
    n = operator.size
    if n <= block * depth:
        block, depth = n, 1  # the whole space: exact in one cycle

    def grow(step, basis):
        last = jax.lax.dynamic_slice_in_dim(basis, (step - 1) * block, block, axis=1)
        image, _ = unit_scale(operator.product(last))
        fresh = operator.transposed(image)
        # Twice is enough; columns of `basis` that are not filled yet are zero.
        for _ in range(2):
            fresh = orthonormal(fresh - basis @ (basis.T @ fresh))
        return jax.lax.dynamic_update_slice_in_dim(basis, fresh, step * block, axis=1)

    def cycle(carry):
        count, start, _ = carry
        basis = jnp.pad(start, ((0, 0), (0, (depth - 1) * block)))
        basis = jax.lax.fori_loop(1, depth, grow, basis)
        # Once the Krylov space is exhausted, fresh columns are rounding; QR makes them a basis.
        basis = orthonormal(basis)
        left, sigma, right = thin_svd(operator.product(basis))
        ritz = basis @ right[:block].T
        top = jnp.where(sigma[0] == 0, jnp.ones_like(sigma[0]), sigma[0])
        pair = min(2, n)
        rest = operator.transposed(left[:, :pair]) / top - ritz[:, :pair] * sigma[None, :pair] / top
        error = jnp.linalg.norm(rest, axis=0)
        # The second value is known to within its own residual, and the gap no better.
        second = sigma[1] / top + error[1] if n > 1 else jnp.zeros_like(top)
        triple = SingularTriple(sigma[0], left[:, 0], ritz[:, 0], error[0], 1 - second)
        return count + 1, ritz, triple

    def unsettled(carry):
        count, _, triple = carry
        return (count < cycles) & (error_angle(triple) > tolerance)

    start = orthonormal(jax.random.normal(jax.random.key(0), (n, block), jnp.float32))
    unknown = SingularTriple(
        sigma=jnp.zeros(()),
        u=start[:, 0],
        v=start[:, 0],
        residual=jnp.full((), jnp.inf),
        gap=jnp.ones(()),
    )
    return jax.lax.while_loop(unsettled, cycle, (jnp.int32(0), start, unknown))[2]


def error_angle(triple: SingularTriple) -> Float[Array, "*stack"]:
    """Error angle of the singular vectors, residual/gap, with the residual's own rounding added.

    That rounding keeps a gap of a few units in the last place from passing as a gap.
    """
    rounding = 4 * jnp.finfo(jnp.float32).eps
    return jnp.where(triple.gap <= 0, jnp.inf, (triple.residual + rounding) / triple.gap)
