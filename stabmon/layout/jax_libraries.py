"""Where libraries of JAX models keep their matrices, and this project's own model.

What holds of all libraries is said in `libraries.py`; the models of `transformers` are
`torch_libraries.py`.
"""

from stabmon.layout.axes import tokens
from stabmon.layout.layout import Layout
from stabmon.layout.rules import Rule
from stabmon.layout.torch_libraries import GEMMA, LLAMA, OLMO2

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
        Rule("q_scale", f"{at}/query_ln/scale", f"{l}h -> {l}h", centred="h"),
        Rule("k_scale", f"{at}/key_ln/scale", f"{l}h -> {l}h", centred="h"),
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


def _transposed(layout: Layout, name: str) -> Layout:
    """A layout of `transformers` as EasyDeL has it: `kernel`, in × out; experts in one leaf."""
    rules = []
    for rule in layout.rules:
        path, role = rule.path.replace("/weight", "/kernel"), str(rule.role)
        axes, right = tokens(rule.left), rule.right
        if "norms/*" in path or path.endswith(("gate_up_proj", "experts/down_proj")):
            continue
        if "experts/*" in path:
            path, axes, right = path.replace("experts/*", "experts"), ["e", *axes], f"e {right}"
        if role == "embedding":
            path = path.replace("/kernel", "/embedding")
        elif "scale" not in role:
            axes[-2:] = reversed(axes[-2:])
        pattern = f"{' '.join(axes)} -> {right}"
        rules.append(Rule(rule.role, path, pattern, rule.plus, rule.centred))
    return Layout(name, tuple(rules), requires=layout.requires.replace("/weight", "/kernel"))


def _stack(path: str) -> bool:
    """Whether a module of MaxText holds several layers: without a number, or in a scanned one."""
    return "*" not in path or path.startswith("layers/")


def _maxtext(path: str, layers: tuple[int | str, int], **rules: tuple[str | tuple[str, ...], str]):
    """Rules by the path of their leaf in a module, which scans over axis 1, the default."""
    for name, (role, pattern) in rules.items():
        left, right = pattern.split(" -> ")
        if _stack(path):
            first, *rest = left.split(" ")
            left = " ".join([first, "l", *rest])
            apart = [right.split(" ")[0]] if isinstance(role, tuple) and "+" not in left else []
            right = " ".join([*apart, "l", *right.split(" ")[len(apart) :]])
        yield Rule(role, f"{path}/{name.replace('__', '/')}", f"{left} -> {right}", layers=layers)


def _maxtext_attention(path: str, layers: tuple[int | str, int] = (0, 1)) -> tuple[Rule, ...]:
    """Attention of MaxText; q, k and v fused along the heads, or in older versions on an axis."""
    rules = {
        "query__kernel": ("q", "d n h -> n d h"),
        "key__kernel": ("k", "d k h -> k d h"),
        "value__kernel": ("v", "d k h -> k d h"),
        "out__kernel": ("o", "n h d -> n h d"),
        "query_norm__scale": ("q_scale", "h -> h"),
        "key_norm__scale": ("k_scale", "h -> h"),
    }
    fused = {"qkv_proj__kernel": (QKV, "d n+k+k h -> n d h")}
    older = {"qkv_proj__kernel": (QKV, "d three n h -> three n d h")}
    return tuple(x for part in (rules, fused, older) for x in _maxtext(path, layers, **part))


def _maxtext_latent(path: str, layers: tuple[int | str, int]) -> tuple[Rule, ...]:
    """Latent attention of MaxText; p is what RoPE turns."""
    rules = {
        "query__kernel": ("q", "d n h+p -> n d h"),
        "wq_a__kernel": ("q_down", "d r -> d r"),
        "q_norm__scale": ("q_latent_scale", "r -> r"),
        "wq_b__kernel": ("q_up", "r n h+p -> n r h"),
        "wkv_a__kernel": ("kv_down", "d c+p -> d c"),
        "kv_norm__scale": ("kv_latent_scale", "c -> c"),
        "out__kernel": ("o", "n v d -> n v d"),
    }
    keys = {"wkv_b__kernel": ("k_up", "c n h+v -> n c h")}
    values = {"wkv_b__kernel": ("v_up", "c n h+v -> n c v")}
    return tuple(x for part in (rules, keys, values) for x in _maxtext(path, layers, **part))


