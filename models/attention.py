"""Causal self-attention: two backends behind one function, and the module that projects into it.

Here: `attention`, its reference flash path with a hand-written backward pass, the statistics that
monitors ask for, and `Attention`. Not here: what a fault does to the backward pass (the caller
hands that in as a function), nor norms and residual sums (`gpt.py`).
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from models.config import GPTConfig
from models.layers import Norm, Projection, rope

Backward = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    backend: str,
    backward: Backward | None = None,
    gate: jax.Array | None = None,
) -> jax.Array:
    """Causal softmax attention, softmax(q kᵀ H^-1/2) v, with float32 logits.

    Query head n reads key-value head n // (N / K).

    Args:
      q_BTNH: queries.
      k_BSKH: keys, S = T; K divides N.
      v_BSKH: values.
      backend: "plain", `jax.nn.dot_product_attention`, or "flash", `flash_attention`.
      backward: for "flash" only; see `flash_attention`.
      gate: float32 scalar handed to `backward`; None is 1.

    Returns:
      The heads' outputs, BTNH, in the dtype of the values.

    Raises:
      ValueError: an unknown backend, shapes that do not fit, or `backward` with "plain".
    """
    _check_shapes(q_BTNH.shape, k_BSKH.shape, v_BSKH.shape)
    if backend == "flash":
        gate = jnp.float32(1) if gate is None else jnp.asarray(gate, jnp.float32)
        return flash_attention(q_BTNH, k_BSKH, v_BSKH, gate, backward)
    if backend != "plain":
        raise ValueError(f"backend={backend!r} is not offered; write one of 'plain', 'flash'.")
    if backward is not None:
        raise ValueError(
            "backend='plain' cannot change its backward pass, but backward is given; "
            "write backend='flash', or backward=None."
        )
    return jax.nn.dot_product_attention(q_BTNH, k_BSKH, v_BSKH, is_causal=True)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def flash_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    gate: jax.Array,
    backward: Backward | None,
) -> jax.Array:
    """Attention with the backward pass of a flash kernel, as a reference (it forms T × S).

    The forward pass keeps q, k, v, O and the row log-sum-exp; the backward pass is

        P = exp(S − lse)      dV = Pᵀ dO      dP = dO Vᵀ      δ = rowsum(dO ∘ O)
        dS = P ∘ (dP − δ)     dQ = dS K H^-1/2     dK = dSᵀ Q H^-1/2

    all in float32. `backward` replaces O and dO in δ alone, so it can reach dQ and dK through δ
    and nothing else: the forward pass, dV and dP stay what they are.

    Reverse mode only, as every custom VJP: for a JVP use the plain path.

    Args:
      q_BTNH: queries.
      k_BSKH: keys.
      v_BSKH: values.
      gate: float32 scalar, handed on to `backward`; its own cotangent is zero.
      backward: None, or a hashable function (O, dO, gate) -> (O, dO) of BTNH arrays.

    Returns:
      The heads' outputs, BTNH, in the dtype of the values.

    References:
      arXiv 2307.08691, Algorithm 2; arXiv 2510.04212 for what a low-precision δ does.
    """
    return _flash_forward(q_BTNH, k_BSKH, v_BSKH, gate, backward)[0]


def _flash_forward(q_BTNH, k_BSKH, v_BSKH, gate, backward):
    """The output, and what the backward pass needs; see `flash_attention`."""
    del backward
    logits_BKGTS = _causal_logits(q_BTNH, k_BSKH)
    lse_BKGT = jax.nn.logsumexp(logits_BKGTS, axis=-1)
    p_BKGTS = jnp.exp(logits_BKGTS - lse_BKGT[..., None])
    o_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", p_BKGTS, v_BSKH.astype(jnp.float32))
    o_BTNH = o_BTKGH.reshape(q_BTNH.shape).astype(v_BSKH.dtype)
    return o_BTNH, (q_BTNH, k_BSKH, v_BSKH, o_BTNH, lse_BKGT, gate)


def _flash_backward(backward, residuals, do_BTNH):
    """The cotangents of q, k, v and gate; see `flash_attention`."""
    q_BTNH, k_BSKH, v_BSKH, o_BTNH, lse_BKGT, gate = residuals
    kv_heads = k_BSKH.shape[2]
    scale = q_BTNH.shape[-1] ** -0.5
    q_BTKGH = _group(q_BTNH, kv_heads).astype(jnp.float32)
    do_BTKGH = _group(do_BTNH, kv_heads).astype(jnp.float32)
    k, v = k_BSKH.astype(jnp.float32), v_BSKH.astype(jnp.float32)

    o, do = (o_BTNH, do_BTNH) if backward is None else backward(o_BTNH, do_BTNH, gate)
    delta_BTN = jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32), axis=-1)
    delta_BKGT = _group(delta_BTN, kv_heads).transpose(0, 2, 3, 1)

    p_BKGTS = jnp.exp(_causal_logits(q_BTNH, k_BSKH) - lse_BKGT[..., None])
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


flash_attention.defvjp(_flash_forward, _flash_backward)


def attention_statistics(q_BTNH: jax.Array, k_BSKH: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Entropy and largest logit of each head's causal attention.

    Entropy is lse − Σ_s P_s S_s, in nats, averaged over batch and query positions: 0 where every
    query looks at one key, mean_t ln(t + 1) where attention is uniform.

    Args:
      q_BTNH: queries, as they enter `attention`.
      k_BSKH: keys, likewise.

    Returns:
      entropy_N and max_logit_N, float32; the logits are those after scaling and masking.
    """
    logits_BKGTS = _causal_logits(q_BTNH, k_BSKH)
    lse_BKGT = jax.nn.logsumexp(logits_BKGTS, axis=-1)
    p_BKGTS = jnp.exp(logits_BKGTS - lse_BKGT[..., None])
    # 0 · (−inf) behind the mask would be NaN; a NaN logit in sight stays one.
    seen = jnp.where(jnp.isneginf(logits_BKGTS), 0.0, logits_BKGTS)
    entropy_BKGT = lse_BKGT - jnp.sum(p_BKGTS * seen, axis=-1)
    heads = q_BTNH.shape[2]
    return (
        jnp.mean(entropy_BKGT, axis=(0, 3)).reshape(heads),
        jnp.max(logits_BKGTS, axis=(0, 3, 4)).reshape(heads),
    )


