"""Where MaxText keeps its matrices: scanned or not, dense, with experts, in blocks and in pairs.

Names and axes are those of MaxText 0.2.5. What holds of all libraries is said in `libraries.py`.
"""

from collections.abc import Iterator

from stabmon.layout.layout import Layout
from stabmon.layout.rules import Rule

QKV = ("q", "k", "v")
Layers = tuple[int | str, int]


def _stack(path: str) -> bool:
    """Whether a module of MaxText holds several layers: without a number, or in a scanned one."""
    return "*" not in path or path.startswith("layers/")


def _rules(path: str, layers: Layers, **rules: tuple[str | tuple[str, ...], str]) -> Iterator[Rule]:
    """Rules by the path of their leaf in a module, which scans over axis 1, the default."""
    for name, (role, pattern) in rules.items():
        left, right = pattern.split(" -> ")
        if _stack(path):
            first, *rest = left.split(" ")
            left = " ".join([first, "l", *rest])
            apart = [right.split(" ")[0]] if isinstance(role, tuple) and "+" not in left else []
            right = " ".join([*apart, "l", *right.split(" ")[len(apart) :]])
        yield Rule(role, f"{path}/{name.replace('__', '/')}", f"{left} -> {right}", layers=layers)


def _attention(path: str, layers: Layers = (0, 1)) -> tuple[Rule, ...]:
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
    return tuple(x for part in (rules, fused, older) for x in _rules(path, layers, **part))


def _latent(path: str, layers: Layers) -> tuple[Rule, ...]:
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
    return tuple(x for part in (rules, keys, values) for x in _rules(path, layers, **part))


def _mlp(path: str, layers: Layers = (0, 1)) -> tuple[Rule, ...]:
    """Feed-forward layer of MaxText."""
    rules = {
        "wi_0__kernel": ("mlp_gate", "d f -> d f"),
        "wi_1__kernel": ("mlp_up", "d f -> d f"),
        "wi__kernel": ("mlp_up", "d f -> d f"),
        "wo__kernel": ("mlp_down", "f d -> f d"),
    }
    return tuple(_rules(path, layers, **rules))


def _experts(path: str, layers: Layers = (0, 1)) -> tuple[Rule, ...]:
    """Router and experts of MaxText."""
    rules = {
        "gate__kernel": ("router", "d e -> e d"),
        "wi_0": ("expert_gate", "e d f -> e d f"),
        "wi_1": ("expert_up", "e d f -> e d f"),
        "wo": ("expert_down", "e f d -> e f d"),
    }
    return tuple(_rules(path, layers, **rules))


def _layer(path: str, layers: Layers = (0, 1)) -> tuple[Rule, ...]:
    """A layer, or a stack of layers, of MaxText."""
    blocks = ("MoeBlock_0", "moe_block")
    return (
        *_attention(f"{path}/self_attention", layers),
        *_mlp(f"{path}/mlp", layers),
        *(x for block in blocks for x in _experts(f"{path}/{block}", layers)),
    )


def _pairs(path: str) -> tuple[Rule, ...]:
    """Gemma 2, whose layers are pairs: a local one, then a global one."""
    names = {"local": (0, 2), "global": (1, 2)}
    return tuple(
        rule
        for name, layers in names.items()
        for rule in (
            *_attention(f"{path}/self_attention_{name}", layers),
            *_mlp(f"{path}/mlp_{name}", layers),
        )
    )


def _deepseek(dense: str, experts: str) -> tuple[Rule, ...]:
    """DeepSeek, whose dense layers come before those with experts."""
    after = (dense.rstrip("*"), 1)
    return (
        *_latent(f"{dense}/self_attention", (0, 1)),
        *_mlp(f"{dense}/mlp"),
        *_latent(f"{experts}/self_attention", after),
        *_experts(f"{experts}/DeepSeekMoeBlock_0/MoeBlock_0", after),
    )


_OUTER = (
    Rule("embedding", "token_embedder/embedding", "vocab d -> vocab d"),
    Rule("head", "logits_dense/kernel", "d vocab -> vocab d"),
)
_BLOCKS = ("layers/layers_*", "layers_remainder/layers_*")
MAXTEXT = tuple(
    Layout(name, (*rules, *_OUTER))
    for name, rules in {
        "MaxText": _layer("layers"),
        "MaxText, not scanned": _layer("layers_*"),
        "MaxText, blocks of layers": (
            *_layer(_BLOCKS[0]),
            *_layer(_BLOCKS[1], ("layers/layers_", 1)),
        ),
        "MaxText Gemma 2": _pairs("layers"),
        "MaxText Gemma 2, not scanned": _pairs("layers_*"),
        "MaxText DeepSeek": _deepseek("dense_layers", "moe_layers"),
        "MaxText DeepSeek, not scanned": _deepseek("dense_layers_*", "moe_layers_*"),
    }.items()
)
