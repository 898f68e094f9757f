"""Attention entropy and largest logit per head from a flash kernel's log-sum-exp, without T×S.

The kernel itself is the caller's and stays unmodified. The same quantities from logits live in
`attention.py`.
"""

import inspect
import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

# Kernels mark a row that sees no key by a log-sum-exp of −∞ or of about −1e38.
_EMPTY_ROW = -1e30


class FlashStats(NamedTuple):
    """What a flash kernel's log-sum-exp tells, per head (N,), float32.

    Attributes:
        entropy: Mean attention entropy over rows, in nats.
        max_logit: Upper bound of the largest scaled logit, at most ln S / β above it.
        max_logit_lower: Lower bound of the same.
    """

    entropy: Float[Array, " N"]
    max_logit: Float[Array, " N"]
    max_logit_lower: Float[Array, " N"]


def flash_attention_stats(
    q: ArrayLike,
    k: ArrayLike,
    attend: Callable[..., tuple[Array, Array]],
    *,
    scale: float | int | None = None,
    beta: float | int = 64.0,
) -> FlashStats:
    """Attention entropy and largest logit from a flash kernel's log-sum-exp, without T×S.

    With values V = K the kernel returns P·K, so the mean logit of a row is scale·q·(PK) and its
    entropy is lse − scale·q·(PK). A second call at inverse temperature β bounds the largest logit,
    E_β[s] <= max_s <= lse_β/β, where E_β[s] = scale·q·(P_β K) is at least (lse_β − ln S)/β; so the
    bounds are at most ln S / β apart, 0.13 at S = 4096.

    Two forward calls of the kernel, nothing else of more than linear size in T. Entropy is
    in [0, ln S]. Rows that see no key (a log-sum-exp of −∞ or below −1e30) are left out; a head
    without other rows, or with a non-finite row, is NaN. The logits must be scale·q·k with a mask
    and nothing more: no bias, no soft cap. A kernel that rounds its log-sum-exp to bfloat16 (the
    XLA path of `jax.nn.dot_product_attention` on bfloat16 input) rounds these values as much.

    Args:
        q: Queries (B, T, N, H) as they enter the kernel: after position encoding and QK-norm.
        k: Keys (B, S, K, H), K dividing N (grouped queries).
        attend: `attend(q, k, v) -> (out, lse)`, out (B, T, N, H), lse (B, T, N), with its own
            mask. If it has a parameter named `scale`, the scale is passed by that keyword;
            otherwise it must apply `scale` itself, and the temperature goes into q.
            `functools.partial(jax.nn.dot_product_attention, is_causal=True,
            return_residual=True)` fits as it is.
        scale: Logit scale; None for 1/√H, as `jax.nn.dot_product_attention` has it.
        beta: Inverse temperature of the second call, at least 1. A power of two scales q exactly.

    Returns:
        FlashStats of float32 vectors (N,).

    Raises:
        ValueError: Shapes of `q`, `k` or of what `attend` returns do not fit, or `beta` < 1.

    >>> from functools import partial
    >>> import jax, jax.numpy as jnp
    >>> q = k = jnp.ones((1, 8, 2, 4))
    >>> attend = partial(jax.nn.dot_product_attention, return_residual=True)
    >>> stats = flash_attention_stats(q, k, attend)
    >>> print(stats.entropy.round(3), stats.max_logit_lower, stats.max_logit.round(3))
    [2.079 2.079] [2. 2.] [2.032 2.032]

    References:
        arXiv 2307.08691 (FlashAttention-2), section 3.1, for the log-sum-exp.
    """
    q, k = jnp.asarray(q), jnp.asarray(k)
    _check_heads(q, k)
    if not beta >= 1:
        raise ValueError(f"flash_attention_stats: expected beta >= 1, got {beta}; 64 is usual")
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1])
    lse, mean_logit = _kernel_rows(q, k, attend, scale, 1.0)
    hot_lse, hot_mean = _kernel_rows(q, k, attend, scale, beta)

    seen = ~(lse < _EMPTY_ROW)
    rows = jnp.sum(seen, (0, 1)).astype(jnp.float32)
    entropy = jnp.sum(jnp.where(seen, lse - mean_logit, jnp.zeros_like(lse)), (0, 1))
    floor = jnp.full_like(lse, -jnp.inf)
    upper = jnp.max(jnp.where(seen, hot_lse / beta, floor), (0, 1))
    lower = jnp.max(jnp.where(seen, hot_mean, floor), (0, 1))
    clean = lambda x: jnp.where((rows > 0) & jnp.isfinite(x), x, jnp.full_like(x, jnp.nan))
    return FlashStats(
        entropy=clean(jnp.maximum(entropy / jnp.maximum(rows, 1.0), 0.0)),
        max_logit=clean(upper),
        max_logit_lower=clean(lower),
    )


def _kernel_rows(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    attend: Callable[..., tuple[Array, Array]],
    scale: float | int,
    beta: float | int,
) -> tuple[Float[Array, "B T N"], Float[Array, "B T N"]]:
    """Log-sum-exp of β·s, and mean of s under softmax(β·s), for each row."""
    if "scale" in inspect.signature(attend).parameters:
        out, lse = attend(q, k, k, scale=scale * beta)
    else:
        out, lse = attend(q * beta, k, k)
    if out.shape != q.shape or lse.shape != q.shape[:3]:
        raise ValueError(
            f"flash_attention_stats: expected attend to return out {q.shape} and its"
            f" log-sum-exp {q.shape[:3]} (B, T, N), got {out.shape} and {lse.shape};"
            " transpose a (B, N, T) one with lse.transpose(0, 2, 1)"
        )
    product = q.astype(jnp.float32) * out.astype(jnp.float32)
    return lse.astype(jnp.float32), scale * jnp.sum(product, -1)


def _check_heads(q: Array, k: Array) -> None:
    for x, axes in ((q, "q (B, T, N, H)"), (k, "k (B, S, K, H)")):
        if x.ndim != 4 or not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                f"flash_attention_stats: expected floating {axes}, got {x.dtype} {x.shape}"
            )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise ValueError(
            "flash_attention_stats: expected q (B, T, N, H) and k (B, S, K, H) with K dividing N,"
            f" got {q.shape} and {k.shape}"
        )
