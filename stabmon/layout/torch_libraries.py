"""Where the models of `transformers` keep their matrices, by the names of their state dicts.

Linear weights are out × in, those of GPT-2 in × out. What holds of all libraries is said in
`libraries.py`; those of JAX are `jax_libraries.py`.
"""

from collections.abc import Sequence

from stabmon.layout.layout import Layout
from stabmon.layout.rules import Rule

QKV = ("q", "k", "v")
_LAYER, _ATTN = "layers/*", "layers/*/self_attn"


def _outer(embedding: str, head: str = "lm_head", position: str = "") -> tuple[Rule, ...]:
    """Embedding, positions and head by the names of their modules."""
    named = {"embedding": embedding, "head": head, "position": position}
    axes = {"embedding": "vocab d", "head": "vocab d", "position": "t d"}
    return tuple(
        Rule(x, f"{name}/weight", f"{axes[x]} -> {axes[x]}") for x, name in named.items() if name
    )


def _projections(attn: str, q: str, k: str, v: str, o: str) -> tuple[Rule, ...]:
    """Four linear layers."""
    return (
        Rule("q", f"{attn}/{q}/weight", "(n h) d -> n d h"),
        Rule("k", f"{attn}/{k}/weight", "(k h) d -> k d h"),
        Rule("v", f"{attn}/{v}/weight", "(k v) d -> k d v"),
        Rule("o", f"{attn}/{o}/weight", "d (n v) -> n v d"),
    )


def _mlp(layer: str, up: str, down: str, gate: str = "") -> tuple[Rule, ...]:
    """A feed-forward layer, gated or not."""
    return (
        Rule("mlp_up", f"{layer}/{up}/weight", "f d -> d f"),
        Rule("mlp_down", f"{layer}/{down}/weight", "d f -> f d"),
        *([Rule("mlp_gate", f"{layer}/{gate}/weight", "f d -> d f")] if gate else []),
    )


def _fused(
    attn: str, weight: str, o: str, axes: str = "(n three h) d -> three n d h"
) -> tuple[Rule, ...]:
    """One linear layer for q, k and v, and one for the output."""
    return (
        Rule(QKV, f"{attn}/{weight}/weight", axes),
        Rule("o", f"{attn}/{o}/weight", "d (n h) -> n h d"),
    )


def _scales(
    names: Sequence[str], axes: str = "h -> h", plus: float = 0.0, centred: str = ""
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
        *_mlp(f"{layer}/mlp", "up_proj", "down_proj", "gate_proj"),
        *(Rule("router", f"{block}/gate/weight", "e d -> e d") for block, _ in experts),
        *(
            Rule(f"expert_{x}", f"{block}/experts/*/{names[x]}/weight", axes[x])
            for block, names in experts
            for x in names
        ),
        Rule(joined, f"{layer}/mlp/experts/gate_up_proj", "e (two f) d -> two e d f"),
        Rule("expert_down", f"{layer}/mlp/experts/down_proj", "e d f -> e f d"),
    )


def _llama(*scales: Rule) -> tuple[Rule, ...]:
    """Llama's names, with query-key norms that its successors added."""
    projections = _projections(_ATTN, "q_proj", "k_proj", "v_proj", "o_proj")
    return (*projections, *scales, *gated(_LAYER), *_outer("embed_tokens"))


