"""The decoder-only language model: embeddings, a loop over stacked blocks, output logits.

Here: `GPT`, and the functional pair `init_params` and `apply` for training steps that hold
parameters as a nested dict. Not here: a block and its parts (`block.py`), the loss and the
optimizer.

Parameter tree, every block parameter stacked over the layers L on axis 0:

    embed/embedding (V, D)         positions/embedding (context, D)    positions="learned"
    norm/scale (D)                 head/kernel (D, V)                  tied=False
    layers/attn_norm/scale (L, D)  layers/mlp_norm/scale (L, D)
    layers/attn/q/kernel (L, D, N, H)    layers/attn/{k,v}/kernel (L, D, K, H)
    layers/attn/o/kernel (L, N, H, D)    layers/attn/{q,k}_norm/scale (L, H)   qk_norm=True
    layers/mlp/{up,gate}/kernel (L, D, F)    layers/mlp/down/kernel (L, F, D)  gate: "swiglu"

With experts > 0, in place of layers/mlp:

    layers/moe/router/kernel (L, D, E)   layers/moe/{up,gate}/kernel (L, E, D, F)
    layers/moe/down/kernel (L, E, F, D)  layers/moe/shared/{up,gate,down}/kernel as layers/mlp,
                                         of shared_experts · F

With attention="mla", layers/attn holds, R the rank of its latent and P the rotated part:

    q_down/kernel (L, D, R)   q_norm/scale (L, R)    q_up/kernel (L, R, N, H)
    kv_down/kernel (L, D, R)  kv_norm/scale (L, R)   {k,v}_up/kernel (L, R, N, H)
    o/kernel (L, N, H, D)     q_rope/kernel (L, R, N, P)  k_rope/kernel (L, D, P)  "rope" only

NoPE logits are those of q_down · diag(q_norm) · q_up against kv_down · diag(kv_norm) · k_up;
q_rope reads the queries' latent, k_rope the stream.
"""

from functools import lru_cache, partial
from itertools import accumulate
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.block import Block
from models.config import GPTConfig
from models.flash import Backward
from models.layers import Embedding, Norm, Projection


