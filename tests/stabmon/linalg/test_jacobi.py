"""Jacobi rotations and Gram–Schmidt against float64 on matrices of prescribed spectrum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stabmon.linalg import jacobi
from stabmon.linalg.decompositions import on_stack, singular_values, thin_svd
from stabmon.linalg.platforms import as_on_accelerator

N = 24
SPECTRA = {
    "even": np.linspace(1, 0.1, N),
    "graded": np.geomspace(1, 1e-6, N),
    "rank one": np.r_[1.0, np.zeros(N - 1)],
    "repeated": np.repeat([1.0, 0.5, 1e-3], N // 3),
    "zero": np.zeros(N),
}


def with_spectrum(m, n, sigma):
    rng = np.random.default_rng(0)
    u, v = (np.linalg.qr(rng.normal(size=(k, len(sigma))))[0] for k in (m, n))
    return (u * sigma) @ v.T


values, decomposed = jax.jit(jacobi.singular_values), jax.jit(jacobi.thin_svd)


@pytest.mark.parametrize("shape", [(N, N), (60, N), (N, 60), (N + 1, N + 1)])
@pytest.mark.parametrize("name", SPECTRA)
def test_singular_values_are_exact_to_rounding_of_the_largest(name, shape):
    w = with_spectrum(*shape, SPECTRA[name]).astype(np.float32)
    exact = np.linalg.svd(w.astype(np.float64), compute_uv=False)
    np.testing.assert_allclose(values(w), exact, rtol=1e-6, atol=2.5e-7 * exact[0])


@pytest.mark.parametrize("shape", [(N, N), (60, N), (N, 60)])
@pytest.mark.parametrize("name", SPECTRA)
def test_vectors_are_those_of_the_matrix(name, shape):
    w = with_spectrum(*shape, SPECTRA[name]).astype(np.float32)
    u, sigma, vt = (np.asarray(x, np.float64) for x in decomposed(w))
    np.testing.assert_allclose((u * sigma) @ vt, w, atol=2e-6 * max(sigma[0], 1e-30))
    short = u.T if shape[0] <= shape[1] else vt
    np.testing.assert_allclose(short @ short.T, np.eye(N), atol=5e-6)
    kept = sigma > 1e-3 * sigma[0]
    long = (vt if shape[0] <= shape[1] else u.T)[kept]
    np.testing.assert_allclose(long @ long.T, np.eye(len(long)), atol=2e-4)


@pytest.mark.parametrize("scale", [2.0**-100, 2.0**100])
def test_any_scale(scale):
    w = with_spectrum(N, N, SPECTRA["graded"]).astype(np.float32)
    np.testing.assert_allclose(values(w * np.float32(scale)) / scale, values(w), rtol=1e-5)


def test_a_bad_matrix_leaves_the_rest_of_a_stack_alone():
    w = np.stack([with_spectrum(N, N, SPECTRA["even"])] * 3).astype(np.float32)
    bad = w.copy()
    bad[1, 2, 3] = np.nan
    found = np.asarray(values(bad))
    assert np.all(np.isnan(found[1]))
    np.testing.assert_allclose(found[[0, 2]], np.asarray(values(w))[[0, 2]], rtol=1e-6)


@pytest.mark.parametrize("rank", [0, 1, 5, 8])
@pytest.mark.parametrize("rows", [8, 40])
def test_orthonormal_is_a_basis_whatever_the_rank(rows, rank):
    rng = np.random.default_rng(1)
    w = (rng.normal(size=(rows, rank)) @ rng.normal(size=(rank, 8))).astype(np.float32)
    q = np.asarray(jax.jit(jacobi.orthonormal)(w), np.float64)
    np.testing.assert_allclose(q.T @ q, np.eye(8), atol=2e-6)
    np.testing.assert_allclose(q @ (q.T @ w), w, atol=1e-5)


@pytest.mark.usefixtures("route")
def test_a_stack_of_stacks_equals_one_by_one():
    w = np.random.default_rng(2).normal(size=(2, 3, 7, 5)).astype(np.float32)
    stacked = jax.jit(on_stack(singular_values))(w)
    nested = jax.jit(jax.vmap(jax.vmap(singular_values)))(w)
    exact = np.linalg.svd(w.astype(np.float64), compute_uv=False)
    np.testing.assert_allclose(stacked, exact, rtol=2e-6)
    np.testing.assert_allclose(nested, exact, rtol=2e-6)


@pytest.mark.usefixtures("route")
def test_derivative_of_singular_values():
    rng = np.random.default_rng(3)
    w = with_spectrum(7, 5, np.linspace(1, 0.2, 5))
    d, weight = rng.normal(size=(7, 5)), rng.normal(size=5)
    slope = np.sum(jax.jit(jax.grad(lambda w: singular_values(w) @ weight))(jnp.float32(w)) * d)
    ahead, behind = (np.linalg.svd(w + e * d, compute_uv=False) for e in (1e-6, -1e-6))
    np.testing.assert_allclose(slope, (ahead - behind) @ weight / 2e-6, rtol=1e-4)


def test_the_switch_reaches_functions_that_were_compiled_before():
    f = jax.jit(thin_svd)
    w = np.eye(3, dtype=np.float32)
    assert "lapack" in f.lower(w).as_text()
    with as_on_accelerator(True):
        assert "lapack" not in f.lower(w).as_text()
