"""Products of matrices in full float32, on every platform.

A matrix unit multiplies bfloat16. XLA's own float32 product on a TPU takes several times as long to
compile as the six bfloat16 products of which it consists, so they are written out here, as a loop.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Int

from stabmon.linalg.platforms import by_platform

# Smallest block worth a product of its own, and most blocks along an axis.
BLOCK = 512
MOST_BLOCKS = 4
# Parts of the factors that are multiplied, the smallest products first. What is left out is below
# 2⁻²⁴ of the product of the lengths.
_PASSES = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))


def product(a: Float[Array, "*a m k"], b: Float[Array, "*b k n"]) -> Float[Array, "*c m n"]:
    """Matrix product in full precision, also where the backend would round inputs to bfloat16."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def large_product(a: Float[Array, "*a m k"], b: Float[Array, "*b k n"]) -> Float[Array, "*c m n"]:
    """The same of large matrices that each device has whole; on a TPU `in_passes`.

    Not for derivatives: their cotangents would be rounded.
    """
    if a.dtype != jnp.float32 or b.dtype != jnp.float32:
        return product(a, b)
    own = dict.fromkeys(("cpu", "cuda", "rocm"), product)
    return by_platform(a, b, accelerator=in_passes, **own)


def in_passes(a: Float[Array, "*a m k"], b: Float[Array, "*b k n"]) -> Float[Array, "*c m n"]:
    """Matrix product of float32 matrices by six products of bfloat16 ones, summed in float32.

    Relative to Σ|a||b| the error is 2⁻²³, as of a float32 product. With the last three passes only
    it would be 2⁻¹⁵, with the last alone 2⁻⁸.
    """
    left, right = _parts(a), _parts(b)
    i, j = (jnp.asarray(x, jnp.int32) for x in zip(*_PASSES, strict=True))

    def add(p: Int[Array, ""], total: Array) -> Array:
        x, y = (jax.lax.dynamic_index_in_dim(s, k[p], 0, False) for s, k in ((left, i), (right, j)))
        return total + jnp.matmul(x, y, preferred_element_type=jnp.float32)

    stack = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    begun = jnp.zeros((*stack, a.shape[-2], b.shape[-1]), jnp.float32)
    return jax.lax.fori_loop(0, len(_PASSES), add, begun)


def symmetric_product(
    a: Float[Array, "*stack n k"], b: Float[Array, "*stack k n"]
) -> Float[Array, "*stack n n"]:
    """A product known to be symmetric: of large ones only the blocks on and above the diagonal.

    The others are their mirror images. Four blocks along an axis take 5/8 of the operations, two
    take 3/4. Where blocks do not divide the axis the last reaches back.
    """
    n, axis = a.shape[-2], a.ndim - 2
    count = max(1, min(MOST_BLOCKS, n // BLOCK))
    if count == 1:
        return large_product(a, b)
    width = -(-n // count)
    pairs = [(i, j) for i in range(count) for j in range(i, count)]
    start = jnp.asarray([min(i * width, n - width) for i in range(count)], jnp.int32)
    i, j = (jnp.asarray(x, jnp.int32) for x in zip(*pairs, strict=True))
    zeros = (jnp.zeros((), jnp.int32),) * axis

    def put(p: Int[Array, ""], whole: Array) -> Array:
        row, column = start[i[p]], start[j[p]]
        block = large_product(
            jax.lax.dynamic_slice_in_dim(a, row, width, axis),
            jax.lax.dynamic_slice_in_dim(b, column, width, axis + 1),
        )
        mirrored = jnp.swapaxes(block, -1, -2)
        whole = jax.lax.dynamic_update_slice(whole, mirrored, (*zeros, column, row))
        return jax.lax.dynamic_update_slice(whole, block, (*zeros, row, column))

    begun = jnp.zeros((*a.shape[:-1], n), a.dtype)
    return jax.lax.fori_loop(0, len(pairs), put, begun)


def _parts(x: Float[Array, "*stack m n"]) -> BFloat16[Array, "3 *stack m n"]:
    """Three bfloat16 arrays that add up to `x`, largest first."""
    parts = []
    for _ in range(3):
        part = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return jnp.stack(parts)
