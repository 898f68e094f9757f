"""What an update says beside its weight: alignment, lag exponent, outliers of the noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stabmon
from stabmon.metrics.updates import marchenko_pastur_median


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31 - 1), st.floats(1e-3, 1e3))
def test_radial_alignment_is_the_cosine_whatever_the_scale(seed, scale):
    rng = np.random.default_rng(seed)
    delta, w = rng.normal(size=(2, 5, 7))
    expected = (delta * w).sum() / np.linalg.norm(delta) / np.linalg.norm(w)
    got = stabmon.radial_alignment((scale * delta).astype(np.float32), w.astype(np.float32))
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_radial_alignment_of_zero_and_nan():
    w = jnp.ones((3, 2))
    assert float(stabmon.radial_alignment(jnp.zeros((3, 2)), w)) == 0.0
    assert np.isnan(stabmon.radial_alignment(w.at[0, 0].set(jnp.nan), w))


def test_radial_alignment_refuses_other_shapes():
    with pytest.raises(ValueError, match=r"shapes differ, \(3, 2\) and \(2, 3\)"):
        stabmon.radial_alignment(jnp.ones((3, 2)), jnp.ones((2, 3)))


@pytest.mark.parametrize("exponent", [0.5, 1.0])
def test_lag_exponent_of_a_power_law(exponent):
    sigma = lambda lag: np.float32(0.3 * lag**exponent)
    np.testing.assert_allclose(
        stabmon.lag_exponent(sigma(50), sigma(200), 50, 200), exponent, rtol=1e-5
    )


def test_lag_exponent_of_nothing_is_nan():
    assert np.isnan(stabmon.lag_exponent(jnp.float32(0.0), jnp.float32(1.0), 1, 2))


def test_lag_exponent_refuses_equal_lags():
    with pytest.raises(ValueError, match="expected 0 < short < long, got 50, 50"):
        stabmon.lag_exponent(jnp.float32(1.0), jnp.float32(1.0), 50, 50)


@pytest.mark.parametrize("beta", [0.1, 0.5, 1.0])
def test_marchenko_pastur_median_against_a_large_sample(beta):
    n = 1200
    w = np.random.default_rng(0).normal(size=(int(beta * n), n))
    sample = np.median(np.linalg.svd(w, compute_uv=False) ** 2) / n
    np.testing.assert_allclose(marchenko_pastur_median(beta), sample, rtol=0.01)


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("shape", [(60, 60), (60, 240), (240, 60)])
@pytest.mark.parametrize("planted", [0, 1, 3])
def test_noise_outliers_counts_planted_directions(shape, planted):
    rng = np.random.default_rng(1)
    edge = np.sqrt(shape[0]) + np.sqrt(shape[1])
    w = 0.1 * rng.normal(size=shape)
    for i in range(planted):
        w[i, i] += 0.1 * 3 * edge
    result = jax.jit(stabmon.noise_outliers)(w.astype(np.float32))
    assert planted <= float(result.count) <= planted + 1
    if planted:
        assert 1.5 < float(result.excess) < 2.6
    else:
        assert abs(float(result.excess)) < 0.1


@pytest.mark.usefixtures("route")
def test_noise_outliers_without_noise():
    rank_two = np.zeros((6, 9), np.float32)
    rank_two[0, 0], rank_two[1, 1] = 3.0, 1.0
    result = stabmon.noise_outliers(rank_two)
    assert (float(result.count), float(result.excess)) == (2.0, np.inf)


@pytest.mark.usefixtures("route")
def test_noise_outliers_of_zero_and_nan():
    assert [float(x) for x in stabmon.noise_outliers(jnp.zeros((4, 6)))] == [0.0, 0.0]
    assert all(np.isnan(x) for x in stabmon.noise_outliers(jnp.full((4, 6), jnp.nan)))
