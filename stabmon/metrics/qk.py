"""The increment of the query-key product of one attention head, through compressed cores.

With W_q, W_k ∈ R^{D×H} of one head and d = W_t − W_{t−δ} (arXiv 2606.28116):

    Δ1 = W_{q,t} W_{k,t}ᵀ − W_q W_kᵀ = Δ2 + Δ3
    Δ2 = dW_q W_kᵀ + W_q dW_kᵀ
    Δ3 = dW_q dW_kᵀ

No D×D product is formed: with [dW_q, W_q] = Q_A R_A and [dW_k, W_k] = Q_B R_B the non-zero
singular values of all three are those of small cores of the R factors. The factors come from a
Cholesky-QR that touches the long axis D only through H-sized Gram matrices, so a D-sharded input
costs one small all-reduce a pass. `jax.vmap` it over heads and layers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from stabmon.metrics.checks import as_matrix, nan_unless
from stabmon.metrics.lapack import cholesky, cholesky_with_inverse, singular_values
from stabmon.metrics.spectrum import SpectrumStats, spectrum_stats


class QKIncrement(NamedTuple):
    """Spectra of the three increments of one head; Δ1 = Δ2 + Δ3.

    Attributes:
        delta1: Whole change of W_q W_kᵀ, rank ≤ 2H.
        delta2: First-order part, rank ≤ 2H, O(‖W‖‖dW‖): the earliest signal.
        delta3: Second-order part, rank ≤ H, O(‖dW‖²).
    """

    delta1: SpectrumStats
    delta2: SpectrumStats
    delta3: SpectrumStats


def qk_increment(q0: ArrayLike, k0: ArrayLike, q1: ArrayLike, k1: ArrayLike) -> QKIncrement:
    """Spectra of Δ1, Δ2, Δ3 between the base point (q0, k0) and now (q1, k1), for one head.

    Invariant to the gauge (W_q R, W_k R⁻ᵀ) that leaves attention logits unchanged, unlike the
    spectrum of dW_q alone. Grouped-query attention: pair query head n with kv head n // group.
    Entropy and modes are at α = 2. Accurate to 1e-4 relative (1e-3 for `effective_rank`) for
    ‖dW‖/‖W‖ from 1e-1 to 1e-6. No change at all: the zero matrix's values of `SpectrumStats`.
    A non-finite entry: NaN everywhere.

    Args:
        q0: Query projection at the base point, (D, H), any float dtype.
        k0: Key projection at the base point, (D, H).
        q1: Query projection now, (D, H).
        k1: Key projection now, (D, H).

    Raises:
        ValueError: The four are not floating-point matrices of one shape.

    >>> import jax.numpy as jnp
    >>> q, k = jnp.eye(4, 2), jnp.eye(4, 2)
    >>> step = jnp.zeros((4, 2)).at[3, 0].set(0.5)
    >>> print(qk_increment(q, k, q + step, k).delta2.spectral_norm.round(4))
    0.5

    References:
        arXiv 2606.28116, QK increment; Fukaya et al. 2020 for shifted Cholesky-QR.
    """
    q0, k0, q1, k1 = (as_matrix(x, "qk_increment") for x in (q0, k0, q1, k1))
    if not q0.shape == k0.shape == q1.shape == k1.shape:
        raise ValueError(
            "qk_increment: expected four (D, H) matrices of one head, got "
            f"{q0.shape}, {k0.shape}, {q1.shape}, {k1.shape}; with grouped queries repeat the kv "
            "heads, with a head axis use jax.vmap"
        )
    spectra = increment_spectra(q0, k0, q1 - q0, k1 - k0)
    return QKIncrement(
        spectrum_stats(spectra.delta1),
        spectrum_stats(spectra.delta2),
        spectrum_stats(spectra.delta3),
    )


class IncrementSpectra(NamedTuple):
    """Singular values behind one head's increments, each descending, float32.

    Attributes:
        delta1: Of Δ1, 2H values, of which at most min(2H, D) are not zero.
        delta2: Of Δ2, likewise.
        delta3: Of Δ3, H values.
        query: Of dW_q, H values; from the factor already at hand.
        key: Of dW_k, H values.
    """

    delta1: Float[Array, " r"]
    delta2: Float[Array, " r"]
    delta3: Float[Array, " s"]
    query: Float[Array, " s"]
    key: Float[Array, " s"]


def increment_spectra(
    q0: Float[Array, "D H"],
    k0: Float[Array, "D H"],
    dq: Float[Array, "D H"],
    dk: Float[Array, "D H"],
) -> IncrementSpectra:
    """Singular values of Δ1, Δ2, Δ3, dW_q and dW_k of one head; see `qk_increment`.

    The base point and the differences are separate arguments because a tracked dW keeps digits
    that W_t − W_{t−δ} in a low precision has lost. Non-finite input: NaN.
    """
    largest = jnp.stack([jnp.max(jnp.abs(x)) for x in (q0, k0, dq, dk)])
    finite = jnp.all(jnp.isfinite(largest))  # a maximum keeps NaN and ∞
    h = q0.shape[1]

    def factor(delta, base, small, large):
        rows = [_unit_rows(x, scale, finite) for x, scale in ((delta, small), (base, large))]
        r = triangular_factor(jnp.concatenate(rows))
        return r[:, :h] * small, r[:, h:] * large

    r_dq, r_q = factor(dq, q0, largest[2], largest[0])
    s_dk, s_k = factor(dk, k0, largest[3], largest[1])
    # Δ1 = dq k0ᵀ + (q0 + dq) dkᵀ and Δ2 = dq k0ᵀ + q0 dkᵀ: no difference of large products is
    # ever taken, and Δ1 shares the factors of Δ2.
    cores = IncrementSpectra(
        delta1=product(r_dq, s_k.T) + product(r_q + r_dq, s_dk.T),
        delta2=product(r_dq, s_k.T) + product(r_q, s_dk.T),
        delta3=product(r_dq[:h], s_dk[:h].T),
        query=r_dq[:h],
        key=s_dk[:h],
    )
    return IncrementSpectra(*(nan_unless(finite, _core_singular_values(c)) for c in cores))


def _unit_rows(
    x: Float[Array, "D H"], scale: Float[Array, ""], finite: Bool[Array, ""]
) -> Float[Array, "H D"]:
    """`x` transposed and divided by its largest magnitude `scale`; zero where that is zero."""
    usable = finite & (scale > 0)
    divisor = jax.lax.broadcast(jnp.where(usable, scale, jnp.ones_like(scale)), x.shape)
    return (jnp.where(usable, x, jnp.zeros_like(x)) / divisor).T


def triangular_factor(rows: Float[Array, "n m"]) -> Float[Array, "n n"]:
    """Upper-triangular R with RᵀR = AᵀA for A = `rows`ᵀ, safe for any scales and any rank.

    Cholesky-QR in two passes, each on unit columns of A and with a small diagonal shift. The unit
    columns make blocks of very different size (dW beside W) equally accurate; the shift lets the
    factorisation pass rank deficiency; and re-normalising between the passes turns what was left
    of a dependent column into a row of R of rounding size. Singular values of R X differ from
    those of A X by rounding times ‖A‖‖X‖. Zero matrix: zero. `rows` must be finite, with entries
    whose squares neither overflow nor underflow.

    Between the passes A is multiplied by an explicit inverse of the triangular factor, since a
    product is several times faster than a substitution. The residual grows with ‖|L⁻¹||L|‖ only,
    which no scaling of the columns changes: small however far the lengths are apart and whatever
    the rank.

    A lies transposed: a Gram matrix of rows runs along contiguous memory. Only these reduce over
    the long axis m.
    """
    n = rows.shape[0]
    identity = jnp.eye(n, dtype=rows.dtype)
    shift = n * jnp.finfo(rows.dtype).eps

    def cosines(rows):
        gram = product(rows, rows.T)
        lengths = jnp.sqrt(jnp.diag(gram))
        safe = jnp.where(lengths > 0, lengths, jnp.ones_like(lengths))
        return lengths, safe, gram / (safe[:, None] * safe[None, :]) + shift * identity

    lengths, safe, gram = cosines(rows)
    first, inverse = cholesky_with_inverse(gram)
    again, _, gram = cosines(product(inverse / safe[None, :], rows))
    second = cholesky(gram)
    return product((again[:, None] * second).T, (lengths[:, None] * first).T)


def product(a: Float[Array, "m k"], b: Float[Array, "k n"]) -> Float[Array, "m n"]:
    """Matrix product in full float32, also where the backend would round inputs to bfloat16."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _core_singular_values(core: Float[Array, "n n"]) -> Float[Array, " n"]:
    """Singular values of a small core; rescaled first, since Δ3 of a tiny dW underflows."""
    scale = jnp.max(jnp.abs(core))
    unit = core / jnp.where(scale > 0, scale, jnp.ones_like(scale))
    return singular_values(unit) * scale
