"""Block power iteration: right where it says so, and honest where it has not settled."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from stabmon.linalg.power import power_norm

SHAPES = {"tall": (40, 12), "wide": (12, 40), "square": (24, 24), "row": (1, 9), "column": (9, 1)}


def with_spectrum(rng, shape, sigma):
    """An m×n matrix, float64, whose singular values are `sigma`."""
    r = len(sigma)
    left = np.linalg.qr(rng.normal(size=(shape[0], r)))[0]
    right = np.linalg.qr(rng.normal(size=(shape[1], r)))[0]
    return (left * sigma) @ right.T


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_power_norm_settles_on_the_largest(shape):
    sigma = np.geomspace(2.0, 0.2, min(shape))
    w = with_spectrum(np.random.default_rng(5), shape, sigma).astype(np.float32)
    estimate = power_norm(w)
    np.testing.assert_allclose(estimate.value, 2.0, rtol=1e-4)
    assert bool(estimate.converged)


def test_power_norm_says_when_it_has_not_settled():
    w = np.random.default_rng(6).normal(size=(100, 100)).astype(np.float32)
    estimate = power_norm(w, iterations=2)
    assert not bool(estimate.converged)
    assert float(estimate.value) <= np.linalg.norm(w, 2) * (1 + 1e-5)


@pytest.mark.usefixtures("route")
def test_power_norm_of_zero_and_of_nan():
    assert [float(x) for x in power_norm(jnp.zeros((4, 6)))] == [0.0, 1.0]
    broken = power_norm(jnp.full((4, 6), jnp.nan))
    assert math.isnan(broken.value)
    assert not bool(broken.converged)
