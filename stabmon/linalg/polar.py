"""The iterations behind `matrix_sign`: the polar factor of one float32 stack, and its derivative.

A stack here is (…, m, n) with m ≥ n, finite, each matrix of Frobenius norm 1 or zero. Scaling,
transposition and the choice of the method live in `sign.py`, scalar coefficients in
`approximants.py`.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from stabmon.linalg.approximants import Polynomial, halley_schedule, quintic_schedule
from stabmon.linalg.decompositions import divided, on_stack, thin_svd
from stabmon.linalg.platforms import by_platform
from stabmon.linalg.products import large_product, product, symmetric_product

Stack = Float[Array, "*stack m n"]

# From this many rows per column, iterating on the Gram matrix takes fewer products than on X.
GRAM_ASPECT = 1.5
# Polynomials of one Gram matrix. A third would cost digits while X is ill-conditioned.
TALL_STEPS = 2
# Rounding a matrix to float32 perturbs its zero singular values to about 2⁻²⁴ σ₁, at any size.
ZERO_LEVEL = 2.0**-20


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def polar_factor(x: Stack, method: str | Callable[[Array], Array], condition: float) -> Stack:
    """UVᵀ of each matrix; zero for a zero matrix.

    Args:
        x: As in the module docstring.
        method: "svd", "polar", "newton_schulz", "auto", or a function of `x`.
        condition: σ₁/σ_min that is brought to 1.
    """
    if callable(method):
        return method(x)
    if method == "svd":
        return _by_svd(x)
    # Scaling by the Schatten 8-norm leaves σ₁ within n^(−1/8) of 1.
    lower = x.shape[-1] ** -0.125 / condition
    if method == "polar":
        return _by_halley(x, lower)
    size = TALL_STEPS if x.shape[-2] >= GRAM_ASPECT * x.shape[-1] else 1
    by_products = lambda x: _compose(x, quintic_schedule(lower, size), size)
    if method == "auto" and lapack_is_faster(*x.shape[-2:]):
        return by_platform(x, accelerator=by_products, cpu=_by_svd)
    return by_products(x)


def lapack_is_faster(m: int, n: int) -> bool:
    """Whether an SVD of one matrix, m ≥ n, takes a CPU less time than the products."""
    return n >= 256 and m < 2 * n


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
    dxv = product(dx, _transpose(vt))
    a = product(_transpose(u), dxv)
    turned = jnp.where(both, (a - _transpose(a)) / sums, 0)
    outside = (dxv - product(u, a)) * inverse[..., None, :]
    return q, product(product(u, turned) + outside, vt)


def _by_svd(x: Stack) -> Stack:
    """UVᵀ with σ ≤ `ZERO_LEVEL`·σ₁ treated as zero."""
    u, s, vt = on_stack(thin_svd)(x)
    kept = (s > ZERO_LEVEL * s[..., :1]).astype(x.dtype)
    return product(u * kept[..., None, :], vt)


def _by_halley(x: Stack, lower: float) -> Stack:
    """Quintic lifts, then X ← (b/c) X + (a − b/c) X (I + c XᵀX)⁻¹."""
    lifts, steps = halley_schedule(lower)
    a, b, c = (jnp.asarray(weights, x.dtype) for weights in zip(*steps, strict=True))

    def step(i: Int[Array, ""], x: Stack) -> Stack:
        gram = symmetric_product(_transpose(x), x)
        y = on_stack(divided)(x, c[i] * gram + identity_like(gram))
        return b[i] / c[i] * x + (a[i] - b[i] / c[i]) * y

    return jax.lax.fori_loop(0, len(steps), step, _compose(x, lifts))


def _compose(x: Stack, polynomials: Sequence[Polynomial], size: int = 1) -> Stack:
    """p_k(…p₁(X/‖X‖_S8)) for odd quintics p, `size` of them at a time, in a loop.

    X ← X q(XᵀX) one by one for matrices near square. For tall ones several q of one Gram matrix are
    multiplied up on the n × n side, and the Gram matrix is formed afresh from X for each block: its
    rounding, ε‖X‖², would otherwise stand where the small σ² of later steps are.
    """
    table = jnp.asarray(polynomials, x.dtype).reshape(-1, size, 3)

    def block(i: Int[Array, ""], x: Stack) -> Stack:
        gram = symmetric_product(_transpose(x), x)
        square = symmetric_product(gram, gram)
        norm = jnp.sum(jnp.square(square), axis=(-2, -1), keepdims=True) ** 0.125
        scale = jnp.where((i == 0) & (norm > 0), 1 / jnp.where(norm > 0, norm, 1), 1)
        x, gram, square = x * scale, gram * scale**2, square * scale**4
        if size == 1:
            return table[i, 0, 0] * x + large_product(x, _tail(table[i, 0], gram, square))
        eye = identity_like(gram)
        total = z = table[i, 0, 0] * eye + _tail(table[i, 0], gram, square)
        for k in range(1, size):  # Z_k…Z₁ with Z_k = q_k(G_k), G_{k+1} = Z_k G_k Z_k; all commute
            gram = symmetric_product(z, symmetric_product(gram, z))
            square = symmetric_product(gram, gram)
            z = table[i, k, 0] * eye + _tail(table[i, k], gram, square)
            total = symmetric_product(total, z)
        return large_product(x, total)

    return jax.lax.fori_loop(0, len(table), block, x)


def _tail(c: Float[Array, " 3"], gram: Stack, square: Stack) -> Stack:
    """q(G) − q(0) = c₁G + c₂G²."""
    return c[1] * gram + c[2] * square


def identity_like(x: Float[Array, "*stack n n"]) -> Float[Array, "*stack n n"]:
    """A stack of identity matrices."""
    return jnp.broadcast_to(jnp.eye(x.shape[-1], dtype=x.dtype), x.shape)


def _transpose(x: Float[Array, "*stack m n"]) -> Float[Array, "*stack n m"]:
    return jnp.swapaxes(x, -1, -2)
