"""Checks and conversions at the border of the metric functions; no mathematics lives here."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float


def as_matrix(w: ArrayLike, name: str) -> Float[Array, "m n"]:
    """The matrix `w` in at least float32, or a ValueError that says what to write instead."""
    w = as_float(w, name)
    if w.ndim != 2 or 0 in w.shape:
        remedy = (
            "use jax.vmap over the leading axes of a stack"
            if w.ndim > 2
            else "pass a non-empty matrix"
        )
        raise ValueError(f"{name}: expected a matrix (m, n), got shape {w.shape}; {remedy}")
    return w


def as_float(x: ArrayLike, name: str) -> Float[Array, "..."]:
    """The array `x` in at least float32, or a ValueError for a dtype that is not floating."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"{name}: expected a floating dtype, got {x.dtype}; convert with .astype(jnp.float32)"
        )
    return x if jnp.finfo(x.dtype).bits >= 32 else x.astype(jnp.float32)


def all_finite(*arrays: Float[Array, "..."]) -> Bool[Array, ""]:
    """Whether every entry of every array is finite."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in arrays]))


def nan_unless(valid: Bool[Array, ""], value: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`value` in float32 where `valid` holds, NaN elsewhere."""
    value = value.astype(jnp.float32)
    return jnp.where(valid, value, jnp.full_like(value, jnp.nan))


def unit_scale(x: Float[Array, "..."]) -> tuple[Float[Array, "..."], Float[Array, ""]]:
    """`x` divided by its largest magnitude, and that magnitude; (0, 0) for x = 0.

    Squares of the result neither overflow nor underflow, whatever the scale of `x`.
    """
    scale = jnp.max(jnp.abs(x))
    divisor = jnp.where(scale > 0, scale, jnp.ones_like(scale))
    return x / jax.lax.broadcast(divisor, x.shape), scale
