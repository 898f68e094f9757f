"""The decoder-only language model: embeddings, a loop over stacked blocks, output logits.

Here: `Block`, `GPT`, and the functional pair `init_params` and `apply` for training steps that
hold parameters as a nested dict. Not here: the parts of a block (`layers.py`, `attention.py`),
the loss and the optimizer.

Parameter tree, every block parameter stacked over the layers L on axis 0:

    embed/embedding (V, D)         positions/embedding (context, D)    positions="learned"
    norm/scale (D)                 head/kernel (D, V)                  tied=False
    layers/attn_norm/scale (L, D)  layers/mlp_norm/scale (L, D)
    layers/attn/q/kernel (L, D, N, H)    layers/attn/{k,v}/kernel (L, D, K, H)
    layers/attn/o/kernel (L, N, H, D)    layers/attn/{q,k}_norm/scale (L, H)   qk_norm=True
    layers/mlp/{up,gate}/kernel (L, D, F)    layers/mlp/down/kernel (L, F, D)  gate: "swiglu"
"""

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.attention import Attention, Backward
from models.config import GPTConfig
from models.layers import MLP, Embedding, Norm, Projection


class Block(nnx.Module):
    """One pre-norm block: x + attn(norm x), then x + mlp(norm x)."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        """Builds `attn_norm`, `attn`, `mlp_norm` and `mlp`."""
        self.attn_norm = Norm(config.model, config.norm, config)
        self.attn = Attention(config, rngs)
        self.mlp_norm = Norm(config.model, config.norm, config)
        self.mlp = MLP(config, rngs)

    def __call__(
        self,
        x_BTD: jax.Array,
        *,
        gate: jax.Array | None = None,
        backward: Backward | None = None,
        capture: bool = False,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the residual stream after the block, and the captured arrays if asked for."""
        attended_BTD, captured = self.attn(
            self.attn_norm(x_BTD), gate=gate, backward=backward, capture=capture
        )
        x_BTD = x_BTD + attended_BTD
        x_BTD = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        if capture:
            captured["residual"] = x_BTD
        return x_BTD, captured


