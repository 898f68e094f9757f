"""Jacobian statistics against float64 SVD of dense Jacobians of small models."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stabmon.metrics import jacobian

T, D = 8, 12


def transformer_layer(seed):
    """A pre-norm attention and MLP block on h (T, D)."""
    keys = jax.random.split(jax.random.key(seed), 6)
    wq, wk, wv, wo, up, down = (jax.random.normal(key, (D, D)) / D**0.5 for key in keys)
    causal = jnp.tril(jnp.ones((T, T), bool))
    norm = lambda h: h / jnp.sqrt(jnp.mean(jnp.square(h), -1, keepdims=True) + 1e-6)

    def layer(h):
        x = norm(h)
        logits = jnp.where(causal, (x @ wq) @ (x @ wk).T / D**0.5, -1e30)
        h = h + jax.nn.softmax(logits) @ (x @ wv) @ wo
        return h + jax.nn.gelu(norm(h) @ up) @ down

    return layer


def linear(a):
    a = jnp.asarray(a, jnp.float32)
    return lambda h: jnp.einsum("ij,j->i", a, h)


def dense(layers, h):
    """The layers' Jacobians along the trajectory, as float64 matrices."""
    matrices = []
    for layer in layers:
        matrix = jax.jit(jax.jacfwd(lambda x, f=layer: f(x.reshape(T, D)).ravel()))(h.ravel())
        matrices.append(np.asarray(matrix, np.float64))
        h = layer(h)
    return matrices


def triples(matrices):
    for matrix in matrices:
        u, sigma, vt = np.linalg.svd(matrix)
        yield sigma[0], u[:, 0], vt[0]


@jax.jit
def aligned(matrices):
    return jacobian.jacobian_alignment([linear(a) for a in matrices], jnp.ones(len(matrices[0])))


@jax.jit
def cumulative(matrices):
    return jacobian.cumulative_norms([linear(a) for a in matrices], jnp.ones(len(matrices[0])))


LAYERS = [transformer_layer(seed) for seed in range(3)]
H = jax.random.normal(jax.random.key(9), (T, D))


def test_alignment_of_a_transformer_against_dense_jacobians():
    sigma, u, v = (np.stack(x) for x in zip(*triples(dense(LAYERS, H)), strict=True))
    stats = jax.jit(lambda h: jacobian.jacobian_alignment(LAYERS, h))(H)
    forward = np.abs(np.sum(v[1:] * u[:-1], 1))
    growth = forward.min() * sigma.min()
    assert stats.converged
    np.testing.assert_allclose(stats.norms, sigma, rtol=1e-5)
    np.testing.assert_allclose(stats.forward, forward, atol=1e-3)
    np.testing.assert_allclose(stats.reversed, np.abs(np.sum(u[1:] * v[:-1], 1)), atol=1e-3)
    np.testing.assert_allclose(stats.growth, growth, atol=1e-3 * sigma.min())
    np.testing.assert_allclose(stats.bound, growth**2 * sigma.min(), rtol=0.02)
    assert bool(stats.danger) == (growth > 1)


def test_cumulative_norms_of_a_transformer():
    matrices = dense(LAYERS, H)
    products = list(itertools.accumulate(matrices, lambda p, j: j @ p))
    sigma, u, v = (np.stack(x) for x in zip(*triples(products), strict=True))
    single, left, right = (np.stack(x) for x in zip(*triples(matrices), strict=True))
    stats = jax.jit(lambda h: jacobian.cumulative_norms(LAYERS, h))(H)
    forward = np.abs(np.sum(right[1:] * u[:-1], 1))
    assert stats.converged
    np.testing.assert_allclose(stats.norms, sigma, rtol=1e-5)
    np.testing.assert_allclose(stats.forward, forward, atol=1e-3)
    np.testing.assert_allclose(stats.reversed, np.abs(np.sum(left[1:] * v[:-1], 1)), atol=1e-3)
    np.testing.assert_allclose(stats.growth, forward.min() * single.min(), rtol=0.01)
    assert stats.bound <= sigma[-1] * (1 + 1e-5)


def test_forward_is_output_of_the_earlier_on_input_of_the_later():
    earlier = 3.0 * np.outer([0.6, 0.8, 0.0], [0.0, 0.0, 1.0])
    later = 5.0 * np.outer([0.0, 0.28, 0.96], [1.0, 0.0, 0.0])
    stats = aligned(np.stack([earlier, later]))
    np.testing.assert_allclose(stats.norms, [3.0, 5.0], rtol=1e-5)
    np.testing.assert_allclose(stats.forward, [0.6], atol=1e-5)
    np.testing.assert_allclose(stats.reversed, [0.96], atol=1e-5)
    np.testing.assert_allclose([stats.growth, stats.bound], [1.8, 5.4], rtol=1e-5)
    assert stats.danger
    assert np.linalg.norm(later @ earlier, 2) >= 5.4 - 1e-6


