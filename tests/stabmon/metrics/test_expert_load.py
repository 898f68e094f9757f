"""Loads, margins, balance and overflow against token-by-token NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stabmon.metrics import expert_load as el

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(3, 10, 8)) + np.linspace(1.5, -2.5, 8)
load_of = jax.jit(el.expert_load, static_argnums=1)
margin_of = jax.jit(el.topk_margin, static_argnums=1)
overflow_of = jax.jit(el.capacity_overflow, static_argnums=(1, 2))
balance_of = jax.jit(el.balance_gradient_ratio, static_argnums=(1, 3))
trend_of = jax.jit(el.margin_growth, static_argnames="every")


def counts(logits, top_k):
    count = np.zeros(logits.shape[-1])
    for token in np.asarray(logits, np.float64).reshape(-1, logits.shape[-1]):
        count[np.argsort(-token, kind="stable")[:top_k]] += 1
    return count


def margins(logits, top_k):
    ranked = -np.sort(-np.asarray(logits, np.float64), axis=-1)
    return (ranked[..., top_k - 1] - ranked[..., top_k]).ravel()


@pytest.mark.parametrize("top_k", [1, 2, 7])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_load_against_the_oracle(top_k, dtype):
    logits = jnp.asarray(LOGITS, dtype)
    load, count = load_of(logits, top_k), counts(logits, top_k)
    p = count[count > 0] / count.sum()
    assert all(value.dtype == jnp.float32 for value in load)
    np.testing.assert_allclose(load.fraction, count / (30 * top_k), rtol=1e-6)
    np.testing.assert_allclose(load.max_violation, count.max() / count.mean() - 1, rtol=1e-5)
    np.testing.assert_allclose(load.effective_experts, np.exp(-(p * np.log(p)).sum()), rtol=1e-5)
    np.testing.assert_allclose(load.margin, margins(logits, top_k).mean(), rtol=1e-5)
    assert float(load.dead) == (count == 0).sum()


def test_some_experts_are_dead_in_the_oracle():
    assert (counts(LOGITS, 1) == 0).sum() > 0


def test_perfect_balance_and_full_collapse():
    even = load_of(10.0 * np.tile(np.eye(8), (4, 1)), 1)
    np.testing.assert_allclose(even[1:], [0.0, 0.0, 8.0, 10.0], rtol=1e-6)
    collapsed = load_of(np.zeros(LOGITS.shape), 2)
    np.testing.assert_allclose(collapsed.fraction, [0.5, 0.5] + [0.0] * 6)
    np.testing.assert_allclose(collapsed[1:], [3.0, 6.0, 2.0, 0.0], rtol=1e-6)


def test_choosing_all_experts():
    load = load_of(LOGITS, 8)
    np.testing.assert_allclose(load[1:], [0.0, 0.0, 8.0, 0.0], rtol=1e-6, atol=1e-6)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**16), top_k=st.sampled_from([1, 3]))
def test_load_ignores_shifts_and_permutes_with_the_experts(seed, top_k):
    rng = np.random.default_rng(seed)
    order = rng.permutation(8)
    logits = rng.integers(-64, 64, size=LOGITS.shape) + np.linspace(0, 0.75, 8)
    moved = logits[..., order] + rng.integers(-9, 9, size=(3, 10, 1))
    a, b = load_of(logits, top_k), load_of(moved, top_k)
    np.testing.assert_array_equal(b.fraction, a.fraction[order])
    np.testing.assert_allclose(b[1:], a[1:], rtol=1e-5)


def test_margin_percentiles():
    values = margin_of(LOGITS, 2)
    expected = margins(LOGITS, 2)
    np.testing.assert_allclose(
        values, [expected.mean(), *np.quantile(expected, [0.1, 0.01])], rtol=1e-5
    )


def test_margin_growth_is_slope_and_scatter():
    time = np.arange(40.0)
    window = 3.0 + 0.02 * time + 0.1 * RNG.normal(size=40)
    slope, offset = np.polyfit(time, window, 1)
    rest = window - slope * time - offset
    trend = trend_of(window, every=5)
    np.testing.assert_allclose(trend.growth, slope / 5, rtol=1e-5)
    np.testing.assert_allclose(trend.noise, np.sqrt((rest**2).sum() / 38), rtol=1e-5)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**16), offset=st.floats(-8, 8, width=32), power=st.integers(-20, 20))
def test_margin_growth_scales_and_ignores_offsets(seed, offset, power):
    window = np.random.default_rng(seed).normal(size=12)
    a = trend_of(window)
    b = trend_of((window + offset) * 2.0**power)
    np.testing.assert_allclose(np.array(b) / 2.0**power, a, rtol=1e-4, atol=1e-6)


def test_constant_margins_neither_grow_nor_scatter():
    assert tuple(trend_of(jnp.full(7, 0.1))) == (0.0, 0.0)


def test_balance_gradient_ratio():
    grad, alpha = RNG.normal(size=8), 1e-3
    fraction = counts(LOGITS, 2) / 60

    def balance(mean_probs):
        return alpha * 8 * jnp.sum(jnp.asarray(fraction, jnp.float32) * mean_probs)

    expected = np.linalg.norm(jax.grad(balance)(jnp.full(8, 0.125))) / np.linalg.norm(grad)
    value = balance_of(LOGITS, 2, grad, alpha)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    tiny = balance_of(LOGITS, 2, 1e-30 * grad, alpha)
    np.testing.assert_allclose(tiny, 1e30 * expected, rtol=1e-5)


def test_balance_ratio_without_a_task_gradient_is_zero():
    assert balance_of(LOGITS, 2, jnp.zeros(8), 1e-3) == 0.0


@pytest.mark.parametrize("capacity", [1, 7.5, 9, 100])
def test_capacity_overflow(capacity):
    count = counts(LOGITS, 2)
    expected = np.maximum(count - capacity, 0).sum() / count.sum()
    np.testing.assert_allclose(overflow_of(LOGITS, 2, capacity), expected, atol=1e-6)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_a_non_finite_logit_gives_nan(bad):
    logits = jnp.asarray(LOGITS, jnp.float32).at[1, 2, 3].set(bad)
    assert all(jnp.all(jnp.isnan(value)) for value in load_of(logits, 2))
    assert all(jnp.isnan(value) for value in margin_of(logits, 2))
    assert jnp.isnan(overflow_of(logits, 2, 9))
    assert jnp.isnan(balance_of(logits, 2, jnp.ones(8), 1e-3))
    assert all(jnp.isnan(value) for value in trend_of(np.r_[np.ones(6), bad]))


def test_a_non_finite_task_gradient_gives_nan():
    grad = jnp.ones(8).at[0].set(jnp.inf)
    assert jnp.isnan(balance_of(LOGITS, 2, grad, 1e-3))


def test_jit_and_vmap():
    stacked = jax.jit(jax.vmap(lambda z: el.expert_load(z, 2)))(LOGITS)
    for i, logits in enumerate(LOGITS):
        for value, expected in zip(stacked, load_of(logits, 2), strict=True):
            np.testing.assert_allclose(value[i], expected, rtol=1e-6)


@pytest.mark.parametrize("top_k", [0, 9])
def test_top_k_must_fit(top_k):
    with pytest.raises(
        ValueError, match=f"expected top_k in 1…8, the number of experts, got {top_k}"
    ):
        load_of(LOGITS, top_k)


def test_margin_checks_top_k_too():
    with pytest.raises(ValueError, match="topk_margin: expected top_k in 1…8"):
        margin_of(LOGITS, 9)


def test_growth_needs_three_margins():
    with pytest.raises(ValueError, match=r"of W >= 3 margins, got shape \(2,\)"):
        trend_of(jnp.ones(2))


def test_growth_needs_a_positive_interval():
    with pytest.raises(ValueError, match="expected every > 0 steps, got 0"):
        trend_of(jnp.ones(4), every=0)


def test_the_task_gradient_has_one_entry_an_expert():
    with pytest.raises(
        ValueError, match=r"expected a gradient \(8,\), one entry an expert, got \(7,\)"
    ):
        balance_of(LOGITS, 2, jnp.ones(7), 1e-3)


def test_the_coefficient_must_not_be_negative():
    with pytest.raises(ValueError, match="expected coefficient >= 0, got -1"):
        balance_of(LOGITS, 2, jnp.ones(8), -1)


def test_capacity_must_be_positive():
    with pytest.raises(ValueError, match="expected capacity > 0 slots, got 0"):
        overflow_of(LOGITS, 2, 0)
