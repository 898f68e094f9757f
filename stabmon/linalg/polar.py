"""The iterations behind `matrix_sign`: the polar factor of one float32 stack, and its derivative.

A stack here is (…, m, n) with m ≥ n, finite, each matrix of Frobenius norm 1 or zero. Scaling,
transposition and the choice of the method live in `_matrix_sign.py`, scalar coefficients in
`_approximants.py`.
"""

import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from stabmon.linalg.approximants import Polynomial, halley_schedule, polynomial_schedule
from stabmon.linalg.lapack import divided, on_stack, thin_svd

Stack = Float[Array, "*stack m n"]

# From this many rows per column, iterating on the Gram matrix takes fewer products than on X.
GRAM_ASPECT = 1.5
# Smallest block worth a product of its own.
SYMMETRIC_BLOCK = 512
# Rounding a matrix to float32 perturbs its zero singular values to about 2⁻²⁴ σ₁, at any size.
ZERO_LEVEL = 2.0**-20

_product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def polar_factor(x: Stack, method: str | Callable[[Array], Array], condition: float) -> Stack:
    """UVᵀ of each matrix by a resolved method; zero for a zero matrix.

    Args:
        x: As in the module docstring.
        method: "svd", "polar", "newton_schulz", or a function of `x`.
        condition: σ₁/σ_min that is brought to 1.
    """
    if callable(method):
        return method(x)
    if method == "svd":
        return _by_svd(x)
    # Scaling by the Schatten 8-norm leaves σ₁ within n^(−1/8) of 1.
    lower = x.shape[-1] ** -0.125 / condition
    if method == "newton_schulz":
        return _compose(x, polynomial_schedule(lower))
    return _by_halley(x, lower)


@polar_factor.defjvp
def _polar_factor_jvp(method, condition, primals, tangents):
    """Derivative dQ = U [(A − Aᵀ) ∘ 1/(σᵢ + σⱼ)] Vᵀ + (I − UUᵀ) dX V Σ⁻¹ Vᵀ, A = Uᵀ dX V."""
    (x,), (dx,) = primals, tangents
    q = polar_factor(x, method, condition)
    u, s, vt = on_stack(thin_svd)(x)
    kept = s > ZERO_LEVEL * s[..., :1]
    both = kept[..., :, None] & kept[..., None, :]
    sums = jnp.where(both, s[..., :, None] + s[..., None, :], 1)
    inverse = jnp.where(kept, 1 / jnp.where(kept, s, 1), 0)
    dxv = _product(dx, _transpose(vt))
    a = _product(_transpose(u), dxv)
    turned = jnp.where(both, (a - _transpose(a)) / sums, 0)
    outside = (dxv - _product(u, a)) * inverse[..., None, :]
    return q, _product(_product(u, turned) + outside, vt)


def _by_svd(x: Stack) -> Stack:
    """UVᵀ with σ ≤ `ZERO_LEVEL`·σ₁ treated as zero."""
    u, s, vt = on_stack(thin_svd)(x)
    kept = (s > ZERO_LEVEL * s[..., :1]).astype(x.dtype)
    return _product(u * kept[..., None, :], vt)


def _by_halley(x: Stack, lower: float) -> Stack:
    """Quintic lifts, then X ← (b/c) X + (a − b/c) X (I + c XᵀX)⁻¹."""
    lifts, steps = halley_schedule(lower)
    x = _compose(x, lifts)
    for a, b, c in steps:
        gram = _gram(x)
        y = on_stack(divided)(x, c * gram + identity_like(gram))
        x = (b / c) * x + (a - b / c) * y
    return x