_NORMS = ("q_norm", "k_norm")
# A LayerNorm for each head: Cohere's in one leaf, StableLM's in one each.
_BY_HEAD = (
    *_scales(_NORMS, "n h -> n h", centred="h"),
    *_scales(("q_layernorm/norms/*", "k_layernorm/norms/*"), centred="h"),
)
LLAMA = Layout(
    "Hugging Face Llama",
    _llama(*_scales(_NORMS), *_scales(("query_layernorm", "key_layernorm")), *_BY_HEAD),
)
# One scale for all heads together, so that a norm does not tell the head dim.
OLMO2 = Layout("Hugging Face OLMo 2", _llama(*_scales(_NORMS, "(n h) -> n h")))
GEMMA = Layout(
    "Hugging Face Gemma",
    _llama(*_scales(_NORMS, plus=1.0)),
    requires="layers/*/pre_feedforward_layernorm/weight",
)
GEMMA_3N = Layout(
    "Hugging Face Gemma 3n",
    _llama(*_scales(_NORMS)),
    requires="layers/*/laurel/linear_left/weight",
    refuses="its last layers take their keys from earlier ones, whatever they hold themselves",
)
# Each query head is followed by its gate.
QWEN_NEXT = Layout(
    "Hugging Face Qwen 3 Next",
    (
        Rule("q", f"{_ATTN}/q_proj/weight", "(n h+gate) d -> n d h"),
        *_llama(*_scales(_NORMS, plus=1.0))[1:],
    ),
    requires="layers/*/linear_attn/out_proj/weight",
)
PHI = Layout(
    "Hugging Face Phi",
    (
        *_projections(_ATTN, "q_proj", "k_proj", "v_proj", "dense"),
        *_scales(("q_layernorm", "k_layernorm"), centred="h"),
        *_mlp(f"{_LAYER}/mlp", "fc1", "fc2"),
        *_outer("embed_tokens"),
    ),
    requires="layers/*/self_attn/dense/weight",
)
PHI3 = Layout(
    "Hugging Face Phi 3",
    (
        *_fused(_ATTN, "qkv_proj", "o_proj", "(n+k+k h) d -> n d h"),
        Rule(("mlp_gate", "mlp_up"), f"{_LAYER}/mlp/gate_up_proj/weight", "(two f) d -> two d f"),
        Rule("mlp_down", f"{_LAYER}/mlp/down_proj/weight", "d f -> f d"),
        *_outer("embed_tokens"),
    ),
)
LFM2 = Layout(
    "Hugging Face LFM 2",
    (
        *_projections(_ATTN, "q_proj", "k_proj", "v_proj", "out_proj"),
        *_scales(("q_layernorm", "k_layernorm")),
        *_mlp(f"{_LAYER}/feed_forward", "w3", "w2", "w1"),
        *_outer("embed_tokens"),
    ),
    requires="layers/*/feed_forward/w1/weight",
)
OPT = Layout(
    "Hugging Face OPT",
    (
        *_projections(_ATTN, "q_proj", "k_proj", "v_proj", "out_proj"),
        *_mlp(_LAYER, "fc1", "fc2"),
        *_outer("embed_tokens", position="embed_positions"),
    ),
    requires="layers/*/fc1/weight",
)
PERSIMMON = Layout(
    "Hugging Face Persimmon",
    (
        *_fused(_ATTN, "query_key_value", "dense"),
        *_scales(("q_layernorm", "k_layernorm"), centred="h"),
        *_mlp(f"{_LAYER}/mlp", "dense_h_to_4h", "dense_4h_to_h"),
        *_outer("embed_tokens"),
    ),
)
GPT2 = Layout(
    "Hugging Face GPT-2",
    (
        Rule(QKV, "h/*/attn/c_attn/weight", "d (three n h) -> three n d h"),
        Rule("o", "h/*/attn/c_proj/weight", "(n h) d -> n h d"),
        Rule("mlp_up", "h/*/mlp/c_fc/weight", "d f -> d f"),
        Rule("mlp_down", "h/*/mlp/c_proj/weight", "f d -> f d"),
        *_outer("wte", position="wpe"),
    ),
)
_BIGCODE = (*_mlp("h/*/mlp", "c_fc", "c_proj"), *_outer("wte", position="wpe"))
GPT_BIGCODE = Layout(
    "Hugging Face GPT-BigCode",
    (*_fused("h/*/attn", "c_attn", "c_proj", "(n+1+1 h) d -> n d h"), *_BIGCODE),
)
GPT_BIGCODE_MHA = Layout(
    "Hugging Face GPT-BigCode, as many key heads",
    (*_fused("h/*/attn", "c_attn", "c_proj"), *_BIGCODE),
)
GPTJ = Layout(
    "Hugging Face GPT-J",
    (
        *_projections("h/*/attn", "q_proj", "k_proj", "v_proj", "out_proj"),
        *_mlp("h/*/mlp", "fc_in", "fc_out"),
        *_outer("wte"),
    ),
)
GPT_NEO = Layout(
    "Hugging Face GPT-Neo",
    (
        *_projections("h/*/attn/attention", "q_proj", "k_proj", "v_proj", "out_proj"),
        *_mlp("h/*/mlp", "c_fc", "c_proj"),
        *_outer("wte", position="wpe"),
    ),
)
# Written for four devices: each has its heads' q, v and k.
CODEGEN = Layout(
    "Hugging Face CodeGen",
    (
        Rule(("q", "v", "k"), "h/*/attn/qkv_proj/weight", "(4 three g h) d -> three (4 g) d h"),
        Rule("o", "h/*/attn/out_proj/weight", "d (n h) -> n h d"),
        *_mlp("h/*/mlp", "fc_in", "fc_out"),
        *_outer("wte"),
    ),
)
GPT_NEOX = Layout(
    "Hugging Face GPT-NeoX",
    (
        *_fused("layers/*/attention", "query_key_value", "dense"),
        *_mlp(f"{_LAYER}/mlp", "dense_h_to_4h", "dense_4h_to_h"),
        *_outer("embed_in", "embed_out"),
        Rule("head", "lm_head/weight", "vocab d -> vocab d"),
    ),
)
_BLOOM = (*_mlp("h/*/mlp", "dense_h_to_4h", "dense_4h_to_h"), *_outer("word_embeddings"))
BLOOM = Layout(
    "Hugging Face BLOOM", (*_fused("h/*/self_attention", "query_key_value", "dense"), *_BLOOM)
)
# Key heads follow the query heads that share them; in the first models there is one.
FALCON = Layout(
    "Hugging Face Falcon",
    (
        *_fused("h/*/self_attention", "query_key_value", "dense", "(k g+1+1 h) d -> (k g) d h"),
        *_BLOOM,
    ),
)
MPT = Layout(
    "Hugging Face MPT",
    (
        *_fused("blocks/*/attn", "Wqkv", "out_proj", "(three n h) d -> three n d h"),
        *_mlp("blocks/*/ffn", "up_proj", "down_proj"),
        *_outer("wte", position="wpe"),
    ),
)
_DBRX = "blocks/*/ffn/experts/mlp"
DBRX = Layout(
    "Hugging Face DBRX",
    (
        *_fused("blocks/*/norm_attn_norm/attn", "Wqkv", "out_proj", "(n+k+k h) d -> n d h"),
        Rule("router", "blocks/*/ffn/router/layer/weight", "e d -> e d"),
        Rule("expert_gate", f"{_DBRX}/w1", "(e f) d -> e d f"),
        Rule("expert_up", f"{_DBRX}/v1", "(e f) d -> e d f"),
        Rule("expert_down", f"{_DBRX}/w2", "(e f) d -> e f d"),
        *_outer("wte"),
    ),
)
BERT = Layout(
    "Hugging Face BERT",
    (
        *_projections("layer/*/attention", "self/query", "self/key", "self/value", "output/dense"),
        *_mlp("layer/*", "intermediate/dense", "output/dense"),
        *_outer("word_embeddings", "predictions/decoder", "position_embeddings"),
    ),
)


