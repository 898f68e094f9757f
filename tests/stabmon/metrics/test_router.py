"""Router geometry and softmax entropy against float64 NumPy."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stabmon.metrics import router

RNG = np.random.default_rng(0)
W = RNG.normal(size=(6, 20)) + 0.3
LOGITS = 3.0 * RNG.normal(size=(2, 9, 8))
weights_metric = partial(jax.jit, static_argnames="experts")
similarity = weights_metric(router.router_similarity)
conditioning = weights_metric(router.router_conditioning)
proxy = weights_metric(router.routing_entropy_proxy)
entropy, z_loss, bound = map(
    jax.jit, (router.routing_entropy, router.router_z, router.similarity_bound)
)
ON_WEIGHTS = [similarity, conditioning, proxy]
ON_LOGITS = [entropy, z_loss]


def cosines(w):
    w = np.asarray(w, np.float64)
    unit = [row / max(np.linalg.norm(row), 1e-300) for row in w]
    return [a @ b for a, b in itertools.combinations(unit, 2)]


def conditioning_oracle(w):
    w = np.asarray(w, np.float64)
    mean = w.mean(0)
    return max(np.linalg.norm(row - mean) for row in w) / np.linalg.norm(mean)


def entropy_oracle(logits):
    p = np.exp(np.asarray(logits, np.float64))
    p /= p.sum(-1, keepdims=True)
    return -(p * np.log(p)).sum(-1).mean()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_against_the_oracle(dtype):
    w, logits = jnp.asarray(W, dtype), jnp.asarray(LOGITS, dtype)
    for value, expected in [
        (similarity(w), np.mean(cosines(w))),
        (conditioning(w), conditioning_oracle(w)),
        (entropy(logits), entropy_oracle(logits)),
    ]:
        assert value.dtype == jnp.float32
        assert value.shape == ()
        np.testing.assert_allclose(value, expected, rtol=3e-6)


def test_similarity_is_of_experts_and_not_of_model_axes():
    w = np.zeros((3, 4))
    w[:, 0], w[0, 1] = 2.0, 2.0
    expected = (1 + 2 * np.sqrt(0.5)) / 3
    np.testing.assert_allclose(similarity(w), expected, rtol=1e-6)


@pytest.mark.parametrize("cosine", [-0.2, 0.0, 0.5, 0.999])
def test_similarity_of_a_prescribed_cosine(cosine):
    gram = np.full((6, 6), cosine) + (1 - cosine) * np.eye(6)
    eigenvalues, vectors = np.linalg.eigh(gram)
    w = (vectors * np.sqrt(np.maximum(eigenvalues, 0))) * RNG.uniform(0.01, 100, size=(6, 1))
    np.testing.assert_allclose(similarity(w), cosine, atol=1e-6)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**16), power=st.integers(-60, 60))
def test_weight_metrics_ignore_order_rotation_and_scale(seed, power):
    rng = np.random.default_rng(seed)
    w = rng.normal(size=W.shape) + 0.2
    rotation = np.linalg.qr(rng.normal(size=(20, 20)))[0]
    moved = rng.permutation(w) @ rotation
    np.testing.assert_allclose(similarity(moved * 2.0**power), similarity(w), atol=1e-6)
    np.testing.assert_allclose(conditioning(moved * 2.0**power), conditioning(w), rtol=1e-5)
    np.testing.assert_allclose(proxy(moved), proxy(w), rtol=1e-5)
    rows = 2.0 ** rng.integers(-20, 20, size=(6, 1))
    np.testing.assert_allclose(similarity(w * rows), similarity(w), atol=1e-6)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**16), spread=st.floats(0.01, 0.9))
def test_the_bound_holds_for_every_pair(seed, spread):
    rng = np.random.default_rng(seed)
    w = rng.normal(size=20) + spread * rng.normal(size=W.shape) / 2
    assert bound(conditioning(w)) <= min(cosines(w)) + 1e-5


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 0.9])
def test_the_bound_is_tight(epsilon):
    # Two rows that stand off a mean of length 1 at right angles to themselves.
    tilt, length = np.arcsin(epsilon), np.sqrt(1 - epsilon**2)
    pair = length * np.array([[np.cos(tilt), np.sin(tilt)], [np.cos(tilt), -np.sin(tilt)]])
    rest = 2 * (1 - length * np.cos(tilt)) / 4 + 1
    w = np.vstack([pair, np.tile([rest, 0.0], (4, 1))])
    value = bound(conditioning(w, experts=6))
    np.testing.assert_allclose(value, min(cosines(w)), atol=1e-5)
    np.testing.assert_allclose(value, 1 - 2 * epsilon**2, atol=1e-5)


def test_bound_is_vacuous_from_one_on():
    np.testing.assert_array_equal(bound(jnp.array([1.0, 7.0, jnp.inf], jnp.bfloat16)), -1.0)
    assert jnp.isnan(bound(jnp.nan))


def test_routing_entropy_is_of_all_experts():
    logits = np.full((5, 16), -40.0)
    logits[:, :4] = 0.0
    np.testing.assert_allclose(entropy(logits), np.log(4), rtol=1e-6)
    np.testing.assert_allclose(entropy(np.zeros((5, 16))), np.log(16), rtol=1e-6)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**16), size=st.sampled_from([1.0, 100.0]))
def test_routing_entropy_ignores_shift_and_order_of_experts(seed, size):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=LOGITS.shape)
    moved = logits[..., rng.permutation(8)] + size * rng.normal(size=(2, 9, 1))
    np.testing.assert_allclose(entropy(moved), entropy(logits), rtol=1e-5)


def test_entropy_proxy_for_small_logits_and_isotropic_inputs():
    w = 0.02 * RNG.normal(size=(16, 64)) + RNG.normal(size=(1, 64))
    x = np.random.default_rng(1).normal(size=(4000, 64))
    fall = np.log(16) - entropy_oracle(x @ w.T)
    guess = np.log(16) - float(proxy(w))
    assert abs(guess / fall - 1) < 0.03


def test_router_z():
    z = np.log(np.exp(LOGITS).sum(-1))
    np.testing.assert_allclose(z_loss(LOGITS), np.mean(z**2), rtol=1e-6)


def test_degenerate_weights():
    zero, same, one = np.zeros(W.shape), np.ones(W.shape), np.ones((1, 20))
    assert similarity(zero) == conditioning(zero) == 0.0
    np.testing.assert_allclose(proxy(zero), np.log(6), rtol=1e-6)
    assert similarity(one) == conditioning(one) == proxy(one) == 0.0
    np.testing.assert_allclose([similarity(same), conditioning(same)], [1.0, 0.0], atol=1e-6)
    opposed = np.outer([1, 1, 1, -1, -1, -1], np.eye(20)[0]).astype(np.float32)
    assert conditioning(opposed) == jnp.inf


def test_a_zero_row_is_orthogonal_to_all():
    w = W.copy()
    w[[1, 4]] = 0.0
    np.testing.assert_allclose(similarity(w), np.mean(cosines(w)), rtol=1e-5)


@pytest.mark.parametrize("metric", ON_WEIGHTS + ON_LOGITS)
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_a_non_finite_entry_gives_nan(metric, bad):
    assert jnp.isnan(metric(jnp.asarray(W, jnp.float32).at[1, 0].set(bad)))


def test_one_expert_with_a_non_finite_entry_gives_nan():
    assert jnp.isnan(similarity(np.full((1, 20), np.nan)))


@pytest.mark.parametrize("metric", ON_WEIGHTS + ON_LOGITS)
def test_vmap_over_layers(metric):
    w = RNG.normal(size=(3, *W.shape)).astype(np.float32)
    np.testing.assert_allclose(
        jax.jit(jax.vmap(metric))(w), [float(metric(row)) for row in w], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("metric", ON_WEIGHTS)
def test_a_transposed_router_is_refused(metric):
    with pytest.raises(
        ValueError, match=r"\(experts, model\).*\(20, 6\), which looks transposed; pass"
    ):
        metric(W.T)


@pytest.mark.parametrize("metric", ON_WEIGHTS)
def test_more_experts_than_model_axes_must_be_said(metric):
    assert jnp.isfinite(metric(W.T, experts=20))
    with pytest.raises(ValueError, match=r"with 6 rows, got shape \(20, 6\); pass w\.T"):
        metric(W.T, experts=6)


def test_a_wrong_number_of_experts_is_refused():
    with pytest.raises(ValueError, match=r"with 7 rows, got shape \(6, 20\); check"):
        similarity(W, experts=7)


def test_a_stack_of_routers_is_refused():
    with pytest.raises(ValueError, match=r"use jax\.vmap"):
        conditioning(W[None])


def test_logits_need_an_expert_axis():
    with pytest.raises(ValueError, match="expected non-empty router logits"):
        entropy(jnp.ones(()))
