"""Recovery through optimizer state: one compilation, exact factors, resets, skipped spikes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_ext._delta import track_delta
from optax_ext._msign import msign
from optax_ext._recovery import (
    ControlState,
    reset_moments,
    scale_by_control,
    scale_learning_rate,
)
from optax_ext._skip import skip_spikes

PARAMS = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3)}
GRADS = jax.tree.map(lambda x: jnp.cos(x) + 0.1, PARAMS)


def compiled(tx):
    return jax.jit(lambda g, s, p: tx.update(g, s, p), donate_argnums=1)


def test_the_learning_rate_changes_without_compiling_again():
    tx = optax.chain(optax.adamw(1e-2), scale_by_control(), track_delta(every=2, keep=1))
    step = compiled(tx)
    base, state = step(GRADS, tx.init(PARAMS), PARAMS)
    twice, state = step(GRADS, scale_learning_rate(tx.init(PARAMS), 0.5), PARAMS)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(0.5 * a, b), base, twice)
    _, state = step(GRADS, scale_learning_rate(state, 0.25), PARAMS)
    assert float(optax.tree.get(state, "control_scale")) == 0.25
    assert step._cache_size() == 1


@pytest.mark.parametrize("before", [0.0, np.nan, 0.5])
def test_the_factor_is_set_whatever_it_was(before):
    state = ControlState(jnp.float32(before))
    assert float(scale_learning_rate(state, 0.2).control_scale) == pytest.approx(0.2)


def test_the_factor_composes_with_injected_hyperparameters():
    """A schedule injected from outside goes on; the factor scales what it says."""
    make = lambda rate: optax.chain(optax.sgd(rate), scale_by_control())
    tx = optax.inject_hyperparams(make)(rate=lambda count: 1.0 / (1 + count))
    step, state, seen = compiled(tx), tx.init(PARAMS), []
    for scale in (1.0, 0.5, 0.5, 1.0):
        updates, state = step(GRADS, scale_learning_rate(state, scale), PARAMS)
        seen.append(float(-updates["b"][0] / GRADS["b"][0]))
    np.testing.assert_allclose(seen, [1.0, 0.25, 0.5 / 3, 0.25], rtol=1e-6)
    assert step._cache_size() == 1


def test_the_factor_composes_with_a_rate_that_is_set_from_outside():
    tx = optax.chain(optax.inject_hyperparams(optax.sgd)(1.0), scale_by_control())
    state = scale_learning_rate(tx.init(PARAMS), 0.5)
    state = optax.tree.set(state, learning_rate=jnp.float32(0.1))
    updates, _ = tx.update(GRADS, state, PARAMS)
    np.testing.assert_allclose(updates["b"], -0.05 * GRADS["b"], rtol=1e-6)


def test_a_factor_of_one_changes_no_bit():
    base, with_it = optax.adamw(1e-2), optax.chain(optax.adamw(1e-2), scale_by_control())
    a, _ = compiled(base)(GRADS, base.init(PARAMS), PARAMS)
    b, _ = compiled(with_it)(GRADS, with_it.init(PARAMS), PARAMS)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_reset_moments_forgets_averages_and_their_count_and_nothing_else():
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    tx = optax.chain(optax.adam(schedule), scale_by_control(), track_delta(every=1, keep=1))
    step, fresh = compiled(tx), tx.init(PARAMS)
    state = tx.init(PARAMS)
    for _ in range(3):
        _, state = step(GRADS, state, PARAMS)
    state = scale_learning_rate(state, 0.5)
    reset = reset_moments(state, fresh)
    adam, rate = reset[0]
    jax.tree.map(np.testing.assert_array_equal, adam, fresh[0][0])
    assert int(rate.count) == 3
    assert float(reset[1].control_scale) == 0.5
    assert int(reset[2].delta_step) == 3
    step(GRADS, reset, PARAMS)
    assert step._cache_size() == 1


RATE = optax.linear_schedule(0.1, 0.0, 10)
LABELS = {"w": "matrix", "b": "vector"}
# Optimizer -> what is reset, as a pattern on the path in its state; nothing else may change.
OPTIMIZERS = {
    "adam": (optax.adam(RATE), r"\[0\]\.(mu|nu|count)"),
    "lion": (optax.lion(RATE), r"\[0\]\.(mu|count)"),
    "momentum": (optax.sgd(RATE, momentum=0.9), r"\.trace"),
    "adafactor": (
        optax.adafactor(0.1, momentum=0.9, min_dim_size_to_factor=2),
        r"\.(v_row|v_col|v|ema)\[|\[\d\]\.count",
    ),
    "muon": (optax.contrib.muon(RATE), r"\.inner_state\[0\]\.(mu|nu|count)"),
    "schedule-free": (
        optax.contrib.schedule_free_adamw(0.1),
        r"\.base_optimizer_state\[0\]\.(nu|count)",
    ),
    "ademamix": (optax.contrib.ademamix(RATE), r"\.(m1|m2|nu|count_m2)|\[0\]\.count"),
    "prodigy": (optax.contrib.prodigy(0.1), r"\.(exp_avg|exp_avg_sq|count)\b"),
    "partition": (
        optax.partition({"matrix": optax.adam(RATE), "vector": optax.sgd(0.1, 0.9)}, LABELS),
        r"\.inner_state\[0\]\.(mu|nu|count|trace)",
    ),
    "masked": (
        optax.masked(optax.adam(RATE), {"w": True, "b": False}),
        r"\.inner_state\[0\]\.(mu|nu|count)",
    ),
    "injected": (
        optax.inject_hyperparams(optax.adam)(RATE),
        r"\.inner_state\[0\]\.(mu|nu|count)",
    ),
    "accumulated": (
        optax.MultiSteps(optax.adam(RATE), 2).gradient_transformation(),
        r"\.inner_opt_state\[0\]\.(mu|nu|count)",
    ),
    "with transforms": (
        optax.chain(
            optax.adam(RATE), scale_by_control(), msign(period=2), track_delta(every=1, keep=1)
        ),
        r"^\[0\]\[0\]\.(mu|nu|count)",
    ),
}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_reset_moments_of_every_optimizer_resets_moments_alone(name):
    tx, moments = OPTIMIZERS[name]
    step, fresh = compiled(tx), tx.init(PARAMS)
    state, params = jax.tree.map(jnp.copy, fresh), PARAMS
    for _ in range(3):
        updates, state = step(GRADS, state, params)
        params = optax.apply_updates(params, updates)
    reset, changed = reset_moments(state, fresh), 0
    rows = zip(
        *(jax.tree_util.tree_leaves_with_path(x) for x in (state, reset, fresh)), strict=True
    )
    for (path, old), (_, got), (_, new) in rows:
        where = jax.tree_util.keystr(path)
        is_moment = re.search(moments, where) is not None
        np.testing.assert_array_equal(got, new if is_moment else old, err_msg=where)
        changed += is_moment and not np.array_equal(old, new)
    assert changed >= 2
    step(GRADS, reset, params)
    assert step._cache_size() == 1


def test_sharded_state_stays_where_it_lies():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    params = {"w": jax.device_put(jnp.ones((8, 2)), where)}
    tx = optax.chain(optax.adam(1e-2), scale_by_control())
    state = jax.jit(tx.init)(params)
    reset = scale_learning_rate(reset_moments(state, tx.init({"w": jnp.ones((8, 2))})), 0.5)
    for a, b in zip(jax.tree.leaves(reset), jax.tree.leaves(state), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


def test_reset_moments_under_jit_and_with_nan_in_the_averages():
    tx = optax.sgd(0.1, momentum=0.9)
    state = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), tx.init(PARAMS))
    reset = jax.jit(reset_moments)(state, tx.init(PARAMS))
    assert not any(np.any(x) for x in jax.tree.leaves(reset))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: scale_learning_rate(optax.sgd(1.0).init(PARAMS), 0.5), "found 0 scale_by_control"),
        (
            lambda: scale_learning_rate(scale_by_control().init(PARAMS), -1.0),
            "finite scale >= 0, got -1",
        ),
        (
            lambda: reset_moments(optax.sgd(1.0).init(PARAMS), optax.adam(1.0).init(PARAMS)),
            "of another structure",
        ),
        (
            lambda: reset_moments(optax.sgd(1.0).init(PARAMS), optax.sgd(1.0).init(PARAMS)),
            "no state has a field ema, exp_avg",
        ),
        (lambda: skip_spikes(optax.sgd(1.0), 0.0), "threshold > 0"),
        (lambda: skip_spikes(optax.sgd(1.0), warmup=0), "warmup >= 1"),
    ],
)
def test_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def norms(*values):
    """Gradients of the given norms through one compiled step; accepted or not, and last state."""
    tx = skip_spikes(optax.adam(1e-2), 4.0, decay=0.9, warmup=20, max_consecutive=3)
    step = compiled(tx)
    state, accepted = tx.init(PARAMS), []
    for value in values:
        grads = {"w": jnp.full((2, 3), value / 3), "b": jnp.full(3, value / 3)}
        updates, state = step(grads, state, PARAMS)
        accepted.append(bool(np.any(updates["w"])))
    assert step._cache_size() == 1
    return accepted, state


CALM = [1 + 0.1 * (-1) ** i for i in range(30)]


def test_calm_gradients_pass_and_early_ones_too():
    accepted, state = norms(*[1.0, 50.0, *CALM])
    assert all(accepted)
    assert int(state.skip_total) == 0


def test_a_spike_is_skipped_and_leaves_no_trace():
    accepted, state = norms(*CALM, 10.0)
    assert accepted == [True] * 30 + [False]
    _, before = norms(*CALM)
    jax.tree.map(np.testing.assert_array_equal, state.skip_inner, before.skip_inner)
    np.testing.assert_array_equal(state[:3], before[:3])
    assert int(state.skip_consecutive) == 1


def test_a_new_level_is_accepted_after_the_cap():
    accepted, state = norms(*CALM, *[10.0] * 5)
    assert accepted[30:] == [False, False, False, True, True]
    assert int(state.skip_consecutive) == 0
    assert int(state.skip_total) == 3


def test_non_finite_gradients_are_never_accepted_and_never_enter_the_averages():
    accepted, state = norms(*CALM, *[np.nan] * 5, np.inf, 1.0)
    assert accepted[30:] == [False] * 6 + [True]
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(state))
    assert int(state.skip_total) == 6
