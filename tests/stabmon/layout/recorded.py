"""Parameters as other libraries make them: paths and shapes, and where one head lies in them.

Recorded from transformers 5.24; those of JAX are `recorded_jax.py`. Each entry says by indexing
alone what the query matrix of layer 1, head 4, and the key matrix of layer 1, kv head 1, are,
D × H, and what their norms do to them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.stabmon.trees import VOCABULARY, D, F, H, K, N, numbers

Leaves = dict[str, Any]
Slice = Callable[[Leaves], np.ndarray]


@dataclass(frozen=True)
class Recorded:
    """One model.

    Attributes:
        layout: Name of the layout.
        shapes: Path → shape; {} in a path stands for the layers 0 and 1.
        q: Query matrix of layer 1, head 4.
        k: Key matrix of layer 1, kv head 1.
        sizes: What `find_layout` has to be told.
        left_out: Words, one of which is in every path that is left out.
    """

    layout: str
    shapes: dict[str, tuple[int, ...]]
    q: Slice
    k: Slice
    sizes: dict[str, int] = field(default_factory=lambda: {"heads": N})
    left_out: tuple[str, ...] = ("norm", "ln_", "bias")

    def leaves(self) -> Leaves:
        """Whole numbers in every leaf, by path."""
        return numbers({p.format(i): s for p, s in self.shapes.items() for i in range(2)})


def head(i: int) -> slice:
    return slice(i * H, (i + 1) * H)


def centred(w: np.ndarray) -> np.ndarray:
    """Columns without their mean, as a LayerNorm over a head sees them."""
    return w - w.mean(axis=-1, keepdims=True)


def linear(attn: str, q: str = "q_proj", k: str = "k_proj", kv: int = K) -> dict[str, Any]:
    """Separate projections, out × in."""
    return {f"{attn}.{q}.weight": (N * H, D), f"{attn}.{k}.weight": (kv * H, D)}


def rows(name: str, start: int, turn: Callable[[np.ndarray], np.ndarray] = lambda w: w) -> Slice:
    """H rows of a weight, out × in, from one on."""
    return lambda t: turn(t[name][start : start + H].T)


def scaled(matrix: Slice, scale: Slice, turn: Callable[[np.ndarray], np.ndarray]) -> Slice:
    """A matrix whose columns a norm multiplies."""
    return lambda t: turn(matrix(t)) * scale(t)


_A = "model.layers.1.self_attn"
_Q, _K = rows(f"{_A}.q_proj.weight", 4 * H), rows(f"{_A}.k_proj.weight", H)


def llama_kin(layout: str, norms: dict[str, tuple[int, ...]], q: Slice, k: Slice, **more: Any):
    """Llama's names with norms of q and k under any name; `more` are other leaves of a layer."""
    shapes: dict[str, Any] = linear("model.layers.{}.self_attn")
    shapes |= {f"model.layers.{{}}.self_attn.{x}": shape for x, shape in norms.items()}
    shapes |= {f"model.layers.{{}}.{x.replace('__', '.')}": shape for x, shape in more.items()}
    return Recorded(layout, shapes, q, k)


def normed(
    q: str, k: str, turn: Callable[[np.ndarray], np.ndarray] = lambda w: w
) -> dict[str, Slice]:
    """Both matrices with the scales at these names of the module."""
    return {
        "q": scaled(_Q, lambda t: t[f"{_A}.{q}"], turn),
        "k": scaled(_K, lambda t: t[f"{_A}.{k}"], turn),
    }


