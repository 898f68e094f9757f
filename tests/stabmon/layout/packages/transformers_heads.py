"""Queries and keys of tiny models of `transformers`, computed by them and from a layout.

Run by `test_packages.py` where transformers is installed. One token at position 0, where RoPE turns
nothing, and biases of zero: what attention gets is the layer's input times the matrix, up to the
data-dependent length of a norm. Prints a line of JSON for each model: name, layout, largest
difference of directions.
"""

import json
import os
import sys

sys.path.extend(os.environ["STABMON_PATHS"].split(os.pathsep))

import numpy as np
import torch
import transformers
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

import stabmon

SEEN = []
BASE = {"vocab_size": 32, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2}
BASE |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4}
BASE |= {"max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
GPT = {"n_embd": 24, "n_head": 6, "n_layer": 2}
LATENT = {"q_lora_rank": 9, "kv_lora_rank": 7, "qk_rope_head_dim": 2, "qk_nope_head_dim": 4}
LATENT |= {"v_head_dim": 5, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
LATENT |= {"num_experts_per_tok": 1, "num_key_value_heads": 6, "head_dim": 2}
NAMES = ("q_proj", "query_key_value", "qkv_proj", "c_attn", "query", "q_a_proj")
MODELS = {
    **{x: {} for x in ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo")},
    **{x: {} for x in ("olmo2", "hunyuan_v1_dense", "glm4", "starcoder2", "cohere2", "phi3")},
    **{x: {} for x in ("exaone4", "apertus", "granite", "smollm3", "bert", "gpt_neox")},
    "mixtral": {"num_local_experts": 3},
    "gpt_oss": {"num_local_experts": 3, "num_experts_per_tok": 1},
    "lfm2": {"layer_types": ["full_attention", "conv"]},
    "phi": {"qk_layernorm": True},
    "persimmon": {"qk_layernorm": True, "num_key_value_heads": 6},
    "cohere": {"use_qk_norm": True},
    "stablelm": {"qk_layernorm": True, "partial_rotary_factor": 0.5},
    "opt": {"ffn_dim": 20, "word_embed_proj_dim": 24},
    "gptj": GPT | {"rotary_dim": 4},
    "codegen": GPT
    | {"hidden_size": 48, "n_embd": 48, "n_head": 12, "rotary_dim": 4}
    | {"num_attention_heads": 12},
    "gpt_bigcode": GPT | {"multi_query": True},
    "gpt2": GPT,
    "deepseek_v3": LATENT | {"first_k_dense_replace": 1},
}


def capture(module, query, key, value, *_, **__):
    """Attention that keeps its queries and keys, and hands on the values."""
    SEEN.append((query.detach(), key.detach()))
    values = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    return values.transpose(1, 2).contiguous(), None


def made(name, settings):
    """A model with random weights, norm scales around 1 and no biases."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **BASE | settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="capture").eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if path.endswith("bias"):
                weight.zero_()
            elif weight.ndim == 1:
                weight.copy_(torch.rand_like(weight) + 0.5)
            else:
                weight.normal_(0, 0.3)
    return model, config


def difference(model, config):
    """The layout, and by how much the directions of queries and keys differ."""
    SEEN.clear()
    inputs = []
    keep = lambda _, args, kwargs: inputs.append(kwargs.get("hidden_states", [*args, None][0]))
    for module in model.modules():
        children = {name for name, _ in module.named_children()}
        if children.intersection(NAMES) and not children.intersection(("mlp", "attention")):
            module.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model(input_ids=torch.tensor([[3]]))
    state = {x: w.numpy() for x, w in model.state_dict().items() if w.is_floating_point()}
    layout = stabmon.find_layout(state, heads=config.num_attention_heads)
    found = layout.collect(state, ["q", "k"])
    worst = 0.0
    for i, pair in enumerate(SEEN):
        x = inputs[i].detach()[0, 0].numpy()
        for role, computed in zip("qk", pair, strict=True):
            ours = np.einsum("d,ndh->nh", x, np.asarray(found[role][i], np.float64))
            theirs = computed.reshape(-1, computed.shape[-1]).numpy()[: len(ours), : ours.shape[1]]
            unit = lambda y: y / np.linalg.norm(y, axis=1, keepdims=True)
            worst = max(worst, float(np.abs(unit(ours) - unit(theirs)).max()))
    assert len(SEEN) == len(found["q"])
    return layout.name, worst


AttentionInterface.register("capture", capture)
transformers.logging.set_verbosity_error()
for name, settings in MODELS.items():
    layout, worst = difference(*made(name, settings))
    print(json.dumps({"model": name, "layout": layout, "difference": worst}))
