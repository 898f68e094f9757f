"""Statistics from a log-sum-exp, against the float64 softmax they stand for."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stabmon.metrics import flash
from stabmon.metrics.attention import attention_entropy, max_attention_logit

B, T, S, N, K, H = 2, 24, 24, 4, 2, 8
RNG = np.random.default_rng(0)
CAUSAL = partial(jax.nn.dot_product_attention, is_causal=True, return_residual=True)


def tensors(seed=0, size=1.0, keys=S):
    rng = np.random.default_rng(seed)
    return size * rng.normal(size=(B, T, N, H)), rng.normal(size=(B, keys, K, H))


def logits_of(q, k, scale=H**-0.5):
    """Float64 logits (B, N, T, S); query head n reads key head n // (N // K)."""
    return scale * np.einsum("btnh,bsnh->bnts", q, np.repeat(k, N // K, axis=2))


def oracle(logits, mask):
    """Entropy and largest logit per head, float64."""
    s = np.where(mask, logits, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    entropy = -np.sum(p * np.log(np.where(p > 0, p, 1.0)), -1).mean((0, 2))
    return entropy, s.max((0, 2, 3))


def causal_bfloat16(q, k, v, scale):
    """`CAUSAL`, which promotes types in its own ways."""
    with jax.numpy_dtype_promotion("standard"):
        return CAUSAL(q, k, v, scale=scale)


@partial(jax.jit, static_argnames=("attend", "scale", "beta"))
def stats_of(q, k, attend, scale=None, beta=64.0):
    return flash.flash_attention_stats(q, k, attend, scale=scale, beta=beta)


def kernel(mask, scale=H**-0.5, empty=-np.inf):
    """A kernel of three arguments that knows its own scale and mask, written out in full."""

    def attend(q, k, v):
        k, v = jnp.repeat(k, N // K, axis=2), jnp.repeat(v, N // K, axis=2)
        s = scale * jnp.einsum("btnh,bsnh->btns", q, k, precision="highest")
        s = jnp.where(jnp.broadcast_to(mask[:, None, :], s.shape), s, -jnp.inf)
        lse = jax.nn.logsumexp(s, axis=-1)
        p = jnp.where(jnp.isneginf(s), 0.0, jnp.exp(s - lse[..., None]))
        out = jnp.einsum("btns,bsnh->btnh", p, v, precision="highest")
        return out, jnp.where(jnp.isneginf(lse), jnp.float32(empty), lse)

    return attend


@pytest.mark.parametrize("size", [0.1, 1.0, 30.0])
def test_against_explicit_logits(size):
    q, k = tensors(size=size)
    entropy, largest = oracle(logits_of(q, k), np.tril(np.ones((T, S), bool)))
    stats = stats_of(q, k, CAUSAL)
    np.testing.assert_allclose(stats.entropy, entropy, atol=2e-5 * max(1.0, size))
    slack = 1e-5 * np.abs(largest)
    assert np.all(stats.max_logit_lower <= largest + slack)
    assert np.all(stats.max_logit >= largest - slack)
    assert np.all(stats.max_logit - stats.max_logit_lower <= np.log(S) / 64 + slack)


def test_agrees_with_the_statistics_from_logits():
    q, k = tensors(size=3.0)
    logits, mask = logits_of(q, k), np.tril(np.ones((T, S), bool))
    stats = stats_of(q, k, CAUSAL, beta=1024.0)
    np.testing.assert_allclose(stats.entropy, attention_entropy(logits, mask), atol=1e-5)
    np.testing.assert_allclose(stats.max_logit, max_attention_logit(logits, mask), atol=4e-3)


def test_bfloat16_is_within_its_own_rounding():
    q, k = (jnp.asarray(x, jnp.bfloat16) for x in tensors())
    entropy, largest = oracle(
        logits_of(np.asarray(q, np.float64), np.asarray(k, np.float64)),
        np.tril(np.ones((T, S), bool)),
    )
    stats = stats_of(q, k, causal_bfloat16)
    assert stats.entropy.dtype == jnp.float32
    np.testing.assert_allclose(stats.entropy, entropy, atol=2**-7)
    np.testing.assert_allclose(stats.max_logit, largest, rtol=2**-7, atol=np.log(S) / 64)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_rotation_of_queries_and_keys_changes_nothing(seed):
    q, k = tensors(seed)
    rotation = np.linalg.qr(np.random.default_rng(seed).normal(size=(H, H)))[0]
    a = stats_of(q, k, CAUSAL)
    b = stats_of(q @ rotation, k @ rotation, CAUSAL)
    np.testing.assert_allclose(jnp.stack(a), jnp.stack(b), atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_scale_reaches_both_kinds_of_kernel(scale):
    q, k = tensors()
    entropy, largest = oracle(logits_of(q, k, scale), np.ones((T, S), bool))
    named = partial(jax.nn.dot_product_attention, return_residual=True)
    for attend in (named, kernel(np.ones((T, S), bool), scale)):
        stats = stats_of(q, k, attend, scale=scale)
        np.testing.assert_allclose(stats.entropy, entropy, atol=2e-5)
        np.testing.assert_allclose(stats.max_logit_lower, largest, atol=np.log(S) / 64)


@pytest.mark.parametrize("empty", [-np.inf, -2e38])
def test_rows_that_see_nothing_are_left_out(empty):
    q, k = tensors(keys=9)
    mask = RNG.random((T, 9)) < 0.7
    mask[[3, 8]] = False
    seen = mask.any(-1)
    entropy, largest = oracle(logits_of(q, k)[:, :, seen], mask[seen])
    stats = stats_of(q, k, kernel(mask, empty=empty))
    np.testing.assert_allclose(stats.entropy, entropy, atol=1e-5)
    np.testing.assert_allclose(stats.max_logit_lower, largest, atol=np.log(9) / 64)


def test_a_head_without_rows_is_nan():
    q, k = tensors()
    stats = stats_of(q, k, kernel(np.zeros((T, S), bool)))
    assert jnp.all(jnp.isnan(jnp.stack(stats)))


def test_a_non_finite_query_spoils_its_own_head():
    q, k = tensors()
    q[1, 2, 3, 4] = np.nan
    stats = stats_of(q, k, CAUSAL)
    for value in stats:
        np.testing.assert_array_equal(jnp.isnan(value), [False, False, False, True])


def test_zero_queries_attend_evenly():
    _, k = tensors()
    stats = stats_of(np.zeros((B, T, N, H)), k, kernel(np.ones((T, S), bool)))
    np.testing.assert_allclose(stats.entropy, np.log(S), rtol=1e-6)
    np.testing.assert_allclose(stats.max_logit_lower, 0.0, atol=1e-6)


def test_no_intermediate_has_both_a_query_and_a_key_axis():
    q, k = jnp.zeros((B, 31, N, H)), jnp.zeros((B, 37, K, H))
    stub = lambda q, k, v: (q, q[..., 0])
    jaxpr = jax.make_jaxpr(lambda q, k: flash.flash_attention_stats(q, k, stub))(q, k)

    seen = [tuple(map(int, dims.split(","))) for dims in re.findall(r"\w\[([\d,]+)\]", str(jaxpr))]
    assert (B, 31, N, H) in seen
    assert not [shape for shape in seen if 31 in shape and 37 in shape]
    assert max(map(np.prod, seen)) <= B * 31 * N * H


def test_eager_and_compiled_agree():
    q, k = tensors()
    eager = flash.flash_attention_stats(q, k, CAUSAL)
    np.testing.assert_allclose(jnp.stack(stats_of(q, k, CAUSAL)), jnp.stack(eager), atol=1e-6)


def test_a_log_sum_exp_with_heads_first_is_refused():
    q, k = tensors()
    attend = lambda q, k, v: (q, jnp.zeros((B, N, T)))
    with pytest.raises(ValueError, match=r"got .* \(2, 4, 24\); transpose a \(B, N, T\) one"):
        flash.flash_attention_stats(q, k, attend)


def test_key_heads_must_divide_query_heads():
    q, k = tensors()
    with pytest.raises(ValueError, match="with K dividing N, got"):
        flash.flash_attention_stats(q[:, :, :3], k, CAUSAL)


def test_queries_need_a_batch():
    q, k = tensors()
    with pytest.raises(
        ValueError, match=r"expected floating q \(B, T, N, H\), got float32 \(24, 4"
    ):
        flash.flash_attention_stats(q[0], k[0], CAUSAL)


def test_beta_below_one_is_refused():
    q, k = tensors()
    with pytest.raises(ValueError, match=r"expected beta >= 1, got 0.5"):
        flash.flash_attention_stats(q, k, CAUSAL, beta=0.5)