class GPT(nnx.Module):
    """A dense decoder-only language model; see the module docstring for its parameter tree.

    >>> model = GPT(GPTConfig(layers=2, model=8, heads=2))
    >>> model(jnp.zeros((1, 5), jnp.int32)).shape
    (1, 5, 256)
    """

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs | None = None):
        """Draws the parameters.

        Args:
          config: shape and choices.
          rngs: its stream "params" is drawn from. None: `nnx.Rngs(0)`.
        """
        rngs = nnx.Rngs(0) if rngs is None else rngs
        self.config = config
        self.embed = Embedding(config.vocabulary, config, rngs)
        self.positions = (
            Embedding(config.context, config, rngs) if config.positions == "learned" else None
        )
        make_blocks = nnx.vmap(lambda rngs: Block(config, rngs))
        self.layers = make_blocks(rngs.fork(split=config.layers))
        self.norm = Norm(config.model, config.norm, config)
        head = (config.model, config.vocabulary)
        self.head = (
            None
            if config.tied
            else Projection("BTD,DV->BTV", head, config.embedding_std, config, rngs)
        )

    def __call__(
        self,
        tokens_BT: jax.Array,
        *,
        gate_L: jax.Array | None = None,
        backward: Backward | None = None,
        capture: bool = False,
    ) -> Any:
        """Logits of the next token at each position.

        Args:
          tokens_BT: integer token ids below V, T at most `context`. An id out of range gives
            NaN logits for its sequence from there on.
          gate_L: float32 gate of each layer, handed to `backward`. None: all 1.
          backward: change to the attention's backward pass; see `attention.flash_attention`.
          capture: whether to return intermediates too. Without it none is computed.

        Returns:
          logits_BTV, float32. With `capture`, (logits_BTV, intermediates): a dict of arrays
          stacked over layers, outside the gradient:
          "attention_entropy" (L, N), mean over batch and query positions, nats;
          "max_attention_logit" (L, N), of the scaled causal logits;
          "residual" (L, B, T, D), the stream after each block;
          "query" (L, B, T, N, H) and "value" (L, B, T, K, H), outputs of the projections.

        Raises:
          ValueError: tokens that are not a B × T integer array, too long a sequence, or a gate_L
            of another shape than (L,).
        """
        config = self.config
        _check_tokens(tokens_BT, config)
        gate_L = jnp.ones(config.layers) if gate_L is None else jnp.asarray(gate_L, jnp.float32)
        if gate_L.shape != (config.layers,):
            raise ValueError(
                f"gate_L has shape {gate_L.shape}; write one gate per layer, ({config.layers},)."
            )
        x_BTD = self.embed.embedding[...].at[tokens_BT].get(mode="fill").astype(config.dtype)
        if self.positions is not None:
            position_TD = self.positions.embedding[...][: tokens_BT.shape[1]]
            x_BTD = x_BTD + position_TD[None].astype(config.dtype)

        graphdef, stacked = nnx.split(self.layers)

        def step(x_BTD: jax.Array, layer: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
            block_state, gate = layer
            block = nnx.merge(graphdef, block_state)
            return block(x_BTD, gate=gate, backward=backward, capture=capture)

        x_BTD, captured = jax.lax.scan(step, x_BTD, (stacked, gate_L), unroll=config.unroll)
        logits_BTV = self._logits(self.norm(x_BTD))
        if not capture:
            return logits_BTV
        return logits_BTV, jax.lax.stop_gradient(captured)

    def _logits(self, x_BTD: jax.Array) -> jax.Array:
        """Float32 logits from the normalised stream."""
        if self.head is not None:
            kernel_DV = self.head.kernel[...]
        else:
            kernel_DV = self.embed.embedding[...].T
        return jnp.einsum(
            "BTD,DV->BTV",
            x_BTD,
            kernel_DV.astype(self.config.dtype),
            preferred_element_type=jnp.float32,
        )


def init_params(config: GPTConfig, seed: int | jax.Array) -> dict[str, Any]:
    """Fresh parameters as a nested dict of arrays.

    Args:
      config: the model; static under jit.
      seed: integer; the same seed gives the same parameters.

    Returns:
      The tree in the module docstring.

    >>> init_params(GPTConfig(layers=3, model=8, heads=2), 0)["layers"]["attn"]["q"]["kernel"].shape
    (3, 8, 2, 4)
    """
    model = GPT(config, rngs=nnx.Rngs(seed))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def apply(config: GPTConfig, params: dict[str, Any], tokens_BT: jax.Array, **options: Any) -> Any:
    """`GPT.__call__` as a function of its parameters.

    Args:
      config: the model; static under jit.
      params: a tree as from `init_params`.
      tokens_BT: integer token ids.
      **options: `gate_L`, `backward`, `capture` of `GPT.__call__`.

    Returns:
      What `GPT.__call__` returns.

    >>> config = GPTConfig(layers=1, model=8, heads=2)
    >>> tokens = jnp.zeros((1, 3), jnp.int32)
    >>> loss = lambda params: jnp.sum(apply(config, params, tokens) ** 2)
    >>> jax.grad(loss)(init_params(config, 0))["norm"]["scale"].shape
    (8,)
    """
    return nnx.merge(_graphdef(config), params)(tokens_BT, **options)


@lru_cache(maxsize=64)
def _graphdef(config: GPTConfig) -> nnx.GraphDef[GPT]:
    """The model's structure without its arrays."""
    return nnx.graphdef(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))


def _check_tokens(tokens_BT: jax.Array, config: GPTConfig) -> None:
    """Raises unless tokens are a B × T integer array with T within the context."""
    if tokens_BT.ndim != 2 or not jnp.issubdtype(tokens_BT.dtype, jnp.integer):
        raise ValueError(
            f"tokens are {tokens_BT.dtype} of shape {tokens_BT.shape}; write integers (B, T)."
        )
    if tokens_BT.shape[1] > config.context:
        raise ValueError(
            f"{tokens_BT.shape[1]} tokens are longer than context={config.context}; "
            "write a larger context, or cut the sequence."
        )
