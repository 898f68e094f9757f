"""`monitored`: what it measures is what the Monitor says of the same step, in every wrapper."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
import stabmon

SHAPES = {x: (2, 8, 2, 4) for x in "qk"}
EVERY = 4


def draw(seed):
    rng = np.random.default_rng(seed)
    attn = {x: {"kernel": jnp.asarray(rng.normal(size=s), jnp.float32)} for x, s in SHAPES.items()}
    return {"layers": {"attn": attn}, "norm": jnp.ones(3)}


LAYOUT = stabmon.find_layout(draw(0))
OFF = dict.fromkeys(("weights", "router", "activations", "contracts"), 0)
MONITOR = stabmon.Monitor(LAYOUT, delta=EVERY, symptoms=2, **OFF)


def chain(rate=1e-2):
    ring = optax_ext.track_delta(EVERY, 2, select=LAYOUT.selects("qk"))
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate), ring)


def walk(tx, steps):
    """(gradient, parameters before the update, updates, state after it) of every step."""
    params, update = draw(0), jax.jit(tx.update)
    state, history = jax.jit(tx.init)(params), []
    for step in range(steps):
        grads = draw(100 + step)
        updates, state = update(grads, state, params)
        history.append((grads, params, updates, state))
        params = optax.apply_updates(params, updates)
    return history


@functools.cache
def by_hand(steps):
    """Flat readings of every step at which something is due."""
    tx, params = chain(), draw(0)
    state, found, update = tx.init(params), {}, jax.jit(tx.update)
    measure = jax.jit(lambda step, *args, **kwargs: MONITOR(step, *args, **kwargs))
    for step in range(steps):
        grads = draw(100 + step)
        new, after = update(grads, state, params)
        if step % 2 == 0:
            readings = measure(step, params, state, grads=grads, updates=new)
            found[step] = readings.flatten()
        state, params = after, optax.apply_updates(params, new)
    return found


def close(got, want):
    assert got.pop("symptoms/global/skipped/value", 0.0) == 0.0  # where a wrapper skips steps
    assert got.keys() == want.keys()
    np.testing.assert_allclose([*got.values()], [*want.values()], rtol=1e-4)


def test_every_sample_is_the_monitors_own():
    expected = by_hand(13)
    for step, (*_, state) in enumerate(walk(optax_ext.monitored(chain(), MONITOR), 13)):
        readings = optax_ext.read_monitored(state)
        assert int(readings.step) == step // 2 * 2
        close(readings.flatten(), expected[int(readings.step)])
    assert any("delta8" in key for key in readings.flatten())


def test_updates_are_the_optimizers():
    tx, params, grads = chain(), draw(0), draw(1)
    updates, _ = tx.update(grads, tx.init(params), params)
    measured = optax_ext.monitored(tx, MONITOR)
    got, _ = measured.update(grads, measured.init(params), params)
    jax.tree.map(np.testing.assert_array_equal, got, updates)


def test_a_host_that_looks_seldom_gets_the_newest_of_each_monitor():
    expected = by_hand(13)
    *_, (_, _, _, state) = walk(optax_ext.monitored(chain(), MONITOR), 11)
    samples = optax_ext.monitored_since(state, -1)
    assert [int(sample.step) for sample in samples] == [8, 10]
    spectra, symptoms = (sample.flatten() for sample in samples)
    assert {key.split("/")[0] for key in spectra} == {"delta8"}
    assert {key.split("/")[0] for key in symptoms} == {"symptoms"}
    close(spectra | symptoms, {**expected[8], **expected[10]})
    assert [int(sample.step) for sample in optax_ext.monitored_since(state, 8)] == [10]
    assert optax_ext.monitored_since(state, 10) == []


def test_before_the_first_update_there_is_no_sample():
    tx = optax_ext.monitored(chain(), MONITOR)
    state = tx.init(draw(0))
    assert int(optax_ext.read_monitored(state).step) == -1
    assert optax_ext.read_monitored(state).flatten() == {}
    assert optax_ext.monitored_since(state, -1) == []


def injected():
    make = lambda rate: optax_ext.monitored(chain(rate), MONITOR)
    return optax.inject_hyperparams(make)(rate=lambda count: 1e-2)


@pytest.mark.parametrize(
    "tx",
    [
        injected(),
        optax_ext.monitored(optax.chain(optax.inject_hyperparams(chain)(1e-2)), MONITOR),
        optax.chain(optax.identity(), optax_ext.monitored(chain(), MONITOR)),
        optax.masked(optax_ext.monitored(chain(), MONITOR), lambda tree: True),
        optax_ext.monitored(optax.apply_if_finite(chain(), 3), MONITOR),
    ],
    ids=["injected", "around injected", "chained", "masked", "around apply_if_finite"],
)
def test_in_what_people_wrap(tx):
    expected = by_hand(13)
    *_, (_, _, _, state) = walk(tx, 9)
    close(optax_ext.read_monitored(state).flatten(), expected[8])


@pytest.mark.parametrize("inside", [True, False])
def test_accumulation_measures_the_update_that_is_applied(inside):
    if inside:
        tx = optax.MultiSteps(optax_ext.monitored(chain(), MONITOR), 3).gradient_transformation()
    else:
        accumulated = optax.MultiSteps(chain(), 3).gradient_transformation()
        tx = optax_ext.monitored(accumulated, MONITOR)
    history = walk(tx, 3 * 9)
    for micro in range(2, 3 * 9):
        readings = optax_ext.read_monitored(history[micro][-1])
        applied = ((micro + 1) // 3 - 1) // 2 * 2  # the last due one
        assert int(readings.step) == applied
        _, _, updates, _ = history[3 * applied + 2]
        norm = np.sqrt(sum(np.sum(np.square(u)) for u in jax.tree.leaves(updates)))
        assert norm > 0
        got = readings.flatten()["symptoms/global/update_norm/value"]
        assert got == pytest.approx(norm, rel=1e-4)
    assert any("delta8" in key for key in readings.flatten())


def test_a_masked_part_is_measured_alone():
    mask = {"layers": True, "norm": False}
    *_, (grads, _, _, state) = walk(optax.masked(optax_ext.monitored(chain(), MONITOR), mask), 3)
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads["layers"])))
    got = optax_ext.read_monitored(state).flatten()["symptoms/global/grad_norm/value"]
    assert got == pytest.approx(norm, rel=1e-4)


def test_an_optimizer_without_a_ring_is_refused():
    tx = optax_ext.monitored(optax.adam(1e-3), MONITOR)
    with pytest.raises(ValueError, match=r"found 0 in a chain of .*optax_ext\.track_delta\(\)"):
        tx.init(draw(0))


def test_a_ring_of_an_unfit_cadence_is_refused():
    tx = optax_ext.monitored(optax_ext.track_delta(every=3), MONITOR)
    with pytest.raises(ValueError, match="delta=4 is no multiple of track_delta's every=3"):
        tx.init(draw(0))


def test_a_state_without_readings_is_refused():
    with pytest.raises(ValueError, match=r"expected one `monitored` optimizer .* found 0"):
        optax_ext.read_monitored(chain().init(draw(0)))


def test_nothing_is_nan_in_a_state_that_waits():
    tx = optax_ext.monitored(chain(), MONITOR)
    state = tx.init(draw(0))
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(state))