def _maxtext_mlp(path: str, layers: tuple[int | str, int] = (0, 1)) -> tuple[Rule, ...]:
    """Feed-forward layer of MaxText."""
    rules = {
        "wi_0__kernel": ("mlp_gate", "d f -> d f"),
        "wi_1__kernel": ("mlp_up", "d f -> d f"),
        "wi__kernel": ("mlp_up", "d f -> d f"),
        "wo__kernel": ("mlp_down", "f d -> f d"),
    }
    return tuple(_maxtext(path, layers, **rules))


def _maxtext_experts(path: str, layers: tuple[int | str, int] = (0, 1)) -> tuple[Rule, ...]:
    """Router and experts of MaxText."""
    rules = {
        "gate__kernel": ("router", "d e -> e d"),
        "wi_0": ("expert_gate", "e d f -> e d f"),
        "wi_1": ("expert_up", "e d f -> e d f"),
        "wo": ("expert_down", "e f d -> e f d"),
    }
    return tuple(_maxtext(path, layers, **rules))


def _maxtext_layer(path: str, layers: tuple[int | str, int] = (0, 1)) -> tuple[Rule, ...]:
    """A layer, or a stack of layers, of MaxText."""
    blocks = ("MoeBlock_0", "moe_block")
    return (
        *_maxtext_attention(f"{path}/self_attention", layers),
        *_maxtext_mlp(f"{path}/mlp", layers),
        *(x for block in blocks for x in _maxtext_experts(f"{path}/{block}", layers)),
    )


def _maxtext_pairs(path: str) -> tuple[Rule, ...]:
    """Gemma 2, whose layers are pairs: a local one, then a global one."""
    names = {"local": (0, 2), "global": (1, 2)}
    return tuple(
        rule
        for name, layers in names.items()
        for rule in (
            *_maxtext_attention(f"{path}/self_attention_{name}", layers),
            *_maxtext_mlp(f"{path}/mlp_{name}", layers),
        )
    )


def _maxtext_deepseek(dense: str, experts: str) -> tuple[Rule, ...]:
    """DeepSeek, whose dense layers come before those with experts."""
    after = (dense.rstrip("*"), 1)
    return (
        *_maxtext_latent(f"{dense}/self_attention", (0, 1)),
        *_maxtext_mlp(f"{dense}/mlp"),
        *_maxtext_latent(f"{experts}/self_attention", after),
        *_maxtext_experts(f"{experts}/DeepSeekMoeBlock_0/MoeBlock_0", after),
    )


_MAXTEXT_OUTER = _outer("token_embedder/embedding", "logits_dense/kernel")
_BLOCKS = ("layers/layers_*", "layers_remainder/layers_*")
MAXTEXT = tuple(
    Layout(name, (*rules, *_MAXTEXT_OUTER))
    for name, rules in {
        "MaxText": _maxtext_layer("layers"),
        "MaxText, not scanned": _maxtext_layer("layers_*"),
        "MaxText, blocks of layers": (
            *_maxtext_layer(_BLOCKS[0]),
            *_maxtext_layer(_BLOCKS[1], ("layers/layers_", 1)),
        ),
        "MaxText Gemma 2": _maxtext_pairs("layers"),
        "MaxText Gemma 2, not scanned": _maxtext_pairs("layers_*"),
        "MaxText DeepSeek": _maxtext_deepseek("dense_layers", "moe_layers"),
        "MaxText DeepSeek, not scanned": _maxtext_deepseek("dense_layers_*", "moe_layers_*"),
    }.items()
)
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
    *(_transposed(GEMMA, "EasyDeL Gemma"), _transposed(LLAMA, "EasyDeL")),
    *(_transposed(OLMO2, "EasyDeL OLMo 2"), FLAX, FLAX_SCANNED, EQUINOX, EQUINOX_STACKED),
)
