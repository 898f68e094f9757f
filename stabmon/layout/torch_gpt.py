"""Where other models of `transformers` keep their matrices: fused q, k, v, and older names.

Linear weights are out × in, those of GPT-2 in × out. Llama and its kin, and what all have in
common, are `torch_libraries.py`.
"""

from stabmon.layout.layout import Layout
from stabmon.layout.rules import Rule
from stabmon.layout.torch_libraries import gated, mlp, outer, projections, scales

QKV = ("q", "k", "v")
_LAYER, _ATTN = "layers/*", "layers/*/self_attn"


def _fused(
    attn: str, weight: str, o: str, axes: str = "(n three h) d -> three n d h"
) -> tuple[Rule, ...]:
    """One linear layer for q, k and v, and one for the output."""
    return (
        Rule(QKV, f"{attn}/{weight}/weight", axes),
        Rule("o", f"{attn}/{o}/weight", "d (n h) -> n h d"),
    )


PHI3 = Layout(
    "Hugging Face Phi 3",
    (
        *_fused(_ATTN, "qkv_proj", "o_proj", "(n+k+k h) d -> n d h"),
        *gated(_LAYER),
        *outer("embed_tokens"),
    ),
)
PERSIMMON = Layout(
    "Hugging Face Persimmon",
    (
        *_fused(_ATTN, "query_key_value", "dense"),
        *scales(("q_layernorm", "k_layernorm"), centred=True),
        *mlp(f"{_LAYER}/mlp", "dense_h_to_4h", "dense_4h_to_h"),
        *outer("embed_tokens"),
    ),
)
GPT2 = Layout(
    "Hugging Face GPT-2",
    (
        Rule(QKV, "h/*/attn/c_attn/weight", "d (three n h) -> three n d h"),
        Rule("o", "h/*/attn/c_proj/weight", "(n h) d -> n h d"),
        Rule("mlp_up", "h/*/mlp/c_fc/weight", "d f -> d f"),
        Rule("mlp_down", "h/*/mlp/c_proj/weight", "f d -> f d"),
        *outer("wte", position="wpe"),
    ),
)
_BIGCODE = (*mlp("h/*/mlp", "c_fc", "c_proj"), *outer("wte", position="wpe"))
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
        *projections("h/*/attn", "q_proj", "k_proj", "v_proj", "out_proj"),
        *mlp("h/*/mlp", "fc_in", "fc_out"),
        *outer("wte"),
    ),
)
GPT_NEO = Layout(
    "Hugging Face GPT-Neo",
    (
        *projections("h/*/attn/attention", "q_proj", "k_proj", "v_proj", "out_proj"),
        *mlp("h/*/mlp", "c_fc", "c_proj"),
        *outer("wte", position="wpe"),
    ),
)
# Written for four devices: each has its heads' q, v and k.
CODEGEN = Layout(
    "Hugging Face CodeGen",
    (
        Rule(("q", "v", "k"), "h/*/attn/qkv_proj/weight", "(4 three g h) d -> three (4 g) d h"),
        Rule("o", "h/*/attn/out_proj/weight", "d (n h) -> n h d"),
        *mlp("h/*/mlp", "fc_in", "fc_out"),
        *outer("wte"),
    ),
)
GPT_NEOX = Layout(
    "Hugging Face GPT-NeoX",
    (
        *_fused("layers/*/attention", "query_key_value", "dense"),
        *mlp(f"{_LAYER}/mlp", "dense_h_to_4h", "dense_4h_to_h"),
        *outer("embed_in", "embed_out"),
        Rule("head", "lm_head/weight", "vocab d -> vocab d"),
    ),
)
_BLOOM = (*mlp("h/*/mlp", "dense_h_to_4h", "dense_4h_to_h"), *outer("word_embeddings"))
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
        *mlp("blocks/*/ffn", "up_proj", "down_proj"),
        *outer("wte", position="wpe"),
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
        *outer("wte"),
    ),
)
BERT = Layout(
    "Hugging Face BERT",
    (
        *projections("layer/*/attention", "self/query", "self/key", "self/value", "output/dense"),
        *mlp("layer/*", "intermediate/dense", "output/dense"),
        *outer("word_embeddings", "predictions/decoder", "position_embeddings"),
    ),
)


def _t5(stack: str, feed_forward: int, first: int | str) -> tuple[Rule, ...]:
    """The layers of one of T5's two stacks, without the attention from one to the other."""
    attn, dense = f"{stack}/layer/0/SelfAttention", f"{stack}/layer/{feed_forward}/DenseReluDense"
    rules = (
        *projections(attn, "q", "k", "v", "o"),
        *mlp(dense, "wi", "wo"),
        *mlp(dense, "wi_1", "wo", "wi_0"),
    )
    return tuple(Rule(x.role, x.path, x.pattern, layers=(first, 1)) for x in dict.fromkeys(rules))


# Layers of the encoder, then those of the decoder.
T5 = Layout(
    "Hugging Face T5",
    (
        *_t5("encoder/block/*", 1, 0),
        *_t5("decoder/block/*", 2, "encoder/block"),
        *outer("shared"),
    ),
)


GPT_KIN = (
    PHI3,
    PERSIMMON,
    GPT2,
    GPT_BIGCODE,
    GPT_BIGCODE_MHA,
    GPTJ,
    GPT_NEO,
    CODEGEN,
    GPT_NEOX,
    BLOOM,
    FALCON,
    MPT,
    DBRX,
    BERT,
    T5,
)
