"""`matrix_sign` against a float64 SVD on matrices of prescribed spectrum; degenerate cases."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stabmon.linalg.approximants import TOLERANCE, minimax_odd, quintic_schedule
from stabmon.linalg.sign import matrix_sign, orthogonality_error

METHODS = ("newton_schulz", "polar", "svd")
SHAPES = ((32, 32), (64, 32), (32, 64))


@functools.cache
def sign_of(method="auto", max_gain=None):
    return jax.jit(functools.partial(matrix_sign, method=method, max_gain=max_gain))


def orthonormal(rng, m, n):
    return np.linalg.qr(rng.normal(size=(m, n)))[0]


def with_spectrum(m, n, spectrum, seed=0):
    rng = np.random.default_rng(seed)
    return orthonormal(rng, m, len(spectrum)) * spectrum @ orthonormal(rng, n, len(spectrum)).T


def oracle(w):
    u, _, vt = np.linalg.svd(np.asarray(w, np.float64), full_matrices=False)
    return u @ vt


def spectra(n, condition=1e4):
    """Even on a log scale, one small among equals, evenly spaced, well conditioned."""
    return (
        np.geomspace(1, 1 / condition, n),
        np.r_[np.ones(n - 1), 1 / condition],
        np.linspace(1, 1 / condition, n),
        np.linspace(1, 0.5, n),
    )


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", METHODS)
def test_polar_factor(method, shape):
    n = min(shape)
    w = [with_spectrum(*shape, s, i) for k in (1e3, 1e4) for i, s in enumerate(spectra(n, k))]
    w = np.stack(w).astype(np.float32)
    q = sign_of(method)(w)
    assert float(jnp.max(orthogonality_error(q))) <= 1e-4
    distance = np.linalg.norm(np.asarray(q, np.float64) - oracle(w), axis=(-2, -1))
    # A backward stable float32 method may turn the direction of σ by 2⁻²³ σ₁/σ.
    assert np.all(distance[:4] <= 1e-4 * n**0.5)
    assert np.all(distance[4:] <= 1e-4 * n**0.5 + 2**-23 * 1e4)


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("method", ["newton_schulz", "polar"])
def test_one_large_singular_value_does_not_diverge(method):
    w = np.stack([with_spectrum(32, 32, np.r_[1, np.full(31, 1e-4)], seed) for seed in range(8)])
    assert float(jnp.max(orthogonality_error(sign_of(method)(w.astype(np.float32))))) <= 1e-4


def test_condition_sets_what_is_brought_to_one():
    w = np.stack([with_spectrum(32, 32, np.geomspace(1, 1e-2, 32))] * 8).astype(np.float32)
    few = jax.jit(functools.partial(matrix_sign, method="newton_schulz", condition=1e2))
    assert float(jnp.max(orthogonality_error(few(w)))) <= 1e-4
    below = np.stack([with_spectrum(32, 32, np.geomspace(1, 1e-4, 32))] * 8).astype(np.float32)
    assert float(jnp.min(orthogonality_error(few(below)))) > 0.1
    assert float(jnp.max(orthogonality_error(sign_of("newton_schulz")(below)))) <= 1e-4


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("method", ["newton_schulz", "polar"])
@pytest.mark.parametrize("shape", [(256, 64), (64, 64)])
def test_a_condition_of_a_million_on_request(shape, method):
    w = with_spectrum(*shape, np.geomspace(1, 1e-6, 64)).astype(np.float32)
    q = jax.jit(functools.partial(matrix_sign, method=method, condition=1e6))(w)
    assert float(orthogonality_error(q)) <= 1e-4


@pytest.mark.parametrize("shape", [(256, 64), (64, 64)])
def test_newton_schulz_is_one_loop_of_products(shape):
    text = sign_of("newton_schulz").lower(np.ones(shape, np.float32)).as_text()
    assert text.count("stablehlo.while") == 1
    assert text.count("dot_general") <= 7
    assert "custom_call" not in text


def test_auto_is_newton_schulz_except_for_large_square_matrices_on_a_cpu():
    methods = {
        shape: "lapack" in jax.jit(matrix_sign).lower(np.ones(shape, np.float32)).as_text()
        for shape in ((128, 128), (512, 256), (256, 256))
    }
    assert methods == {(128, 128): False, (512, 256): False, (256, 256): True}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_dtype_in_is_dtype_out(dtype):
    w = np.stack([with_spectrum(32, 64, np.linspace(1, 0.1, 32))] * 8)
    w = jnp.asarray(w, dtype)
    q = sign_of("newton_schulz")(w)
    assert q.dtype == dtype
    expected = jnp.asarray(oracle(w.astype(jnp.float32)), dtype)
    np.testing.assert_allclose(q.astype(jnp.float32), expected.astype(jnp.float32), atol=4e-3)


@settings(max_examples=20, deadline=None)
@given(exponent=st.integers(-30, 38), seed=st.integers(0, 5))
def test_invariant_to_scale(exponent, seed):
    w = np.stack([with_spectrum(32, 32, np.linspace(1, 0.1, 32), seed)] * 8)
    w = (w / np.abs(w).max()).astype(np.float32)
    scaled = w * np.float32(10.0**exponent)
    f = sign_of("newton_schulz")
    np.testing.assert_allclose(f(scaled), f(w), atol=2e-5)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_equivariant_under_rotation_and_odd(seed):
    rng = np.random.default_rng(seed)
    w = np.stack([with_spectrum(64, 32, np.linspace(1, 0.1, 32), i) for i in range(8)])
    left, right = orthonormal(rng, 64, 64), orthonormal(rng, 32, 32)
    f = sign_of("newton_schulz")
    turned = f((-left @ w @ right).astype(np.float32))
    np.testing.assert_allclose(
        turned, -left @ np.asarray(f(w.astype(np.float32))) @ right, atol=1e-4
    )


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("method", METHODS)
def test_zero_and_nan_leave_the_rest_of_a_stack_alone(method):
    w = np.stack([with_spectrum(32, 32, np.linspace(1, 0.1, 32), i) for i in range(8)])
    w = w.astype(np.float32)
    bad = w.copy()
    bad[1], bad[2, 3, 3], bad[3, 0, 0] = 0, np.nan, np.inf
    q = sign_of(method)(bad)
    assert not np.any(q[1])
    assert np.all(np.isnan(q[2:4]))
    np.testing.assert_array_equal(q[4:], sign_of(method)(w)[4:])


def test_subnormal_entries_count_as_zero():
    assert not np.any(sign_of("newton_schulz")(np.full((8, 32, 32), 1e-39, np.float32)))


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("method", METHODS)
def test_rank_deficient(method):
    w = with_spectrum(32, 32, np.r_[np.linspace(1, 0.1, 4), np.zeros(28)]).astype(np.float32)
    q = np.asarray(sign_of(method)(np.stack([w] * 8))[0], np.float64)
    u, s, vt = np.linalg.svd(q)
    np.testing.assert_allclose(s[:4], 1, atol=1e-4)
    assert s[4] <= (2e-6 if method == "svd" else 5e-3)
    np.testing.assert_allclose(u[:, :4] @ vt[:4], oracle_of_rank(w, 4), atol=1e-5)


def oracle_of_rank(w, rank):
    u, _, vt = np.linalg.svd(np.asarray(w, np.float64))
    return u[:, :rank] @ vt[:rank]


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("method", ["newton_schulz", "polar"])
def test_below_the_condition_number_singular_values_are_lifted_in_proportion(method):
    w = with_spectrum(32, 32, np.r_[np.ones(30), 1e-5, 1e-6]).astype(np.float32)
    q = np.asarray(sign_of(method)(np.stack([w] * 8))[0], np.float64)
    s = np.linalg.svd(q, compute_uv=False)
    assert np.all(s <= 1 + 1e-4)
    assert 0.05 < s[30] < 0.9
    assert 0.005 < s[31] < 0.15


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(1, 7), (7, 1), (1, 1)])
def test_a_single_row_or_column_is_normalised(method, shape):
    w = np.arange(1.0, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
    np.testing.assert_allclose(sign_of(method)(w), w / np.linalg.norm(w), rtol=1e-6)


def test_empty_stack():
    assert matrix_sign(jnp.zeros((0, 4, 3))).shape == (0, 4, 3)


def test_vmap_over_leading_axes():
    w = np.stack([with_spectrum(32, 32, np.linspace(1, 0.1, 32), i) for i in range(8)])
    w = w.astype(np.float32)
    mapped = jax.jit(jax.vmap(functools.partial(matrix_sign, method="svd")))
    np.testing.assert_allclose(
        mapped(w.reshape(2, 4, 32, 32)).reshape(w.shape), oracle(w), atol=1e-5
    )


def test_max_gain_is_a_smooth_cut_relative_to_the_rms():
    max_gain = 10.0
    s = np.geomspace(1, 1e-3, 16)
    w = with_spectrum(24, 16, s)
    u, s, vt = np.linalg.svd(w, full_matrices=False)
    rms = np.sqrt(np.mean(s**2))
    expected = u * (s / np.sqrt(s**2 + (rms / max_gain) ** 2)) @ vt
    q = sign_of("newton_schulz", max_gain)(w.astype(np.float32))
    np.testing.assert_allclose(q, expected, atol=1e-4)
    gain = np.linalg.svd(np.asarray(q), compute_uv=False) / (s / rms)
    assert np.all(gain <= max_gain * (1 + 1e-3))


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize(
    ("method", "shape", "max_gain"),
    [
        ("newton_schulz", (6, 6), None),
        ("newton_schulz", (9, 5), None),
        ("newton_schulz", (5, 9), 3.0),
        ("svd", (9, 5), 3.0),
        ("svd", (5, 9), None),
    ],
)
def test_derivative(method, shape, max_gain):
    w = with_spectrum(*shape, np.linspace(1, 0.3, min(shape)))
    d, weight = np.random.default_rng(3).normal(size=(2, *shape))
    f = functools.partial(matrix_sign, method=method, max_gain=max_gain)

    @jax.jit
    def push_and_pull(w, d, weight):
        return jax.jvp(f, (w,), (d,))[1], jax.grad(lambda w: jnp.sum(f(w) * weight))(w)

    step = 1e-6
    expected = smooth_sign(w + step * d, max_gain) - smooth_sign(w - step * d, max_gain)
    expected = expected / (2 * step)
    pushed, pulled = push_and_pull(*(x.astype(np.float32) for x in (w, d, weight)))
    np.testing.assert_allclose(pushed, expected, atol=5e-5)
    slope = float(np.sum(np.asarray(pulled) * d))
    assert slope == pytest.approx(float(np.sum(expected * weight)), abs=1e-3)


def smooth_sign(w, max_gain):
    u, s, vt = np.linalg.svd(w, full_matrices=False)
    floor = 0.0 if max_gain is None else np.sqrt(np.mean(s**2)) / max_gain
    return u * (s / np.sqrt(s**2 + floor**2)) @ vt


@pytest.mark.usefixtures("route")
def test_derivative_is_finite_at_equal_and_zero_singular_values():
    w = np.stack([np.eye(4), np.zeros((4, 4)), np.diag([1.0, 1, 0, 0])]).astype(np.float32)
    weight = jnp.arange(48.0).reshape(3, 4, 4)
    f = lambda w: jnp.sum(matrix_sign(w, "newton_schulz") * weight)
    assert np.all(np.isfinite(jax.jit(jax.grad(f))(w)))


def test_a_function_gets_tall_normalised_float32():
    seen = []

    def method(x):
        seen.append((x.shape, x.dtype))
        return 2 * x

    w = jnp.full((3, 4, 8), 5.0, jnp.bfloat16)
    q = matrix_sign(w, method)
    assert seen == [((3, 8, 4), jnp.float32)]
    np.testing.assert_allclose(jnp.linalg.norm(q.astype(jnp.float32), axis=(1, 2)), 2, rtol=1e-2)


def test_orthogonality_error():
    assert float(orthogonality_error(jnp.zeros((3, 5)))) == 1
    assert float(orthogonality_error(jnp.eye(5, 3, dtype=jnp.bfloat16))) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: matrix_sign(jnp.ones(3)), r"expected a float array \(…, m, n\), got float32\[3\]"),
        (lambda: matrix_sign(jnp.ones((3, 3), jnp.int32)), r"got int32\[3, 3\]"),
        (lambda: matrix_sign(jnp.ones((3, 3)), "muon"), r"'svd' or a function, got 'muon'"),
        (lambda: matrix_sign(jnp.ones((3, 3)), condition=1.0), r"1 < condition <= 1e7, got 1.0"),
        (lambda: matrix_sign(jnp.ones((3, 3)), max_gain=0.0), r"max_gain > 0 or None, got 0.0"),
    ],
)
def test_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("degree", [3, 5, 7, 9])
def test_minimax_polynomial_equioscillates(degree):
    coefficients, error = minimax_odd(0.05, 1.5, degree)
    x = np.linspace(0.05, 1.5, 200_001)
    deviation = 1 - sum(c * x ** (2 * i + 1) for i, c in enumerate(coefficients))
    assert np.abs(deviation).max() == pytest.approx(error, rel=1e-6)
    touched = np.abs(deviation) > error * (1 - 1e-6)
    signs = np.sign(deviation[touched])
    assert 1 + np.sum(signs[1:] != signs[:-1]) == (degree + 3) // 2


@pytest.mark.parametrize("multiple", [1, 2])
@pytest.mark.parametrize("lower", [0.9, 1e-2, 6e-5, 1e-7])
def test_schedule_reaches_one(lower, multiple):
    polynomials = quintic_schedule(lower, multiple)
    assert len(polynomials) % multiple == 0
    y = np.geomspace(lower, 1, 100_001)
    for coefficients in polynomials:
        y = sum(c * y ** (2 * i + 1) for i, c in enumerate(coefficients))
    assert np.abs(1 - y).max() <= TOLERANCE
