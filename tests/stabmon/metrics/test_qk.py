"""`qk_increment` against a float64 SVD of the explicit D×D products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stabmon import qk_increment
from stabmon.linalg.factor import triangular_factor

increment = jax.jit(qk_increment)


def head(rng, d, h, condition=1.0):
    """A D×H matrix with singular values from 1 down to 1/condition."""
    r = min(d, h)
    left = np.linalg.qr(rng.normal(size=(d, r)))[0]
    right = np.linalg.qr(rng.normal(size=(h, r)))[0]
    return (left * np.geomspace(1, 1 / condition, r)) @ right.T


def change(rng, w, size, kind):
    """A change of relative Frobenius size `size`: full rank, rank one, or graded over 1e4."""
    if kind == "rank one":
        d = np.outer(rng.normal(size=w.shape[0]), rng.normal(size=w.shape[1]))
    elif kind == "graded":
        d = head(rng, *w.shape, condition=1e4)
    else:
        d = rng.normal(size=w.shape)
    return d * (size * np.linalg.norm(w) / np.linalg.norm(d))


def four(rng, d, h, size, kind, condition=1.0):
    """q0, k0, q1, k1 in float32."""
    q, k = head(rng, d, h, condition), head(rng, d, h, condition)
    pair = (q, k, q + change(rng, q, size, kind), k + change(rng, k, size, kind))
    return [x.astype(np.float32) for x in pair]


def oracle(q0, k0, q1, k1):
    """Explicit products and their SVD in float64; Δ1 must equal Δ2 + Δ3."""
    q0, k0, q1, k1 = (np.asarray(x, np.float64) for x in (q0, k0, q1, k1))
    dq, dk = q1 - q0, k1 - k0
    products = (q1 @ k1.T - q0 @ k0.T, dq @ k0.T + q0 @ dk.T, dq @ dk.T)
    np.testing.assert_allclose(products[0], products[1] + products[2], atol=1e-13)
    return [statistics(np.linalg.svd(x, compute_uv=False)) for x in products]


def statistics(sigma):
    def entropy(alpha):
        p = (sigma / sigma[0]) ** alpha
        p = p[p > 0] / p.sum()
        return -(p * np.log(p)).sum()

    norm = np.linalg.norm(sigma)
    stable = norm**2 / sigma[0] ** 2
    return np.array([norm, sigma[0], stable, entropy(2), np.exp(entropy(2)), np.exp(entropy(1))])


def assert_close(stats, expected, alpha2=1e-4, alpha1=1e-3):
    got = np.asarray(stats, np.float64)
    np.testing.assert_allclose(got[[0, 1, 2, 4]], expected[[0, 1, 2, 4]], rtol=alpha2)
    # The entropy of a rank-one Δ3 is 0: relative to that, only an absolute bound means anything.
    np.testing.assert_allclose(got[3], expected[3], rtol=alpha2, atol=1e-6)
    np.testing.assert_allclose(got[5], expected[5], rtol=alpha1)


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("condition", [1.0, 1e3])
@pytest.mark.parametrize("kind", ["full rank", "rank one", "graded"])
@pytest.mark.parametrize("shape", [(96, 16), (24, 24), (12, 20)], ids=["tall", "square", "wide"])
@pytest.mark.parametrize("size", [1e-1, 1e-3, 1e-6])
def test_agrees_with_float64(shape, kind, size, condition):
    arrays = four(np.random.default_rng(0), *shape, size, kind, condition)
    for stats, expected in zip(increment(*arrays), oracle(*arrays), strict=True):
        assert_close(stats, expected)


def test_parts_of_delta1_add_up_when_only_one_side_moves():
    q0, k0, q1, _ = four(np.random.default_rng(1), 40, 8, 1e-2, "full rank")
    result = increment(q0, k0, q1, k0)
    np.testing.assert_allclose(result.delta1, result.delta2, rtol=1e-5)
    assert float(result.delta3.norm) == 0.0


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31 - 1), st.floats(1.0, 30.0))
def test_gauge_transformation_changes_nothing(seed, stretch):
    rng = np.random.default_rng(seed)
    q0, k0, q1, k1 = (x.astype(np.float64) for x in four(rng, 48, 8, 1e-2, "full rank"))
    gauge = head(rng, 8, 8, condition=stretch)
    inverse = np.linalg.inv(gauge).T
    before = increment(*(x.astype(np.float32) for x in (q0, k0, q1, k1)))
    turned = (q0 @ gauge, k0 @ inverse, q1 @ gauge, k1 @ inverse)
    after = increment(*(x.astype(np.float32) for x in turned))
    # float32 inputs of the gauged pair differ by rounding · stretch / ‖dW‖.
    for a, b in zip(before, after, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31 - 1), st.integers(-40, 40))
def test_scale_moves_norms_only(seed, exponent):
    arrays = four(np.random.default_rng(seed), 20, 4, 1e-2, "full rank")
    scale = np.float32(2.0**exponent)
    before, after = increment(*arrays), increment(*(scale * x for x in arrays))
    for a, b in zip(before, after, strict=True):
        np.testing.assert_allclose(b.norm, a.norm * scale**2, rtol=1e-5)
        np.testing.assert_allclose(b[2:], a[2:], rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("route")
def test_no_change_is_the_zero_matrix():
    q, k, _, _ = four(np.random.default_rng(2), 16, 4, 1e-2, "full rank")
    for stats in increment(q, k, q, k):
        np.testing.assert_array_equal(stats, [0, 0, 0, 0, 1, 1])


def test_a_nan_anywhere_gives_nan_everywhere():
    q0, k0, q1, k1 = four(np.random.default_rng(3), 16, 4, 1e-2, "full rank")
    k1[3, 2] = np.nan
    assert all(np.all(np.isnan(stats)) for stats in increment(q0, k0, q1, k1))


def test_bfloat16_and_one_column():
    q0, k0, q1, k1 = (
        jnp.asarray(x, jnp.bfloat16)
        for x in four(np.random.default_rng(4), 16, 1, 0.5, "full rank")
    )
    for stats, expected in zip(increment(q0, k0, q1, k1), oracle(q0, k0, q1, k1), strict=True):
        assert stats.norm.dtype == jnp.float32
        assert_close(stats, expected)


def test_a_stack_through_vmap_equals_one_by_one():
    stack = [four(np.random.default_rng(s), 20, 4, 1e-2, "full rank") for s in range(3)]
    batched = jax.jit(jax.vmap(qk_increment))(*(np.stack(x) for x in zip(*stack, strict=True)))
    for i, arrays in enumerate(stack):
        single = increment(*arrays)
        np.testing.assert_allclose([s[i] for s in batched.delta2], single.delta2, rtol=1e-5)


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("rank", [1, 3, 8])
def test_triangular_factor_reproduces_the_gram_matrix(rank):
    rng = np.random.default_rng(5)
    a = (rng.normal(size=(40, rank)) @ rng.normal(size=(rank, 8))).astype(np.float32)
    a[:, :4] *= 1e-5
    r = np.asarray(triangular_factor(jnp.asarray(a.T)), np.float64)
    lengths = np.linalg.norm(a.astype(np.float64), axis=0)
    gram = a.astype(np.float64).T @ a.astype(np.float64)
    scale = np.outer(lengths, lengths)
    np.testing.assert_allclose(r.T @ r / scale, gram / scale, atol=1e-5)
    np.testing.assert_array_equal(r, np.triu(r))


def test_different_shapes_are_refused():
    q, k = jnp.ones((8, 4)), jnp.ones((8, 2))
    with pytest.raises(ValueError, match="with grouped queries repeat the kv heads"):
        qk_increment(q, k, q, k)


def test_a_stack_is_refused():
    x = jnp.ones((2, 8, 4))
    with pytest.raises(ValueError, match=r"expected a matrix \(m, n\), got shape \(2, 8, 4\)"):
        qk_increment(x, x, x, x)
