"""Norms, ratios and counts against float64 NumPy, and what they return for degenerate arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stabmon.metrics import symptoms

FLOATS = [jnp.bfloat16, jnp.float16, jnp.float32]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 40, 7))


norm, root_mean_square, update_ratio, log_z_squared, nonfinite_count = map(
    jax.jit,
    (
        symptoms.norm,
        symptoms.root_mean_square,
        symptoms.update_ratio,
        symptoms.log_z_squared,
        symptoms.nonfinite_count,
    ),
)
adam_update_rms = jax.jit(symptoms.adam_update_rms, static_argnames="eps")
gradient_rms_over_epsilon = jax.jit(symptoms.gradient_rms_over_epsilon, static_argnames="eps")
gradient_noise_scale = jax.jit(symptoms.gradient_noise_scale, static_argnums=(2, 3))


def relative(value, expected):
    return abs(float(value) - expected) / abs(expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_norm_and_rms_of_the_stored_values(dtype):
    x = jnp.asarray(X, dtype)
    exact = np.asarray(x, np.float64)
    for value, expected in [
        (norm(x), np.sqrt((exact**2).sum())),
        (root_mean_square(x), np.sqrt((exact**2).mean())),
    ]:
        assert value.dtype == jnp.float32
        assert relative(value, expected) < 1e-6


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_norm_neither_overflows_nor_underflows(scale):
    assert relative(norm(jnp.asarray(X * scale)), np.linalg.norm(X) * scale) < 1e-6


def test_rms_of_many_equal_entries_keeps_its_digits():
    assert relative(root_mean_square(jnp.full((1000, 5000), 0.1)), 0.1) < 1e-5


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**16), power=st.integers(-12, 12), sign=st.sampled_from([1.0, -1.0]))
def test_ratios_ignore_a_common_scale(seed, power, sign):
    g, v = np.random.default_rng(seed).normal(size=(2, 5, 6)).astype(np.float32)
    v, c = np.square(v), np.float32(sign * 2.0**power)
    assert update_ratio(g * c, v * c) == update_ratio(g, v)
    assert root_mean_square(g * c) == root_mean_square(g) * abs(c)
    np.testing.assert_allclose(adam_update_rms(g * c, v * c * c), adam_update_rms(g, v), rtol=1e-6)


def test_update_ratio():
    w, step = RNG.normal(size=(2, 16, 8))
    expected = 1e-3 * np.linalg.norm(step) / np.linalg.norm(w)
    assert relative(update_ratio(jnp.asarray(1e-3 * step), jnp.asarray(w)), expected) < 1e-6


def test_update_ratio_of_a_zero_parameter_is_zero():
    assert update_ratio(jnp.ones(3), jnp.zeros(3)) == 0.0


def test_adam_update_rms():
    g, root = RNG.normal(size=(2, 9, 4))
    v, eps = root**2, 0.3
    expected = np.sqrt(np.mean(g**2 / np.maximum(v, eps**2)))
    assert relative(adam_update_rms(g, v, eps=eps), expected) < 1e-6


def test_adam_update_rms_with_vanished_second_moment_divides_by_epsilon():
    value = adam_update_rms(jnp.full(5, 3e-8), jnp.zeros(5), eps=1e-8)
    assert relative(value, 3.0) < 1e-5


@pytest.mark.parametrize("v", [-1.0, jnp.inf, jnp.nan])
def test_adam_update_rms_of_an_impossible_second_moment_is_nan(v):
    assert jnp.isnan(adam_update_rms(jnp.ones(2), jnp.array([1.0, v])))


def test_gradient_rms_over_epsilon():
    g = RNG.normal(size=50) * 1e-8
    expected = np.sqrt(np.mean(g**2)) / 1e-8
    assert relative(gradient_rms_over_epsilon(g), expected) < 1e-6


def test_noise_scale_solves_for_both_parts():
    gradient_sq, trace, small, big = 0.7, 90.0, 8, 128
    stats = gradient_noise_scale(
        jnp.float32(gradient_sq + trace / small), jnp.float32(gradient_sq + trace / big), small, big
    )
    assert relative(stats.gradient_sq, gradient_sq) < 1e-5
    assert relative(stats.trace, trace) < 1e-5
    assert relative(stats.noise_scale, trace / gradient_sq) < 1e-5


def test_noise_scale_of_sampled_gradients():
    rng, dim, big = np.random.default_rng(1), 400, 16
    mean = rng.normal(size=dim)
    samples = mean + 3.0 * rng.normal(size=(300, big, dim))
    small_sq = np.mean(np.sum(samples**2, -1))
    big_sq = np.mean(np.sum(samples.mean(1) ** 2, -1))
    stats = gradient_noise_scale(np.float32(small_sq), np.float32(big_sq), 1, big)
    assert relative(stats.noise_scale, 9.0 * dim / np.sum(mean**2)) < 0.05


def test_noise_scale_degenerate_values():
    zero, one, two = jnp.zeros(()), jnp.float32(1.0), jnp.float32(2.0)
    assert tuple(gradient_noise_scale(zero, zero, 1, 2)) == (0.0, 0.0, 0.0)
    hidden = gradient_noise_scale(two, one, 1, 2)
    assert jnp.isnan(hidden.noise_scale)
    assert hidden.gradient_sq == 0.0
    assert jnp.isnan(gradient_noise_scale(jnp.float32(jnp.nan), one, 1, 2).trace)


def test_log_z_squared():
    logits = 30.0 * RNG.normal(size=(2, 5, 11))
    top = logits.max(-1, keepdims=True)
    expected = np.mean((np.log(np.exp(logits - top).sum(-1)) + top[..., 0]) ** 2)
    assert relative(log_z_squared(logits), expected) < 1e-6


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**16), shift=st.floats(-50, 50, width=32))
def test_log_z_moves_by_the_shift_of_the_logits(seed, shift):
    logits = np.random.default_rng(seed).normal(size=(1, 7)).astype(np.float32)
    log_z = np.log(np.exp(logits.astype(np.float64)).sum())
    np.testing.assert_allclose(
        log_z_squared(logits + np.float32(shift)),
        (log_z + shift) ** 2,
        rtol=1e-4,
        atol=1e-4,
    )


def test_nonfinite_count():
    x = X.copy()
    x[0, 0, :3] = np.nan, np.inf, -np.inf
    for dtype in FLOATS:
        count = nonfinite_count(jnp.asarray(x, dtype))
        assert (count, count.dtype) == (3, jnp.int32)
    assert nonfinite_count(jnp.arange(4)) == 0


SCALARS = [
    norm,
    root_mean_square,
    gradient_rms_over_epsilon,
    log_z_squared,
    lambda x: update_ratio(x, np.ones((2, 3), np.float32)),
    lambda x: update_ratio(np.ones((2, 3), np.float32), x),
    lambda x: adam_update_rms(x, np.ones((2, 3), np.float32)),
]


@pytest.mark.parametrize("metric", SCALARS)
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_a_non_finite_entry_gives_nan(metric, bad):
    assert jnp.isnan(metric(jnp.ones((2, 3)).at[0, 1].set(bad)))


@pytest.mark.parametrize("metric", SCALARS[:3] + SCALARS[4:])
def test_zero_gives_zero(metric):
    assert metric(jnp.zeros((2, 3))) == 0.0


def test_an_empty_array_counts_as_zero():
    empty = jnp.zeros((0, 4))
    assert norm(empty) == root_mean_square(empty) == 0.0
    assert nonfinite_count(empty) == 0


def test_metrics_go_through_jit_and_vmap():
    x = jnp.asarray(X[:, :2, :3], jnp.float32)
    for metric in SCALARS:
        np.testing.assert_allclose(
            jax.jit(jax.vmap(metric))(x), [float(metric(row)) for row in x], rtol=1e-6
        )


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"update_ratio: expected arrays of one shape.*\(3,\)"):
        update_ratio(jnp.ones(3), jnp.ones(4))


def test_integers_are_refused():
    with pytest.raises(ValueError, match="expected a floating dtype, got int32"):
        norm(jnp.arange(3))


def test_epsilon_must_be_positive():
    with pytest.raises(ValueError, match="expected eps > 0, got 0"):
        adam_update_rms(jnp.ones(2), jnp.ones(2), eps=0.0)


def test_batches_must_be_ordered():
    with pytest.raises(ValueError, match="expected 1 <= small_batch < big_batch, got 8 and 8"):
        gradient_noise_scale(jnp.ones(()), jnp.ones(()), 8, 8)


def test_logits_need_an_axis():
    with pytest.raises(ValueError, match="expected non-empty logits"):
        log_z_squared(jnp.ones(()))
