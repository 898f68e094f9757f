"""Singular values and vectors by one-sided Jacobi rotations: the decomposition of an accelerator.

Elementwise work and sums over contiguous rows in one loop: no library call, small code, float32
wherever it runs, so that what a CPU computes here is what a TPU computes. When it is used is told
by `lapack.py`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Sweeps converge quadratically: random matrices of 128 rows take 9, of 512 rows 11.
_MOST_SWEEPS = 24


def singular_values(w: Float[Array, "*stack m n"]) -> Float[Array, "*stack r"]:
    """The min(m, n) singular values of each matrix, descending; NaN for one that is not finite."""
    rows, scale = _wide(w)
    turned = orthogonal_rows(rows, rows.shape[-1])[..., : min(w.shape[-2:]), :]
    return -jnp.sort(-_lengths(turned), axis=-1) * scale


def thin_svd(
    w: Float[Array, "*stack m n"],
) -> tuple[Float[Array, "*stack m r"], Float[Array, "*stack r"], Float[Array, "*stack r n"]]:
    """U, σ, Vᵀ of each matrix, σ descending; NaN for one that is not finite.

    Vectors of the longer side that belong to σ = 0 are zero.
    """
    rows, scale = _wide(w)
    n, m = rows.shape[-2:]
    eye = jnp.broadcast_to(jnp.eye(n, dtype=w.dtype), (*rows.shape[:-1], n))
    turned = orthogonal_rows(jnp.concatenate([rows, eye], axis=-1), m)[..., :n, :]
    sigma = _lengths(turned[..., :m])
    order = jnp.argsort(-sigma, axis=-1)
    sigma = jnp.take_along_axis(sigma, order, axis=-1)
    turned = jnp.take_along_axis(turned, order[..., None], axis=-2)
    long = turned[..., :m] / jnp.where(sigma > 0, sigma, 1)[..., None]
    short, sigma = turned[..., m:], sigma * scale
    if w.shape[-2] <= w.shape[-1]:
        return jnp.swapaxes(short, -1, -2), sigma, long
    return jnp.swapaxes(long, -1, -2), sigma, short


def orthonormal(w: Float[Array, "*stack m n"]) -> Float[Array, "*stack m n"]:
    """An orthonormal basis whose first k vectors span the first k columns of `w`, m ≥ n.

    Gram–Schmidt, each column twice. In place of a column that depends on those before comes the
    unit vector that is least covered by them, made orthogonal to them.
    """
    rows = jnp.swapaxes(w, -1, -2)
    size = rows.shape[-1]

    def away(row: Array, basis: Array) -> Array:
        covered = jnp.sum(basis * row[..., None, :], axis=-1, keepdims=True)
        return row - jnp.sum(basis * covered, axis=-2)

    def unit(row: Array) -> Array:
        length = _lengths(row)[..., None]
        return row / jnp.where(length == 0, 1, length)

    def add(j: Int[Array, ""], basis: Array) -> Array:
        row = unit(jax.lax.dynamic_index_in_dim(rows, j, rows.ndim - 2, keepdims=False))
        left = away(row, basis)
        least = jnp.argmin(jnp.sum(jnp.square(basis), axis=-2), axis=-1)
        spare = jax.nn.one_hot(least, size, dtype=row.dtype)
        depends = _lengths(left)[..., None] <= 16 * jnp.finfo(row.dtype).eps
        row = unit(away(jnp.where(depends, spare, unit(left)), basis))
        row = unit(away(row, basis))
        return jax.lax.dynamic_update_index_in_dim(basis, row, j, rows.ndim - 2)

    # Lengths of any scale: squares neither overflow nor underflow.
    largest = jnp.max(jnp.abs(rows), axis=-1, keepdims=True)
    rows = rows / jnp.where(largest == 0, 1, largest)
    basis = jax.lax.fori_loop(0, rows.shape[-2], add, jnp.zeros_like(rows))
    return jnp.swapaxes(basis, -1, -2)


def orthogonal_rows(rows: Float[Array, "*stack n m"], seen: int) -> Float[Array, "*stack p m"]:
    """The rows, rotated in pairs until their first `seen` entries are orthogonal; in no order.

    n odd: with a row of zeros more. Every pair meets once in a sweep, n/2 pairs at a time, and
    sweeps end when no angle is left above rounding, in any matrix of the stack. One-sided
    rotations keep small singular values as exact as the rows themselves: the error is rounding
    times the lengths that a pair has. Zero rows stay zero. `rows` must be finite, with entries
    whose squares do not overflow.

    References:
        Brent & Luk, SIAM J. Sci. Stat. Comput. 6 (1985), section 3, for the order of the pairs.
        Demmel & Veselić, SIAM J. Matrix Anal. Appl. 13 (1992), for the accuracy.
    """
    n = rows.shape[-2]
    if n == 1:
        return rows
    pad = [(0, 0)] * (rows.ndim - 2) + [(0, n % 2), (0, 0)]
    rows = jnp.pad(rows, pad)
    half = (n + 1) // 2
    eps = jnp.finfo(rows.dtype).eps
    tolerance = eps * max(seen, 16) ** 0.5
    # Rows no longer than the rounding of the longest are noise, which nothing settles.
    longest = jnp.max(jnp.sum(jnp.square(rows[..., :seen]), axis=-1, keepdims=True), axis=-2)
    noise = jnp.square(4 * eps) * longest

    def sweep(carry):
        count, first, second, _ = carry
        turns = (first, second, jnp.zeros((), rows.dtype))
        first, second, worst = jax.lax.fori_loop(0, 2 * half - 1, meet, turns)
        return count + 1, first, second, worst

    def meet(_, carry):
        first, second, worst = carry
        first, second, cosine = _rotated(first, second, seen, noise)
        worst = jnp.maximum(worst, jnp.max(cosine))
        return *_moved_on(first, second), worst

    def unsettled(carry):
        return (carry[0] < _MOST_SWEEPS) & (carry[3] > tolerance)

    begun = (jnp.int32(0), rows[..., :half, :], rows[..., half:, :], jnp.ones((), rows.dtype))
    _, first, second, _ = jax.lax.while_loop(unsettled, sweep, begun)
    return jnp.concatenate([first, second], axis=-2)


def _rotated(
    p: Float[Array, "*stack k m"],
    q: Float[Array, "*stack k m"],
    seen: int,
    noise: Float[Array, "*stack 1"],
) -> tuple[Float[Array, "*stack k m"], Float[Array, "*stack k m"], Float[Array, "*stack k"]]:
    """Each pair of rows made orthogonal by the smaller rotation, and its |cosine| before.

    The cosine of a pair whose lengths' product is below `noise` is that much smaller.
    """
    dot = lambda x, y: jnp.sum(x[..., :seen] * y[..., :seen], axis=-1)
    pp, qq, pq = dot(p, p), dot(q, q), dot(p, q)
    lengths = jnp.sqrt(pp) * jnp.sqrt(qq)
    scale = jnp.maximum(lengths, jnp.broadcast_to(noise, lengths.shape))
    cosine = jnp.abs(pq) / jnp.where(scale > 0, scale, 1)
    # tan 2θ = 2pq/(qq − pp), and the smaller root of t² + 2ζt − 1 with ζ = cot 2θ.
    turn = (lengths > 0) & (pq != 0)
    zeta = (qq - pp) / jnp.where(turn, 2 * pq, 1)
    far = jnp.abs(zeta) > 1e8  # ζ² would lose nothing that matters, or overflow
    near = jnp.where(far, 1, zeta)
    root = jnp.abs(near) + jnp.sqrt(1 + jnp.square(near))
    size = 1 / jnp.where(far, 2 * jnp.abs(zeta), root)
    tan = jnp.where(turn, jnp.where(zeta < 0, -size, size), 0)
    cos = 1 / jnp.sqrt(1 + jnp.square(tan))
    sin = tan * cos
    # With sin/(1 + cos) = tan θ/2 a small turn changes a row by its own rounding only.
    share = sin / (1 + cos)
    sin, share = sin[..., None], share[..., None]
    return p - sin * (q + share * p), q + sin * (p - share * q), cosine


def _moved_on(
    first: Float[Array, "*stack k m"], second: Float[Array, "*stack k m"]
) -> tuple[Float[Array, "*stack k m"], Float[Array, "*stack k m"]]:
    """The pairs of the next round: all rows but the first move on by one place in the ring."""
    if first.shape[-2] == 1:
        return first, second
    ahead = [first[..., :1, :], second[..., :1, :], first[..., 1:-1, :]]
    behind = [second[..., 1:, :], first[..., -1:, :]]
    return jnp.concatenate(ahead, axis=-2), jnp.concatenate(behind, axis=-2)


def _wide(w: Float[Array, "*stack m n"]) -> tuple[Float[Array, "*stack r s"], Array]:
    """Each matrix with the longer side along rows, its largest entry 1, and that entry (…, 1)."""
    rows = w if w.shape[-2] <= w.shape[-1] else jnp.swapaxes(w, -1, -2)
    scale = jnp.max(jnp.abs(rows), axis=(-2, -1), keepdims=True)
    finite = jnp.isfinite(scale)  # a maximum keeps NaN and ∞
    rows = jnp.where(finite, rows, 0) / jnp.where(finite & (scale > 0), scale, 1)
    return rows, jnp.where(finite, scale, jnp.nan)[..., 0]


def _lengths(rows: Float[Array, "*rows m"]) -> Float[Array, "*rows"]:
    return jnp.sqrt(jnp.sum(jnp.square(rows), axis=-1))
