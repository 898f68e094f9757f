"""Where known libraries keep their matrices: one table of rules for each naming.

Here: names and axes, as the libraries make them. How a tree is matched to one of the tables, cut
and composed is `layout.py`.

RoPE turns queries and keys after the projection, position by position, so no fixed matrix holds
it: all products here are of the weights before the rotation. Where a library keeps a part of its
own for RoPE (latent attention), that part is left out and the rest is the exact NoPE product.
Permutations of the columns within a head, by which libraries differ in their RoPE, change no
spectrum.
"""

from typing import NamedTuple

from stabmon.layout.rules import Rule

QKV = ("q", "k", "v")


class Preset(NamedTuple):
    """The naming of one library.

    Attributes:
        name: For messages.
        rules: Its matrix families.
        requires: Path of a leaf, as in `Rule`, without which a tree is not of this kind; so trees
            that differ in their meaning alone are told apart. Empty for none.
    """

    name: str
    rules: tuple[Rule, ...]
    requires: str = ""


def _torch_llama(plus: float = 0.0, scale: str = "h -> h") -> tuple[Rule, ...]:
    """Llama's names, with the query-key norms that its successors added; weights out × in."""
    layer, attn = "layers/*", "layers/*/self_attn"
    key_scale = scale.replace("n", "k")
    return (
        Rule("q", f"{attn}/q_proj/weight", "(n h) d -> n d h"),
        Rule("k", f"{attn}/k_proj/weight", "(k h) d -> k d h"),
        Rule("v", f"{attn}/v_proj/weight", "(k v) d -> k d v"),
        Rule("o", f"{attn}/o_proj/weight", "d (n v) -> n v d"),
        Rule("q_scale", f"{attn}/q_norm/weight", scale, plus),
        Rule("k_scale", f"{attn}/k_norm/weight", key_scale, plus),
        *_torch_mlp(layer),
    )


def _torch_mlp(layer: str) -> tuple[Rule, ...]:
    """Gated feed-forward layers and experts, each expert in leaves of its own."""
    dense = {"up": "up_proj", "gate": "gate_proj", "down": "down_proj"}
    mixtral = {"up": "w3", "gate": "w1", "down": "w2"}
    axes = {"up": "f d -> d f", "gate": "f d -> d f", "down": "d f -> f d"}
    experts = ((f"{layer}/mlp", dense), (f"{layer}/block_sparse_moe", mixtral))
    return (
        *(Rule(f"mlp_{x}", f"{layer}/mlp/{dense[x]}/weight", axes[x]) for x in dense),
        *(Rule("router", f"{block}/gate/weight", "e d -> e d") for block, _ in experts),
        *(
            Rule(f"expert_{x}", f"{block}/experts/*/{names[x]}/weight", axes[x])
            for block, names in experts
            for x in names
        ),
    )


