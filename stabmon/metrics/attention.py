"""Attention per head from its logits: entropy, largest logit, sink mass, repeated row maxima.

For models that can show logits (..., N, T, S). Where T×S must never exist, `flash.py` has entropy
and largest logit from a flash kernel. Spectra of the QK product live in `qk.py`; collecting logits
is the model's work.
"""

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from stabmon.linalg.checks import all_finite, as_float, nan_unless


def attention_entropy(logits: ArrayLike, mask: ArrayLike | None = None) -> Float[Array, " N"]:
    """Attention entropy −Σ_s p_s ln p_s per head, mean over batch and query rows.

    In nats, in [0, ln S]: 0 when each row looks at one key. Invariant to a shift of each row. Rows
    without a visible key are left out; a head that has no other rows, or a non-finite visible
    logit, is NaN, and other heads are not touched. A logit of −∞ counts as masked.

    Watch the mean over heads and the minimum: one sharp head is normal, all falling together is
    not.

    Args:
        logits: Scaled logits (..., N, T, S) of any float dtype, before or after masking.
        mask: Boolean, True where a key is visible: (T, S), or of the rank of `logits` with ones
            where it broadcasts. None shows all keys.

    Returns:
        Float32 vector (N,).

    Raises:
        ValueError: `logits` has less than 3 axes, or `mask` is not boolean or does not fit.

    >>> import jax.numpy as jnp
    >>> print(attention_entropy(jnp.zeros((1, 2, 4, 8)), jnp.ones((4, 8), bool)).round(4))
    [2.0794 2.0794]

    References:
        arXiv 2303.06296, attention entropy and its collapse.
    """
    logits, visible = _visible(logits, mask, "attention_entropy")
    weight, shifted, total = _softmax_parts(logits, visible)
    row = jnp.log(total) - jnp.sum(weight * shifted, -1) / total
    return _row_mean(row, logits, visible)


def max_attention_logit(logits: ArrayLike, mask: ArrayLike | None = None) -> Float[Array, " N"]:
    """Largest visible logit per head, over batch, queries and keys.

    Growth is the symptom: runs above 1e4 diverged. A head without a visible key, or with a
    non-finite visible logit, is NaN; a logit of −∞ counts as masked.

    Args:
        logits: As in `attention_entropy`.
        mask: As in `attention_entropy`.

    Returns:
        Float32 vector (N,).

    Raises:
        ValueError: As `attention_entropy`.

    >>> import jax.numpy as jnp
    >>> logits = jnp.array([[[1.0, 9.0], [2.0, 3.0]]])
    >>> print(max_attention_logit(logits, jnp.tril(jnp.ones((2, 2), bool))))
    [3.]

    References:
        arXiv 2309.14322, attention logit growth; arXiv 2507.20534, QK-Clip.
    """
    logits, visible = _visible(logits, mask, "max_attention_logit")
    top = jnp.max(jnp.where(visible, logits, jnp.full_like(logits, -jnp.inf)), _other_axes(logits))
    return jnp.where(_measurable(logits, visible), top, jnp.full_like(top, jnp.nan))


def sink_mass(logits: ArrayLike, mask: ArrayLike | None = None) -> Float[Array, " N"]:
    """Mean attention probability that a head puts on the first key, in [0, 1].

    Rows without a visible key are left out; NaN as in `attention_entropy`. Under a causal mask the
    first row alone gives 1/T. Where a window hides the first key, that row counts 0.

    Args:
        logits: As in `attention_entropy`.
        mask: As in `attention_entropy`.

    Returns:
        Float32 vector (N,).

    Raises:
        ValueError: As `attention_entropy`.

    >>> import jax.numpy as jnp
    >>> print(sink_mass(jnp.zeros((1, 3, 4)), jnp.ones((3, 4), bool)))
    [0.25]

    References:
        arXiv 2309.17453, attention sinks.
    """
    logits, visible = _visible(logits, mask, "sink_mass")
    weight, _, total = _softmax_parts(logits, visible)
    return _row_mean(weight[..., 0] / total, logits, visible)


def repeated_maximum(logits: ArrayLike, mask: ArrayLike | None = None) -> Float[Array, " N"]:
    """Number of rows per head whose largest visible logit occurs more than once.

    Two keys at the maximum m both get exp(s − m) = 1 exactly: the precondition of the
    low-precision flash-attention failure. Equality is judged on the values as given, so pass
    logits in the precision in which the kernel compares them. NaN for a head with a non-finite
    visible logit; 0 for one without visible keys.

    Args:
        logits: As in `attention_entropy`, in the kernel's precision.
        mask: As in `attention_entropy`.

    Returns:
        Float32 vector (N,), at most batch × T.

    Raises:
        ValueError: As `attention_entropy`.

    >>> import jax.numpy as jnp
    >>> print(repeated_maximum(jnp.array([[[1.0, 2.0, 2.0], [1.0, 2.0, 3.0]]])))
    [1.]

    References:
        arXiv 2510.04212, r_s = rowsum(S ≡ r_m).
    """
    logits, visible = _visible(logits, mask, "repeated_maximum")
    top = jnp.max(jnp.where(visible, logits, jnp.full_like(logits, -jnp.inf)), -1, keepdims=True)
    repeats = jnp.sum(visible & (logits == top), -1)
    count = jnp.sum((repeats > 1).astype(jnp.float32), _other_axes(repeats, keys=False))
    return jnp.where(_finite_heads(logits, visible), count, jnp.full_like(count, jnp.nan))


