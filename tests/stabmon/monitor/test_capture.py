"""Intermediates as a model is traced: right statistics, under jit, scan, gradients and Flax."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import stabmon
from stabmon.monitor.capture import capture, record, watch_attention
from stabmon.monitor.intermediates import collect_intermediates
from tests.models.quick import quick_jit

B, T, N, K, H = 2, 150, 4, 2, 8  # more queries than one block has


def draw(seed, *shape):
    return 2.0 * jax.random.normal(jax.random.key(seed), shape)


Q, KEYS = draw(0, B, T, N, H), draw(1, B, T, K, H)
ATTEND = watch_attention(jax.nn.dot_product_attention)


def oracle(q, k, visible, scale, bias=0.0):
    """Entropy and largest logit of each head in float64."""
    q, k = np.asarray(q, np.float64), np.repeat(np.asarray(k, np.float64), N // k.shape[2], 2)
    logits = np.einsum("btnh,bsnh->bnts", q, k) * scale + bias
    logits = np.where(visible, logits, -np.inf)
    seen = np.broadcast_to(np.any(visible, -1), logits.shape[:-1])
    safe = np.where(seen[..., None], logits, 0.0)
    weight = np.exp(safe - safe.max(-1, keepdims=True))
    p = weight / weight.sum(-1, keepdims=True)
    entropy = -np.sum(p * np.log(np.where(p > 0, p, 1.0)), -1)
    mean = np.sum(np.where(seen, entropy, 0), (0, 2)) / np.sum(seen, (0, 2))
    return mean, np.max(logits, (0, 2, 3))


CAUSAL = np.tril(np.ones((T, T), bool))
PADDED = CAUSAL & (np.arange(T) < 140)[None] & (np.arange(T) < 140)[:, None]
BIAS = np.linspace(-1, 1, N * T).reshape(1, N, 1, T).astype(np.float32)
CASES = {
    "causal": ({"is_causal": True}, CAUSAL, H**-0.5, 0.0),
    "mask": ({"mask": jnp.asarray(PADDED[None, None])}, PADDED, H**-0.5, 0.0),
    "scale and bias": ({"bias": jnp.asarray(BIAS), "scale": 0.1}, np.ones((T, T), bool), 0.1, BIAS),
}


@pytest.mark.parametrize("case", CASES)
def test_statistics_equal_those_of_all_logits(case):
    options, visible, scale, bias = CASES[case]

    def run(q, k):
        with capture() as seen:
            out = ATTEND(q, k, k, **options)
        return out, seen.layer()

    out, got = quick_jit(run)(Q, KEYS)
    np.testing.assert_array_equal(
        out, quick_jit(partial(jax.nn.dot_product_attention, **options))(Q, KEYS, KEYS)
    )
    entropy, top = oracle(Q, KEYS, visible, scale, bias)
    np.testing.assert_allclose(got["attention_entropy"], entropy, rtol=1e-5)
    np.testing.assert_allclose(got["max_attention_logit"], top, rtol=1e-5)


def stack(x, weights):
    for w in weights:
        x = x + ATTEND(x * w, x, x, is_causal=True)
        record(residual=x.reshape(*x.shape[:2], -1))
    return jnp.sum(x)


def test_layers_of_a_loop_are_stacked_and_leave_the_gradient_alone():
    x, weights = draw(2, 1, 8, 2, 4), jnp.linspace(0.1, 1, 3)

    def loss(x):
        with capture() as seen:
            total = stack(x, weights)
        return total, seen.layers()

    grad, got = quick_jit(jax.grad(loss, has_aux=True))(x)
    np.testing.assert_array_equal(grad, quick_jit(jax.grad(stack))(x, weights))
    assert {name: a.shape for name, a in got.items()} == {
        "attention_entropy": (3, 2),
        "max_attention_logit": (3, 2),
        "residual": (3, 1, 8, 8),
    }
    assert got["attention_entropy"][0, 0] > got["attention_entropy"][2, 0]


def test_without_a_capture_nothing_is_computed():
    x, weights = draw(2, 1, 8, 2, 4), jnp.linspace(0.1, 1, 3)
    jaxpr = str(jax.make_jaxpr(lambda x: ATTEND(x, x, x, is_causal=True))(x))
    alone = lambda x: jax.nn.dot_product_attention(x, x, x, is_causal=True)
    assert jaxpr == str(jax.make_jaxpr(alone)(x))
    assert stack(x, weights).shape == ()


def test_under_scan_and_remat_one_layer_leaves_each_body():
    @jax.checkpoint
    def block(x, w):
        with capture() as seen:
            x = x + ATTEND(x * w, x, x, is_causal=True)
        return x, seen.layer()

    x, weights = draw(2, 1, 8, 2, 4), jnp.linspace(0.1, 1, 3)
    _, got = quick_jit(lambda x: jax.lax.scan(block, x, weights))(x)
    with capture() as seen:
        stack(x, weights)
    want = seen.layers()
    np.testing.assert_allclose(got["attention_entropy"], want["attention_entropy"], rtol=1e-5)


def test_two_layers_in_one_body_are_refused():
    with capture() as seen:
        stack(draw(2, 1, 8, 2, 4), jnp.ones(3))
    with pytest.raises(ValueError, match="attention_entropy was recorded 3 times"):
        seen.layer()


def test_what_may_change_the_logits_is_refused_while_it_is_watched():
    lengths = jnp.asarray([4])
    x = draw(2, 1, 8, 2, 4)
    assert ATTEND(x, x, x, query_seq_lengths=lengths).shape == x.shape
    with capture(), pytest.raises(ValueError, match=r"'query_seq_lengths'.* may change the logits"):
        ATTEND(x, x, x, query_seq_lengths=lengths)


def test_an_unknown_setting_is_refused():
    with pytest.raises(ValueError, match=r"unknown settings \['causal'\]"):
        watch_attention(jax.nn.dot_product_attention, causal=True)


def test_a_setting_says_what_the_function_does_by_itself():
    kernel = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)
    with capture() as seen:
        watch_attention(kernel, is_causal=True)(Q, KEYS, KEYS)
    entropy, _ = oracle(Q, KEYS, CAUSAL, H**-0.5)
    np.testing.assert_allclose(seen.layer()["attention_entropy"], entropy, rtol=1e-5)


def test_flax_modules_take_it_as_their_attention():
    x = draw(3, 2, 6, 8)
    mask = nn.make_causal_mask(x[..., 0])
    of_linen = nn.MultiHeadDotProductAttention(
        num_heads=2, attention_fn=watch_attention(nn.dot_product_attention)
    )
    variables = of_linen.init(jax.random.key(0), x, mask=mask)
    with capture() as seen:
        of_linen.apply(variables, x, mask=mask)
    assert seen.layer()["attention_entropy"].shape == (2,)
    assert float(seen.layer()["attention_entropy"].max()) < np.mean(np.log(np.arange(1, 7)))
    of_nnx = nnx.MultiHeadAttention(
        num_heads=2,
        in_features=8,
        decode=False,
        rngs=nnx.Rngs(0),
        attention_fn=watch_attention(nnx.dot_product_attention),
    )
    with capture() as seen:
        of_nnx(x, mask=mask)
    assert seen.layer()["max_attention_logit"].shape == (2,)


def test_what_linen_and_nnx_sow_is_collected():
    class Sows(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(4, name="out")(x)
            self.sow("intermediates", "attention_entropy", jnp.mean(x, (0, 1)))
            return x

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(12):
                x = Sows(name=f"block_{i}")(x)
            return x

    x = draw(4, 2, 3, 4)
    variables = Model().init(jax.random.key(0), x)
    kept = lambda module, _: isinstance(module, Sows)
    _, extra = Model().apply(variables, x, mutable=["intermediates"], capture_intermediates=kept)
    sown = extra["intermediates"]
    got = collect_intermediates(sown, residual=r"block_\d+/__call__")
    assert got["residual"].shape == (12, 2, 3, 4)
    np.testing.assert_array_equal(got["residual"][10], sown["block_10"]["__call__"][0])
    np.testing.assert_array_equal(got["attention_entropy"], got["residual"].mean((1, 2)))

    class OfNnx(nnx.Module):
        def __init__(self):
            self.blocks = nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(3)])

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
                block.sow(nnx.Intermediate, "attention_entropy", jnp.mean(x, (0, 1)))
            return x

    _, sown = nnx.capture(OfNnx(), nnx.Intermediate)(x)
    got = collect_intermediates(sown)
    assert got["attention_entropy"].shape == (3, 4)


def test_the_monitor_takes_what_was_captured():
    attn = {x: {"kernel": jnp.ones((3, 8, 2, 4))} for x in "qk"}
    params = {"layers": {"attn": attn}}
    monitor = stabmon.Monitor(stabmon.find_layout(params), delta=0, activations=1, weights=0)
    x, weights = draw(2, 1, 8, 2, 4), jnp.linspace(0.1, 1, 3)
    with capture() as seen:
        stack(x, weights)
    flat = monitor(0, params, (), seen.layers(), due=("activations",)).flatten()
    assert flat["attention/global/entropy/worst_layer"] == 2
