"""Multi-head latent attention: queries, keys and values through low-rank latents.

Here: `LatentAttention`, which stands where `Attention` does. Not here: the attention itself and
its statistics (`attention.py`), nor absorbing the up-projections for decoding.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from models.attention import attend, attention_statistics
from models.config import GPTConfig
from models.flash import Backward
from models.layers import Norm, Projection, rope


class LatentAttention(nnx.Module):
    """Self-attention whose projections are down · norm · up, with a part of its own for RoPE.

        c_q = norm(W_dq x)     q = [W_uq c_q ; rope(W_qr c_q)]     per head, H and P wide
        c   = norm(W_dkv x)    k = [W_uk c   ; rope(W_kr x)]       W_kr x is shared by all heads
                               v =  W_uv c
        o   = softmax(q kᵀ (H + P)^-1/2) v

    A head's NoPE logits depend on W_dq diag(scale_q) W_uq and W_dkv diag(scale_kv) W_uk alone, the
    weights of an ordinary head up to the norms' division. RoPE would stand between the two, so a
    small part of the head carries it instead. Without RoPE there is no such part, P = 0.

    References:
      arXiv 2405.04434, Sections 2.1.2 and 2.1.3.
    """

    def __init__(self, config: GPTConfig):
        """Builds the projections, the latents' norms and, for RoPE only, `q_rope` and `k_rope`."""
        d, n, h, p = config.model, config.heads, config.head_dim_H, config.rope_dim_P
        query_r, r = config.query_rank_R, config.kv_rank_R
        # A normalised latent has R unit entries, as the normalised stream has D.
        up_std = r**-0.5 if config.std is None else config.std
        query_std = query_r**-0.5 if config.std is None else config.std
        query_std = 0.0 if config.zero_query else query_std
        self.config = config
        self.q_down = Projection("BTD,DR->BTR", (d, query_r), config.block_std, config)
        self.q_norm = Norm(query_r, "rmsnorm", config)
        self.q_up = Projection("BTR,RNH->BTNH", (query_r, n, h), query_std, config)
        self.kv_down = Projection("BSD,DR->BSR", (d, r), config.block_std, config)
        self.kv_norm = Norm(r, "rmsnorm", config)
        self.k_up = Projection("BSR,RNH->BSNH", (r, n, h), up_std, config)
        self.v_up = Projection("BSR,RNH->BSNH", (r, n, h), up_std, config)
        self.o = Projection("BTNH,NHD->BTD", (n, h, d), config.residual_std, config)
        turned = config.positions == "rope"
        q_rope, k_rope = (query_r, n, p), (d, p)
        self.q_rope = Projection("BTR,RNP->BTNP", q_rope, query_std, config) if turned else None
        self.k_rope = (
            Projection("BSD,DP->BSP", k_rope, config.block_std, config) if turned else None
        )

    def __call__(
        self,
        x_BTD: jax.Array,
        *,
        gate: jax.Array | None = None,
        backward: Backward | None = None,
        capture: bool = False,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Attends; with `capture`, also returns what monitors read, else an empty dict."""
        latent_BTR, latent_BSR = self.q_norm(self.q_down(x_BTD)), self.kv_norm(self.kv_down(x_BTD))
        q_BTNH, k_BSNH, v_BSNH = self.q_up(latent_BTR), self.k_up(latent_BSR), self.v_up(latent_BSR)
        captured = {"query": q_BTNH, "value": v_BSNH} if capture else {}
        if self.q_rope is not None and self.k_rope is not None:
            q_BTNP, k_BSNP = rope(self.q_rope(latent_BTR)), rope(self.k_rope(x_BTD)[:, :, None])
            k_BSNP = jnp.broadcast_to(k_BSNP, q_BTNP.shape)
            q_BTNH = jnp.concatenate([q_BTNH, q_BTNP], axis=-1)
            k_BSNH = jnp.concatenate([k_BSNH, k_BSNP], axis=-1)
        captured |= attention_statistics(q_BTNH, k_BSNH) if capture else {}
        return self.o(attend(self.config, q_BTNH, k_BSNH, v_BSNH, backward, gate)), captured