class GPT(nnx.Module):
    """A decoder-only language model; see the module docstring for its parameter tree.

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
        self.config = config
        self.embed = Embedding(config.vocabulary, config)
        self.positions = (
            Embedding(config.context, config) if config.positions == "learned" else None
        )
        self.layers = nnx.vmap(lambda _: Block(config))(jnp.arange(config.layers))
        self.norm = Norm(config.model, config.norm, config)
        head = (config.model, config.vocabulary)
        self.head = (
            None if config.tied else Projection("BTD,DV->BTV", head, config.embedding_std, config)
        )
        _draw(self, (nnx.Rngs(0) if rngs is None else rngs).params())

    def __call__(
        self,
        tokens_BT: jax.Array,
        *,
        gate_L: jax.Array | None = None,
        backward: Backward | None = None,
        probe_LE: jax.Array | None = None,
        losses: bool = False,
        capture: bool = False,
    ) -> Any:
        """Logits of the next token at each position.

        Args:
          tokens_BT: integer token ids below V, T at most `context`. An id of V or more turns
            the logits of its whole sequence into NaN.
          gate_L: float32 gate of each layer, handed to `backward`. None: all 1.
          backward: change to the attention's backward pass; see `attention.flash_attention`.
          probe_LE: zeros, added to the routers' probabilities: the loss's gradient with respect to
            it is that with respect to the mean expert probabilities. With experts only.
          losses: whether to return the routers' losses too, for `moe.auxiliary_loss`.
          capture: whether to return intermediates too. What is not asked for is not computed.

        Returns:
          logits_BTV, float32. With `losses` or `capture` a tuple of logits_BTV and, in this order,
          what they ask for.

          Losses: {"balance": (L,), "z": (L,)}, float32, unweighted; zeros in a dense model.

          Intermediates: a dict of arrays stacked over layers, outside the gradient:
          "attention_entropy" (L, N), mean over batch and query positions, nats;
          "max_attention_logit" (L, N), of the scaled causal logits;
          "sink_mass" (L, N), mean probability of the first key;
          "repeated_maximum" (L, N), rows whose largest logit, in bfloat16, comes twice;
          "residual" (L, B, T, D), the stream after each block;
          "query" (L, B, T, N, H) and "value" (L, B, T, K, H), outputs of the projections, with
          "mla" those of q_up and v_up; with experts also
          "router_logits" (L, B, T, E), float32;
          "expert_load" (L, E), fraction of the tokens' choices, before any is dropped;
          "dropped" (L,), fraction of the choices that found their expert full.

        Raises:
          ValueError: tokens that are not a B × T integer array, too long a sequence, or a gate_L
            of another shape than (L,).
        """
        config = self.config
        _check_tokens(tokens_BT, config)
        gate_L = (
            jnp.ones(config.layers, jnp.float32)
            if gate_L is None
            else jnp.asarray(gate_L, jnp.float32)
        )
        if gate_L.shape != (config.layers,):
            raise ValueError(
                f"gate_L has shape {gate_L.shape}; write one gate per layer, ({config.layers},)."
            )
        if probe_LE is not None and probe_LE.shape != (config.layers, config.experts):
            raise ValueError(
                f"probe_LE has shape {probe_LE.shape}; write zeros "
                f"({config.layers}, {config.experts}), with experts."
            )
        x_BTD = self.embed.embedding[...].at[tokens_BT].get(mode="fill").astype(config.dtype)
        if self.positions is not None:
            position_TD = self.positions.embedding[...][: tokens_BT.shape[1]]
            x_BTD = x_BTD + position_TD[None].astype(config.dtype)

        graphdef, stacked = nnx.split(self.layers)

        def step(x_BTD: jax.Array, layer: Any) -> tuple[jax.Array, Any]:
            block_state, gate, probe_E = layer
            block = nnx.merge(graphdef, block_state)
            x_BTD, lost, captured = block(
                x_BTD,
                gate=gate,
                backward=backward,
                probe_E=probe_E,
                losses=losses,
                capture=capture,
            )
            return x_BTD, (lost, captured)

        x_BTD, (lost, captured) = jax.lax.scan(
            step, x_BTD, (stacked, gate_L, probe_LE), unroll=config.unroll
        )
        returned: list[Any] = [self._logits(self.norm(x_BTD))]
        if losses and not config.experts:
            lost = {name: jnp.zeros(config.layers, jnp.float32) for name in ("balance", "z")}
        if losses:
            returned.append(lost)
        if capture:
            returned.append(jax.lax.stop_gradient(captured))
        return returned[0] if len(returned) == 1 else tuple(returned)

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

    >>> init_params(GPTConfig(layers=2, model=8, heads=2), 0)["layers"]["attn"]["q"]["kernel"].shape
    (2, 8, 2, 4)
    """
    model = GPT(config, rngs=nnx.Rngs(jax.random.key(seed)))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def apply(config: GPTConfig, params: dict[str, Any], tokens_BT: jax.Array, **options: Any) -> Any:
    """`GPT.__call__` as a function of its parameters.

    Args:
      config: the model; static under jit.
      params: a tree as from `init_params`.
      tokens_BT: integer token ids.
      **options: `gate_L`, `backward`, `probe_LE`, `losses`, `capture` of `GPT.__call__`.

    Returns:
      What `GPT.__call__` returns.

    Raises:
      ValueError: a parameter that is missing, unknown or of another shape than `config` says.

    >>> config = GPTConfig(layers=2, model=8, heads=2)
    >>> tokens = jnp.zeros((1, 5), jnp.int32)
    >>> params = init_params(config, 0)
    >>> loss = lambda params: jnp.sum(apply(config, params, tokens) ** 2)
    >>> jax.jit(jax.grad(loss))(params)["norm"]["scale"].shape
    (8,)
    """
    graphdef, shapes = _structure(config)
    _check_params({path: jnp.shape(x) for path, x in _flatten(params).items()}, shapes)
    return nnx.merge(graphdef, params)(tokens_BT, **options)


@lru_cache(maxsize=64)
def _structure(config: GPTConfig) -> tuple[nnx.GraphDef[GPT], dict[str, tuple[int, ...]]]:
    """The model without its arrays, and the shape of each array by path."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: GPT(config)))
    return graphdef, {path: x.shape for path, x in _flatten(nnx.to_pure_dict(state)).items()}


def _flatten(tree: dict[str, Any]) -> dict[str, Any]:
    """Leaves by path, "layers/attn/q/kernel"."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _check_params(given: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> None:
    """Raises at the first parameter, by path, that is not as the config says."""
    for path in sorted(given.keys() | expected.keys()):
        if given.get(path) != expected.get(path):
            raise ValueError(
                f"params['{path}'] has shape {given.get(path)}, the config says "
                f"{expected.get(path)} (None: absent); write init_params(config, seed), "
                "or the config that the parameters were made with."
            )


def _draw(model: GPT, key: jax.Array) -> None:
    """Fills each parameter that carries a `std` with its part of one long normal draw.

    One draw, because compiling the generator costs about as much as compiling all the rest.
    """
    drawn = [
        (path, param)
        for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param))
        if "std" in param.get_metadata()
    ]
    values = _normals(
        key,
        tuple(param.shape for _, param in drawn),
        tuple(param.get_metadata("std") for _, param in drawn),
        model.config.param_dtype,
    )
    for (_, param), value in zip(drawn, values, strict=True):
        param[...] = value


@partial(jax.jit, static_argnums=(1, 2, 3))
def _normals(
    key: jax.Array, shapes: tuple[tuple[int, ...], ...], stds: tuple[float, ...], dtype: str
) -> list[jax.Array]:
    """Independent N(0, std²) arrays of the given shapes."""
    ends = list(accumulate(map(prod, shapes)))
    flat = jax.random.normal(key, (ends[-1],), jnp.float32)
    parts = jnp.split(flat, ends[:-1])
    return [
        (std * part.reshape(shape)).astype(dtype)
        for std, part, shape in zip(stds, parts, shapes, strict=True)
    ]


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
