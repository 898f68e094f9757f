"""`qk_clip`: products after clipping, shared kv heads, separate layers, pass-through."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_ext._clip import qk_clip
from stabmon.layout import Layout, Rule

L, D, N, K, H = 2, 6, 4, 2, 3
SEPARATE = Layout(
    "one leaf a layer",
    (Rule("q", "h/*/q", "d n h -> n d h"), Rule("k", "h/*/k", "d k h -> k d h")),
)
LOGITS = np.array([[10.0, 400.0, 50.0, 100.0], [np.nan, -5.0, 200.0, 0.0]], np.float32)
GAMMA = np.array([[1, 0.25, 1, 1], [1, 1, 0.5, 1]])


def kernels(seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(L, D, N, H)), rng.normal(size=(L, D, K, H))


def stacked(q, k):
    cast = lambda x: {"kernel": jnp.asarray(x, jnp.float32)}
    return {"layers": {"attn": {"q": cast(q), "k": cast(k)}}, "norm": jnp.ones(D)}


def separate(q, k):
    cast = lambda x: jnp.asarray(x, jnp.float32)
    return {"h": {str(i): {"q": cast(q[i]), "k": cast(k[i])} for i in range(L)}}


def products(q, k):
    """W_q W_kᵀ of each query head with its kv head, in float64."""
    k = np.repeat(np.asarray(k, np.float64), N // K, axis=2)
    return np.einsum("ldnh,lenh->lnde", np.asarray(q, np.float64), k)


def apply(tx, params, updates, logits=LOGITS):
    update = jax.jit(lambda u, s, p, z: tx.update(u, s, p, max_attention_logits=z))
    updates, state = update(updates, tx.init(params), params, logits)
    return jax.tree.map(lambda p, u: p + u, params, updates), updates, state


@pytest.mark.parametrize(
    ("tree", "tx"),
    [(stacked, qk_clip(100.0)), (separate, qk_clip(100.0, layout=SEPARATE))],
    ids=["stacked", "separate"],
)
def test_every_head_is_scaled_by_its_own_factor_after_the_update(tree, tx):
    weights, moves = kernels(0), [0.1 * x for x in kernels(1)]
    after = [w + m for w, m in zip(weights, moves, strict=True)]
    new, _, state = apply(tx, tree(*weights), tree(*moves))
    if tree is stacked:
        q, k = (new["layers"]["attn"][x]["kernel"] for x in "qk")
    else:
        q, k = (np.stack([new["h"][str(i)][x] for i in range(L)]) for x in "qk")
    expected = GAMMA[:, :, None, None] * products(*after)
    np.testing.assert_allclose(products(q, k), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.asarray(k)[0, :, 0], np.sqrt(0.25) * after[1][0, :, 0], rtol=1e-5)
    np.testing.assert_allclose(state.qk_clip_last, GAMMA, rtol=1e-6)
    np.testing.assert_array_equal(state.qk_clip_count, GAMMA < 1)


def test_passes_through_below_the_threshold_and_leaves_healthy_groups_alone():
    params, updates = stacked(*kernels(0)), stacked(*kernels(1))
    _, same, _ = apply(qk_clip(1000.0), params, updates)
    jax.tree.map(np.testing.assert_array_equal, same, updates)
    _, clipped, _ = apply(qk_clip(100.0), params, updates)
    attn, before = clipped["layers"]["attn"], updates["layers"]["attn"]
    # In layer 0 the second kv head and its queries 2 and 3 are healthy.
    healthy = lambda x, heads: np.asarray(x["kernel"])[0][:, heads]
    np.testing.assert_array_equal(healthy(attn["q"], [2, 3]), healthy(before["q"], [2, 3]))
    np.testing.assert_array_equal(healthy(attn["k"], [1]), healthy(before["k"], [1]))
    np.testing.assert_array_equal(clipped["norm"], updates["norm"])


def test_refuses_a_threshold_that_is_not_positive():
    with pytest.raises(ValueError, match=r"expected threshold > 0, got 0\.0"):
        qk_clip(0.0)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, r"max_attention_logits=…\) with the largest logit"),
        ({"max_attention_logits": jnp.ones(3)}, r"has shape \(3,\), expected .* = \(2, 4\)"),
    ],
)
def test_needs_logits_of_each_head(extra, message):
    params = stacked(*kernels(0))
    tx = qk_clip()
    with pytest.raises(ValueError, match=message):
        tx.update(params, tx.init(params), params, **extra)
