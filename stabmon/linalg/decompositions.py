"""Decompositions of small matrices that a stack may safely be put through on any machine.

On a CPU a batched LAPACK call of JAX cuts its batch into tasks for the thread pool that it runs on,
and waits for them there. Two such calls at once, where the pool has two threads, wait for ever. So
a CPU takes a batch one matrix at a time, which never waits. On an accelerator there is neither an
SVD nor a QR decomposition: XLA's take twenty seconds to compile and megabytes of code. There
singular values come from Jacobi rotations (`jacobi.py`) of the whole batch. What is made of them is
in `spectrum.py`, `qk.py`, `power.py` and `krylov.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from stabmon.linalg import jacobi
from stabmon.linalg.mesh import replicated, spread
from stabmon.linalg.platforms import by_platform
from stabmon.linalg.products import product


def by_matrix(
    lapack: Callable[..., Any], of_stack: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """A function of matrices: `lapack` of each on a CPU, `of_stack` of all at once elsewhere.

    `of_stack` takes any leading axes; None: `lapack` does. Only the first axis is looped over in
    any one `jax.vmap` on a CPU; nested ones nest their loops, so flatten a stack of several axes
    first.

    >>> factor = by_matrix(jnp.linalg.cholesky)
    >>> print(jax.vmap(factor)(jnp.ones((3, 1, 1))).shape)
    (3, 1, 1)
    """
    native = custom_vmap(of_stack or lapack)
    mapped = custom_vmap(lambda *xs: by_platform(*xs, accelerator=native, cpu=lapack))

    def stacked(size: int, batched: Any, args: tuple[jax.Array, ...]) -> list[jax.Array]:
        repeat = lambda x: jnp.broadcast_to(x[None], (size, *x.shape))
        return [x if has else repeat(x) for x, has in zip(args, batched, strict=True)]

    @native.def_vmap
    def as_it_is(axis_size: int, in_batched: Any, *args: jax.Array):
        out = native(*stacked(axis_size, in_batched, args))
        return out, jax.tree.map(lambda _: True, out)

    @mapped.def_vmap
    def rule(axis_size: int, in_batched: Any, *args: jax.Array):
        one_at_a_time = lambda *xs: jax.lax.map(lambda matrices: mapped(*matrices), xs)
        whole = lambda *xs: by_platform(*xs, accelerator=native, cpu=one_at_a_time)
        out = spread(whole, *stacked(axis_size, in_batched, args))
        return out, jax.tree.map(lambda _: True, out)

    return mapped


def on_stack(decompose: Callable[..., Any]) -> Callable[..., Any]:
    """`decompose`, a function of matrices, for stacks (..., m, n) with the same leading axes.

    >>> print(on_stack(singular_values)(jnp.ones((2, 3, 4, 5))).shape)
    (2, 3, 4)
    """

    def whole(*stacks: jax.Array) -> Any:
        leading = stacks[0].shape[:-2]
        if not leading:
            return decompose(*stacks)
        # Whole on every device before axes are merged: with the sum over a sharded axis still
        # open, XLA's partitioner was seen to give wrong numbers (jax 0.10.2).
        flat = [x.reshape(-1, *x.shape[-2:]) for x in replicated(stacks)]
        out = jax.vmap(decompose)(*flat)
        return jax.tree.map(lambda x: x.reshape(*leading, *x.shape[1:]), out)

    return whole


def turned(x: jax.Array) -> jax.Array:
    """The transpose of each matrix of a stack."""
    return jnp.swapaxes(x, -1, -2)


@partial(by_matrix, of_stack=jacobi.singular_values)
def _values(w: jax.Array) -> jax.Array:
    return jnp.linalg.svd(w, compute_uv=False)


@partial(by_matrix, of_stack=jacobi.thin_svd)
def thin_svd(w: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """U, σ, Vᵀ of a finite matrix (m, n), min(m, n) of each.

    On an accelerator vectors of the longer side that belong to σ = 0 are zero, and those of small σ
    are orthogonal to others as far as their own rounding allows.
    """
    u, sigma, vt = jnp.linalg.svd(w, full_matrices=False)
    return u, sigma, vt


@jax.custom_jvp
def singular_values(w: jax.Array) -> jax.Array:
    """Singular values of a finite matrix (m, n), descending; differentiable once."""
    return _values(w)


@singular_values.defjvp
def _singular_values_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]):
    """Derivative dσᵢ = uᵢᵀ dW vᵢ."""
    u, sigma, vt = thin_svd(primals[0])
    moved = product(tangents[0], turned(vt))
    return sigma, jnp.sum(u * moved, axis=-2)


@partial(by_matrix, of_stack=jacobi.orthonormal)
def orthonormal(w: jax.Array) -> jax.Array:
    """Q of the QR decomposition of a matrix (m, n), m ≥ n: a basis, whatever the rank."""
    return jnp.linalg.qr(w)[0]


@by_matrix
def cholesky(cosines: jax.Array) -> jax.Array:
    """Lower-triangular L with LLᵀ = C + sI for a Gram matrix C of n unit vectors of any rank.

    s = n·eps, or as many times 16 of that as it takes where rounding made C indefinite.
    """
    return _shifted(cosines)


@by_matrix
def cholesky_with_inverse(cosines: jax.Array) -> tuple[jax.Array, jax.Array]:
    """L as from `cholesky`, and L⁻¹."""
    lower = _shifted(cosines)
    identity = jnp.broadcast_to(jnp.eye(lower.shape[-1], dtype=lower.dtype), lower.shape)
    return lower, jax.lax.linalg.triangular_solve(lower, identity, left_side=True, lower=True)


def _shifted(cosines: jax.Array) -> jax.Array:
    n = cosines.shape[-1]
    eye = jnp.broadcast_to(jnp.eye(n, dtype=cosines.dtype), cosines.shape)
    failed = lambda lower: ~jnp.all(jnp.isfinite(lower), axis=(-2, -1), keepdims=True)

    def again(carry: tuple[jax.Array, jax.Array, jax.Array]):
        count, shift, lower = carry
        shift = jnp.where(failed(lower) & (count > 0), 16 * shift, shift)
        shifted = cosines + shift * eye
        return count + 1, shift, jax.lax.linalg.cholesky(shifted, symmetrize_input=False)

    def unfinished(carry: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        return (carry[0] < 6) & jnp.any(failed(carry[2]))

    least = jnp.full((*cosines.shape[:-2], 1, 1), n * jnp.finfo(cosines.dtype).eps, cosines.dtype)
    begun = (jnp.int32(0), least, jnp.full_like(cosines, jnp.inf))
    return jax.lax.while_loop(unfinished, again, begun)[2]


@by_matrix
def divided(x: jax.Array, positive: jax.Array) -> jax.Array:
    """X P⁻¹ for X (m, n) and a positive definite P (n, n), of which the lower triangle is read."""
    lower = jax.lax.linalg.cholesky(positive, symmetrize_input=False)
    half = jax.lax.linalg.triangular_solve(lower, x, lower=True, transpose_a=True)
    return jax.lax.linalg.triangular_solve(lower, half, lower=True)
