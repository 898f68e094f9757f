"""Attention statistics from logits, against a float64 row-by-row oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stabmon.metrics import attention

RNG = np.random.default_rng(0)
SHAPE = (2, 3, 5, 7)
LOGITS = 4.0 * RNG.normal(size=SHAPE)
COARSE = 5.0 * np.round(LOGITS / 5.0)
MASK = RNG.random((2, 1, 5, 7)) < 0.6
MASK[:, :, 2] = False
MASK[:, :, 3] = [True] + [False] * 6
entropy_of, maximum_of, sink_of, repeats_of = FROM_LOGITS = [
    jax.jit(metric)
    for metric in (
        attention.attention_entropy,
        attention.max_attention_logit,
        attention.sink_mass,
        attention.repeated_maximum,
    )
]


def rows(logits, mask):
    """For each head, its rows as float64 vectors of visible logits, and whether key 0 is seen."""
    logits = np.asarray(logits, np.float64)
    mask = np.broadcast_to(mask, logits.shape)
    heads = [[] for _ in range(logits.shape[-3])]
    for *batch, n, t in np.ndindex(*logits.shape[:-1]):
        index = (*batch, n, t)
        if mask[index].any():
            heads[n].append((logits[index][mask[index]], mask[index][0]))
    return heads


def softmax(s):
    p = np.exp(s - s.max())
    return p / p.sum()


def entropy_oracle(logits, mask):
    return [
        np.mean([-(softmax(s) * np.log(softmax(s))).sum() for s, _ in head])
        for head in rows(logits, mask)
    ]


def sink_oracle(logits, mask):
    return [
        np.mean([softmax(s)[0] if first else 0.0 for s, first in h]) for h in rows(logits, mask)
    ]


def maximum_oracle(logits, mask):
    return [max(s.max() for s, _ in head) for head in rows(logits, mask)]


def repeat_oracle(logits, mask):
    return [sum((s == s.max()).sum() > 1 for s, _ in head) for head in rows(logits, mask)]


ORACLES = [entropy_oracle, maximum_oracle, sink_oracle, repeat_oracle]
PAIRS = list(zip(FROM_LOGITS, ORACLES, strict=True))


@pytest.mark.parametrize(("metric", "oracle"), PAIRS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_against_the_oracle(metric, oracle, dtype):
    for logits in (LOGITS, COARSE):
        stored = jnp.asarray(logits, dtype)
        value = metric(stored, MASK)
        assert (value.shape, value.dtype) == ((3,), jnp.float32)
        np.testing.assert_allclose(value, oracle(stored, MASK), rtol=2e-6)


def test_coarse_logits_do_repeat_their_maximum():
    assert min(repeat_oracle(COARSE, MASK)) > 0


@pytest.mark.parametrize(("metric", "oracle"), PAIRS)
def test_masks_broadcast_and_minus_infinity_masks(metric, oracle):
    causal = np.tril(np.ones((5, 7), bool))
    expected = oracle(LOGITS, causal)
    hidden = np.where(np.broadcast_to(causal, SHAPE), LOGITS, -np.inf)
    for value in (
        metric(LOGITS, causal),
        metric(LOGITS, causal[None, None]),
        metric(LOGITS, causal[None]),
        metric(hidden),
        metric(LOGITS.reshape(1, *SHAPE), causal),
    ):
        np.testing.assert_allclose(value, expected, rtol=2e-6)
    np.testing.assert_allclose(metric(LOGITS[0]), oracle(LOGITS[0], True), rtol=2e-6)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**16), size=st.sampled_from([1e-3, 1.0, 1e4]))
def test_invariances(seed, size):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=SHAPE).astype(np.float32)
    shifted = (logits + size * rng.normal(size=(2, 3, 5, 1))).astype(np.float32)
    keys, heads = rng.permutation(7), rng.permutation(3)
    entropy = entropy_of(logits)
    np.testing.assert_allclose(entropy_of(shifted), entropy, rtol=2e-3)
    np.testing.assert_allclose(entropy_of(logits[..., keys]), entropy, rtol=1e-5)
    for metric in FROM_LOGITS:
        np.testing.assert_array_equal(metric(logits[:, heads]), metric(logits)[heads])


def test_entropy_ends_of_the_range():
    np.testing.assert_allclose(entropy_of(np.full(SHAPE, 3.0)), np.log(7), 1e-6)
    sharp = np.zeros(SHAPE)
    sharp[..., 4] = 1e4
    np.testing.assert_array_equal(entropy_of(sharp), 0.0)
    np.testing.assert_array_equal(sink_of(sharp), 0.0)
    np.testing.assert_array_equal(entropy_of(LOGITS[..., :1]), 0.0)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("metric", FROM_LOGITS)
def test_a_non_finite_logit_spoils_its_own_head_if_visible(metric, bad):
    logits = LOGITS.copy()
    logits[1, 2, 4, 0] = bad
    mask = np.ones((5, 7), bool)
    np.testing.assert_array_equal(jnp.isnan(metric(logits, mask)), [False, False, True])
    mask[4, 0] = False
    assert jnp.all(jnp.isfinite(metric(logits, mask)))


def test_a_head_without_visible_keys():
    mask = np.ones(SHAPE, bool)
    mask[:, 1] = False
    for metric in FROM_LOGITS[:3]:
        np.testing.assert_array_equal(jnp.isnan(metric(LOGITS, mask)), [False, True, False])
    assert repeats_of(np.zeros(SHAPE), mask)[1] == 0


def test_maximum_repeats_in_the_kernels_precision_only():
    logits = jnp.array([[[4.70399046, 4.71]]])
    assert repeats_of(logits) == 0
    assert repeats_of(logits.astype(jnp.bfloat16)) == 1


def test_sharp_head_fraction():
    entropy = jnp.array([[0.1, 0.5], [0.6, 3.0]], jnp.bfloat16)
    assert jax.jit(attention.sharp_head_fraction, static_argnums=1)(entropy, 0.5) == 0.25
    assert jnp.isnan(
        jax.jit(attention.sharp_head_fraction, static_argnums=1)(entropy.at[0, 0].set(jnp.nan), 0.5)
    )


@pytest.mark.parametrize("metric", FROM_LOGITS)
def test_vmap(metric):
    np.testing.assert_allclose(
        jax.jit(jax.vmap(metric))(LOGITS, MASK),
        np.stack([metric(l, m) for l, m in zip(LOGITS, MASK, strict=True)]),
        rtol=1e-6,
    )


def test_logits_need_heads_queries_and_keys():
    with pytest.raises(ValueError, match=r"expected non-empty logits .*got shape \(5, 7\)"):
        entropy_of(LOGITS[0, 0])


def test_an_additive_mask_is_refused():
    with pytest.raises(
        ValueError, match="expected a boolean mask, True where visible, got float32"
    ):
        entropy_of(LOGITS, jnp.zeros((5, 7)))


@pytest.mark.parametrize("shape", [(5, 6), (3, 5, 7), (2, 2, 5, 7), (1, 1, 2, 1, 5, 7)])
def test_a_mask_that_does_not_fit_is_refused(shape):
    with pytest.raises(ValueError, match=r"expected a mask \(T, S\) or one axis by axis"):
        entropy_of(LOGITS, jnp.ones(shape, bool))


def test_threshold_must_be_positive():
    with pytest.raises(ValueError, match="expected threshold > 0 nats, got 0"):
        attention.sharp_head_fraction(jnp.ones(3), 0.0)