_BY_HEAD = {
    f"{x}_layernorm.norms.{i}.weight": (H,) for x, n in (("q", N), ("k", K)) for i in range(n)
}
_FALCON, _BLOOM = (
    "transformer.h.{}.self_attention",
    "transformer.h.1.self_attention.query_key_value.weight",
)
_NEO, _BERT = "transformer.h.{}.attn.attention", "bert.encoder.layer.{}.attention.self"
TORCH = {
    "hunyuan": llama_kin(
        "Hugging Face Llama",
        {"query_layernorm.weight": (H,), "key_layernorm.weight": (H,)},
        **normed("query_layernorm.weight", "key_layernorm.weight"),
    ),
    "cohere": llama_kin(
        "Hugging Face Llama",
        {"q_norm.weight": (N, H), "k_norm.weight": (K, H)},
        scaled(_Q, lambda t: t[f"{_A}.q_norm.weight"][4], centred),
        scaled(_K, lambda t: t[f"{_A}.k_norm.weight"][1], centred),
    ),
    "stablelm": llama_kin(
        "Hugging Face Llama",
        _BY_HEAD,
        scaled(_Q, lambda t: t[f"{_A}.q_layernorm.norms.4.weight"], centred),
        scaled(_K, lambda t: t[f"{_A}.k_layernorm.norms.1.weight"], centred),
    ),
    "lfm2": llama_kin(
        "Hugging Face LFM 2",
        {"q_layernorm.weight": (H,), "k_layernorm.weight": (H,)},
        **normed("q_layernorm.weight", "k_layernorm.weight"),
        feed_forward__w1__weight=(F, D),
    ),
    "phi": llama_kin(
        "Hugging Face Phi",
        {"q_layernorm.weight": (H,), "k_layernorm.weight": (H,), "dense.weight": (D, N * H)}
        | {f"{x}_layernorm.bias": (H,) for x in "qk"},
        **normed("q_layernorm.weight", "k_layernorm.weight", centred),
    ),
    "phi3": Recorded(
        "Hugging Face Phi 3",
        {
            "model.layers.{}.self_attn.qkv_proj.weight": ((N + 2 * K) * H, D),
            "model.layers.{}.self_attn.o_proj.weight": (D, N * H),
            "model.layers.{}.mlp.gate_up_proj.weight": (2 * F, D),
        },
        rows(f"{_A}.qkv_proj.weight", 4 * H),
        rows(f"{_A}.qkv_proj.weight", (N + 1) * H),
    ),
    "persimmon": Recorded(
        "Hugging Face Persimmon",
        {
            "model.layers.{}.self_attn.query_key_value.weight": (3 * N * H, D),
            "model.layers.{}.self_attn.q_layernorm.weight": (H,),
            "model.layers.{}.self_attn.k_layernorm.weight": (H,),
        },
        scaled(
            rows(f"{_A}.query_key_value.weight", 12 * H),
            lambda t: t[f"{_A}.q_layernorm.weight"],
            centred,
        ),
        scaled(
            rows(f"{_A}.query_key_value.weight", 4 * H),
            lambda t: t[f"{_A}.k_layernorm.weight"],
            centred,
        ),
    ),
    "falcon": Recorded(
        "Hugging Face Falcon",
        {
            f"{_FALCON}.query_key_value.weight": ((N + 2 * K) * H, D),
            f"{_FALCON}.dense.weight": (D, N * H),
        },
        rows(_BLOOM, (5 + 1) * H),
        rows(_BLOOM, (5 + 3) * H),
    ),
    "falcon-7b": Recorded(
        "Hugging Face Falcon",
        {
            f"{_FALCON}.query_key_value.weight": ((N + 2) * H, D),
            f"{_FALCON}.dense.weight": (D, N * H),
        },
        rows(_BLOOM, 4 * H),
        rows(_BLOOM, N * H),
    ),
    "bloom": Recorded(
        "Hugging Face BLOOM",
        {
            f"{_FALCON}.query_key_value.weight": (3 * N * H, D),
            f"{_FALCON}.dense.weight": (D, N * H),
            "transformer.word_embeddings.weight": (VOCABULARY, D),
        },
        rows(_BLOOM, 12 * H),
        rows(_BLOOM, 4 * H),
    ),
    "bigcode": Recorded(
        "Hugging Face GPT-BigCode",
        {
            "transformer.h.{}.attn.c_attn.weight": ((N + 2) * H, D),
            "transformer.h.{}.attn.c_proj.weight": (D, N * H),
        },
        rows("transformer.h.1.attn.c_attn.weight", 4 * H),
        rows("transformer.h.1.attn.c_attn.weight", N * H),
    ),
    "gpt-j": Recorded(
        "Hugging Face GPT-J",
        linear("transformer.h.{}.attn", kv=N)
        | {"transformer.h.{}.attn.out_proj.weight": (D, N * H)},
        rows("transformer.h.1.attn.q_proj.weight", 4 * H),
        rows("transformer.h.1.attn.k_proj.weight", H),
    ),
    "gpt-neo": Recorded(
        "Hugging Face GPT-Neo",
        linear(_NEO, kv=N),
        rows(_NEO.format(1) + ".q_proj.weight", 4 * H),
        rows(_NEO.format(1) + ".k_proj.weight", H),
    ),
    "codegen": Recorded(
        "Hugging Face CodeGen",
        {"transformer.h.{}.attn.qkv_proj.weight": (3 * 8 * H, D)},
        # Four parts of two heads, each q, v, k.
        rows("transformer.h.1.attn.qkv_proj.weight", (2 * 6) * H),
        rows("transformer.h.1.attn.qkv_proj.weight", (4 + 1) * H),
        {"heads": 8, "sizes": {"h": H}},
    ),
    "mpt": Recorded(
        "Hugging Face MPT",
        {
            "transformer.blocks.{}.attn.Wqkv.weight": (3 * N * H, D),
            "transformer.blocks.{}.attn.out_proj.weight": (D, N * H),
        },
        rows("transformer.blocks.1.attn.Wqkv.weight", 4 * H),
        rows("transformer.blocks.1.attn.Wqkv.weight", (N + 1) * H),
    ),
    "bert": Recorded(
        "Hugging Face BERT",
        linear(_BERT, "query", "key", N),
        rows(_BERT.format(1) + ".query.weight", 4 * H),
        rows(_BERT.format(1) + ".key.weight", H),
    ),
}
