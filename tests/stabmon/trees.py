"""Parameter trees in the storage formats of JAX libraries, small, in NumPy.

Names and shapes are those that the libraries' modules make. Here too: where in that format a change
of one head belongs, and what the norm scales make of it, by indexing alone. PyTorch's formats are
`state_dicts.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

L, D, N, K, H, F, E, VOCABULARY = 2, 24, 6, 2, 4, 20, 3, 32
R, C, P, V = 9, 7, 2, 5  # latent attention: query and key-value latent, rotated part, values
Tree = dict[str, Any]
Effect = Callable[[Tree, str, int, int, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Library:
    """One storage format.

    Attributes:
        layout: Name of the preset.
        tree: Its parameters, whole numbers, the same at every call.
        plant: plant(tree, role, layer, head, change) adds a change to one head's matrix where the
            format keeps it; D × H, or R × H behind a latent.
        effect: effect(tree, role, layer, head, change) is the D × H change of the folded product.
        sizes: What `find_layout` has to be told.
        heads: Heads and kv heads.
        latent: Rows of a change of q and of k, v.
        value: Head dim of the values.
    """

    layout: str
    tree: Callable[[], Tree]
    plant: Callable[[Tree, str, int, int, np.ndarray], None]
    effect: Effect = lambda tree, role, layer, head, change: change
    sizes: dict[str, int] = field(default_factory=dict)
    heads: tuple[int, int] = (N, K)
    latent: tuple[int, int] = (D, D)
    value: int = H


def numbers(shapes: dict[str, tuple[int, ...]]) -> Tree:
    """Whole numbers in every leaf, so that float32 sums are exact; those of norms are not 0."""
    rng = np.random.default_rng(0)
    draw = lambda path, shape: rng.integers(1 if "norm" in path else -4, 5, shape)
    return {path: draw(path, shape).astype(np.float32) for path, shape in shapes.items()}


def nested(flat: Tree) -> Tree:
    """Leaves by "a/b/c" as nested dicts."""
    tree: Tree = {}
    for path, leaf in flat.items():
        *parents, last = path.split("/")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = leaf
    return tree


def get(tree: Tree, path: str) -> Any:
    """A leaf or a branch of a nested tree."""
    for name in path.split("/"):
        tree = tree[name]
    return tree


def layered(per_layer: dict[str, tuple[int, ...]], **once: tuple[int, ...]) -> Tree:
    """Whole numbers in leaves by path, those with {} in it for every layer."""
    shapes = {path.format(i): shape for path, shape in per_layer.items() for i in range(L)}
    return numbers(shapes | {name.replace("__", "."): shape for name, shape in once.items()})


def flax_gemma(fused: bool = False) -> Tree:
    attn: dict[str, Any] = {"attn_vec_einsum/w": (N, H, D)}
    attn |= {"_query_norm/scale": (H,), "_key_norm/scale": (H,)}
    split = {"q_einsum/w": (N, D, H), "kv_einsum/w": (2, K, D, H)}
    attn |= {"qkv_einsum/w": (3, N, D, H)} if fused else split
    mlp = {"gate_proj/kernel": (D, F), "up_proj/kernel": (D, F), "down_proj/kernel": (F, D)}
    shapes = {f"layers/{{}}/attn/{name}": shape for name, shape in attn.items()}
    shapes |= {f"layers/{{}}/mlp/{name}": shape for name, shape in mlp.items()}
    shapes |= {"layers/{}/pre_attention_norm/scale": (D,)}
    return nested(layered(shapes) | numbers({"embedder/input_embedding": (VOCABULARY, D)}))


def plant_flax_gemma(tree: Tree, role: str, layer: int, head: int, change: np.ndarray) -> None:
    attn = tree["layers"][str(layer)]["attn"]
    if "qkv_einsum" in attn:
        attn["qkv_einsum"]["w"]["qkv".index(role), head] += change
    elif role == "q":
        attn["q_einsum"]["w"][head] += change
    else:
        attn["kv_einsum"]["w"]["kv".index(role), head] += change


def effect_flax_gemma(tree: Tree, role: str, layer: int, _: int, change: np.ndarray) -> np.ndarray:
    attn, names = tree["layers"][str(layer)]["attn"], {"q": "_query_norm", "k": "_key_norm"}
    return change if role == "v" else change * (1 + attn[names[role]]["scale"])


def maxtext(moe: str = "") -> Tree:
    """Scanned over axis 1; `moe`: name of the block of experts."""
    attn = {"query": (D, L, N, H), "key": (D, L, K, H), "value": (D, L, K, H), "out": (N, L, H, D)}
    shapes: dict[str, Any] = {f"self_attention/{x}/kernel": shape for x, shape in attn.items()}
    shapes |= {f"self_attention/{x}_norm/scale": (H, L) for x in ("query", "key")}
    shapes |= {"pre_self_attention_layer_norm/scale": (D, L)}
    if moe:
        block = {"gate/kernel": (D, L, E), "wi_0": (E, L, D, F), "wi_1": (E, L, D, F)}
        shapes |= {f"{moe}/{x}": shape for x, shape in (block | {"wo": (E, L, F, D)}).items()}
    else:
        dense = {"wi_0": (D, L, F), "wi_1": (D, L, F), "wo": (F, L, D)}
        shapes |= {f"mlp/{x}/kernel": shape for x, shape in dense.items()}
    shapes = {f"params/decoder/layers/{path}": shape for path, shape in shapes.items()}
    return nested(numbers(shapes | {"params/token_embedder/embedding": (VOCABULARY, D)}))


def plant_maxtext(tree: Tree, role: str, layer: int, head: int, change: np.ndarray) -> None:
    name = {"q": "query", "k": "key", "v": "value"}[role]
    kernel = get(tree, f"params/decoder/layers/self_attention/{name}/kernel")
    kernel[:, layer, head] += change


def effect_maxtext(tree: Tree, role: str, layer: int, _: int, change: np.ndarray) -> np.ndarray:
    attn, names = tree["params"]["decoder"]["layers"]["self_attention"], {"q": "query", "k": "key"}
    return change if role == "v" else change * attn[f"{names[role]}_norm"]["scale"][:, layer]


def levanter() -> Tree:
    """Llama; linear weights are out × in, queries by kv head and place in its group."""
    attn = {"q_proj": (L, K, N // K, H, D), "k_proj": (L, K, H, D), "v_proj": (L, K, H, D)}
    attn |= {"o_proj": (L, D, N, H), "q_norm": (L, H), "k_norm": (L, H)}
    mlp = {"gate_proj": (L, F, D), "up_proj": (L, F, D), "down_proj": (L, D, F)}
    shapes: dict[str, Any] = {f"self_attn/{name}/weight": shape for name, shape in attn.items()}
    shapes |= {f"mlp/{name}/weight": shape for name, shape in mlp.items()}
    shapes = {f"transformer/layers/stacked/{path}": shape for path, shape in shapes.items()}
    return nested(numbers(shapes | {"embeddings/token_embeddings/weight": (VOCABULARY, D)}))


def plant_levanter(tree: Tree, role: str, layer: int, head: int, change: np.ndarray) -> None:
    weight = get(tree, f"transformer/layers/stacked/self_attn/{role}_proj/weight")
    place = divmod(head, N // K) if role == "q" else (head,)
    weight[(layer, *place)] += change.T


def effect_levanter(tree: Tree, role: str, layer: int, _: int, change: np.ndarray) -> np.ndarray:
    attn = get(tree, "transformer/layers/stacked/self_attn")
    return change if role == "v" else change * attn[f"{role}_norm"]["weight"][layer]


def levanter_gpt2() -> Tree:
    shapes: dict[str, Any] = {
        "attn/c_attn/weight": (L, D, 3, N, H),
        "attn/c_attn/bias": (L, 3, N, H),
    }
    shapes |= {"attn/c_proj/weight": (L, N, H, D), "mlp/c_fc/weight": (L, D, F)}
    shapes |= {"mlp/c_proj/weight": (L, F, D)}
    return nested(numbers({f"transformer/blocks/stacked/{path}": x for path, x in shapes.items()}))


def plant_levanter_gpt2(tree: Tree, role: str, layer: int, head: int, change: np.ndarray) -> None:
    weight = get(tree, "transformer/blocks/stacked/attn/c_attn/weight")
    weight[layer, :, "qkv".index(role), head] += change


def nanodo() -> Tree:
    attn = {"query": (D, N, H), "key": (D, N, H), "value": (D, N, H), "attn_out_proj": (N, H, D)}
    shapes = {f"params/blocks_{{}}/CausalAttn_0/{x}/kernel": shape for x, shape in attn.items()}
    shapes |= {
        f"params/blocks_{{}}/Mlp_0/Dense_{i}/kernel": s for i, s in enumerate([(D, F), (F, D)])
    }
    shapes |= {"params/blocks_{}/LayerNorm_0/scale": (D,)}
    return nested(layered(shapes) | numbers({"params/embed/embedding": (VOCABULARY, D)}))


def plant_nanodo(tree: Tree, role: str, layer: int, head: int, change: np.ndarray) -> None:
    name = {"q": "query", "k": "key", "v": "value"}[role]
    tree["params"][f"blocks_{layer}"]["CausalAttn_0"][name]["kernel"][:, head] += change


def scanned(moe: bool = False, norm: bool = False) -> Tree:
    """This project's own model."""
    attn = {"q": (L, D, N, H), "k": (L, D, K, H), "v": (L, D, K, H), "o": (L, N, H, D)}
    shapes: dict[str, Any] = {f"attn/{name}/kernel": shape for name, shape in attn.items()}
    shapes |= {f"attn/{x}_norm/scale": (L, H) for x in "qk"} if norm else {}
    return nested(_own(shapes, moe))


