"""The mixture of experts against a token-by-token float64 oracle: routing, drops, losses."""

import dataclasses
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from models.config import GPTConfig
from models.moe import MoE, plan_capacity, plan_dropless, route
from tests.models import oracle
from tests.models.quick import quick_jit

B, T, D, E = 2, 7, 6, 4
DROPLESS = GPTConfig(model=D, heads=2, feedforward=5, experts=E, top_k=2)
SWITCH = dataclasses.replace(
    DROPLESS,
    top_k=1,
    norm_top_k=False,
    capacity_factor=1.0,
    shared_experts=2,
    activation="swiglu",
)
both = pytest.mark.parametrize("config", [DROPLESS, SWITCH], ids=["dropless", "switch"])


@lru_cache
def split(config):
    return nnx.split(nnx.eval_shape(lambda: MoE(config)))


@lru_cache
def layer(config):
    """(params, x, cotangents of y, balance and z) -> ((y, losses, captured), gradients)."""
    graphdef, _ = split(config)

    def run(params, x, dy, dbalance, dz):
        def forward(params, x):
            y, losses, captured = nnx.merge(graphdef, params)(x, losses=True, capture=True)
            return (y, losses), captured

        (y, losses), vjp, captured = jax.vjp(forward, params, x, has_aux=True)
        return (y, losses, captured), vjp((dy, {"balance": dbalance, "z": dz}))

    return quick_jit(run)


def draw(config, seed=0):
    """Parameters and inputs of order one."""
    rng = np.random.default_rng(seed)
    shapes = nnx.to_pure_dict(split(config)[1])
    params = jax.tree.map(lambda x: rng.normal(0, 0.6, x.shape).astype(np.float32), shapes)
    return params, rng.normal(size=(B, T, D)).astype(np.float32)


