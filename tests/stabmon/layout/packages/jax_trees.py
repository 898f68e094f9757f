"""Trees that Tunix, EasyDeL, Equinox and Flax make, and what a layout finds in them.

Run by `test_packages.py` where one of them is installed; its argument says which. Prints a line of
JSON for each model: name, layout, and the largest difference of a head of layer 1 from the leaf
that the library itself reads.
"""

import json
import os
import sys

sys.path.extend(os.environ["STABMON_PATHS"].split(os.pathsep))

import importlib
import inspect

import numpy as np
from flax import nnx

import stabmon

D, N, K, H = 24, 6, 2, 4


def say(name, tree, q, k, **sizes):
    """Compares two heads of layer 1 with arrays that a library's own module holds."""
    layout = stabmon.find_layout(tree, **sizes)
    found = layout.collect(tree, ["q", "k"], fold=False)
    worst = max(
        float(np.abs(np.asarray(found[role][1, head]) - np.asarray(w)).max())
        for role, head, w in (("q", 4, q), ("k", 1, k))
    )
    print(json.dumps({"model": name, "layout": layout.name, "difference": worst}))


def tunix():
    sizes = {"num_layers": 2, "vocab_size": 32, "embed_dim": D, "hidden_dim": 20, "num_heads": N}
    sizes |= {"num_kv_heads": K, "head_dim": H, "rope_theta": 10000, "norm_eps": 1e-6}
    for name in ("llama3", "qwen2", "qwen3"):
        module = importlib.import_module(f"tunix.models.{name}.model")
        known = inspect.signature(module.ModelConfig).parameters
        settings = {
            x: value for x, value in (sizes | {"use_tied_embedding": True}).items() if x in known
        }
        model = getattr(module, name.capitalize())(module.ModelConfig(**settings), rngs=nnx.Rngs(0))
        attn = model.layers[1].attn
        say(name, model, attn.q_proj.w[...][:, 4], attn.k_proj.w[...][:, 1])


def easydel():
    import easydel as ed
    import jax.numpy as jnp

    sizes = {"vocab_size": 32, "hidden_size": D, "intermediate_size": 20, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": N, "num_key_value_heads": K, "head_dim": H}
    sizes |= {"max_position_embeddings": 16}
    of = {"Llama": {}, "Qwen3": {}, "Gemma2": {}, "Mixtral": {"num_local_experts": 3}}
    for name, more in of.items():
        config = getattr(ed, f"{name}Config")(**sizes, **more)
        make = getattr(ed, f"{name}ForCausalLM")
        model = make(config=config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
        attn = model.model.layers[1].self_attn
        q, k = (attn.q_proj.kernel.value, attn.k_proj.kernel.value)
        say(name, model, q[:, 4 * H : 5 * H], k[:, H : 2 * H], heads=N)


def equinox():
    import equinox as eqx
    import jax

    keys = jax.random.split(jax.random.key(0))
    model = {"blocks": [{"attn": eqx.nn.MultiheadAttention(N, D, key=key)} for key in keys]}
    attn = model["blocks"][1]["attn"]
    head = lambda w, i: w.reshape(N, H, D)[i].T
    q, k = head(attn.query_proj.weight, 4), head(attn.key_proj.weight, 1)
    say("equinox", model, q, k, heads=N)
    stacked = jax.tree.map(
        lambda *x: np.stack(x) if hasattr(x[0], "shape") else x[0], *model["blocks"]
    )
    say("equinox stacked", {"blocks": stacked}, q, k, heads=N)


{"tunix": tunix, "easydel": easydel, "equinox": equinox}[sys.argv[1]]()
