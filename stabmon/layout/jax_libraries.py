"""Where libraries of JAX models keep their matrices, and this project's own model.

What holds of all libraries is said in `libraries.py`; MaxText is `maxtext.py`, the models of
`transformers` are `torch_libraries.py`.
"""

from stabmon.layout.axes import tokens
from stabmon.layout.layout import Layout
from stabmon.layout.maxtext import MAXTEXT
from stabmon.layout.rules import Rule
from stabmon.layout.torch_gpt import FALCON, GPT_NEOX, GPTJ, MPT, PHI3
from stabmon.layout.torch_libraries import DEEPSEEK, GEMMA, LLAMA, OLMO2, OPT, PHI

QKV = ("q", "k", "v")


def _outer(embedding: str, head: str, axes: str = "d vocab") -> tuple[Rule, ...]:
    """Embedding, V × D, and head, by default D × V."""
    return (
        Rule("embedding", embedding, "vocab d -> vocab d"),
        Rule("head", head, f"{axes} -> vocab d"),
    )


_OWN = (
    Rule("mlp_up", "layers/mlp/up/kernel", "l d f -> l d f"),
    Rule("mlp_gate", "layers/mlp/gate/kernel", "l d f -> l d f"),
    Rule("mlp_down", "layers/mlp/down/kernel", "l f d -> l f d"),
    Rule("router", "layers/moe/router/kernel", "l d e -> l e d"),
    Rule("expert_up", "layers/moe/up/kernel", "l e d f -> l e d f"),
    Rule("expert_gate", "layers/moe/gate/kernel", "l e d f -> l e d f"),
    Rule("expert_down", "layers/moe/down/kernel", "l e f d -> l e f d"),
    *_outer("embed/embedding", "head/kernel"),
    Rule("position", "positions/embedding", "t d -> t d"),
)
SCANNED_GPT = Layout(
    "scanned GPT",
    (
        Rule("q", "layers/attn/q/kernel", "l d n h -> l n d h"),
        Rule("k", "layers/attn/k/kernel", "l d n h -> l n d h"),
        Rule("v", "layers/attn/v/kernel", "l d n h -> l n d h"),
        Rule("o", "layers/attn/o/kernel", "l n h d -> l n h d"),
        Rule("q_scale", "layers/attn/q_norm/scale", "l h -> l h"),
        Rule("k_scale", "layers/attn/k_norm/scale", "l h -> l h"),
        *_OWN,
    ),
)
SCANNED_MLA = Layout(
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
        *_OWN,
    ),
)


def _flax(stacked: bool) -> tuple[Rule, ...]:
    """Flax's attention in any module of any numbered block; or in a scanned one."""
    at, l = ("?", "l ") if stacked else ("?*/?", "")
    names = {"q": "query", "k": "key", "v": "value"}
    return (
        *(Rule(x, f"{at}/{name}/kernel", f"{l}d n h -> {l}n d h") for x, name in names.items()),
        Rule("o", f"{at}/out/kernel", f"{l}n h d -> {l}n h d"),
        Rule("q_scale", f"{at}/query_ln/scale", f"{l}h -> {l}h", centred=True),
        Rule("k_scale", f"{at}/key_ln/scale", f"{l}h -> {l}h", centred=True),
    )


def _equinox(stacked: bool) -> tuple[Rule, ...]:
    """Equinox's attention, likewise; weights out × in."""
    at, l = ("?", "l ") if stacked else ("?*/?", "")
    names = {"q": "query_proj", "k": "key_proj", "v": "value_proj"}
    axes = {"q": "(n h) d -> {}n d h", "k": "(k h) d -> {}k d h", "v": "(k v) d -> {}k d v"}
    return (
        *(Rule(x, f"{at}/{name}/weight", l + axes[x].format(l)) for x, name in names.items()),
        Rule("o", f"{at}/output_proj/weight", f"{l}d (n v) -> {l}n v d"),
    )


FLAX = Layout("Flax MultiHeadAttention", _flax(stacked=False))
FLAX_SCANNED = Layout("Flax MultiHeadAttention, scanned", _flax(stacked=True))
EQUINOX = Layout("Equinox MultiheadAttention", _equinox(stacked=False))
EQUINOX_STACKED = Layout("Equinox MultiheadAttention, stacked", _equinox(stacked=True))
_GEMMA_MLP = (
    Rule("mlp_up", "layers/*/mlp/up_proj/kernel", "d f -> d f"),
    Rule("mlp_gate", "layers/*/mlp/gate_proj/kernel", "d f -> d f"),
    Rule("mlp_down", "layers/*/mlp/down_proj/kernel", "f d -> f d"),
)
# Gemma's norms multiply by 1 + scale. Fused q, k, v where there are as many kv heads as heads.
FLAX_GEMMA = Layout(
    "Flax Gemma",
    (
        Rule("q", "layers/*/attn/q_einsum/w", "n d h -> n d h"),
        Rule(("k", "v"), "layers/*/attn/kv_einsum/w", "two k d h -> two k d h"),
        Rule(QKV, "layers/*/attn/qkv_einsum/w", "three n d h -> three n d h"),
        Rule("o", "layers/*/attn/attn_vec_einsum/w", "n h d -> n h d"),
        Rule("q_scale", "layers/*/attn/_query_norm/scale", "h -> h", plus=1.0),
        Rule("k_scale", "layers/*/attn/_key_norm/scale", "h -> h", plus=1.0),
        *_GEMMA_MLP,
        *_outer("embedder/input_embedding", "lm_head/w"),
    ),
)
# Llama 3, Qwen 2 and 3; Tunix's Gemmas have the names of Flax's.
TUNIX = Layout(
    "Tunix",
    (
        Rule("q", "layers/*/attn/q_proj/w", "d n h -> n d h"),
        Rule("k", "layers/*/attn/k_proj/w", "d k h -> k d h"),
        Rule("v", "layers/*/attn/v_proj/w", "d k h -> k d h"),
        Rule("o", "layers/*/attn/o_proj/w", "n h d -> n h d"),
        Rule("q_scale", "layers/*/attn/q_norm/w", "h -> h"),
        Rule("k_scale", "layers/*/attn/k_norm/w", "h -> h"),
        *_GEMMA_MLP,
        Rule("router", "layers/*/mlp/router/kernel", "d e -> e d"),
        Rule("expert_up", "layers/*/mlp/up_proj", "e d f -> e d f"),
        Rule("expert_gate", "layers/*/mlp/gate_proj", "e d f -> e d f"),
        Rule("expert_down", "layers/*/mlp/down_proj", "e f d -> e f d"),
        *_outer("embedder/input_embedding", "lm_head/w"),
    ),
)


