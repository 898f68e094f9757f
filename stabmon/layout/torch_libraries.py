"""Where Llama and its kin in `transformers` keep their matrices, by the names of their state dicts.

Linear weights are out × in. Here too: the parts that models of `transformers` have in common. Those
that fuse q, k and v, or go back to GPT-2, BERT and T5, are `torch_gpt.py`. What holds of all
libraries is said in `libraries.py`.
"""

from collections.abc import Sequence

from stabmon.layout.layout import Layout
from stabmon.layout.rules import Rule

_LAYER, _ATTN = "layers/*", "layers/*/self_attn"


def outer(embedding: str, head: str = "lm_head", position: str = "") -> tuple[Rule, ...]:
    """Embedding, positions and head by the names of their modules."""
    named = {"embedding": embedding, "head": head, "position": position}
    axes = {"embedding": "vocab d", "head": "vocab d", "position": "t d"}
    return tuple(
        Rule(x, f"{name}/weight", f"{axes[x]} -> {axes[x]}") for x, name in named.items() if name
    )


def projections(attn: str, q: str, k: str, v: str, o: str) -> tuple[Rule, ...]:
    """Four linear layers."""
    return (
        Rule("q", f"{attn}/{q}/weight", "(n h) d -> n d h"),
        Rule("k", f"{attn}/{k}/weight", "(k h) d -> k d h"),
        Rule("v", f"{attn}/{v}/weight", "(k v) d -> k d v"),
        Rule("o", f"{attn}/{o}/weight", "d (n v) -> n v d"),
    )


def mlp(layer: str, up: str, down: str, gate: str = "") -> tuple[Rule, ...]:
    """A feed-forward layer, gated or not."""
    return (
        Rule("mlp_up", f"{layer}/{up}/weight", "f d -> d f"),
        Rule("mlp_down", f"{layer}/{down}/weight", "d f -> f d"),
        *([Rule("mlp_gate", f"{layer}/{gate}/weight", "f d -> d f")] if gate else []),
    )


def scales(
    names: Sequence[str], axes: str = "h -> h", plus: float = 0.0, centred: bool = False
) -> tuple[Rule, ...]:
    """Query-key norms by the names of their modules: that of q, then that of k."""
    q, k = (f"{_ATTN}/{name}/weight" for name in names)
    return (
        Rule("q_scale", q, axes, plus, centred),
        Rule("k_scale", k, axes.replace("n", "k"), plus, centred),
    )


def gated(layer: str) -> tuple[Rule, ...]:
    """Gated feed-forward layers and experts, in leaves of their own or all in one."""
    dense = {"up": "up_proj", "gate": "gate_proj", "down": "down_proj"}
    mixtral = {"up": "w3", "gate": "w1", "down": "w2"}
    axes = {"up": "f d -> d f", "gate": "f d -> d f", "down": "d f -> f d"}
    experts = ((f"{layer}/mlp", dense), (f"{layer}/block_sparse_moe", mixtral))
    joined = ("expert_gate", "expert_up")
    return (
        *mlp(f"{layer}/mlp", "up_proj", "down_proj", "gate_proj"),
        *(Rule("router", f"{block}/gate/weight", "e d -> e d") for block, _ in experts),
        Rule("router", f"{layer}/mlp/router/weight", "e d -> e d"),
        *(
            Rule(f"expert_{x}", f"{block}/experts/*/{names[x]}/weight", axes[x])
            for block, names in experts
            for x in names
        ),
        Rule(joined, f"{layer}/mlp/experts/gate_up_proj", "e (two f) d -> two e d f"),
        Rule("expert_down", f"{layer}/mlp/experts/down_proj", "e d f -> e f d"),
        Rule(("mlp_gate", "mlp_up"), f"{layer}/mlp/gate_up_proj/weight", "(two f) d -> two d f"),
    )


def _llama(*scales: Rule) -> tuple[Rule, ...]:
    """Llama's names, with query-key norms that its successors added."""
    linear = projections(_ATTN, "q_proj", "k_proj", "v_proj", "o_proj")
    plain = mlp(f"{_LAYER}/mlp", "c_fc", "c_proj")
    return (*linear, *scales, *gated(_LAYER), *plain, *outer("embed_tokens"))


