"""A small mixture of experts with positions and norms, written out, for faults planted by hand.

What is planted is `experiments/real_faults.py`'s. It is not a model to train: it compiles in no
time and has every kind of leaf.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

D, N, H, V, E, F, T = 16, 2, 4, 32, 4, 16, 8
LAYERS = 2


def init_mini(seed: int = 0) -> Any:
    """Returns the parameters of two layers."""
    keys = iter(jax.random.split(jax.random.key(seed), 16))
    draw = lambda *shape: 0.3 * jax.random.normal(next(keys), shape)
    attn = {name: {"kernel": draw(LAYERS, D, N, H)} for name in "qkv"}
    attn["o"] = {"kernel": draw(LAYERS, N, H, D)}
    moe = {"router": draw(LAYERS, D, E), "up": draw(LAYERS, E, D, F), "down": draw(LAYERS, E, F, D)}
    layers = {"attn": attn, "moe": moe, "norm": {"scale": jnp.ones((LAYERS, D))}}
    outer = {"embed": draw(V, D), "position": draw(T, D), "head": draw(D, V)}
    return outer | {"layers": layers, "norm": {"scale": jnp.ones(D)}}


def mini_loss(params: Any, tokens: jax.Array) -> jax.Array:
    """Returns the next-token loss in nats.

    Args:
        params: As of `init_mini`.
        tokens: B × (T + 1).
    """
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = params["embed"][inputs] + params["position"][None]
    mask = jnp.tril(jnp.ones((T, T), bool))
    for i in range(LAYERS):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
        h = _norm(x, layer["norm"]["scale"])
        q, k, v = (jnp.einsum("btd,dnh->btnh", h, layer["attn"][c]["kernel"]) for c in "qkv")
        scores = jnp.where(mask[None, None], jnp.einsum("btnh,bsnh->bnts", q, k) / H**0.5, -1e9)
        mixed = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)
        x = x + jnp.einsum("btnh,nhd->btd", mixed, layer["attn"]["o"]["kernel"])
        h, moe = _norm(x, layer["norm"]["scale"]), layer["moe"]
        weight = jax.nn.softmax(h @ moe["router"])
        x = x + jnp.einsum("bte,btd,edf,efo->bto", weight, h, moe["up"], moe["down"])
    logits = _norm(x, params["norm"]["scale"]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def mini_batch(step: int, rows: int = 8) -> jax.Array:
    """Returns the tokens of a step."""
    return jax.random.randint(jax.random.key(step), (rows, T + 1), 0, V)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale[None, None]