def test_the_bound_is_met_by_equal_rank_one_layers():
    a = 1.1 * np.outer([0.8, 0.6, 0.0], [1.0, 0.0, 0.0])
    stats = aligned(np.stack([a, a]))
    np.testing.assert_allclose(stats.bound, np.linalg.norm(a @ a, 2), rtol=1e-5)
    assert not stats.danger


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_a_change_of_basis_changes_nothing(seed):
    rng = np.random.default_rng(seed)
    matrices = [(np.linalg.qr(rng.normal(size=(8, 8)))[0] * 0.7 ** np.arange(8)) for _ in range(2)]
    matrices = [m @ np.linalg.qr(rng.normal(size=(8, 8)))[0] for m in matrices]
    basis = np.linalg.qr(rng.normal(size=(8, 8)))[0]
    plain = aligned(np.stack(matrices))
    turned = aligned(np.stack([basis @ m @ basis.T for m in matrices]))
    np.testing.assert_allclose(turned.norms, plain.norms, rtol=1e-5)
    np.testing.assert_allclose(turned.forward, plain.forward, atol=1e-3)
    np.testing.assert_allclose(turned.reversed, plain.reversed, atol=1e-3)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_the_cumulative_bound_holds_without_assumptions(seed):
    matrices = 2.0 * np.random.default_rng(seed).normal(size=(3, 6, 6))
    exact = np.linalg.norm(np.linalg.multi_dot(matrices[::-1]), 2)
    stats = cumulative(matrices)
    np.testing.assert_allclose(stats.norms[-1], exact, rtol=1e-5)
    assert stats.bound <= exact * (1 + 1e-5)


def test_a_product_with_a_repeated_value_is_flagged_though_its_layers_are_clear():
    rest = [0.3, 0.2, 0.1, 0.0]
    diagonals = [[2.0, 1.0, *rest], [1.0, 2.0, *rest], [3.0, 1.0, *rest]]
    stats = cumulative(np.stack([np.diag(d) for d in diagonals]))
    np.testing.assert_allclose(stats.norms, [2.0, 2.0, 6.0], rtol=1e-5)
    assert not stats.converged


def test_identity_layers_have_norm_one_and_no_alignment_to_speak_of():
    stats = aligned(np.stack([np.eye(3)] * 2))
    np.testing.assert_allclose(stats.norms, 1.0, rtol=1e-6)
    assert not stats.converged


def test_too_few_cycles_are_flagged():
    matrix = np.diag(np.linspace(1.0, 0.9, 40))
    assert not jacobian.jacobian_alignment([linear(matrix)], jnp.ones(40), cycles=1).converged


def test_a_zero_layer():
    stats = aligned(np.stack([np.diag([2.0, 1.0, 0.0]), np.zeros((3, 3))]))
    np.testing.assert_array_equal(stats.norms[1], 0.0)
    np.testing.assert_array_equal([*stats.forward, *stats.reversed, stats.bound], 0.0)
    assert stats.converged
    assert not stats.danger


def test_one_layer():
    stats = jacobian.jacobian_alignment([linear(np.diag([2.0, 1.0]))], jnp.ones(2))
    assert stats.forward.shape == stats.reversed.shape == (0,)
    np.testing.assert_allclose([stats.bound, stats.growth], 2.0, rtol=1e-6)


def test_a_non_finite_layer_is_nan_and_not_converged():
    stats = aligned(np.stack([np.diag([2.0, 1.0, 0.0]), np.full((3, 3), np.nan)]))
    np.testing.assert_array_equal(jnp.isnan(stats.norms), [False, True])
    assert jnp.isnan(stats.forward[0])
    assert jnp.isnan(stats.bound)
    assert not stats.danger
    assert not stats.converged


def test_overflow_of_the_bound_is_infinite():
    stats = aligned(np.stack([np.diag([1e20, 1.0, 0.0])] * 2))
    np.testing.assert_allclose(stats.norms, 1e20, rtol=1e-5)
    assert stats.bound == jnp.inf


def test_bfloat16_layers_give_float32_within_their_rounding():
    matrix = np.diag([2.0, 1.0, 0.5])
    layer = lambda h: jnp.einsum("ij,j->i", jnp.asarray(matrix, jnp.bfloat16), h)
    stats = jacobian.jacobian_alignment([layer, layer], jnp.ones(3, jnp.bfloat16))
    assert stats.norms.dtype == stats.forward.dtype == stats.bound.dtype == jnp.float32
    np.testing.assert_allclose(stats.norms, 2.0, rtol=2**-7)
    np.testing.assert_allclose(stats.forward, 1.0, atol=2**-7)


def test_a_layer_that_changes_the_shape_is_refused():
    with pytest.raises(ValueError, match=r"expected layer 1 to keep the shape \(3,\), got \(2,\)"):
        jacobian.jacobian_alignment([lambda h: h, lambda h: h[:2]], jnp.ones(3))


def test_no_layers_are_refused():
    with pytest.raises(ValueError, match="expected at least one layer, got none"):
        jacobian.jacobian_alignment([], jnp.ones(3))


def test_integer_activations_are_refused():
    with pytest.raises(ValueError, match=r"expected a non-empty float h, got int32 \(3,\)"):
        jacobian.jacobian_alignment([lambda h: h], jnp.arange(3))


def test_parameters_out_of_range_are_refused():
    with pytest.raises(ValueError, match="expected tolerance > 0"):
        jacobian.jacobian_alignment([lambda h: h], jnp.ones(3), tolerance=0.0)
