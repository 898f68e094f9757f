"""Rank ratio, grades and layer correlation against float64 NumPy on prescribed spectra."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stabmon.metrics import activations

RNG = np.random.default_rng(0)


rank_ratio = jax.jit(activations.rank_ratio, static_argnames="k")
segment_rank_ratio = jax.jit(activations.segment_rank_ratio, static_argnames=("segments", "k"))
sample_tokens = jax.jit(activations.sample_tokens, static_argnames="limit")
grade, layer_correlation = map(jax.jit, (activations.grade, activations.layer_correlation))


def with_spectrum(sigma, tokens, width, seed=0):
    """A tokens × width matrix, float64, with the given singular values."""
    rng = np.random.default_rng(seed)
    rank = len(sigma)
    left = np.linalg.qr(rng.normal(size=(tokens, rank)))[0]
    right = np.linalg.qr(rng.normal(size=(width, rank)))[0]
    return (left * sigma) @ right.T


def oracle(x, k):
    x = np.asarray(x, np.float64)
    sigma = np.linalg.svd(x.reshape(-1, x.shape[-1]), compute_uv=False)[:k]
    p = sigma / sigma.sum()
    p = p[p > 0]
    return np.exp(-(p * np.log(p)).sum()) / len(sigma)


SPECTRA = {
    "flat": np.ones(16),
    "geometric": 0.5 ** np.arange(16.0),
    "steep": 10.0 ** -np.arange(0.0, 8.0, 0.5),
    "one massive direction": np.array([1e4] + [1.0] * 15),
    "rank one": np.ones(1),
}


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("shape", [(200, 24), (17, 40)], ids=["tall", "wide"])
def test_rank_ratio_of_a_prescribed_spectrum(name, shape):
    sigma = SPECTRA[name]
    p = sigma / sigma.sum()
    expected = np.exp(-(p * np.log(p)).sum()) / 12
    x = with_spectrum(sigma, *shape)
    if len(sigma) > 12:
        expected = oracle(x, 12)
    value = rank_ratio(x, k=12)
    assert value.dtype == jnp.float32
    assert abs(float(value) / expected - 1) < 1e-3


@pytest.mark.parametrize("shape", [(2, 9, 20), (1, 20), (20, 1)])
def test_rank_ratio_divides_by_rows_columns_or_k(shape):
    x = RNG.normal(size=shape)
    for k in (3, 32):
        assert abs(float(rank_ratio(x, k=k)) / oracle(x, k) - 1) < 1e-5


def test_rank_ratio_of_bfloat16_is_that_of_the_stored_values():
    x = jnp.asarray(with_spectrum(SPECTRA["geometric"], 64, 24), jnp.bfloat16)
    assert abs(float(rank_ratio(x)) / oracle(np.asarray(x, np.float64), 32) - 1) < 1e-5


@pytest.mark.usefixtures("route")
def test_rank_ratio_of_degenerate_activations():
    x = np.ones((3, 5, 8), np.float32)
    assert rank_ratio(0.0 * x) == pytest.approx(1 / 8)
    assert rank_ratio(x) == pytest.approx(1 / 8, rel=1e-4)
    for bad in (np.nan, np.inf):
        x[1, 2, 3] = bad
        assert jnp.isnan(rank_ratio(x))


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("tokens", [17, 512])
@pytest.mark.parametrize("width", [3, 64, 256])
def test_rank_ratio_of_collapsed_activations(width, tokens, dtype):
    """One repeated token, two kinds of token, one repeated channel, and rounding beside one."""
    rng = np.random.default_rng(0)
    one, other = rng.normal(size=(2, 1, width))
    kinds = (
        np.tile(one, (tokens, 1)),
        np.ones((tokens, width)),
        np.where(rng.random((tokens, 1)) < 0.5, one, other),
        np.tile(rng.normal(size=(tokens, 1)), (1, width)),
        *(one + noise * rng.normal(size=(tokens, width)) for noise in (1e-5, 1e-6, 1e-8)),
    )
    stack = jnp.asarray(np.stack(kinds), dtype)
    found = jax.jit(jax.vmap(rank_ratio))(stack)
    for x, ratio in zip(np.asarray(stack.astype(jnp.float32), np.float64), found, strict=True):
        sigma = np.linalg.svd(x, compute_uv=False)[:32]
        p = sigma / sigma.sum()
        expected = np.exp(-np.sum(p * np.log(np.maximum(p, 1e-300)))) / len(sigma)
        np.testing.assert_allclose(ratio, expected, rtol=5e-3)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**16), power=st.integers(-30, 30))
def test_rank_ratio_ignores_scale_rotation_and_token_order(seed, power):
    rng = np.random.default_rng(seed)
    x = with_spectrum(0.7 ** np.arange(12.0), 30, 12, seed)
    rotation = np.linalg.qr(rng.normal(size=(12, 12)))[0]
    moved = 2.0**power * rng.permutation(x) @ rotation
    np.testing.assert_allclose(rank_ratio(moved), rank_ratio(x), rtol=1e-5)


def test_segments_are_the_stretches_of_the_context():
    x = RNG.normal(size=(3, 10, 6))
    x[:, 7:] = x[:, 7:, :1]
    value = segment_rank_ratio(x, segments=3, k=4)
    expected = [oracle(x[:, a:b], 4) for a, b in [(0, 3), (3, 6), (6, 10)]]
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert value[2] < value[1]


@pytest.mark.usefixtures("route")
def test_a_bad_segment_does_not_hide_the_others():
    x = RNG.normal(size=(1, 8, 4))
    x[0, 6, 0] = np.nan
    value = segment_rank_ratio(x)
    assert jnp.isfinite(value[0])
    assert jnp.isnan(value[1])


def test_grade_table():
    ratios = [0.0, 0.1, 0.11, 0.21, 0.31, 0.41, 0.5, 0.51, 0.61, 0.7, 0.71, 1.0]
    grades = grade(jnp.array(ratios).reshape(3, 4))
    assert grades.dtype == jnp.int32
    np.testing.assert_array_equal(grades.ravel(), [0, 0, 1, 2, 3, 4, 4, 5, 6, 6, 7, 7])
    assert grade(0.63) == 6


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_grade_of_what_cannot_be_measured_is_the_worst(bad, dtype):
    assert grade(jnp.array(bad, dtype)) == 0


def test_layer_correlation():
    x = RNG.normal(size=(4, 5, 6, 7)) + 3.0
    x[2] = 0.9 * x[1] + 0.1 * x[2]
    flat = x.reshape(4, -1)
    expected = [np.corrcoef(a, b)[0, 1] for a, b in itertools.pairwise(flat)]
    np.testing.assert_allclose(layer_correlation(x), expected, atol=1e-6)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**16), power=st.integers(-60, 60), shift=st.floats(-4, 4, width=32))
def test_layer_correlation_ignores_scale_and_offset(seed, power, shift):
    x = np.random.default_rng(seed).normal(size=(2, 9, 5))
    moved = np.stack([x[0] * 2.0**power, x[1] + shift])
    np.testing.assert_allclose(layer_correlation(moved), layer_correlation(x), atol=1e-5)


def test_layer_correlation_of_degenerate_layers():
    x = RNG.normal(size=(5, 8, 3))
    x[1], x[4, 0, 0] = 0.1, np.nan
    value = layer_correlation(x)
    np.testing.assert_array_equal(value[:2], 0.0)
    assert jnp.isfinite(value[2])
    assert jnp.isnan(value[3])


def test_sample_is_even_bounded_and_skips_the_first_position():
    x = jnp.arange(24.0).reshape(2, 12, 1)
    np.testing.assert_array_equal(sample_tokens(x, limit=4).ravel(), [3, 9, 15, 21])
    np.testing.assert_array_equal(sample_tokens(x, limit=24), x.reshape(24, 1))
    np.testing.assert_array_equal(sample_tokens(x, limit=99), x.reshape(24, 1))
    assert len(set(np.ravel(sample_tokens(x, limit=23)))) == 23


@pytest.mark.parametrize(
    "metric", [segment_rank_ratio, layer_correlation, lambda h: grade(rank_ratio(h))]
)
def test_vmap(metric):
    x = RNG.normal(size=(2, 3, 8, 5)).astype(np.float32)
    np.testing.assert_allclose(
        jax.jit(jax.vmap(metric))(x), np.stack([metric(h) for h in x]), rtol=1e-5
    )


def test_k_must_be_positive():
    with pytest.raises(ValueError, match="expected k >= 1, got 0"):
        rank_ratio(jnp.ones((3, 3)), k=0)


def test_limit_must_be_positive():
    with pytest.raises(ValueError, match="expected limit >= 1, got 0"):
        sample_tokens(jnp.ones((3, 3)), limit=0)


def test_activations_need_a_token_axis():
    with pytest.raises(
        ValueError, match=r"expected non-empty activations \(..., D\), got shape \(3,\)"
    ):
        rank_ratio(jnp.ones(3))


def test_segments_must_fit_the_context():
    with pytest.raises(ValueError, match="expected segments in 1…4, the context length, got 5"):
        segment_rank_ratio(jnp.ones((1, 4, 2)), segments=5)


def test_segments_need_a_batch_axis():
    with pytest.raises(ValueError, match=r"expected activations \(B, T, D\), got shape \(4, 2\)"):
        segment_rank_ratio(jnp.ones((4, 2)))


def test_correlation_needs_two_layers():
    with pytest.raises(ValueError, match="with L >= 2, got shape"):
        layer_correlation(jnp.ones((1, 4, 2)))
