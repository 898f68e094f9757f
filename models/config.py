"""The shape of a model: one frozen, hashable, flat set of choices.

Here: `GPTConfig` and the check of every field. Not here: parameters and arrays (`layers.py`,
`attention.py`, `gpt.py`), nor anything about data or optimisation.

Axis letters, used as suffixes (`att_BNTS`) in `models/` only: B batch, T query position,
S key position, D model, N heads, K key-value heads, H head dimension, F feed-forward,
V vocabulary, L layers.
"""

import dataclasses

_CHOICES = {
    "norm": ("rmsnorm", "layernorm"),
    "positions": ("learned", "rope", "none"),
    "activation": ("gelu", "swiglu"),
    "backend": ("plain", "flash"),
    "dtype": ("float32", "bfloat16"),
    "param_dtype": ("float32", "bfloat16"),
}
_SIZES = ("vocabulary", "layers", "model", "heads", "context")
_OPTIONAL_SIZES = ("kv_heads", "head_dim", "feedforward")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """A dense, decoder-only, pre-norm GPT without biases.

    The three sizes that may be None follow from others; read them as `kv_heads_K`, `head_dim_H`
    and `feedforward_F`.

    Attributes:
      vocabulary: V, number of token ids.
      layers: L, number of blocks; their parameters are stacked on axis 0.
      model: D, width of the residual stream.
      heads: N, number of query heads.
      kv_heads: K, number of key-value heads, a divisor of N. None: K = N.
      head_dim: H. None: H = D / N.
      feedforward: F, width of the hidden layer. None: F = 4 D.
      context: longest sequence, in tokens.
      norm: "rmsnorm" or "layernorm", both with a scale and no bias.
      positions: "learned" (a table added to the embeddings), "rope" (queries and keys rotated) or
        "none" (the causal mask alone).
      activation: "gelu", or "swiglu", which adds a gate matrix.
      qk_norm: whether queries and keys pass through an RMSNorm over H, before RoPE.
      tied: whether the output head is the transposed embedding.
      backend: attention path, "plain" or "flash" (`attention.attention`).
      std: standard deviation of every block matrix at initialisation. None: D^-1/2. The two that
        write into the residual stream, W_o and W_down, are further divided by (2 L)^1/2.
      embedding_std: standard deviation of the embeddings, the positions and an untied head.
      zero_query: whether W_q starts at zero, so that attention starts uniform.
      dtype: dtype of the forward pass. Norms, attention logits and output logits are float32.
      param_dtype: dtype in which parameters are created.
      unroll: blocks in one iteration of the layer loop. 1 compiles one block whatever the depth;
        L compiles them all in a row.

    Raises:
      ValueError: a size below 1, a name that is not offered, heads that do not divide.

    >>> GPTConfig(model=64, heads=4).head_dim_H
    16
    >>> GPTConfig(norm="batchnorm")
    Traceback (most recent call last):
    ...
    ValueError: norm='batchnorm' is not offered; write one of 'rmsnorm', 'layernorm'.
    """

    vocabulary: int = 256
    layers: int = 4
    model: int = 64
    heads: int = 4
    kv_heads: int | None = None
    head_dim: int | None = None
    feedforward: int | None = None
    context: int = 64
    norm: str = "rmsnorm"
    positions: str = "learned"
    activation: str = "gelu"
    qk_norm: bool = False
    tied: bool = True
    backend: str = "plain"
    std: float | None = None
    embedding_std: float = 0.02
    zero_query: bool = False
    dtype: str = "float32"
    param_dtype: str = "float32"
    unroll: int = 1

    def __post_init__(self) -> None:
        """Checks every field, then the fields against each other."""
        for name in (*_SIZES, *_OPTIONAL_SIZES, "unroll"):
            size = getattr(self, name)
            if size is None and name in _OPTIONAL_SIZES:
                continue
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}={size!r} is not a size; write an integer of at least 1.")
        for name, choices in _CHOICES.items():
            choice = getattr(self, name)
            if choice not in choices:
                offered = ", ".join(map(repr, choices))
                raise ValueError(f"{name}={choice!r} is not offered; write one of {offered}.")
        for name in ("std", "embedding_std"):
            std = getattr(self, name)
            if std is not None and not 0 <= std < float("inf"):
                raise ValueError(f"{name}={std!r} is no standard deviation; write a number >= 0.")
        if self.head_dim is None and self.model % self.heads:
            raise ValueError(
                f"model={self.model} does not divide into heads={self.heads}; "
                "write a multiple of it, or give head_dim."
            )
        if self.heads % self.kv_heads_K:
            raise ValueError(
                f"heads={self.heads} do not divide among kv_heads={self.kv_heads_K}; "
                "write a divisor of heads, or None for one per head."
            )
        if self.positions == "rope" and self.head_dim_H % 2:
            raise ValueError(
                f"positions='rope' turns pairs, but the head dimension is {self.head_dim_H}; "
                "write an even head_dim, or positions='learned'."
            )

    @property
    def kv_heads_K(self) -> int:
        """K: `kv_heads`, or N where None."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_dim_H(self) -> int:
        """H: `head_dim`, or D / N where None."""
        return self.model // self.heads if self.head_dim is None else self.head_dim

    @property
    def feedforward_F(self) -> int:
        """F: `feedforward`, or 4 D where None."""
        return 4 * self.model if self.feedforward is None else self.feedforward

    @property
    def block_std(self) -> float:
        """Standard deviation of the block matrices: `std`, or D^-1/2 where None."""
        return self.model**-0.5 if self.std is None else self.std

    @property
    def residual_std(self) -> float:
        """Standard deviation of W_o and W_down: `block_std` / (2 L)^1/2."""
        return self.block_std / (2 * self.layers) ** 0.5