def _t5(stack: str, feed_forward: int, first: int | str) -> tuple[Rule, ...]:
    """The layers of one of T5's two stacks, without the attention from one to the other."""
    attn, mlp = f"{stack}/layer/0/SelfAttention", f"{stack}/layer/{feed_forward}/DenseReluDense"
    rules = (
        *_projections(attn, "q", "k", "v", "o"),
        *_mlp(mlp, "wi", "wo"),
        *_mlp(mlp, "wi_1", "wo", "wi_0"),
    )
    return tuple(Rule(x.role, x.path, x.pattern, layers=(first, 1)) for x in dict.fromkeys(rules))


# Layers of the encoder, then those of the decoder.
T5 = Layout(
    "Hugging Face T5",
    (
        *_t5("encoder/block/*", 1, 0),
        *_t5("decoder/block/*", 2, "encoder/block"),
        *_outer("shared"),
    ),
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
        *_outer("embed_tokens"),
    ),
)
TORCH = (
    *(GEMMA_3N, GEMMA, QWEN_NEXT, LLAMA, OLMO2, PHI, PHI3, LFM2, OPT, PERSIMMON, GPT2),
    *(GPT_BIGCODE, GPT_BIGCODE_MHA, GPTJ, GPT_NEO, CODEGEN, GPT_NEOX, BLOOM, FALCON, MPT, DBRX),
    *(BERT, T5, DEEPSEEK),
)
