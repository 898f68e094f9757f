"""The increment of the query-key product of one attention head, through compressed cores.

With W_q, W_k ∈ R^{D×H} of one head and d = W_t − W_{t−δ} (arXiv 2606.28116):

    Δ1 = W_{q,t} W_{k,t}ᵀ − W_q W_kᵀ = Δ2 + Δ3
    Δ2 = dW_q W_kᵀ + W_q dW_kᵀ
    Δ3 = dW_q dW_kᵀ

No D×D product is formed: with [dW_q, W_q] = Q_A R_A and [dW_k, W_k] = Q_B R_B the non-zero
singular values of all three are those of small cores of the R factors (`factor.py`), which touch
the long axis D only through H-sized Gram matrices. Functions of a stack of heads take any leading
axes.
"""

import itertools
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from stabmon.linalg.checks import as_matrix
from stabmon.linalg.decompositions import on_stack, singular_values, turned
from stabmon.linalg.factor import triangular_factor
from stabmon.linalg.mesh import replicated
from stabmon.linalg.platforms import by_platform
from stabmon.linalg.products import product
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
    """Singular values behind the increments of heads, each descending, float32.

    Attributes:
        delta1: Of Δ1, 2H values, of which at most min(2H, D) are not zero.
        delta2: Of Δ2, likewise.
        delta3: Of Δ3, H values.
        query: Of dW_q, H values; from the factor already at hand.
        key: Of dW_k, H values, of each key head.
    """

    delta1: Float[Array, "*heads r"]
    delta2: Float[Array, "*heads r"]
    delta3: Float[Array, "*heads s"]
    query: Float[Array, "*queries s"]
    key: Float[Array, "*keys s"]


def increment_spectra(
    q0: Float[Array, "*queries D H"],
    k0: Float[Array, "*keys D H"],
    dq: Float[Array, "*queries D H"],
    dk: Float[Array, "*keys D H"],
) -> IncrementSpectra:
    """Singular values of Δ1, Δ2, Δ3, dW_q and dW_k of each head of a stack; see `qk_increment`.

    The leading axes of queries and keys broadcast: with grouped queries give them as (…, K, G, D,
    H) and (…, K, 1, D, H), and each key head is factored once. The base point and the differences
    are separate arguments because a tracked dW keeps digits that W_t − W_{t−δ} in a low precision
    has lost. Non-finite input: NaN.

    Nothing here merges axes of the big arrays, so they may be sharded along any.
    """
    h = q0.shape[-1]

    def factor(delta, base):
        small, large = (jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True) for x in (delta, base))
        finite = jnp.isfinite(small) & jnp.isfinite(large)  # a maximum keeps NaN and ∞
        rows = [_unit_rows(x, scale, finite) for x, scale in ((delta, small), (base, large))]
        r = triangular_factor(jnp.concatenate(rows, axis=-2))
        return r[..., :h] * small, r[..., h:] * large, finite

    r_dq, r_q, sound_q = factor(dq, q0)
    s_dk, s_k, sound_k = factor(dk, k0)
    # Δ1 = dq k0ᵀ + (q0 + dq) dkᵀ and Δ2 = dq k0ᵀ + q0 dkᵀ: no difference of large products is
    # ever taken, and Δ1 shares the factors of Δ2.
    sound = sound_q & sound_k
    cores = IncrementSpectra(
        delta1=product(r_dq, turned(s_k)) + product(r_q + r_dq, turned(s_dk)),
        delta2=product(r_dq, turned(s_k)) + product(r_q, turned(s_dk)),
        delta3=product(r_dq[..., :h, :], turned(s_dk[..., :h, :])),
        query=r_dq[..., :h, :],
        key=s_dk[..., :h, :],
    )
    valid = IncrementSpectra(sound, sound, sound, sound_q, sound_k)
    large, small = _core_singular_values(cores[:2]), _core_singular_values(cores[2:])
    known = lambda sigma, valid: jnp.where(valid[..., 0], sigma, jnp.full_like(sigma, jnp.nan))
    return IncrementSpectra(*map(known, large + small, valid))


def _unit_rows(
    x: Float[Array, "*stack D H"], scale: Float[Array, "*stack 1 1"], finite: Bool[Array, "..."]
) -> Float[Array, "*stack H D"]:
    """`x` transposed and divided by its largest magnitude `scale`; zero where that is zero."""
    usable = finite & (scale > 0)
    unit = jnp.where(usable, x, jnp.zeros_like(x)) / jnp.where(usable, scale, jnp.ones_like(scale))
    return turned(unit)


def _core_singular_values(
    cores: tuple[Float[Array, "... n n"], ...],
) -> list[Float[Array, "... n"]]:
    """Singular values of small cores of one size; on an accelerator in one batch.

    Rescaled first, since Δ3 of a tiny dW underflows.
    """
    scales = [jnp.max(jnp.abs(core), axis=(-2, -1), keepdims=True) for core in cores]
    safe = [jnp.where(scale > 0, scale, jnp.ones_like(scale)) for scale in scales]
    units = [core / scale for core, scale in zip(cores, safe, strict=True)]
    apart = lambda *units: [on_stack(singular_values)(unit) for unit in units]
    found = by_platform(*units, accelerator=_in_one_batch, cpu=apart)
    return [sigma * scale[..., 0] for sigma, scale in zip(found, scales, strict=True)]


def _in_one_batch(*cores: Float[Array, "... n n"]) -> list[Float[Array, "... n"]]:
    # Whole on every device before axes are merged; see `on_stack`.
    flat = [core.reshape(-1, *core.shape[-2:]) for core in replicated(cores)]
    ends = list(itertools.accumulate(len(core) for core in flat))
    found = jnp.split(on_stack(singular_values)(jnp.concatenate(flat)), ends[:-1])
    return [sigma.reshape(core.shape[:-1]) for sigma, core in zip(found, cores, strict=True)]
