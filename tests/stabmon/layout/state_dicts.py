"""State dicts in the storage formats of PyTorch models, small, in NumPy.

Names and shapes are those of transformers: from the state dicts that version 4.47 makes (Llama,
Qwen 2, Qwen 2 MoE, Mixtral, GPT-2, GPT-NeoX) and from the modelling code of version 5 (Qwen 3,
OLMo 2, Gemma 3, DeepSeek V2 and V3). Linear weights are out × in, those of GPT-2 in × out. The
formats of JAX libraries are `trees.py`.
"""

from typing import Any

import numpy as np

from tests.stabmon.trees import VOCABULARY, C, D, E, Effect, F, H, K, N, P, R, Tree, V, layered


def torch_llama(
    mlp: dict[str, tuple[int, ...]] | None = None,
    *,
    bias: bool = False,
    norm: tuple[int, int] | None = None,
    gemma: bool = False,
    kv_heads: int = K,
) -> Tree:
    """A Llama, Qwen, Mixtral, OLMo 2 or Gemma 3 state dict; `norm`: lengths of q_norm, k_norm."""
    layer, attn = "model.layers.{}", "model.layers.{}.self_attn"
    widths = {"q": N * H, "k": kv_heads * H, "v": kv_heads * H}
    shapes = {f"{attn}.{x}_proj.weight": (width, D) for x, width in widths.items()}
    shapes[f"{attn}.o_proj.weight"] = (D, N * H)
    if bias:
        shapes |= {f"{attn}.{x}_proj.bias": (width,) for x, width in widths.items()}
    if norm:
        shapes |= {f"{attn}.{x}_norm.weight": (n,) for x, n in zip("qk", norm, strict=True)}
    dense = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
    shapes |= mlp or {f"{layer}.mlp.{name}.weight": shape for name, shape in dense.items()}
    for name in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"{layer}.{name}.weight"] = (D,)
    if gemma:
        shapes[f"{layer}.pre_feedforward_layernorm.weight"] = (D,)
    return layered(
        shapes,
        model__embed_tokens__weight=(VOCABULARY, D),
        model__norm__weight=(D,),
        lm_head__weight=(VOCABULARY, D),
    )


def experts(block: str, names: tuple[str, str, str], shared: str = "") -> dict[str, Any]:
    """Router and experts of one layer: `names` are up, gate, down; on request a shared expert."""
    shapes: dict[str, Any] = {f"model.layers.{{}}.{block}.gate.weight": (E, D)}
    units = [f"experts.{e}" for e in range(E)] + ([shared] if shared else [])
    for unit in units:
        for name, shape in zip(names, ((F, D), (F, D), (D, F)), strict=True):
            shapes[f"model.layers.{{}}.{block}.{unit}.{name}.weight"] = shape
    return shapes


def plant_llama(tree: Tree, role: str, layer: int, head: int, change: np.ndarray) -> None:
    tree[f"model.layers.{layer}.self_attn.{role}_proj.weight"][head * H : (head + 1) * H] += (
        change.T
    )


def effect_llama(norm: int, plus: float = 0.0) -> Effect:
    """`norm`: length of the query's norm scale."""

    def effect(tree: Tree, role: str, layer: int, head: int, change: np.ndarray) -> np.ndarray:
        if role == "v":
            return change
        scale = tree[f"model.layers.{layer}.self_attn.{role}_norm.weight"]
        return change * (plus + (scale if norm == H else scale[head * H : (head + 1) * H]))

    return effect


def gpt2() -> Tree:
    block = {"attn.c_attn": (D, 3 * D), "attn.c_proj": (D, D)}
    block |= {"mlp.c_fc": (D, 4 * D), "mlp.c_proj": (4 * D, D)}
    shapes: dict[str, Any] = {f"h.{{}}.{name}.weight": shape for name, shape in block.items()}
    shapes |= {f"h.{{}}.{name}.bias": shape[1:] for name, shape in block.items()}
    shapes |= {f"h.{{}}.{x}.{y}": (D,) for x in ("ln_1", "ln_2") for y in ("weight", "bias")}
    return layered(shapes, wte__weight=(VOCABULARY, D), wpe__weight=(16, D), ln_f__weight=(D,))


def plant_gpt2(tree: Tree, role: str, layer: int, head: int, change: np.ndarray) -> None:
    start = "qkv".index(role) * D + head * H
    tree[f"h.{layer}.attn.c_attn.weight"][:, start : start + H] += change


def gpt_neox() -> Tree:
    block = {"attention.query_key_value": (3 * D, D), "attention.dense": (D, D)}
    block |= {"mlp.dense_h_to_4h": (F, D), "mlp.dense_4h_to_h": (D, F)}
    layer = "gpt_neox.layers.{}"
    shapes: dict[str, Any] = {f"{layer}.{name}.weight": shape for name, shape in block.items()}
    shapes |= {f"{layer}.{name}.bias": shape[:1] for name, shape in block.items()}
    shapes |= {f"{layer}.input_layernorm.{x}": (D,) for x in ("weight", "bias")}
    return layered(shapes, gpt_neox__embed_in__weight=(VOCABULARY, D))


def plant_gpt_neox(tree: Tree, role: str, layer: int, head: int, change: np.ndarray) -> None:
    start = (3 * head + "qkv".index(role)) * H
    name = f"gpt_neox.layers.{layer}.attention.query_key_value.weight"
    tree[name][start : start + H] += change.T


def deepseek(lora: bool = True) -> Tree:
    """DeepSeek V3, or with a plain query projection V2 Lite."""
    attn = "model.layers.{}.self_attn"
    query = {"q_a_proj": (R, D), "q_a_layernorm": (R,), "q_b_proj": (N * (H + P), R)}
    names = query if lora else {"q_proj": (N * (H + P), D)}
    names |= {"kv_a_proj_with_mqa": (C + P, D), "kv_a_layernorm": (C,)}
    names |= {"kv_b_proj": (N * (H + V), C), "o_proj": (D, N * V)}
    shapes: dict[str, Any] = {f"{attn}.{name}.weight": shape for name, shape in names.items()}
    mlp = experts("mlp", ("up_proj", "gate_proj", "down_proj"), "shared_experts")
    mlp["model.layers.{}.mlp.gate.e_score_correction_bias"] = (E,)
    return layered(shapes | mlp, model__embed_tokens__weight=(VOCABULARY, D))


def plant_deepseek(tree: Tree, role: str, layer: int, head: int, change: np.ndarray) -> None:
    attn = f"model.layers.{layer}.self_attn"
    if role == "q":
        name = "q_b_proj" if f"{attn}.q_b_proj.weight" in tree else "q_proj"
        start = head * (H + P)
    else:
        name, start = "kv_b_proj", head * (H + V) + (H if role == "v" else 0)
    tree[f"{attn}.{name}.weight"][start : start + change.shape[1]] += change.T


def effect_deepseek(tree: Tree, role: str, layer: int, _: int, change: np.ndarray) -> np.ndarray:
    attn = f"model.layers.{layer}.self_attn"
    if f"{attn}.q_a_proj.weight" not in tree and role == "q":
        return change
    down, norm = ("q_a_proj", "q_a") if role == "q" else ("kv_a_proj_with_mqa", "kv_a")
    scale = tree[f"{attn}.{norm}_layernorm.weight"]
    return tree[f"{attn}.{down}.weight"][: len(scale)].T @ np.diag(scale) @ change


MIXTRAL = experts("block_sparse_moe", ("w3", "w1", "w2"))
QWEN_MOE = experts("mlp", ("up_proj", "gate_proj", "down_proj"), "shared_expert")
