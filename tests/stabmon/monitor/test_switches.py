"""The monitor under JAX's own switches, and on leaves that are no plain arrays."""

from contextlib import ExitStack

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
import stabmon

L, D, N, E, B, T = 2, 8, 2, 4, 2, 6
SWITCHES = {
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "enable_x64": lambda: jax.enable_x64(True),
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "transfer guard": lambda: jax.transfer_guard("disallow"),
    "leak check": lambda: jax.checking_leaks(),
}


def tree(dtype=jnp.float32, seed=0):
    draw = lambda i, *shape: jax.random.normal(jax.random.key(seed + i), shape).astype(dtype)
    attn = {name: {"kernel": draw(i, L, D, N, 4)} for i, name in enumerate("qkv")}
    return {"layers": {"attn": attn, "moe": {"router": {"kernel": draw(9, L, D, E)}}}}


def train(params):
    """A step of which most tiers sample only some, and what it begins with."""
    layout = stabmon.find_layout(params)
    chain = (optax.sgd(0.1), optax_ext.track_worst(2), optax_ext.track_delta(2, 1, "kernel"))
    tx = optax.chain(*chain)
    monitor = stabmon.Monitor(layout, router=2, delta=2, activations=2, weights=2, symptoms=2)

    @jax.jit
    def step(i, params, state, grads, seen):
        updates, new_state = tx.update(grads, state, params)
        loss = jnp.sum(seen["residual"])
        readings = monitor(i, params, state, seen, grads=grads, updates=updates, loss=loss)
        return optax.apply_updates(params, updates), new_state, readings

    draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape)
    seen = {"residual": draw(0, L, B, T, D), "router_logits": draw(1, L, B, T, E)}
    seen |= {"attention_entropy": jnp.ones((L, N)), "mask": jnp.ones((B, T), bool)}
    return step, (params, tx.init(params), tree(seed=5), seen)


def run(case, switch=None):
    """Samples of three steps."""
    step, (params, state, grads, seen) = case
    found = []
    steps = [jnp.int32(i) for i in range(3)]
    with switch() if switch else ExitStack():
        for i in steps:
            params, state, readings = step(i, params, state, grads, seen)
            found.append(readings)
    return [readings.flatten() for readings in found]


@pytest.fixture(scope="module")
def plain():
    return run(train(tree()))


QUICK = ("debug_nans", "enable_x64")
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in SWITCHES if name not in QUICK]


@pytest.mark.parametrize("name", [*QUICK, *OTHERS])
def test_a_healthy_run_gives_the_same_numbers(name, plain):
    got = run(train(tree()), SWITCHES[name])
    assert [sorted(x) for x in got] == [sorted(x) for x in plain]
    assert not plain[1]
    for a, b in zip(got, plain, strict=True):
        np.testing.assert_allclose([a[k] for k in b], [*b.values()], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_narrow_leaves_are_measured_in_float32(dtype):
    params = tree(dtype)
    monitor = stabmon.Monitor(stabmon.find_layout(params), delta=0, weights=1, symptoms=1)
    measure = jax.jit(lambda p: monitor(0, p, (), grads=p, due=("weights", "symptoms")))
    flat = measure(params).flatten()
    exact = [np.asarray(x.astype(jnp.float32), np.float64) for x in jax.tree.leaves(params)]
    total = np.sqrt(sum(np.sum(x**2) for x in exact))
    assert flat["symptoms/global/param_norm/value"] == pytest.approx(total, rel=1e-5)
    assert flat["symptoms/global/grad_norm/value"] == pytest.approx(total, rel=1e-5)


def test_leaves_that_are_no_weights_count_in_no_norm():
    params = tree()
    monitor = stabmon.Monitor(stabmon.find_layout(params), delta=0, weights=0, symptoms=1)
    others = {"count": jnp.int32(1_000_000), "key": jax.random.key(0), "none": None, "flag": True}
    measure = lambda p: monitor(0, p, (), grads=tree(), due=("symptoms",)).flatten()
    norm = "symptoms/global/param_norm/value"
    assert measure(params | others)[norm] == measure(params)[norm]
    wave = jnp.asarray([3 + 4j, 0j])
    want = np.hypot(measure(params)[norm], np.hypot(5.0, 2.0))
    assert measure(params | {"wave": wave, "scale": 2.0})[norm] == pytest.approx(want, rel=1e-6)


def test_eager_without_jit(plain):
    params = tree()
    tx = optax_ext.track_delta(2, 1)
    layout = stabmon.find_layout(params)
    monitor = stabmon.Monitor(layout, delta=0, router=0, activations=0, weights=0, symptoms=1)
    with jax.disable_jit():
        flat = monitor(jnp.int32(0), params, tx.init(params), grads=params).flatten()
    key = "symptoms/global/param_norm/value"
    assert flat[key] == pytest.approx(plain[0][key], rel=1e-6)
