"""Spectral metrics against float64 NumPy, on matrices with a prescribed spectrum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stabmon
from stabmon.metrics import spectrum

SHAPES = {"tall": (40, 12), "wide": (12, 40), "square": (24, 24), "row": (1, 9), "column": (9, 1)}


def with_spectrum(rng, shape, sigma):
    """An m×n matrix, float64, whose singular values are `sigma`."""
    r = len(sigma)
    left = np.linalg.qr(rng.normal(size=(shape[0], r)))[0]
    right = np.linalg.qr(rng.normal(size=(shape[1], r)))[0]
    return (left * sigma) @ right.T


def entropy(sigma, alpha):
    p = (sigma / sigma.max()) ** alpha
    p = p[p > 0] / p.sum()
    return -(p * np.log(p)).sum()


ORACLES = {
    "spectral_entropy": lambda s: entropy(s, 2),
    "effective_modes": lambda s: np.exp(entropy(s, 2)),
    "effective_rank": lambda s: np.exp(entropy(s, 1)),
    "stable_rank": lambda s: (s**2).sum() / s.max() ** 2,
    "spectral_norm": lambda s: s.max(),
    "spectral_gap": lambda s: 1 - (np.sort(s)[-2] / s.max() if len(s) > 1 else 0),
    "participation_ratio": lambda s: (s**2).sum() ** 2 / (s**4).sum(),
}
METRICS = {name: jax.jit(getattr(spectrum, name)) for name in ORACLES}


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", ORACLES)
def test_agrees_with_the_prescribed_spectrum(name, shape):
    sigma = np.geomspace(3.0, 0.03, min(shape))
    w = with_spectrum(np.random.default_rng(0), shape, sigma).astype(np.float32)
    got = METRICS[name](w)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, ORACLES[name](sigma), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0, 3.0])
def test_entropy_for_any_exponent(alpha):
    sigma = np.geomspace(1.0, 0.01, 10)
    w = with_spectrum(np.random.default_rng(1), (20, 10), sigma).astype(np.float32)
    np.testing.assert_allclose(stabmon.spectral_entropy(w, alpha), entropy(sigma, alpha), rtol=1e-5)


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spectral_entropy", 0),
        ("effective_modes", 1),
        ("effective_rank", 1),
        ("stable_rank", 0),
        ("spectral_norm", 0),
        ("spectral_gap", 0),
        ("participation_ratio", 0),
    ],
)
def test_zero_matrix(name, value):
    assert float(METRICS[name](jnp.zeros((12, 40)))) == value


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("effective_modes", 1),
        ("effective_rank", 1),
        ("stable_rank", 1),
        ("spectral_gap", 1),
        ("participation_ratio", 1),
    ],
)
def test_rank_one(name, value):
    w = np.outer(np.arange(1.0, 13), np.arange(1.0, 41)).astype(np.float32)
    np.testing.assert_allclose(METRICS[name](w), value, rtol=1e-5)


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ORACLES)
def test_non_finite_gives_nan(name, bad):
    w = np.ones((12, 40), np.float32)
    w[3, 5] = bad
    assert np.isnan(METRICS[name](w))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_computed_in_float32(dtype):
    w = jnp.asarray(np.random.default_rng(2).normal(size=(12, 40)), dtype)
    expected = np.linalg.svd(np.asarray(w, np.float64), compute_uv=False)
    for name, oracle in ORACLES.items():
        np.testing.assert_allclose(METRICS[name](w), oracle(expected), rtol=2e-5)


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("exponent", [-100, 100])
def test_extreme_scales_neither_overflow_nor_underflow(exponent):
    sigma = np.geomspace(1.0, 0.1, 12)
    w = with_spectrum(np.random.default_rng(3), (12, 40), sigma) * 2.0**exponent
    for name in ("stable_rank", "effective_rank", "spectral_gap", "participation_ratio"):
        got = METRICS[name](w.astype(np.float32))
        np.testing.assert_allclose(got, ORACLES[name](sigma), rtol=1e-4)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31 - 1), st.floats(1e-3, 1e3))
def test_invariant_to_rotation_scale_and_transposition(seed, scale):
    rng = np.random.default_rng(seed)
    w = with_spectrum(rng, (24, 24), np.geomspace(1.0, 0.1, 24))
    turned = scale * np.linalg.qr(rng.normal(size=(24, 24)))[0] @ w.T
    for name in ("spectral_entropy", "effective_rank", "stable_rank", "spectral_gap"):
        f = METRICS[name]
        before, after = f(w.astype(np.float32)), f(turned.astype(np.float32))
        np.testing.assert_allclose(before, after, rtol=1e-4, atol=1e-5)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31 - 1))
def test_orders_and_ranges(seed):
    w = np.random.default_rng(seed).normal(size=(12, 40)).astype(np.float32)
    value = {name: float(f(w)) for name, f in METRICS.items()}
    assert 1 <= value["stable_rank"] <= value["participation_ratio"] * (1 + 1e-5)
    assert value["participation_ratio"] <= value["effective_modes"] * (1 + 1e-5)
    assert value["effective_modes"] <= value["effective_rank"] * (1 + 1e-5) <= 12 * (1 + 1e-4)
    assert 0 <= value["spectral_gap"] <= 1


def test_gaussian_stable_rank_is_what_a_large_gaussian_has():
    w = np.random.default_rng(4).normal(size=(600, 1200)).astype(np.float32)
    np.testing.assert_allclose(
        stabmon.stable_rank(w), spectrum.gaussian_stable_rank(600, 1200), rtol=0.03
    )


def test_a_stack_is_refused():
    with pytest.raises(ValueError, match=r"use jax\.vmap over the leading axes"):
        stabmon.stable_rank(jnp.ones((2, 3, 4)))


def test_integers_are_refused():
    with pytest.raises(ValueError, match="expected a floating dtype, got int32"):
        stabmon.spectral_norm(jnp.ones((3, 4), jnp.int32))


def test_an_empty_matrix_is_refused():
    with pytest.raises(ValueError, match="pass a non-empty matrix"):
        stabmon.spectral_norm(jnp.ones((0, 4)))


def test_a_bad_exponent_is_refused():
    with pytest.raises(ValueError, match="expected a positive exponent, got 0"):
        stabmon.spectral_entropy(jnp.ones((3, 4)), alpha=0)