class Attention(nnx.Module):
    """Multi-head or grouped-query self-attention with its four projections."""

    def __init__(self, config: GPTConfig):
        """Builds `q`, `k`, `v`, `o` and, on request, `q_norm` and `k_norm`."""
        d, n, k, h = config.model, config.heads, config.kv_heads_K, config.head_dim_H
        std, query_std = config.block_std, 0.0 if config.zero_query else config.block_std
        self.config = config
        self.q = Projection("BTD,DNH->BTNH", (d, n, h), query_std, config)
        self.k = Projection("BSD,DKH->BSKH", (d, k, h), std, config)
        self.v = Projection("BSD,DKH->BSKH", (d, k, h), std, config)
        self.o = Projection("BTNH,NHD->BTD", (n, h, d), config.residual_std, config)
        self.q_norm = Norm(h, "rmsnorm", config) if config.qk_norm else None
        self.k_norm = Norm(h, "rmsnorm", config) if config.qk_norm else None

    def __call__(
        self,
        x_BTD: jax.Array,
        *,
        gate: jax.Array | None = None,
        backward: Backward | None = None,
        capture: bool = False,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Attends; with `capture`, also returns what monitors read, else an empty dict."""
        q_BTNH, k_BSKH, v_BSKH = self.q(x_BTD), self.k(x_BTD), self.v(x_BTD)
        captured = {"query": q_BTNH, "value": v_BSKH} if capture else {}
        if self.q_norm is not None and self.k_norm is not None:
            q_BTNH, k_BSKH = self.q_norm(q_BTNH), self.k_norm(k_BSKH)
        if self.config.positions == "rope":
            q_BTNH, k_BSKH = rope(q_BTNH), rope(k_BSKH)
        if capture:
            entropy_N, max_logit_N = attention_statistics(q_BTNH, k_BSKH)
            captured |= {"attention_entropy": entropy_N, "max_attention_logit": max_logit_N}
        o_BTNH = attention(
            q_BTNH, k_BSKH, v_BSKH, backend=self.config.backend, backward=backward, gate=gate
        )
        return self.o(o_BTNH), captured


def _check_shapes(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    """Raises where queries (B, T, N, H) and keys, values (B, T, K, H) do not fit together."""
    if len(q) != 4 or len(k) != 4 or k != v or q[:2] != k[:2] or q[3] != k[3] or q[2] % k[2]:
        raise ValueError(
            f"queries {q}, keys {k} and values {v} do not fit; write queries (B, T, N, H) with "
            "keys and values (B, T, K, H), K a divisor of N."
        )


def _group(x_BTN: jax.Array, kv_heads: int) -> jax.Array:
    """Splits the heads N into (K, G): BTN… → BTKG…."""
    b, t, n, *rest = x_BTN.shape
    return x_BTN.reshape(b, t, kv_heads, n // kv_heads, *rest)


def _causal_logits(q_BTNH: jax.Array, k_BSKH: jax.Array) -> jax.Array:
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