def forward(config, params, x):
    zero = jnp.float32(0)
    return layer(config)(params, x, jnp.zeros_like(x), zero, zero)[0]


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@both
def test_equals_the_oracle(config):
    params, x = draw(config)
    y, losses, captured = forward(config, params, x)
    expected = oracle.moe(config, oracle.as_float64(params), np.float64(x))
    for ours, theirs in zip((losses, captured), expected[1:], strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            close(ours[name], theirs[name])
    close(y, expected[0])
    assert captured["dropped"] == 0 if config is DROPLESS else captured["dropped"] > 0


@both
def test_gradient_against_differences_of_the_oracle(config):
    params, x = draw(config, 1)
    rng = np.random.default_rng(2)
    dy, dbalance, dz = rng.normal(size=x.shape).astype(np.float32), 3.0, -0.2
    _, grads = layer(config)(params, x, dy, jnp.float32(dbalance), jnp.float32(dz))
    start = oracle.as_float64(params), np.float64(x)
    direction = jax.tree.map(lambda x: rng.normal(size=x.shape), start)

    def at(step):
        moved = jax.tree.map(lambda x, d: x + step * d, start, direction)
        y, losses, _ = oracle.moe(config, *moved)
        return np.sum(dy * y) + dbalance * losses["balance"] + dz * losses["z"]

    slopes = jax.tree.map(lambda g, d: np.sum(np.float64(g) * d), grads, direction)
    difference = (at(1e-6) - at(-1e-6)) / 2e-6
    np.testing.assert_allclose(sum(jax.tree.leaves(slopes)), difference, rtol=1e-5)


@both
def test_each_term_reaches_the_router(config):
    params, x = draw(config, 3)
    for term in np.eye(3, dtype=np.float32):
        _, (grads, _) = layer(config)(params, x, term[0] * jnp.ones_like(x), term[1], term[2])
        router = grads.pop("router")["kernel"]
        assert np.all(np.any(np.asarray(router) != 0, axis=0))
        others = [np.any(x) for x in jax.tree.leaves(grads)]
        assert all(others) if term[0] else not any(others)


@both
def test_order_of_the_experts_is_arbitrary(config):
    params, x = draw(config, 4)
    order = np.array([2, 0, 3, 1])
    routed = params.keys() - {"router", "shared"}
    moved = params | {name: {"kernel": params[name]["kernel"][order]} for name in routed}
    moved["router"] = {"kernel": params["router"]["kernel"][:, order]}
    y, losses, captured = forward(config, params, x)
    y_moved, losses_moved, captured_moved = forward(config, moved, x)
    close(y_moved, y)
    for name in losses:
        close(losses_moved[name], losses[name])
    for name in ("router_logits", "expert_load"):
        close(captured_moved[name], captured[name][..., order])


def test_collapsed_router_fills_one_expert():
    params, x = draw(SWITCH, 5)
    x[..., 0] = 1
    params["router"]["kernel"][0, 2] = 60
    y, losses, captured = forward(SWITCH, params, x)
    np.testing.assert_array_equal(captured["expert_load"], [0, 0, 1, 0])
    close(captured["dropped"], 5 / 7)  # capacity ⌈1 · 7 / 4⌉ = 2 of each sequence
    close(losses["balance"], E)
    shared = oracle.mlp(SWITCH, oracle.as_float64(params["shared"]), np.float64(x))
    close(y[:, 2:], shared[:, 2:])
    assert np.all(np.abs(y - shared)[:, :2].max(-1) > 0.01)


def test_collapsed_router_drops_nothing_when_dropless():
    params, x = draw(DROPLESS, 6)
    x[..., 0] = 1
    params["router"]["kernel"][0, 2] = 60
    params["router"]["kernel"][0, 3] = 40
    y, _, captured = forward(DROPLESS, params, x)
    np.testing.assert_array_equal(captured["expert_load"], [0, 0, 0.5, 0.5])
    assert captured["dropped"] == 0
    close(y, oracle.moe(DROPLESS, oracle.as_float64(params), np.float64(x))[0])


@both
def test_zero_router_is_balanced(config):
    params, x = draw(config, 7)
    params["router"]["kernel"][:] = 0
    _, losses, captured = forward(config, params, x)
    close(losses["balance"], 1)
    close(losses["z"], np.log(E) ** 2)
    first = np.arange(E) < config.top_k  # ties go to the lower number
    np.testing.assert_array_equal(captured["expert_load"], first / config.top_k)


@both
def test_a_bad_token_spoils_itself_only(config):
    params, x = draw(config, 8)
    x[0, 3] = np.nan
    y, losses, captured = forward(config, params, x)
    bad = np.zeros((B, T, D), bool)
    bad[0, 3] = True
    np.testing.assert_array_equal(np.isnan(y), bad)
    np.testing.assert_array_equal(np.isnan(captured["router_logits"]), bad[..., :E])
    assert np.isnan(losses["balance"])
    assert np.isnan(losses["z"])


def test_drops_depend_on_no_later_token_and_no_other_sequence():
    params, x = draw(SWITCH, 9)
    changed = x.copy()
    changed[0, 4:] = draw(SWITCH, 10)[1][0, 4:]
    changed[1] = draw(SWITCH, 10)[1][1]
    np.testing.assert_array_equal(
        forward(SWITCH, params, changed)[0][0, :4], forward(SWITCH, params, x)[0][0, :4]
    )


def test_bfloat16_routes_in_float32():
    config = dataclasses.replace(SWITCH, dtype="bfloat16")
    params, x = draw(config, 11)
    x = jnp.asarray(x, jnp.bfloat16)
    call = lambda params, x: nnx.merge(split(config)[0], params)(x, losses=True, capture=True)
    y, losses, captured = quick_jit(call)(params, x)
    assert y.dtype == jnp.bfloat16
    dtypes = {a.dtype for a in jax.tree.leaves((losses, captured))}
    assert dtypes == {jnp.dtype("float32")}
    exact, *_, routing = oracle.moe(config, oracle.as_float64(params), np.float64(x))
    close(captured["router_logits"], routing["router_logits"])
    assert np.linalg.norm(np.float64(y) - exact) < 0.02 * np.linalg.norm(exact)


def test_forward_mode_differentiates_too():
    params, x = draw(DROPLESS)
    call = lambda x: nnx.merge(split(DROPLESS)[0], params)(x)[0]
    y, dy = jax.eval_shape(lambda x: jax.jvp(call, (x,), (x,)), x)
    assert y.shape == dy.shape == x.shape


@pytest.mark.parametrize("norm", [True, False])
def test_route(norm):
    logits = np.random.default_rng(12).normal(0, 2, (2, 5, E)).astype(np.float32)
    weight, choice = quick_jit(lambda logits: route(logits, 3, norm))(logits)
    p = np.exp(np.float64(logits))
    p /= p.sum(-1, keepdims=True)
    order = np.argsort(-p, axis=-1)[..., :3]
    np.testing.assert_array_equal(choice, order)
    expected = np.take_along_axis(p, order, -1)
    close(weight, expected / expected.sum(-1, keepdims=True) if norm else expected)


choices = st.lists(st.integers(0, 2), min_size=20, max_size=20).map(
    lambda flat: np.array(flat, np.int32).reshape(2, 5, 2)
)
dropless_rows = quick_jit(lambda choice: plan_dropless(choice, 3)[:2])
capacity_rows = quick_jit(lambda choice: plan_capacity(choice, 3, 0.8).row_BTJ)


@settings(max_examples=20, deadline=None)
@given(choices)
def test_dropless_rows_are_distinct_and_owned_by_the_expert(choice):
    rows, owner = dropless_rows(choice)
    plan = jax.eval_shape(lambda choice: plan_dropless(choice, 3)[:2], choice)
    height = 2  # ⌈20 / 12⌉ rows in each of 20 / 2 + 3 groups
    assert plan[1].shape == owner.shape == (13,)
    assert len(np.unique(rows)) == rows.size
    np.testing.assert_array_equal(np.asarray(owner)[np.asarray(rows) // height], choice)


@settings(max_examples=20, deadline=None)
@given(choices)
def test_capacity_rows_go_to_the_first_tokens(choice):
    rows, capacity, end = np.asarray(capacity_rows(choice)), 3, 18  # ⌈0.8 · 2 · 5 / 3⌉; 3 · 2 · 3
    assert len(np.unique(rows[rows < end])) == np.sum(rows < end)
    for sequence, (chosen, given_rows) in enumerate(zip(choice, rows, strict=True)):
        for expert in range(3):
            of_expert = given_rows[chosen == expert]
            start = (expert * 2 + sequence) * capacity
            expected = [start + i if i < capacity else end for i in range(of_expert.size)]
            np.testing.assert_array_equal(of_expert, expected)
