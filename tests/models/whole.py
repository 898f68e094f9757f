"""The models that the whole-model tests share, and one compiled program for each.

A program returns all outputs and the gradient at once, because compiling it is what costs time.
"""

import dataclasses
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.config import GPTConfig
from models.gpt import GPT, init_params
from models.moe import auxiliary_loss
from tests.models.quick import quick_jit

SMALL = GPTConfig(vocabulary=11, layers=2, model=8, heads=4, context=6)
OTHER = dataclasses.replace(
    SMALL,
    kv_heads=2,
    head_dim=4,
    feedforward=12,
    norm="layernorm",
    positions="rope",
    activation="swiglu",
    qk_norm=True,
    tied=False,
    backend="flash",
)
ROUTED = dataclasses.replace(
    SMALL,
    head_dim=4,
    feedforward=5,
    positions="rope",
    tied=False,
    backend="flash",
    attention="mla",
    query_rank=3,
    kv_rank=5,
    experts=3,
    capacity_factor=1.0,
    auxiliary_weight=0.5,
    z_weight=0.1,
)
TOKENS = np.random.default_rng(0).integers(0, 11, (2, 6))


def halve(o, do, gate):
    return jnp.where(gate > 0, o / 2, o), do


def abstract(config):
    """The parameter tree's shapes and dtypes, nothing computed."""
    return jax.eval_shape(lambda: init_params(config, 0))


def lively(config, seed=0):
    """Parameters far from their initialisation: larger logits, uneven norm scales."""
    rng = np.random.default_rng(seed)

    def draw(path, x):
        centre = 1.0 if path[-1].key == "scale" else 0.0
        return jnp.asarray(rng.normal(centre, 0.4, x.shape), x.dtype)

    return jax.tree.map_with_path(draw, abstract(config))


@lru_cache
def program(config):
    """The module with all its outputs and the gradient by its parameters, compiled once."""
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: GPT(config)))
    hook = {"backward": halve} if config == OTHER else {}

    def loss(model, tokens, dlogits, weight, gate_L):
        logits, *others = model(tokens, losses=True, capture=True, gate_L=gate_L, **hook)
        total = jnp.sum(dlogits * logits) + weight * auxiliary_loss(config, others[0])
        return total, (logits, *others)

    def run(params, *arguments):
        model = nnx.merge(graphdef, params)
        (_, out), grads = nnx.value_and_grad(loss, has_aux=True)(model, *arguments)
        return out, nnx.to_pure_dict(grads)

    return quick_jit(run)


def run(config, params, tokens=TOKENS, dlogits=None, weight=1.0, gate_L=(0.0, 0.0)):
    """((logits, losses, intermediates), gradients) of Σ dlogits · logits + weight · auxiliary."""
    dlogits = np.zeros((2, 6, 11), np.float32) if dlogits is None else dlogits
    return program(config)(params, tokens, dlogits, jnp.float32(weight), jnp.array(gate_L))


def differing(a, b):
    """Paths at which two trees differ in any bit."""
    flat = lambda tree: jax.tree.leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for (path, x), (_, y) in zip(flat(a), flat(b), strict=True)
        if not np.array_equal(x, y)
    }