def scanned_mla() -> Tree:
    """This project's own model with latent attention."""
    attn = {"q_down": (L, D, R), "q_up": (L, R, N, H), "kv_down": (L, D, C), "k_up": (L, C, N, H)}
    attn |= {"v_up": (L, C, N, H), "o": (L, N, H, D), "q_rope": (L, R, N, P), "k_rope": (L, D, P)}
    shapes: dict[str, Any] = {f"attn/{name}/kernel": shape for name, shape in attn.items()}
    return nested(_own(shapes | {"attn/q_norm/scale": (L, R), "attn/kv_norm/scale": (L, C)}, False))


def _own(shapes: dict[str, Any], moe: bool) -> Tree:
    dense = {"up": (L, D, F), "gate": (L, D, F), "down": (L, F, D)}
    split = {"router": (L, D, E), "up": (L, E, D, F), "gate": (L, E, D, F), "down": (L, E, F, D)}
    block, names = ("moe", split) if moe else ("mlp", dense)
    shapes = shapes | {f"{block}/{name}/kernel": shape for name, shape in names.items()}
    shapes = {f"layers/{path}": shape for path, shape in shapes.items()}
    return numbers(shapes | {"embed/embedding": (VOCABULARY, D)})


def plant_scanned(tree: Tree, role: str, layer: int, head: int, change: np.ndarray) -> None:
    tree["layers"]["attn"][role]["kernel"][layer, :, head] += change


def effect_scanned(tree: Tree, role: str, layer: int, _: int, change: np.ndarray) -> np.ndarray:
    return (
        change if role == "v" else change * tree["layers"]["attn"][f"{role}_norm"]["scale"][layer]
    )


def plant_scanned_mla(tree: Tree, role: str, layer: int, head: int, change: np.ndarray) -> None:
    tree["layers"]["attn"][f"{role}_up"]["kernel"][layer, :, head] += change


def effect_scanned_mla(tree: Tree, role: str, layer: int, _: int, change: np.ndarray) -> np.ndarray:
    attn, latent = tree["layers"]["attn"], "q" if role == "q" else "kv"
    down, scale = attn[f"{latent}_down"]["kernel"][layer], attn[f"{latent}_norm"]["scale"][layer]
    return down @ np.diag(scale) @ change
