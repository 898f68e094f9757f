"""The parts a block is built from: projections, norms, the feed-forward layer, RoPE.

Here: modules and functions that know one layer. Not here: attention (`attention.py`), the
stacking of layers and the residual stream (`gpt.py`).
"""

import jax
import jax.numpy as jnp
from flax import nnx

from models.config import GPTConfig

EPSILON = 1e-6


class Projection(nnx.Module):
    """A linear map without bias, written as an einsum between an input and `kernel`.

    The kernel is made of zeros and carries the standard deviation it wants as metadata `std`:
    `gpt.GPT` draws all parameters at once.
    """

    def __init__(
        self,
        equation: str,
        shape: tuple[int, ...],
        std: float,
        config: GPTConfig,
        *,
        dtype: str | None = None,
    ):
        """Makes the kernel.

        Args:
          equation: einsum of the input and the kernel, e.g. "BTD,DNH->BTNH".
          shape: shape of the kernel.
          std: standard deviation at initialisation; 0 stays zeros.
          config: gives the dtypes.
          dtype: in which the map is computed. None: that of the forward pass.
        """
        self.equation = equation
        self.dtype = config.dtype if dtype is None else dtype
        self.kernel = nnx.Param(jnp.zeros(shape, config.param_dtype), std=std)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the map."""
        return jnp.einsum(self.equation, x.astype(self.dtype), self.kernel[...].astype(self.dtype))


class Embedding(nnx.Module):
    """A table `embedding` of one vector per token or position, drawn like a `Projection`."""

    def __init__(self, rows: int, config: GPTConfig):
        """Makes the rows × D table."""
        table = jnp.zeros((rows, config.model), config.param_dtype)
        self.embedding = nnx.Param(table, std=config.embedding_std)


class Norm(nnx.Module):
    """RMSNorm or LayerNorm over the last axis, with a `scale` and no bias.

    RMSNorm: x / (mean x² + ε)^1/2 · scale. LayerNorm: the same of x − mean x. Computed in float32,
    returned in the dtype that came; a zero vector gives zero.
    """

    def __init__(self, size: int, kind: str, config: GPTConfig):
        """Starts the scale of shape (size,) at one."""
        self.kind = kind
        self.scale = nnx.Param(jnp.ones(size, config.param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last axis of x, of any rank."""
        y = x.astype(jnp.float32)
        if self.kind == "layernorm":
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + EPSILON)
        scale = jnp.expand_dims(self.scale[...].astype(jnp.float32), tuple(range(x.ndim - 1)))
        return (y * scale).astype(x.dtype)


class MLP(nnx.Module):
    """The feed-forward layer: down(gelu(up x)), or down(silu(gate x) ∘ up x) for SwiGLU."""

    def __init__(self, config: GPTConfig, feedforward: int | None = None):
        """Builds `up`, `down` and, for SwiGLU only, `gate`; F is the config's where None."""
        hidden = config.feedforward_F if feedforward is None else feedforward
        inward = (config.model, hidden)
        self.up = Projection("BTD,DF->BTF", inward, config.block_std, config)
        self.gate = (
            Projection("BTD,DF->BTF", inward, config.block_std, config)
            if config.activation == "swiglu"
            else None
        )
        outward = (hidden, config.model)
        self.down = Projection("BTF,FD->BTD", outward, config.residual_std, config)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Applies the layer to each position by itself."""
        up_BTF = self.up(x_BTD)
        return self.down(activate(None if self.gate is None else self.gate(x_BTD), up_BTF))


def activate(gate_BTF: jax.Array | None, up_BTF: jax.Array) -> jax.Array:
    """The hidden layer: gelu(up) without a gate, silu(gate) ∘ up with one.

    Keeps only the activation's input for the backward pass. In the loop over layers every array
    kept is copied in and out of a stack, which costs more than computing it again.
    """
    if gate_BTF is None:
        return jax.checkpoint(jax.nn.gelu, prevent_cse=False)(up_BTF)
    return jax.checkpoint(_swiglu, prevent_cse=False)(gate_BTF, up_BTF)


def _swiglu(gate_BTF: jax.Array, up_BTF: jax.Array) -> jax.Array:
    """The gated activation, silu(gate) ∘ up."""
    return jax.nn.silu(gate_BTF) * up_BTF


def rope(x_BTNH: jax.Array, base: float = 10_000.0) -> jax.Array:
    """Turns each pair (x_i, x_{i+H/2}) at position t by the angle t · base^(−2i/H).

    The inner product of a turned query and a turned key depends on their positions only through
    t − s, and lengths are kept. Angles and products are float32; the dtype that came is returned.

    Args:
      x_BTNH: queries or keys, H even.
      base: wavelength scale, in positions.

    Returns:
      An array of the same shape and dtype; position 0 is left as it was.

    References:
      arXiv 2104.09864, Eq. 34, with the halves rotated instead of neighbours.
    """
    half = x_BTNH.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    position = jnp.arange(x_BTNH.shape[1], dtype=jnp.float32)
    angle = (position[:, None] * frequency[None, :])[None, :, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTNH.dtype)