def _easydel(layout: Layout) -> Layout:
    """A layout of `transformers` as EasyDeL has it: `kernel`, in × out; experts in one leaf."""
    rules = []
    for rule in layout.rules:
        path, role = rule.path.replace("/weight", "/kernel"), str(rule.role)
        axes, right = tokens(rule.left), rule.right
        if "norms/*" in path or path.endswith(("gate_up_proj", "experts/down_proj")):
            continue
        if "experts/*" in path:
            path, axes, right = path.replace("experts/*", "experts"), ["e", *axes], f"e {right}"
        if role in ("embedding", "position"):
            path = path.replace("/kernel", "/embedding")
        elif "scale" not in role:
            axes[-2:] = reversed(axes[-2:])
        pattern = f"{' '.join(axes)} -> {right}"
        rules.append(Rule(rule.role, path, pattern, rule.plus, rule.centred))
    name = layout.name.replace("Hugging Face", "EasyDeL").replace("DeepSeek", "EasyDeL DeepSeek")
    return Layout(name, tuple(rules), requires=layout.requires.replace("/weight", "/kernel"))


# Llama and its kin; queries are stored by kv head and then by place in its group.
_LEVANTER, _GPT2 = "layers/stacked", "blocks/stacked"
LEVANTER = Layout(
    "Levanter",
    (
        Rule("q", f"{_LEVANTER}/self_attn/q_proj/weight", "l k g h d -> l (k g) d h"),
        Rule("k", f"{_LEVANTER}/self_attn/k_proj/weight", "l k h d -> l k d h"),
        Rule("v", f"{_LEVANTER}/self_attn/v_proj/weight", "l k h d -> l k d h"),
        Rule("o", f"{_LEVANTER}/self_attn/o_proj/weight", "l d n h -> l n h d"),
        Rule("q_scale", f"{_LEVANTER}/self_attn/q_norm/weight", "l h -> l h"),
        Rule("k_scale", f"{_LEVANTER}/self_attn/k_norm/weight", "l h -> l h"),
        Rule("q_scale", f"{_LEVANTER}/self_attn/q_norm/weight", "l k g h -> l (k g) h"),
        Rule("k_scale", f"{_LEVANTER}/self_attn/k_norm/weight", "l k h -> l k h"),
        Rule("mlp_up", f"{_LEVANTER}/mlp/up_proj/weight", "l f d -> l d f"),
        Rule("mlp_gate", f"{_LEVANTER}/mlp/gate_proj/weight", "l f d -> l d f"),
        Rule("mlp_down", f"{_LEVANTER}/mlp/down_proj/weight", "l d f -> l f d"),
        *_outer("token_embeddings/weight", "lm_head/weight", "vocab d"),
    ),
)
LEVANTER_GPT2 = Layout(
    "Levanter GPT-2",
    (
        Rule(QKV, f"{_GPT2}/attn/c_attn/weight", "l d three n h -> three l n d h"),
        Rule("o", f"{_GPT2}/attn/c_proj/weight", "l n h d -> l n h d"),
        Rule("mlp_up", f"{_GPT2}/mlp/c_fc/weight", "l d f -> l d f"),
        Rule("mlp_down", f"{_GPT2}/mlp/c_proj/weight", "l f d -> l f d"),
        *_outer("token_embeddings/weight", "lm_head/weight", "vocab d"),
    ),
)
NANODO = Layout(
    "nanodo",
    (
        Rule("q", "blocks_*/CausalAttn_0/query/kernel", "d n h -> n d h"),
        Rule("k", "blocks_*/CausalAttn_0/key/kernel", "d n h -> n d h"),
        Rule("v", "blocks_*/CausalAttn_0/value/kernel", "d n h -> n d h"),
        Rule("o", "blocks_*/CausalAttn_0/attn_out_proj/kernel", "n h d -> n h d"),
        Rule("mlp_up", "blocks_*/Mlp_0/Dense_0/kernel", "d f -> d f"),
        Rule("mlp_down", "blocks_*/Mlp_0/Dense_1/kernel", "f d -> f d"),
        Rule("embedding", "embed/embedding", "vocab d -> vocab d"),
        Rule("position", "pos_embed/embedding", "t d -> t d"),
    ),
)
JAX = (
    *(SCANNED_GPT, SCANNED_MLA, FLAX_GEMMA, *MAXTEXT, LEVANTER, LEVANTER_GPT2, NANODO, TUNIX),
    *map(_easydel, (GEMMA, LLAMA, OLMO2, PHI, PHI3, OPT, GPTJ, GPT_NEOX, MPT, FALCON, DEEPSEEK)),
    *(FLAX, FLAX_SCANNED, EQUINOX, EQUINOX_STACKED),
)