def sharp_head_fraction(entropy: ArrayLike, threshold: float | int) -> Float[Array, ""]:
    """Fraction of heads whose attention entropy is below `threshold`, in [0, 1].

    Near 1 all heads have turned sharp together, which is the fault; a few sharp heads are not. A
    non-finite entropy: NaN.

    Args:
        entropy: Entropies in nats, any shape: heads, or layers and heads.
        threshold: In nats, positive; half of a healthy run's mean is a start.

    Raises:
        ValueError: `threshold` is not positive, or `entropy` is empty or not of a floating dtype.

    >>> import jax.numpy as jnp
    >>> print(sharp_head_fraction(jnp.array([0.1, 2.0, 3.0, 0.2]), threshold=1.0))
    0.5
    """
    entropy = as_float(entropy, "sharp_head_fraction")
    if not threshold > 0:
        raise ValueError(f"sharp_head_fraction: expected threshold > 0 nats, got {threshold}")
    if entropy.size == 0:
        raise ValueError(f"sharp_head_fraction: expected heads, got shape {entropy.shape}")
    return nan_unless(all_finite(entropy), jnp.mean(entropy < threshold))


def _visible(
    logits: ArrayLike, mask: ArrayLike | None, name: str
) -> tuple[Float[Array, "*batch N T S"], Bool[Array, "*batch N T S"]]:
    """Float logits, and where they count: inside the mask and not −∞."""
    logits = as_float(logits, name)
    if logits.ndim < 3 or logits.size == 0:
        raise ValueError(
            f"{name}: expected non-empty logits (..., N, T, S), got shape {logits.shape};"
            " a single head is logits[None]"
        )
    visible = ~jnp.isneginf(logits)
    if mask is None:
        return logits, visible
    mask = jnp.asarray(mask)
    if mask.dtype != jnp.bool_:
        raise ValueError(
            f"{name}: expected a boolean mask, True where visible, got {mask.dtype};"
            " add an additive mask to the logits instead, or write mask > 0"
        )
    # (B, T, S) against (B, N, T, S) would broadcast over heads without a word when B = N.
    lead = mask.shape[:-2] if mask.ndim < logits.ndim else ()
    pairs = zip(mask.shape[::-1], logits.shape[::-1], strict=False)
    if (
        mask.ndim > logits.ndim
        or max(lead, default=1) > 1
        or any(m not in (1, l) for m, l in pairs)
    ):
        raise ValueError(
            f"{name}: expected a mask (T, S) or one axis by axis like the logits {logits.shape},"
            f" got {mask.shape}; write mask[:, None] for (B, T, S)"
        )
    return logits, visible & jnp.broadcast_to(mask, logits.shape)


def _other_axes(x: Array, keys: bool = True) -> tuple[int, ...]:
    """All axes of (..., N, T, S), or of (..., N, T) if not `keys`, but the heads."""
    return tuple(np.delete(np.arange(x.ndim), -3 if keys else -2).tolist())


def _finite_heads(
    logits: Float[Array, "*batch N T S"], visible: Bool[Array, "*batch N T S"]
) -> Bool[Array, " N"]:
    return jnp.all(jnp.isfinite(logits) | ~visible, _other_axes(logits))


def _measurable(
    logits: Float[Array, "*batch N T S"], visible: Bool[Array, "*batch N T S"]
) -> Bool[Array, " N"]:
    """Heads with a visible logit, all of them finite."""
    return jnp.any(visible, _other_axes(logits)) & _finite_heads(logits, visible)


def _softmax_parts(
    logits: Float[Array, "*batch N T S"], visible: Bool[Array, "*batch N T S"]
) -> tuple[Float[Array, "*batch N T S"], Float[Array, "*batch N T S"], Float[Array, "*batch N T"]]:
    """exp(s − m) and s − m with m the row maximum, both 0 where masked, and Σ exp(s − m) or 1."""
    lowest = jnp.full_like(logits, jnp.finfo(logits.dtype).min)
    top = jnp.max(jnp.where(visible, logits, lowest), -1, keepdims=True)
    shifted = jnp.where(visible, logits - top, jnp.zeros_like(logits))
    weight = jnp.where(visible, jnp.exp(shifted), jnp.zeros_like(logits))
    total = jnp.sum(weight, -1)
    return weight, shifted, jnp.where(total == 0, jnp.ones_like(total), total)


def _row_mean(
    row: Float[Array, "*batch N T"],
    logits: Float[Array, "*batch N T S"],
    visible: Bool[Array, "*batch N T S"],
) -> Float[Array, " N"]:
    """Mean per head over the rows that see a key; NaN for heads that cannot be measured."""
    seen = jnp.any(visible, -1)
    axes = _other_axes(row, keys=False)
    rows = jnp.maximum(jnp.sum(seen, axes).astype(row.dtype), 1.0)
    mean = jnp.sum(jnp.where(seen, row, jnp.zeros_like(row)), axes) / rows
    measurable = _measurable(logits, visible)
    return jnp.where(measurable, mean, jnp.full_like(mean, jnp.nan)).astype(jnp.float32)
