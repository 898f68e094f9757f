"""Flash attention as a reference: its forward pass, its backward pass written out, its precision.

Here: `flash_attention`, `softmax_shift` and the causal logits that they and the statistics share.
Not here: the choice of a backend, statistics and projections (`attention.py`), nor what a fault
does to the backward pass (the caller hands that in as a function).
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

Backward = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]

# Beyond it, exp(S − m) at a moved shift would leave the range of float32.
_SAFE_EXPONENT = 80.0


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def flash_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    gate: jax.Array,
    backward: Backward | None,
    pv_dtype: str = "float32",
    beta: float | None = None,
) -> jax.Array:
    """Attention with the backward pass of a flash kernel, as a reference (it forms T × S).

    The forward pass keeps q, k, v, O and the row log-sum-exp; the backward pass is

        P = exp(S − lse)      dV = Pᵀ dO      dP = dO Vᵀ      δ = rowsum(dO ∘ O)
        dS = P ∘ (dP − δ)     dQ = dS K H^-1/2     dK = dSᵀ Q H^-1/2

    all in float32. `backward` replaces O and dO in δ alone, so it can reach dQ and dK through δ
    and nothing else: the forward pass, dV and dP stay what they are.

    With `pv_dtype` or `beta` the forward pass is the one that a kernel computes, O = (P̄ V) / Σ P̄
    with P̄ = exp(S − m), m from `softmax_shift`; P̄, V and the product are rounded to `pv_dtype`.

    Reverse mode only, as every custom VJP: for a JVP use the plain path.

    Args:
      q_BTNH: queries.
      k_BSKH: keys.
      v_BSKH: values; their head dimension may differ from that of q and k.
      gate: float32 scalar, handed on to `backward`; its own cotangent is zero.
      backward: None, or a hashable function (O, dO, gate) -> (O, dO) of BTNH arrays.
      pv_dtype: "float32" or "bfloat16".
      beta: None, or the factor of `softmax_shift`.

    Returns:
      The heads' outputs, BTNH, in the dtype of the values.

    References:
      arXiv 2307.08691, Algorithm 2; arXiv 2510.04212 for what a low-precision P̄ V and δ do.
    """
    return _forward(q_BTNH, k_BSKH, v_BSKH, gate, backward, pv_dtype, beta)[0]


def softmax_shift(
    logits: jax.Array, beta: float | None = None, dtype: str = "float32"
) -> jax.Array:
    """The m that a kernel subtracts from each row of logits before exp: not always the maximum r.

    Softmax is the same for every m. In low precision it matters: where several P̄ = exp(S − r)
    round to exactly 1, P̄ V adds values of one sign and its rounding is biased. With `beta` a row
    whose maximum is repeated in that sense has m = β r for r > 0 and m = 0 for r < 0, so that
    its P̄ stay below 1. Rows with r = 0, or so far from 0 that P̄ would leave the range of
    float32, (β − 1) r > 80 or r < −80, keep m = r.

    Args:
      logits: (..., S), −inf where masked.
      beta: factor of a repeated maximum, above 1, 2 to 8 in the paper. None: m = r always.
      dtype: in which P̄ is multiplied; decides which P̄ are 1.

    Returns:
      m, float32, of shape (...). NaN for a row with a NaN.

    References:
      arXiv 2510.04212, the stabilised softmax; there a maximum is repeated where logits are
      equal, here where P̄ cannot tell them apart, which includes it.

    >>> softmax_shift(jnp.array([[3.0, 3.0], [3.0, 1.0], [-2.0, -2.0]]), beta=2.0)
    Array([6., 3., 0.], dtype=float32)
    """
    logits = logits.astype(jnp.float32)
    top = jnp.max(logits, axis=-1)
    if beta is None:
        return top
    ones = jnp.exp(logits - top[..., None]).astype(dtype) == 1
    repeated = jnp.sum(ones, axis=-1) > 1
    moved = jnp.where(top > 0, beta * top, 0.0)
    in_range = jnp.abs(moved - top) <= _SAFE_EXPONENT
    return jnp.where(repeated & in_range, moved, top)


def _forward(q_BTNH, k_BSKH, v_BSKH, gate, backward, pv_dtype, beta):
    """The output, and what the backward pass needs; see `flash_attention`."""
    del backward
    logits_BKGTS = causal_logits(q_BTNH, k_BSKH)
    v = v_BSKH.astype(jnp.float32)
    if pv_dtype == "float32" and beta is None:
        lse_BKGT = jax.nn.logsumexp(logits_BKGTS, axis=-1)
        p_BKGTS = jnp.exp(logits_BKGTS - lse_BKGT[..., None])
        o_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", p_BKGTS, v)
    else:
        shift_BKGT = softmax_shift(logits_BKGTS, beta, pv_dtype)
        p_BKGTS = jnp.exp(logits_BKGTS - shift_BKGT[..., None])
        total_BKGT = jnp.sum(p_BKGTS, axis=-1)
        lse_BKGT = shift_BKGT + jnp.log(total_BKGT)
        # Products of rounded factors, summed in float32, then rounded: what a matrix unit does.
        low = lambda x: x.astype(pv_dtype).astype(jnp.float32)
        pv_BTKGH = low(jnp.einsum("BKGTS,BSKH->BTKGH", low(p_BKGTS), low(v)))
        o_BTKGH = pv_BTKGH / total_BKGT.transpose(0, 3, 1, 2)[..., None]
    o_BTNH = o_BTKGH.reshape(*q_BTNH.shape[:3], v.shape[-1]).astype(v_BSKH.dtype)
    return o_BTNH, (q_BTNH, k_BSKH, v_BSKH, o_BTNH, lse_BKGT, gate)


def _backward(backward, pv_dtype, beta, residuals, do_BTNH):
    """The cotangents of q, k, v and gate; see `flash_attention`."""
    del pv_dtype, beta
    q_BTNH, k_BSKH, v_BSKH, o_BTNH, lse_BKGT, gate = residuals
    kv_heads = k_BSKH.shape[2]
    scale = q_BTNH.shape[-1] ** -0.5
    q_BTKGH = _group(q_BTNH, kv_heads).astype(jnp.float32)
    do_BTKGH = _group(do_BTNH, kv_heads).astype(jnp.float32)
    k, v = k_BSKH.astype(jnp.float32), v_BSKH.astype(jnp.float32)

    o, do = (o_BTNH, do_BTNH) if backward is None else backward(o_BTNH, do_BTNH, gate)
    delta_BTN = jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32), axis=-1)
    delta_BKGT = _group(delta_BTN, kv_heads).transpose(0, 2, 3, 1)

    p_BKGTS = jnp.exp(causal_logits(q_BTNH, k_BSKH) - lse_BKGT[..., None])
    dv_BSKH = jnp.einsum("BKGTS,BTKGH->BSKH", p_BKGTS, do_BTKGH)
    dp_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", do_BTKGH, v)
    ds_BKGTS = p_BKGTS * (dp_BKGTS - delta_BKGT[..., None])
    dq_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", ds_BKGTS, k) * scale
    dk_BSKH = jnp.einsum("BKGTS,BTKGH->BSKH", ds_BKGTS, q_BTKGH) * scale
    return (
        dq_BTKGH.reshape(q_BTNH.shape).astype(q_BTNH.dtype),
        dk_BSKH.astype(k_BSKH.dtype),
        dv_BSKH.astype(v_BSKH.dtype),
        jnp.zeros_like(gate),
    )


flash_attention.defvjp(_forward, _backward)


def causal_logits(q_BTNH: jax.Array, k_BSKH: jax.Array) -> jax.Array:
    """Scaled q kᵀ in float32, BKGTS; −inf where a key lies after the query."""
    t, kv_heads, h = q_BTNH.shape[1], k_BSKH.shape[2], q_BTNH.shape[3]
    logits_BKGTS = jnp.einsum(
        "BTKGH,BSKH->BKGTS",
        _group(q_BTNH, kv_heads),
        k_BSKH,
        preferred_element_type=jnp.float32,
    )
    past = jnp.tril(jnp.ones((t, t), bool))[None, None, None]
    return jnp.where(past, logits_BKGTS * h**-0.5, -jnp.inf)


def _group(x_BTN: jax.Array, kv_heads: int) -> jax.Array:
    """Splits the heads N into (K, G): BTN… → BTKG…."""
    b, t, n, *rest = x_BTN.shape
    return x_BTN.reshape(b, t, kv_heads, n // kv_heads, *rest)