def _compose(x: Stack, polynomials: Sequence[Polynomial]) -> Stack:
    """p_k(…p₁(X/‖X‖_S8)) for odd polynomials p.

    X ← X q(XᵀX) one by one for matrices near square. For tall ones, several q of one Gram matrix
    are multiplied up on the n × n side, and the Gram matrix is formed afresh from X after each
    block: its rounding, ε‖X‖², would otherwise stand where the small σ² of later steps are.
    """
    tall = x.shape[-2] >= GRAM_ASPECT * x.shape[-1]
    sizes = _blocks(len(polynomials)) if tall else (1,) * len(polynomials)
    start = 0
    for size in sizes:
        block = polynomials[start : start + size]
        gram = _gram(x)
        square = None
        if start == 0:
            square = _symmetric(gram, gram)
            norm = jnp.sum(jnp.square(square), axis=(-2, -1), keepdims=True) ** 0.125
            scale = 1 / jnp.where(norm > 0, norm, 1)
            x, gram, square = x * scale, gram * scale**2, square * scale**4
        if size == 1:
            x = block[0][0] * x + _product(x, _tail(block[0], gram, square))
        else:
            x = _product(x, _on_gram(gram, square, block))
        start += size
    return x


def _on_gram(gram: Stack, square: Stack | None, block: Sequence[Polynomial]) -> Stack:
    """Z_k…Z₁ with Z_i = q_i(G_i), G_{i+1} = Z_i G_i Z_i; all commute."""
    eye = identity_like(gram)
    total = z = block[0][0] * eye + _tail(block[0], gram, square)
    for polynomial in block[1:]:
        gram = _symmetric(z, _symmetric(gram, z))
        z = polynomial[0] * eye + _tail(polynomial, gram, None)
        total = _symmetric(total, z)
    return total


def _tail(polynomial: Polynomial, gram: Stack, square: Stack | None) -> Stack:
    """q(G) − q(0) for degree 3, 5 or 9 in X: c₁G + c₂G² (+ G²(c₃G + c₄G²))."""
    if len(polynomial) == 2:
        return polynomial[1] * gram
    square = _symmetric(gram, gram) if square is None else square
    low = polynomial[1] * gram + polynomial[2] * square
    if len(polynomial) == 3:
        return low
    return low + _symmetric(square, polynomial[3] * gram + polynomial[4] * square)


def _blocks(count: int) -> tuple[int, ...]:
    """Two steps, while X is ill-conditioned, then as many as three at a time."""
    first = min(2, count)
    rest = count - first
    parts = -(-rest // 3)
    return (first, *(rest // parts + (i >= parts - rest % parts) for i in range(parts)))


def _symmetric(
    a: Float[Array, "*stack n k"], b: Float[Array, "*stack k n"]
) -> Float[Array, "*stack n n"]:
    """A product known to be symmetric: the blocks below the diagonal are mirrored.

    Four block rows take 5/8 of the operations, two take 3/4. Small matrices are not cut.
    """
    n = a.shape[-2]
    parts = max(1, min(4, n // SYMMETRIC_BLOCK))
    if parts == 1:
        return _product(a, b)
    cuts = [n * i // parts for i in range(parts + 1)]
    spans = list(itertools.pairwise(cuts))
    rows = [_product(a[..., low:high, :], b[..., :, low:]) for low, high in spans]
    whole = [
        jnp.concatenate(
            [_transpose(rows[j][..., :, low - cuts[j] : high - cuts[j]]) for j in range(i)]
            + [rows[i]],
            axis=-1,
        )
        for i, (low, high) in enumerate(spans)
    ]
    return jnp.concatenate(whole, axis=-2)


def _gram(x: Stack) -> Float[Array, "*stack n n"]:
    return _symmetric(_transpose(x), x)


def identity_like(x: Float[Array, "*stack n n"]) -> Float[Array, "*stack n n"]:
    """A stack of identity matrices."""
    return jnp.broadcast_to(jnp.eye(x.shape[-1], dtype=x.dtype), x.shape)


def _transpose(x: Float[Array, "*stack m n"]) -> Float[Array, "*stack n m"]:
    return jnp.swapaxes(x, -1, -2)
