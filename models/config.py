"""The shape of a model: one frozen, hashable, flat set of choices.

Here: `GPTConfig` and the check of every field. Not here: parameters and arrays (`layers.py`,
`attention.py`, `gpt.py`), nor anything about data or optimisation.

Axis letters, used as suffixes (`att_BNTS`) in `models/` only: B batch, T query position,
S key position, D model, N heads, K key-value heads, H head dimension, F feed-forward,
V vocabulary, L layers, E experts, J choices of a token, R rank of a latent, P rotated part of a
head.
"""

import dataclasses

_CHOICES = {
    "attention": ("mha", "mla"),
    "norm": ("rmsnorm", "layernorm"),
    "positions": ("learned", "rope", "none"),
    "activation": ("gelu", "swiglu"),
    "backend": ("plain", "flash"),
    "dtype": ("float32", "bfloat16"),
    "param_dtype": ("float32", "bfloat16"),
    "pv_dtype": ("float32", "bfloat16"),
}
_SIZES = ("vocabulary", "layers", "model", "heads", "context", "top_k", "unroll")
_OPTIONAL_SIZES = ("kv_heads", "head_dim", "feedforward", "query_rank", "kv_rank", "rope_dim")
_COUNTS = ("experts", "shared_experts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """A decoder-only, pre-norm GPT without biases, dense or with a mixture of experts.

    The sizes that may be None follow from others; read them as `kv_heads_K`, `head_dim_H`,
    `feedforward_F`, `query_rank_R`, `kv_rank_R` and `rope_dim_P`.

    Attributes:
      vocabulary: V, number of token ids.
      layers: L, number of blocks; their parameters are stacked on axis 0.
      model: D, width of the residual stream.
      heads: N, number of query heads.
      kv_heads: K, number of key-value heads, a divisor of N. None: K = N.
      head_dim: H. None: H = D / N.
      feedforward: F, width of the hidden layer, of each expert if there are any. None: F = 4 D.
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
      attention: "mha", multi-head or grouped-query, or "mla", queries, keys and values through
        low-rank latents (`mla.LatentAttention`); K = N then, and no `qk_norm`.
      query_rank: R of the queries' latent, "mla" only. None: D / 2.
      kv_rank: R of the latent of keys and values, "mla" only. None: D / 4.
      rope_dim: P, width of the rotated part of queries and keys, beside H, with "mla" and "rope"
        only. None: H / 2.
      experts: E, number of experts of every block. 0: one dense MLP instead.
      top_k: J, experts that each token goes to.
      norm_top_k: whether a token's J gate weights are divided by their sum; False leaves them the
        softmax over all E.
      capacity_factor: an expert takes at most this many times J T / E tokens of each sequence,
        the first ones; the rest pass it by. None: dropless.
      shared_experts: experts that every token passes besides, as one MLP of that many times F.
      auxiliary_weight: factor of the load-balance loss in `moe.auxiliary_loss`.
      z_weight: factor of the router z-loss there.
      pv_dtype: dtype of P̄ V in the forward pass of the "flash" backend, "bfloat16" to see what a
        low-precision kernel does (`flash.flash_attention`).
      softmax_beta: factor of that path's stabilised softmax (`flash.softmax_shift`). None: off.

    Raises:
      ValueError: a size below 1, a name that is not offered, heads that do not divide, options
        that exclude each other.

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
    attention: str = "mha"
    query_rank: int | None = None
    kv_rank: int | None = None
    rope_dim: int | None = None
    experts: int = 0
    top_k: int = 2
    norm_top_k: bool = True
    capacity_factor: float | None = None
    shared_experts: int = 0
    auxiliary_weight: float = 1e-2
    z_weight: float = 1e-3
    pv_dtype: str = "float32"
    softmax_beta: float | None = None

    def __post_init__(self) -> None:
        """Checks every field, then the fields against each other."""
        self._check_fields()
        self._check_attention()
        self._check_experts()

    def _check_fields(self) -> None:
        """Raises at a field that cannot be, whatever the others are."""
        for name in (*_SIZES, *_OPTIONAL_SIZES, *_COUNTS):
            size, least = getattr(self, name), 0 if name in _COUNTS else 1
            if size is None and name in _OPTIONAL_SIZES:
                continue
            if isinstance(size, bool) or not isinstance(size, int) or size < least:
                raise ValueError(
                    f"{name}={size!r} is not a size; write an integer of at least {least}."
                )
        for name, choices in _CHOICES.items():
            choice = getattr(self, name)
            if choice not in choices:
                offered = ", ".join(map(repr, choices))
                raise ValueError(f"{name}={choice!r} is not offered; write one of {offered}.")
        for name in ("std", "embedding_std"):
            std = getattr(self, name)
            if std is not None and not 0 <= std < float("inf"):
                raise ValueError(f"{name}={std!r} is no standard deviation; write a number >= 0.")
        for name in ("auxiliary_weight", "z_weight"):
            weight = getattr(self, name)
            if not 0 <= weight < float("inf"):
                raise ValueError(f"{name}={weight!r} is no weight of a loss; write a number >= 0.")

    def _check_attention(self) -> None:
        """Raises where the fields of the attention exclude each other."""
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
        latent = self.attention == "mla"
        turned = ("rope_dim", self.rope_dim_P) if latent else ("head_dim", self.head_dim_H)
        if self.positions == "rope" and turned[1] % 2:
            raise ValueError(
                f"positions='rope' turns pairs, but the {turned[0].replace('_dim', ' dimension')} "
                f"is {turned[1]}; write an even {turned[0]}, or positions='learned'."
            )
        if latent and self.kv_heads_K != self.heads:
            raise ValueError(
                f"attention='mla' has keys for each of heads={self.heads}, not "
                f"kv_heads={self.kv_heads}; write kv_heads=None, and a small kv_rank instead."
            )
        if latent and self.qk_norm:
            raise ValueError(
                "attention='mla' normalises its latents, not its heads; write qk_norm=False."
            )
        if self.backend != "flash" and (
            self.pv_dtype != "float32" or self.softmax_beta is not None
        ):
            raise ValueError(
                f"pv_dtype={self.pv_dtype!r}, softmax_beta={self.softmax_beta!r} are choices of "
                "the flash path; write backend='flash'."
            )
        if self.softmax_beta is not None and not 1 < self.softmax_beta < float("inf"):
            raise ValueError(
                f"softmax_beta={self.softmax_beta!r} leaves repeated maxima as they are; write a "
                "number above 1, such as 2.0, or None."
            )

    def _check_experts(self) -> None:
        """Raises where the fields of the mixture of experts exclude each other."""
        if not self.experts:
            if self.shared_experts:
                raise ValueError(
                    f"shared_experts={self.shared_experts} stand beside routed ones, but "
                    "experts=0; write the number of experts, or shared_experts=0."
                )
            return
        if self.top_k > self.experts:
            raise ValueError(
                f"top_k={self.top_k} experts cannot be chosen of {self.experts}; write a top_k of "
                "at most that."
            )
        if self.top_k == 1 and self.norm_top_k:
            raise ValueError(
                "top_k=1 with norm_top_k=True makes every gate weight 1, and the loss never "
                "reaches the router; write norm_top_k=False."
            )
        factor = self.capacity_factor
        if factor is not None and not 0 < factor < float("inf"):
            raise ValueError(
                f"capacity_factor={factor!r} is no capacity; write a number above 0, such as 1.25, "
                "or None for dropless."
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
    def query_rank_R(self) -> int:
        """R of the queries: `query_rank`, or D / 2 where None."""
        return max(1, self.model // 2) if self.query_rank is None else self.query_rank

    @property
    def kv_rank_R(self) -> int:
        """R of keys and values: `kv_rank`, or D / 4 where None."""
        return max(1, self.model // 4) if self.kv_rank is None else self.kv_rank

    @property
    def rope_dim_P(self) -> int:
        """P: `rope_dim`, or H / 2 where None."""
        return max(1, self.head_dim_H // 2) if self.rope_dim is None else self.rope_dim

    @property
    def block_std(self) -> float:
        """Standard deviation of matrices that read the stream: `std`, or D^-1/2 where None."""
        return self.model**-0.5 if self.std is None else self.std

    @property
    def residual_std(self) -> float:
        """Standard deviation of W_o and W_down: `block_std` / (2 L)^1/2."""
        return self.block_std / (2 * self.layers) ** 0.5
