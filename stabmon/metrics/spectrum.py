"""What the singular values of one matrix say: entropies, ranks, norms, gaps.

Functions of a single matrix, exact to float32, which callers `jax.vmap` over stacks. Spectra of
products W_q W_kᵀ that must never be formed live in `qk.py`; what an update adds to a weight, in
`updates.py`.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from stabmon.linalg import decompositions
from stabmon.linalg.checks import all_finite, as_matrix, nan_unless, unit_scale


class SpectrumStats(NamedTuple):
    """Summary of one spectrum, each a float32 scalar.

    Attributes:
        norm: Frobenius norm ‖·‖_F.
        spectral_norm: Largest singular value σ₁.
        stable_rank: ‖·‖_F²/σ₁², in [1, rank]; 0 for a zero matrix.
        entropy: H₂ in nats, in [0, ln rank]; 0 for a zero matrix.
        modes: exp(H₂), in [1, rank]; 1 for a zero matrix.
        effective_rank: exp(H₁), in [1, rank]; 1 for a zero matrix.
    """

    norm: Float[Array, ""]
    spectral_norm: Float[Array, ""]
    stable_rank: Float[Array, ""]
    entropy: Float[Array, ""]
    modes: Float[Array, ""]
    effective_rank: Float[Array, ""]


def singular_values(w: ArrayLike) -> Float[Array, " r"]:
    """All min(m, n) singular values, descending, by SVD.

    Zero matrix: zeros. A non-finite entry: all NaN.

    Args:
        w: Matrix (m, n) of any float dtype; computed in at least float32.

    Raises:
        ValueError: `w` is not a non-empty floating-point matrix.

    >>> import jax.numpy as jnp
    >>> print(singular_values(jnp.diag(jnp.array([3.0, 4.0]))))
    [4. 3.]
    """
    w = as_matrix(w, "singular_values")
    finite = all_finite(w)
    w, scale = unit_scale(jnp.where(finite, w, jnp.zeros_like(w)))
    return nan_unless(finite, decompositions.singular_values(w) * scale)


def entropy_of_spectrum(sigma: Float[Array, " r"], alpha: float | int = 2.0) -> Float[Array, ""]:
    """H_α of given singular values: −Σ p_i ln p_i, p_i = σ_i^α/Σ_j σ_j^α, in nats.

    Range [0, ln r]; 0 where all σ are zero.

    Args:
        sigma: Singular values (r,), in any order, none negative.
        alpha: Exponent, positive: 2 weighs energies, 1 gives the effective rank.

    Raises:
        ValueError: `alpha` is not positive.

    >>> import jax.numpy as jnp
    >>> print(f"{entropy_of_spectrum(jnp.ones(4)):.4f}")
    1.3863
    """
    if not alpha > 0:
        raise ValueError(f"alpha: expected a positive exponent, got {alpha}; 1 and 2 are usual")
    largest = jnp.max(sigma)
    weight = (sigma / jnp.where(largest > 0, largest, jnp.ones_like(largest))) ** alpha
    total = jnp.sum(weight)
    p = weight / jnp.where(total > 0, total, jnp.ones_like(total))
    return jnp.sum(jax.scipy.special.entr(p)).astype(jnp.float32)


def spectrum_stats(sigma: Float[Array, " r"]) -> SpectrumStats:
    """All of `SpectrumStats` from given singular values (r,), not necessarily sorted."""
    largest = jnp.max(sigma)
    norm = largest * jnp.linalg.norm(sigma / _positive(largest))
    entropy = entropy_of_spectrum(sigma)
    return SpectrumStats(
        norm=norm,
        spectral_norm=largest,
        stable_rank=_squared_ratio(norm, largest),
        entropy=entropy,
        modes=jnp.exp(entropy),
        effective_rank=jnp.exp(entropy_of_spectrum(sigma, 1.0)),
    )


def spectral_entropy(w: ArrayLike, alpha: float | int = 2.0) -> Float[Array, ""]:
    """Entropy of the singular spectrum, H_α = −Σ p_i ln p_i with p_i = σ_i^α/Σ_j σ_j^α.

    In nats, in [0, ln min(m, n)]: 0 for rank one, ln r for r equal singular values. Invariant to
    scale, transposition and orthogonal factors. Zero matrix: 0. A non-finite entry: NaN.

    Args:
        w: Matrix (m, n) of any float dtype.
        alpha: Exponent, positive. 2 is the "singular spectrum" of arXiv 2606.28116; 1 gives the
            logarithm of the effective rank.

    Returns:
        Float32 scalar.

    Raises:
        ValueError: `w` is not a non-empty floating-point matrix, or `alpha` is not positive.

    >>> import jax.numpy as jnp
    >>> print(f"{spectral_entropy(jnp.eye(8)):.4f}")
    2.0794

    References:
        arXiv 2606.28116, spectral entropy; Roy & Vetterli 2007 for α = 1.
    """
    return entropy_of_spectrum(singular_values(w), alpha)


def effective_modes(w: ArrayLike, alpha: float | int = 2.0) -> Float[Array, ""]:
    """Number of modes exp(H_α), in [1, min(m, n)]; see `spectral_entropy`.

    Zero matrix: 1 = exp(0). A non-finite entry: NaN.

    Args:
        w: Matrix (m, n) of any float dtype.
        alpha: Exponent, positive.

    Raises:
        ValueError: As `spectral_entropy`.

    >>> import jax.numpy as jnp
    >>> print(effective_modes(jnp.outer(jnp.arange(3.0), jnp.ones(5))).round(4))
    1.0
    """
    return jnp.exp(spectral_entropy(w, alpha))


def effective_rank(w: ArrayLike) -> Float[Array, ""]:
    """Effective rank exp(H₁), in [1, min(m, n)]; see `spectral_entropy`.

    Zero matrix: 1 = exp(0). A non-finite entry: NaN.

    Args:
        w: Matrix (m, n) of any float dtype.

    Raises:
        ValueError: `w` is not a non-empty floating-point matrix.

    >>> import jax.numpy as jnp
    >>> print(effective_rank(jnp.eye(8)).round(4))
    8.0

    References:
        Roy & Vetterli 2007, "The effective rank".
    """
    return effective_modes(w, 1.0)


def stable_rank(w: ArrayLike) -> Float[Array, ""]:
    """Stable rank ‖W‖_F²/‖W‖₂², in [1, rank W].

    A Gaussian m×n matrix has about mn/(√m+√n)² (`gaussian_stable_rank`), not min(m, n). Invariant
    to scale and orthogonal factors. Zero matrix: 0. A non-finite entry: NaN.

    Args:
        w: Matrix (m, n) of any float dtype.

    Raises:
        ValueError: `w` is not a non-empty floating-point matrix.

    >>> import jax.numpy as jnp
    >>> print(stable_rank(jnp.diag(jnp.array([2.0, 1.0, 1.0]))).round(4))
    1.5

    References:
        arXiv 2602.01734 (MSign), stable rank.
    """
    sigma = singular_values(w)
    return _squared_ratio(jnp.linalg.norm(sigma / _positive(sigma[0])), jnp.sign(sigma[0]))


def gaussian_stable_rank(m: int, n: int) -> float:
    """Stable rank mn/(√m+√n)² that a Gaussian m×n matrix has for large m, n.

    >>> gaussian_stable_rank(64, 64)
    16.0
    """
    return m * n / (math.sqrt(m) + math.sqrt(n)) ** 2


def spectral_norm(w: ArrayLike) -> Float[Array, ""]:
    """Largest singular value σ₁, exact (by SVD). Zero matrix: 0. A non-finite entry: NaN.

    Args:
        w: Matrix (m, n) of any float dtype.

    Raises:
        ValueError: `w` is not a non-empty floating-point matrix.

    >>> import jax.numpy as jnp
    >>> print(spectral_norm(jnp.diag(jnp.array([1.0, -3.0]))))
    3.0
    """
    return singular_values(w)[0]


def spectral_gap(w: ArrayLike) -> Float[Array, ""]:
    """Relative gap 1 − σ₂/σ₁ in [0, 1]: 1 for rank one, 0 for a repeated σ₁.

    A 1×n or n×1 matrix has no second value: 1. Zero matrix: 0. A non-finite entry: NaN.

    Args:
        w: Matrix (m, n) of any float dtype.

    Raises:
        ValueError: `w` is not a non-empty floating-point matrix.

    >>> import jax.numpy as jnp
    >>> print(spectral_gap(jnp.diag(jnp.array([4.0, 1.0]))))
    0.75
    """
    sigma = singular_values(w)
    second = sigma[1] if sigma.shape[0] > 1 else jnp.zeros_like(sigma[0])
    gap = 1.0 - second / _positive(sigma[0])
    return jnp.where(sigma[0] == 0, jnp.zeros_like(gap), gap)


def participation_ratio(w: ArrayLike) -> Float[Array, ""]:
    """Participation ratio (Σσ²)²/Σσ⁴ of the energies, in [1, rank]. Zero matrix: 0.

    The exponential of the order-2 Rényi entropy of σ²; never above exp(H₂). A non-finite entry:
    NaN.

    Args:
        w: Matrix (m, n) of any float dtype.

    Raises:
        ValueError: `w` is not a non-empty floating-point matrix.

    >>> import jax.numpy as jnp
    >>> print(participation_ratio(jnp.eye(5)).round(4))
    5.0
    """
    sigma = singular_values(w)
    energy = jnp.square(sigma / _positive(sigma[0]))
    return _squared_ratio(jnp.sum(energy), jnp.linalg.norm(energy))


def _positive(x: Float[Array, ""]) -> Float[Array, ""]:
    """`x`, or 1 where it is 0, so that it can divide."""
    return jnp.where(x == 0, jnp.ones_like(x), x)


def _squared_ratio(a: Float[Array, ""], b: Float[Array, ""]) -> Float[Array, ""]:
    """(a/b)², or 0 where b = 0."""
    return jnp.where(b == 0, jnp.zeros_like(a), jnp.square(a / _positive(b)))
