"""Decompositions of small matrices that a stack may safely be put through on any machine.

On a CPU a batched LAPACK call of JAX cuts its batch into tasks for the thread pool that it runs on,
and waits for them there. Two such calls at once, where the pool has two threads, wait for ever. The
decompositions here take a batch one matrix at a time on a CPU, which never waits, and as a batch
elsewhere. What is made of them is in `spectrum.py`, `qk.py`, `power.py` and `krylov.py`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from stabmon.linalg.mesh import replicated, spread


def one_at_a_time(decompose: Callable[..., Any]) -> Callable[..., Any]:
    """`decompose`, a function of matrices, with a `jax.vmap` that loops over the batch on a CPU.

    Both give the same numbers. Only the first axis is looped over in any one `vmap`; nested ones
    nest their loops, so flatten a stack of several axes first.

    >>> factor = one_at_a_time(jnp.linalg.cholesky)
    >>> print(jax.vmap(factor)(jnp.ones((3, 1, 1))).shape)
    (3, 1, 1)
    """
    mapped = custom_vmap(decompose)

    @mapped.def_vmap
    def rule(axis_size: int, in_batched: Any, *args: jax.Array):
        repeat = lambda x: jnp.broadcast_to(x[None], (axis_size, *x.shape))
        stacks = [x if has else repeat(x) for x, has in zip(args, in_batched, strict=True)]

        def whole(*stacks: jax.Array) -> Any:
            return jax.lax.platform_dependent(
                *stacks,
                cpu=lambda *stacks: jax.lax.map(lambda matrices: mapped(*matrices), stacks),
                default=lambda *stacks: jax.vmap(decompose)(*stacks),
            )

        out = spread(whole, *stacks)
        return out, jax.tree.map(lambda _: True, out)

    return mapped


@one_at_a_time
def singular_values(w: jax.Array) -> jax.Array:
    """Singular values of a finite matrix (m, n), descending."""
    return jnp.linalg.svd(w, compute_uv=False)


@one_at_a_time
def thin_svd(w: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """U, σ, Vᵀ of a finite matrix (m, n), min(m, n) of each."""
    u, sigma, vt = jnp.linalg.svd(w, full_matrices=False)
    return u, sigma, vt


@one_at_a_time
def orthonormal(w: jax.Array) -> jax.Array:
    """Q of the QR decomposition of a matrix (m, n), m ≥ n."""
    return jnp.linalg.qr(w)[0]


@one_at_a_time
def cholesky(w: jax.Array) -> jax.Array:
    """Lower-triangular L with LLᵀ = `w`, of which the lower triangle is read."""
    return jax.lax.linalg.cholesky(w, symmetrize_input=False)


@one_at_a_time
def cholesky_with_inverse(w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """L as from `cholesky`, and L⁻¹."""
    lower = jax.lax.linalg.cholesky(w, symmetrize_input=False)
    identity = jnp.eye(w.shape[0], dtype=w.dtype)
    return lower, jax.lax.linalg.triangular_solve(lower, identity, left_side=True, lower=True)


@one_at_a_time
def divided(x: jax.Array, positive: jax.Array) -> jax.Array:
    """X P⁻¹ for X (m, n) and a positive definite P (n, n), of which the lower triangle is read."""
    lower = jax.lax.linalg.cholesky(positive, symmetrize_input=False)
    half = jax.lax.linalg.triangular_solve(lower, x, lower=True, transpose_a=True)
    return jax.lax.linalg.triangular_solve(lower, half, lower=True)


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