_NORMS = ("q_norm", "k_norm")
# A LayerNorm for each head: Cohere's in one leaf, StableLM's in one each.
_BY_HEAD = (
    *scales(_NORMS, "n h -> n h", centred=True),
    *scales(("q_layernorm/norms/*", "k_layernorm/norms/*"), centred=True),
)
LLAMA = Layout(
    "Hugging Face Llama",
    _llama(*scales(_NORMS), *scales(("query_layernorm", "key_layernorm")), *_BY_HEAD),
)
# One scale for all heads together, so that a norm does not tell the head dim.
OLMO2 = Layout("Hugging Face OLMo 2", _llama(*scales(_NORMS, "(n h) -> n h")))
GEMMA = Layout(
    "Hugging Face Gemma",
    _llama(*scales(_NORMS, plus=1.0)),
    requires="layers/*/pre_feedforward_layernorm/weight",
)
GEMMA_3N = Layout(
    "Hugging Face Gemma 3n",
    _llama(*scales(_NORMS)),
    requires="layers/*/laurel/linear_left/weight",
    refuses="its last layers take their keys from earlier ones, whatever they hold themselves",
)
# Each query head is followed by its gate.
QWEN_NEXT = Layout(
    "Hugging Face Qwen 3 Next",
    (
        Rule("q", f"{_ATTN}/q_proj/weight", "(n h+gate) d -> n d h"),
        *_llama(*scales(_NORMS, plus=1.0))[1:],
    ),
    requires="layers/*/linear_attn/out_proj/weight",
)
# Gate and up take turns in the columns of the experts.
GPT_OSS = Layout(
    "Hugging Face gpt-oss",
    (
        *projections(_ATTN, "q_proj", "k_proj", "v_proj", "o_proj"),
        Rule("router", f"{_LAYER}/mlp/router/weight", "e d -> e d"),
        Rule(
            ("expert_gate", "expert_up"),
            f"{_LAYER}/mlp/experts/gate_up_proj",
            "e d (f two) -> two e d f",
        ),
        Rule("expert_down", f"{_LAYER}/mlp/experts/down_proj", "e f d -> e f d"),
        *outer("embed_tokens"),
    ),
    requires="layers/*/self_attn/sinks",
)
PHI = Layout(
    "Hugging Face Phi",
    (
        *projections(_ATTN, "q_proj", "k_proj", "v_proj", "dense"),
        *scales(("q_layernorm", "k_layernorm"), centred=True),
        *mlp(f"{_LAYER}/mlp", "fc1", "fc2"),
        *outer("embed_tokens"),
    ),
    requires="layers/*/self_attn/dense/weight",
)
LFM2 = Layout(
    "Hugging Face LFM 2",
    (
        *projections(_ATTN, "q_proj", "k_proj", "v_proj", "out_proj"),
        *scales(("q_layernorm", "k_layernorm")),
        *mlp(f"{_LAYER}/feed_forward", "w3", "w2", "w1"),
        *outer("embed_tokens"),
    ),
    requires="layers/*/feed_forward/w1/weight",
)
OPT = Layout(
    "Hugging Face OPT",
    (
        *projections(_ATTN, "q_proj", "k_proj", "v_proj", "out_proj"),
        *mlp(_LAYER, "fc1", "fc2"),
        *outer("embed_tokens", position="embed_positions"),
    ),
    requires="layers/*/fc1/weight",
)
# p: the part of a head, or of the stream, that RoPE turns; h: the rest. V2 Lite has a plain q_proj.
DEEPSEEK = Layout(
    "DeepSeek",
    (
        Rule("q", f"{_ATTN}/q_proj/weight", "(n h+p) d -> n d h"),
        Rule("q_down", f"{_ATTN}/q_a_proj/weight", "r d -> d r"),
        Rule("q_latent_scale", f"{_ATTN}/q_a_layernorm/weight", "r -> r"),
        Rule("q_up", f"{_ATTN}/q_b_proj/weight", "(n h+p) r -> n r h"),
        Rule("kv_down", f"{_ATTN}/kv_a_proj_with_mqa/weight", "c+p d -> d c"),
        Rule("kv_latent_scale", f"{_ATTN}/kv_a_layernorm/weight", "c -> c"),
        Rule("k_up", f"{_ATTN}/kv_b_proj/weight", "(n h+v) c -> n c h"),
        Rule("v_up", f"{_ATTN}/kv_b_proj/weight", "(n h+v) c -> n c v"),
        Rule("o", f"{_ATTN}/o_proj/weight", "d (n v) -> n v d"),
        *gated(_LAYER),
        *outer("embed_tokens"),
    ),
)
LLAMA_KIN = (GEMMA_3N, GEMMA, QWEN_NEXT, GPT_OSS, LLAMA, OLMO2, PHI, LFM2, OPT, DEEPSEEK)