_FEED_FORWARD = (
    Rule("mlp_up", "layers/mlp/up/kernel", "l d f -> l d f"),
    Rule("mlp_gate", "layers/mlp/gate/kernel", "l d f -> l d f"),
    Rule("mlp_down", "layers/mlp/down/kernel", "l f d -> l f d"),
    Rule("router", "layers/moe/router/kernel", "l d e -> l e d"),
    Rule("expert_up", "layers/moe/up/kernel", "l e d f -> l e d f"),
    Rule("expert_gate", "layers/moe/gate/kernel", "l e d f -> l e d f"),
    Rule("expert_down", "layers/moe/down/kernel", "l e f d -> l e f d"),
)
SCANNED_GPT = Preset(
    "scanned GPT",
    (
        Rule("q", "layers/attn/q/kernel", "l d n h -> l n d h"),
        Rule("k", "layers/attn/k/kernel", "l d n h -> l n d h"),
        Rule("v", "layers/attn/v/kernel", "l d n h -> l n d h"),
        Rule("o", "layers/attn/o/kernel", "l n h d -> l n h d"),
        Rule("q_scale", "layers/attn/q_norm/scale", "l h -> l h"),
        Rule("k_scale", "layers/attn/k_norm/scale", "l h -> l h"),
        *_FEED_FORWARD,
    ),
)
SCANNED_MLA = Preset(
    "scanned GPT with latent attention",
    (
        Rule("q_down", "layers/attn/q_down/kernel", "l d r -> l d r"),
        Rule("q_latent_scale", "layers/attn/q_norm/scale", "l r -> l r"),
        Rule("q_up", "layers/attn/q_up/kernel", "l r n h -> l n r h"),
        Rule("kv_down", "layers/attn/kv_down/kernel", "l d c -> l d c"),
        Rule("kv_latent_scale", "layers/attn/kv_norm/scale", "l c -> l c"),
        Rule("k_up", "layers/attn/k_up/kernel", "l c n h -> l n c h"),
        Rule("v_up", "layers/attn/v_up/kernel", "l c n v -> l n c v"),
        Rule("o", "layers/attn/o/kernel", "l n v d -> l n v d"),
        *_FEED_FORWARD,
    ),
)
# Gemma's norms multiply by 1 + scale. Fused q, k, v where there are as many kv heads as heads.
FLAX_GEMMA = Preset(
    "Flax Gemma",
    (
        Rule("q", "layers/*/attn/q_einsum/w", "n d h -> n d h"),
        Rule(("k", "v"), "layers/*/attn/kv_einsum/w", "two k d h -> two k d h"),
        Rule(QKV, "layers/*/attn/qkv_einsum/w", "three n d h -> three n d h"),
        Rule("o", "layers/*/attn/attn_vec_einsum/w", "n h d -> n h d"),
        Rule("q_scale", "layers/*/attn/_query_norm/scale", "h -> h", plus=1.0),
        Rule("k_scale", "layers/*/attn/_key_norm/scale", "h -> h", plus=1.0),
        Rule("mlp_up", "layers/*/mlp/up_proj/kernel", "d f -> d f"),
        Rule("mlp_gate", "layers/*/mlp/gate_proj/kernel", "d f -> d f"),
        Rule("mlp_down", "layers/*/mlp/down_proj/kernel", "f d -> f d"),
    ),
)
# Scanned layers, on MaxText's default param_scan_axis = 1.
_MAXTEXT_EXPERTS = ("layers/MoeBlock_0", "layers/moe_block")
MAXTEXT = Preset(
    "MaxText",
    (
        Rule("q", "layers/self_attention/query/kernel", "d l n h -> l n d h"),
        Rule("k", "layers/self_attention/key/kernel", "d l k h -> l k d h"),
        Rule("v", "layers/self_attention/value/kernel", "d l k h -> l k d h"),
        Rule(QKV, "layers/self_attention/qkv_proj/kernel", "d l three n h -> three l n d h"),
        Rule("o", "layers/self_attention/out/kernel", "n l h d -> l n h d"),
        Rule("q_scale", "layers/self_attention/query_norm/scale", "h l -> l h"),
        Rule("k_scale", "layers/self_attention/key_norm/scale", "h l -> l h"),
        Rule("mlp_gate", "layers/mlp/wi_0/kernel", "d l f -> l d f"),
        Rule("mlp_up", "layers/mlp/wi_1/kernel", "d l f -> l d f"),
        Rule("mlp_up", "layers/mlp/wi/kernel", "d l f -> l d f"),
        Rule("mlp_down", "layers/mlp/wo/kernel", "f l d -> l f d"),
        *(Rule("router", f"{x}/gate/kernel", "d l e -> l e d") for x in _MAXTEXT_EXPERTS),
        *(Rule("expert_gate", f"{x}/wi_0", "e l d f -> l e d f") for x in _MAXTEXT_EXPERTS),
        *(Rule("expert_up", f"{x}/wi_1", "e l d f -> l e d f") for x in _MAXTEXT_EXPERTS),
        *(Rule("expert_down", f"{x}/wo", "e l f d -> l e f d") for x in _MAXTEXT_EXPERTS),
    ),
)
# Llama and its kin; queries are stored by kv head and then by place in its group.
LEVANTER = Preset(
    "Levanter",
    (
        Rule("q", "layers/stacked/self_attn/q_proj/weight", "l k g h d -> l (k g) d h"),
        Rule("k", "layers/stacked/self_attn/k_proj/weight", "l k h d -> l k d h"),
        Rule("v", "layers/stacked/self_attn/v_proj/weight", "l k h d -> l k d h"),
        Rule("o", "layers/stacked/self_attn/o_proj/weight", "l d n h -> l n h d"),
        Rule("q_scale", "layers/stacked/self_attn/q_norm/weight", "l h -> l h"),
        Rule("k_scale", "layers/stacked/self_attn/k_norm/weight", "l h -> l h"),
        Rule("q_scale", "layers/stacked/self_attn/q_norm/weight", "l k g h -> l (k g) h"),
        Rule("k_scale", "layers/stacked/self_attn/k_norm/weight", "l k h -> l k h"),
        Rule("mlp_up", "layers/stacked/mlp/up_proj/weight", "l f d -> l d f"),
        Rule("mlp_gate", "layers/stacked/mlp/gate_proj/weight", "l f d -> l d f"),
        Rule("mlp_down", "layers/stacked/mlp/down_proj/weight", "l d f -> l f d"),
    ),
)
LEVANTER_GPT2 = Preset(
    "Levanter GPT-2",
    (
        Rule(QKV, "blocks/stacked/attn/c_attn/weight", "l d three n h -> three l n d h"),
        Rule("o", "blocks/stacked/attn/c_proj/weight", "l n h d -> l n h d"),
        Rule("mlp_up", "blocks/stacked/mlp/c_fc/weight", "l d f -> l d f"),
        Rule("mlp_down", "blocks/stacked/mlp/c_proj/weight", "l f d -> l f d"),
    ),
)
NANODO = Preset(
    "nanodo",
    (
        Rule("q", "blocks_*/CausalAttn_0/query/kernel", "d n h -> n d h"),
        Rule("k", "blocks_*/CausalAttn_0/key/kernel", "d n h -> n d h"),
        Rule("v", "blocks_*/CausalAttn_0/value/kernel", "d n h -> n d h"),
        Rule("o", "blocks_*/CausalAttn_0/attn_out_proj/kernel", "n h d -> n h d"),
        Rule("mlp_up", "blocks_*/Mlp_0/Dense_0/kernel", "d f -> d f"),
        Rule("mlp_down", "blocks_*/Mlp_0/Dense_1/kernel", "f d -> f d"),
    ),
)
LLAMA = Preset("Hugging Face Llama", _torch_llama())
# One scale for all heads together, so that a norm does not tell the head dim.
OLMO2 = Preset("Hugging Face OLMo 2", _torch_llama(scale="(n h) -> n h"))
GEMMA = Preset(
    "Hugging Face Gemma", _torch_llama(plus=1.0), "layers/*/pre_feedforward_layernorm/weight"
)
GPT2 = Preset(
    "Hugging Face GPT-2",
    (
        Rule(QKV, "h/*/attn/c_attn/weight", "d (three n h) -> three n d h"),
        Rule("o", "h/*/attn/c_proj/weight", "(n h) d -> n h d"),
        Rule("mlp_up", "h/*/mlp/c_fc/weight", "d f -> d f"),
        Rule("mlp_down", "h/*/mlp/c_proj/weight", "f d -> f d"),
    ),
)
GPT_NEOX = Preset(
    "Hugging Face GPT-NeoX",
    (
        Rule(QKV, "layers/*/attention/query_key_value/weight", "(n three h) d -> three n d h"),
        Rule("o", "layers/*/attention/dense/weight", "d (n h) -> n h d"),
        Rule("mlp_up", "layers/*/mlp/dense_h_to_4h/weight", "f d -> d f"),
        Rule("mlp_down", "layers/*/mlp/dense_4h_to_h/weight", "d f -> f d"),
    ),
)
# p: the part of a head, or of the stream, that RoPE turns; h: the rest. V2 Lite has a plain q_proj.
DEEPSEEK = Preset(
    "DeepSeek",
    (
        Rule("q", "layers/*/self_attn/q_proj/weight", "(n h+p) d -> n d h"),
        Rule("q_down", "layers/*/self_attn/q_a_proj/weight", "r d -> d r"),
        Rule("q_latent_scale", "layers/*/self_attn/q_a_layernorm/weight", "r -> r"),
        Rule("q_up", "layers/*/self_attn/q_b_proj/weight", "(n h+p) r -> n r h"),
        Rule("kv_down", "layers/*/self_attn/kv_a_proj_with_mqa/weight", "c+p d -> d c"),
        Rule("kv_latent_scale", "layers/*/self_attn/kv_a_layernorm/weight", "c -> c"),
        Rule("k_up", "layers/*/self_attn/kv_b_proj/weight", "(n h+v) c -> n c h"),
        Rule("v_up", "layers/*/self_attn/kv_b_proj/weight", "(n h+v) c -> n c v"),
        Rule("o", "layers/*/self_attn/o_proj/weight", "d (n v) -> n v d"),
        *_torch_mlp("layers/*"),
    ),
)
TABLE = (
    *(SCANNED_GPT, SCANNED_MLA, FLAX_GEMMA, MAXTEXT, LEVANTER, LEVANTER_GPT2, NANODO),
    *(GEMMA, LLAMA, OLMO2, GPT2, GPT_NEOX, DEEPSEEK),
)
