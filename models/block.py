"""One block of the model: attention and feed-forward layer around the residual stream.

Here: `Block`, and which attention and which feed-forward layer a config means. Not here: those
parts (`attention.py`, `mla.py`, `layers.py`, `moe.py`), nor the loop over blocks (`gpt.py`).
"""

import jax
from flax import nnx

from models.attention import Attention
from models.config import GPTConfig
from models.flash import Backward
from models.layers import MLP, Norm
from models.mla import LatentAttention
from models.moe import MoE


class Block(nnx.Module):
    """One pre-norm block: x + attn(norm x), then x + mlp(norm x), or moe in place of mlp."""

    def __init__(self, config: GPTConfig):
        """Builds `attn_norm`, `attn`, `mlp_norm` and `mlp` or `moe`."""
        self.attn_norm = Norm(config.model, config.norm, config)
        self.attn = LatentAttention(config) if config.attention == "mla" else Attention(config)
        self.mlp_norm = Norm(config.model, config.norm, config)
        self.mlp = None if config.experts else MLP(config)
        self.moe = MoE(config) if config.experts else None

    def __call__(
        self,
        x_BTD: jax.Array,
        *,
        gate: jax.Array | None = None,
        backward: Backward | None = None,
        probe_E: jax.Array | None = None,
        losses: bool = False,
        capture: bool = False,
    ) -> tuple[jax.Array, dict[str, jax.Array], dict[str, jax.Array]]:
        """Returns the stream after the block; router losses and captured arrays if asked for."""
        attended_BTD, captured = self.attn(
            self.attn_norm(x_BTD), gate=gate, backward=backward, capture=capture
        )
        x_BTD = x_BTD + attended_BTD
        normed_BTD, lost = self.mlp_norm(x_BTD), {}
        if self.mlp is not None:
            x_BTD = x_BTD + self.mlp(normed_BTD)
        if self.moe is not None:
            routed_BTD, lost, routing = self.moe(
                normed_BTD, probe_E=probe_E, losses=losses, capture=capture
            )
            x_BTD = x_BTD + routed_BTD
            captured |= routing
        if capture:
            captured["residual"] = x_BTD
        return x_BTD, lost, captured
