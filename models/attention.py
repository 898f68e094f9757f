"""Causal self-attention: two backends behind one function, and the module that projects into it.

Here: `attention`, the statistics that monitors ask for, and `Attention`. Not here: the reference
flash path with its hand-written backward pass (`flash.py`), attention through latents (`mla.py`),
nor norms and residual sums (`gpt.py`).
"""

import jax
import jax.numpy as jnp
from flax import nnx

from models.config import GPTConfig
from models.flash import Backward, causal_logits, flash_attention
from models.layers import Norm, Projection, rope


def attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    backend: str,
    backward: Backward | None = None,
    gate: jax.Array | None = None,
    pv_dtype: str = "float32",
    beta: float | None = None,
) -> jax.Array:
    """Causal softmax attention, softmax(q kᵀ H^-1/2) v, with float32 logits.

    Query head n reads key-value head n // (N / K). H is the head dimension of queries and keys;
    that of the values may be smaller.

    Args:
      q_BTNH: queries.
      k_BSKH: keys, S = T; K divides N.
      v_BSKH: values.
      backend: "plain", `jax.nn.dot_product_attention`, or "flash", `flash_attention`.
      backward: for "flash" only; see `flash_attention`.
      gate: float32 scalar handed to `backward`; None is 1.
      pv_dtype: for "flash" only; see `flash_attention`.
      beta: likewise.

    Returns:
      The heads' outputs, BTNH, in the dtype of the values.

    Raises:
      ValueError: an unknown backend, shapes that do not fit, or `backward`, `pv_dtype` or `beta`
        with "plain".
    """
    _check_shapes(q_BTNH.shape, k_BSKH.shape, v_BSKH.shape)
    if backend == "flash":
        gate = jnp.float32(1) if gate is None else jnp.asarray(gate, jnp.float32)
        return flash_attention(q_BTNH, k_BSKH, v_BSKH, gate, backward, pv_dtype, beta)
    if backend != "plain":
        raise ValueError(f"backend={backend!r} is not offered; write one of 'plain', 'flash'.")
    if backward is not None:
        raise ValueError(
            "backend='plain' cannot change its backward pass, but backward is given; "
            "write backend='flash', or backward=None."
        )
    if pv_dtype != "float32" or beta is not None:
        raise ValueError(
            f"backend='plain' has no choice of pv_dtype={pv_dtype!r}, beta={beta!r}; "
            "write backend='flash', or leave them out."
        )
    # `dot_product_attention` takes values of one width with the keys only.
    width, value_width = k_BSKH.shape[3], v_BSKH.shape[3]
    if value_width < width:
        v_BSKH = jnp.pad(v_BSKH, ((0, 0), (0, 0), (0, 0), (0, width - value_width)))
    o_BTNH = jax.nn.dot_product_attention(q_BTNH, k_BSKH, v_BSKH, is_causal=True)
    return o_BTNH[..., :value_width]


def attention_statistics(q_BTNH: jax.Array, k_BSKH: jax.Array) -> dict[str, jax.Array]:
    """What monitors read of each head's causal attention.

    Entropy is lse − Σ_s P_s S_s, in nats, averaged over batch and query positions: 0 where every
    query looks at one key, mean_t ln(t + 1) where attention is uniform. The sink mass is the mean
    probability of the first key. A row has a repeated maximum if two of its logits that round to
    the largest in bfloat16 are the same there.

    Args:
      q_BTNH: queries, as they enter `attention`.
      k_BSKH: keys, likewise.

    Returns:
      "attention_entropy", "max_attention_logit", "sink_mass" and "repeated_maximum", the number of
      such rows, each (N,), float32; the logits are those after scaling and masking.
    """
    logits_BKGTS = causal_logits(q_BTNH, k_BSKH)
    # Below the row's maximum: with logits of 10⁴ the difference lse − Σ P S would lose all digits.
    below_BKGTS = logits_BKGTS - jnp.max(logits_BKGTS, axis=-1, keepdims=True)
    lse_BKGT = jax.nn.logsumexp(below_BKGTS, axis=-1)
    p_BKGTS = jnp.exp(below_BKGTS - lse_BKGT[..., None])
    # 0 · (−inf) behind the mask would be NaN; a NaN logit in sight stays one.
    seen = jnp.where(jnp.isneginf(logits_BKGTS), 0.0, below_BKGTS)
    entropy_BKGT = lse_BKGT - jnp.sum(p_BKGTS * seen, axis=-1)
    heads = q_BTNH.shape[2]
    coarse_BKGTS = logits_BKGTS.astype(jnp.bfloat16)
    top_BKGTS = coarse_BKGTS == jnp.max(coarse_BKGTS, axis=-1, keepdims=True)
    repeated_BKGT = (jnp.sum(top_BKGTS, axis=-1) > 1).astype(jnp.float32)
    return {
        "attention_entropy": jnp.mean(entropy_BKGT, axis=(0, 3)).reshape(heads),
        "max_attention_logit": jnp.max(logits_BKGTS, axis=(0, 3, 4)).reshape(heads),
        "sink_mass": jnp.mean(p_BKGTS[..., 0], axis=(0, 3)).reshape(heads),
        "repeated_maximum": jnp.sum(repeated_BKGT, axis=(0, 3)).reshape(heads),
    }


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
        captured |= attention_statistics(q_BTNH, k_BSKH) if capture else {}
        return self.o(attend(self.config, q_BTNH, k_BSKH, v_BSKH, backward, gate)), captured


def attend(
    config: GPTConfig,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    backward: Backward | None,
    gate: jax.Array | None,
) -> jax.Array:
    """`attention` with the backend and the arithmetic of a configuration."""
    return attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        backend=config.backend,
        backward=backward,
        gate=gate,
        pv_dtype=config.pv_dtype,
        beta=config.softmax_beta,
    )


def _check_shapes(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    """Raises where queries (B, T, N, H) and keys, values (B, T, K, H) do not fit together."""
    ranks = {len(q), len(k), len(v)} == {4}
    if not ranks or k[:3] != v[:3] or k[3] < v[3] or q[:2] != k[:2] or q[3] != k[3] or q[2] % k[2]:
        raise ValueError(
            f"queries {q}, keys {k} and values {v} do not fit; write queries (B, T, N, H) with "
            "keys and values (B, T, K, H), K a divisor of N, the values' H no larger."
        )
