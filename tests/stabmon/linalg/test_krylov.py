"""Leading singular triples of matrices with a prescribed spectrum, against float64 SVD."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stabmon.linalg.krylov import LinearMap, SingularTriple, error_angle, leading_triple

N = 96
TOLERANCE = 5e-4


def with_spectrum(sigma, seed=0):
    """An N × N float64 matrix UΣVᵀ, with u₁ and v₁."""
    rng = np.random.default_rng(seed)
    u, v = (np.linalg.qr(rng.normal(size=(N, N)))[0] for _ in range(2))
    sigma = np.concatenate([sigma, np.zeros(N - len(sigma))])
    return (u * sigma) @ v.T, u[:, 0], v[:, 0]


def of_matrix(a, **parameters):
    a = jnp.asarray(a, jnp.float32)
    return leading_triple(LinearMap(a.shape[0], lambda x: a @ x, lambda y: a.T @ y), **parameters)


solve = jax.jit(of_matrix)


def angle(found, exact):
    found = np.asarray(found, np.float64)
    return np.linalg.norm(found - exact * (exact @ found))


SPECTRA = {
    "geometric": 0.8 ** np.arange(N),
    "linear": np.linspace(1, 0, N),
    "gap of 1 %": np.r_[1, 0.99, np.linspace(0.9, 0, N - 2)],
    "eight behind one": np.r_[1, 0.97 - 1e-3 * np.arange(8), np.linspace(0.9, 0, N - 9)],
    "rank one": np.ones(1),
    "rank two": np.array([1.0, 0.5]),
}


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("name", SPECTRA)
def test_a_settled_triple_is_right(name):
    a, u, v = with_spectrum(SPECTRA[name])
    triple = solve(a)
    assert error_angle(triple) <= TOLERANCE
    np.testing.assert_allclose(triple.sigma, 1.0, rtol=2e-6)
    assert max(angle(triple.u, u), angle(triple.v, v)) <= TOLERANCE
    assert abs(np.vdot(np.asarray(triple.u, np.float64), a @ np.asarray(triple.v)) - 1) < 1e-5


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize(
    "sigma",
    [
        np.ones(N),
        np.r_[1, 1, np.linspace(0.9, 0, N - 2)],
        np.r_[1, 1 - 1e-5, np.linspace(0.9, 0, N - 2)],
    ],
    ids=["identity", "double", "gap of 1e-5"],
)
def test_a_repeated_value_is_right_and_its_vectors_are_not_trusted(sigma):
    triple = solve(with_spectrum(sigma)[0])
    np.testing.assert_allclose(triple.sigma, 1.0, rtol=2e-6)
    assert error_angle(triple) > TOLERANCE


def test_too_few_cycles_are_owned_up_to():
    a, _, v = with_spectrum(np.linspace(1, 0.9, N))
    triple = jax.jit(partial(of_matrix, cycles=1))(a)
    assert angle(triple.v, v) > 0.1
    assert error_angle(triple) > 0.1
    assert triple.sigma < 1.0


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**16), power=st.integers(-90, 90))
def test_scale_moves_sigma_alone(seed, power):
    a, u, v = with_spectrum(SPECTRA["geometric"], seed)
    triple = solve(a * 2.0**power)
    np.testing.assert_allclose(triple.sigma / 2.0**power, 1.0, rtol=2e-6)
    assert max(angle(triple.u, u), angle(triple.v, v)) <= TOLERANCE


@pytest.mark.usefixtures("route")
def test_gap_is_no_more_than_it_is():
    for name in ("linear", "gap of 1 %", "rank two"):
        sigma = SPECTRA[name]
        gap = float(solve(with_spectrum(sigma)[0]).gap)
        exact = 1 - sigma[1]
        assert exact - 1e-3 <= gap <= exact + 2e-6


@pytest.mark.parametrize("cycles", [1, 2, 4])
def test_gap_is_not_overstated_before_the_second_value_settles(cycles):
    sigma = SPECTRA["gap of 1 %"]
    gap = jax.jit(partial(of_matrix, cycles=cycles))(with_spectrum(sigma)[0]).gap
    assert gap <= 0.01 + 1e-6


def test_a_gap_of_rounding_is_not_trusted_even_if_the_residual_is_zero():
    x = jnp.ones(2)
    assert error_angle(SingularTriple(x[0], x, x, residual=x[0] * 0.0, gap=x[0] * 1e-7)) > 1


@pytest.mark.usefixtures("route")
def test_small_maps():
    one = solve(np.array([[-3.0]]))
    np.testing.assert_allclose([one.sigma, one.residual, one.gap], [3.0, 0.0, 1.0])
    triple = solve(np.array([[0.0, 2.0], [0.0, 0.0]]))
    np.testing.assert_allclose(np.abs([*triple.u, *triple.v]), [1, 0, 0, 1], atol=1e-6)


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("n", [6, 16, 17])
def test_sizes_around_one_krylov_space(n):
    a = np.random.default_rng(n).normal(size=(n, n))
    np.testing.assert_allclose(solve(a).sigma, np.linalg.norm(a, 2), rtol=2e-6)


@pytest.mark.usefixtures("route")
def test_zero_and_nan():
    zero = solve(np.zeros((N, N)))
    assert tuple(float(x) for x in (zero.sigma, zero.residual, zero.gap)) == (0.0, 0.0, 1.0)
    broken = solve(np.full((N, N), np.nan))
    assert jnp.isnan(broken.sigma)
    assert not error_angle(broken) <= TOLERANCE


def test_the_result_is_the_same_every_time():
    a, _, _ = with_spectrum(SPECTRA["linear"])
    for first, second in zip(solve(a), solve(a), strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("bad", [{"tolerance": 0}, {"cycles": 0}, {"block": 1}, {"depth": 1}])
def test_parameters_out_of_range(bad):
    with pytest.raises(ValueError, match="expected tolerance > 0, cycles >= 1, block >= 2"):
        of_matrix(np.eye(4), **bad)
