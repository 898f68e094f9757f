"""Digests of arrays by their bits, equal on every mesh and in every order of summation.

Sums of integers modulo 2³² do not depend on how an array lies on devices. What is compared with
them is said in the contracts.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

_PRIMES = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)


def bits(x: Any, axes: Sequence[int] = (), *, ordered: bool = True) -> UInt32[Array, "..."]:
    """Returns a 32-bit digest of `x`, one for each index of `axes`.

    Two arrays of one dtype with different entries have the same digest with probability 2⁻³². An
    empty array has digest 0. NaN counts by its bits as any other value.

    Args:
        x: Array of any dtype; keys of `jax.random.key` too.
        axes: Axes that are kept, ascending, such as those of layers and experts.
        ordered: Whether the order of the entries counts.

    Example:
        >>> x = jnp.arange(6.0).reshape(2, 3)
        >>> bool(bits(x) == bits(x[::-1])), bool(bits(x, ordered=False) == bits(x[::-1]))
        (False, False)
        >>> bool(bits(x, ordered=False) == bits(x[::-1], ordered=False))
        True
    """
    word = _words(x)
    rest = [axis for axis in range(word.ndim) if axis not in axes]
    mixed = word * jnp.uint32(_PRIMES[1])
    if ordered:
        place, stride = jnp.zeros((), jnp.uint32), 1
        for axis in reversed(rest):
            along = jax.lax.broadcasted_iota(jnp.uint32, word.shape, axis)
            place = place + along * jnp.uint32(stride & 0xFFFFFFFF)
            stride *= word.shape[axis]
        mixed = (word ^ (place * jnp.uint32(_PRIMES[0]))) * jnp.uint32(_PRIMES[1])
    mixed = (mixed ^ (mixed >> jnp.uint32(15))) * jnp.uint32(_PRIMES[2])
    mixed = mixed ^ (mixed >> jnp.uint32(13))
    return jnp.sum(mixed, axis=tuple(rest), dtype=jnp.uint32)


def _words(x: Any) -> UInt32[Array, "..."]:
    """The entries as 32-bit words; of 64-bit ones both halves are folded."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([jnp.real(x), jnp.imag(x)], axis=-1)
    size = jnp.dtype(x.dtype).itemsize
    raw = jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16}.get(size, jnp.uint32))
    if size == 8:
        raw = raw[..., 0] ^ (raw[..., 1] * jnp.uint32(_PRIMES[0]))
    return raw.astype(jnp.uint32)
