"""A two-layer causal language model in plain JAX, with switches for what may be wrong with it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from stabmon import find_layout
from stabmon.audits import Case

L, D, N, H, V, B, T = 2, 16, 2, 8, 32, 4, 16


def init_params(seed=0):
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    draw = lambda *shape: 0.25 * jax.random.normal(next(keys), shape)
    attn = {name: {"kernel": draw(L, D, N, H)} for name in "qkv"}
    attn["o"] = {"kernel": draw(L, N, H, D)}
    mlp = {"up": {"kernel": draw(L, D, 32)}, "down": {"kernel": draw(L, 32, D)}}
    layers = {"attn": attn, "mlp": mlp, "attn_norm": {"scale": jnp.ones((L, D))}}
    return {"layers": layers, "embed": {"embedding": 0.1 * draw(V, D)}}


def forward(params, tokens, attend=None, causal=True, use_mlp=(True, True)):
    x = params["embed"]["embedding"][tokens]
    layers = params["layers"]
    for i in range(L):
        w = {name: layers["attn"][name]["kernel"][i] for name in "qkvo"}
        size = jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        h = x / size * layers["attn_norm"]["scale"][i][None, None]
        q, k, v = (jnp.einsum("btd,dnh->btnh", h, w[name]) for name in "qkv")
        logits = jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
        if attend is not None:
            logits = attend(logits, i)
        if causal:
            mask = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
            logits = jnp.where(mask[None, None], logits, -1e9)
        p = jax.nn.softmax(logits)
        x = x + jnp.einsum("bnts,bsnh,nhd->btd", p, v, w["o"])
        if use_mlp[i]:
            hidden = jax.nn.gelu(jnp.einsum("btd,df->btf", x, layers["mlp"]["up"]["kernel"][i]))
            x = x + jnp.einsum("btf,fd->btd", hidden, layers["mlp"]["down"]["kernel"][i])
    return jnp.einsum("btd,vd->btv", x, params["embed"]["embedding"])


def entropy(logits, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def logits_fn(params, batch):
    return forward(params, batch[0])


def loss_fn(params, batch):
    return entropy(forward(params, batch[0]), batch[1])


def batch_of(seed, count=B, length=T):
    """Sequences of a chain in which a token is followed by one of four; low ids are frequent."""
    rng = np.random.default_rng(seed)
    rows = np.zeros((count, length + 1), np.int32)
    for t in range(1, length + 1):
        steps = rng.choice([1, 2, 3, 5], count)
        rows[:, t] = (3 * rows[:, t - 1] + steps) % 20
    rows[:, 0] = rng.integers(0, 20, count)
    return jnp.asarray(rows[:, :-1]), jnp.asarray(rows[:, 1:])


def case(**changes):
    params = changes.pop("params", None) or init_params()
    known = {"loss": loss_fn, "logits": logits_fn, "layout": find_layout(params)}
    return Case(**(known | {"params": params, "batch": batch_of(0)} | changes))
