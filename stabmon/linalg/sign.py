"""`matrix_sign`: the orthogonal polar factor UVᵀ of a matrix or a stack of matrices.

Here: scaling, transposition, what happens to zero and non-finite matrices, the choice of a method.
Not here: the iterations and the derivative (`polar.py`), and what is done with the sign of a
weight (`optax_ext`).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from stabmon.linalg.polar import identity_like, polar_factor

METHODS = ("auto", "newton_schulz", "polar", "svd")
_TINY = float(jnp.finfo(jnp.float32).tiny)


def matrix_sign(
    w: ArrayLike,
    method: str | Callable[[Array], Array] = "auto",
    *,
    condition: float | int = 1e4,
    max_gain: float | int | None = None,
) -> Float[Array, "..."]:
    """Sign of a matrix: UVᵀ of its thin SVD W = UΣVᵀ, every singular value set to 1.

    Computed in float32 from W/‖W‖_F, so it is invariant to scale and does not overflow.

    Accuracy for σ₁/σ_min ≤ `condition`: ‖QᵀQ − I‖_max ≤ 1e-4 on the smaller side, and as close to
    the float64 result as a float32 SVD comes. Which singular values count as zero:

    - "svd": σ ≤ 2⁻²⁰·σ₁ gives 0.
    - "newton_schulz", "polar": σ below σ₁/`condition` is lifted as far as σ₁/`condition` is, so
      it comes out between 0 and 1, in proportion to σ as σ → 0; and 0 gives 0 to rounding,
      2⁻²³·`condition`.

    A zero matrix (also one whose entries all lie below 1.2e-38) gives zero; a matrix with a
    non-finite entry gives NaN; neither touches the rest of the stack. A single row or column
    gives W/‖W‖.

    Differentiable once, forward and reverse, for every method, by the derivative of the polar
    factor (an SVD, taken in the derivative only); directions with σ = 0 are held fixed.

    "auto" is "newton_schulz", on any backend, but "svd" on a CPU from a shorter side of 256 on,
    unless the longer is twice as long. Speed against an SVD (LAPACK), two CPU cores, float32,
    condition 1e4, medians of interleaved runs; ‖QᵀQ − I‖_max is at most 2e-5 in all:

        stack          newton_schulz  polar      stack          newton_schulz  polar
        16×48×48            2.6        2.2       8×256×64            2.3        1.3
        16×64×64            1.9        1.3       4×512×128           2.0        1.3
        4×128×128           1.0        1.0       2×1024×256          2.8        2.3
        2×256×256           0.7        0.8       1×4096×1024         0.9        0.6
        1×1024×1024         0.6        0.8       1×2048×2048         0.7        1.0

    An SVD suffers most where other threads compete for the cores (five times slower and more). On
    an accelerator "svd" and the derivative take Jacobi rotations, and a TPU forms each product from
    six bfloat16 ones; `stabmon.linalg.platforms.as_on_accelerator` shows on a CPU what comes out.

    Args:
        w: m × n, any float dtype, any leading axes.
        method: "svd"; "newton_schulz", composed minimax odd polynomials, matrix products only;
            "polar", weighted Halley steps with Cholesky factors; a function of a float32 stack
            (…, m, n) with m ≥ n and Frobenius norm 1 (or zero); or "auto".
        condition: Largest σ₁/σ_min that is brought to 1; sets the number of iterations. Static.
        max_gain: None, or the largest gain: with s the root mean square of all singular values, σ
            becomes σ/√(σ² + (s/max_gain)²), at most max_gain·σ/s, instead of 1, so that
            directions of noise are not restored to full strength. Static.

    Returns:
        The sign, in the shape and dtype of `w`.

    Raises:
        ValueError: `w` is not a float array of two or more axes, `method` is unknown, `condition`
            is not in (1, 1e7], or `max_gain` is not positive.

    >>> q = matrix_sign(jnp.array([[3.0, 0.0], [0.0, -0.5]]))
    >>> jnp.round(q, 4) + 0
    Array([[ 1.,  0.],
           [ 0., -1.]], dtype=float32)

    References:
        Polar Express, arXiv 2505.16932, algorithm 1 (composed minimax polynomials).
        Nakatsukasa, Bai, Gygi, SIAM J. Matrix Anal. Appl. 31 (2010), eq. 3.9 (weighted Halley).
    """
    check_method(method, "matrix_sign")
    w = jnp.asarray(w)
    if w.ndim < 2 or not jnp.issubdtype(w.dtype, jnp.floating):
        raise ValueError(
            f"matrix_sign: expected a float array (…, m, n), got {w.dtype}{list(w.shape)}"
        )
    if not 1 < condition <= 1e7:
        raise ValueError(f"matrix_sign: expected 1 < condition <= 1e7, got {condition}")
    if max_gain is not None and not max_gain > 0:
        raise ValueError(f"matrix_sign: expected max_gain > 0 or None, got {max_gain}")
    if w.size == 0:
        return w
    x, _, finite = normalised(w)
    wide = x.shape[-2] < x.shape[-1]
    x = jnp.swapaxes(x, -1, -2) if wide else x
    if x.shape[-1] == 1:
        q = x
    else:
        q = _tall_sign(x, method, float(condition), max_gain)
    q = jnp.swapaxes(q, -1, -2) if wide else q
    return jnp.where(finite, q, jnp.nan).astype(w.dtype)


def orthogonality_error(u: ArrayLike) -> Float[Array, "..."]:
    """‖UᵀU − I‖_max of each matrix, on the smaller side; 0 for orthonormal, 1 for zero. float32.

    >>> orthogonality_error(2 * jnp.eye(3))
    Array(3., dtype=float32)
    """
    x = jnp.asarray(u).astype(jnp.float32)
    x = jnp.swapaxes(x, -1, -2) if x.shape[-2] < x.shape[-1] else x
    gram = jnp.matmul(jnp.swapaxes(x, -1, -2), x, precision=jax.lax.Precision.HIGHEST)
    return jnp.max(jnp.abs(gram - identity_like(gram)), axis=(-2, -1))


def normalised(
    w: Float[Array, "*stack m n"],
) -> tuple[Float[Array, "*stack m n"], Float[Array, "*stack 1 1"], Bool[Array, "*stack 1 1"]]:
    """W/‖W‖_F in float32, ‖W‖_F, and whether all entries are finite; without overflow.

    A zero or non-finite matrix gives zeros and norm 0.
    """
    w = w if w.dtype == jnp.float64 else w.astype(jnp.float32)
    finite = jnp.all(jnp.isfinite(w), axis=(-2, -1), keepdims=True)
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(w), axis=(-2, -1), keepdims=True))
    usable = finite & (largest >= _TINY)
    # In two exact halves: the reciprocal of a very large entry is subnormal, and flushed to zero.
    shift = jnp.where(largest > 1, 2.0**-64, 2.0**64).astype(w.dtype)
    x = (w * shift) / jnp.where(usable, largest * shift, 1)
    x = jnp.where(usable, x, 0).astype(jnp.float32)
    total = jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True)
    norm = jnp.sqrt(jnp.where(usable, total, 1))
    return x / norm, jnp.where(usable, norm * largest.astype(jnp.float32), 0), finite


def check_method(method: object, caller: str) -> None:
    """Raises ValueError unless `method` is one of `METHODS` or a function."""
    if not callable(method) and method not in METHODS:
        offered = ", ".join(map(repr, METHODS))
        raise ValueError(f"{caller}: expected method {offered} or a function, got {method!r}")


def _tall_sign(
    x: Float[Array, "*stack m n"],
    method: str | Callable[[Array], Array],
    condition: float,
    max_gain: float | int | None,
) -> Float[Array, "*stack m n"]:
    """Sign of normalised stacks with m ≥ n ≥ 2."""
    if max_gain is None:
        return polar_factor(x, method, condition)
    # The polar factor of [W; τI] is [W; τI](WᵀW + τ²I)^(−1/2). Its upper part is what is wanted,
    # and its condition number is at most √(1 + τ⁻²), so a small gain also means fewer steps.
    m, n = x.shape[-2:]
    floor = 1 / (max_gain * n**0.5)
    below = floor * identity_like(x[..., :n, :])
    padded = jnp.concatenate([x, below], axis=-2) / (1 + max_gain**-2) ** 0.5
    reached = min(condition, (1 + floor**-2) ** 0.5)
    return polar_factor(padded, method, reached)[..., :m, :]
