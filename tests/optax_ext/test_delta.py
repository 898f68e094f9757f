"""`track_delta` and `read_delta`: exact differences, a fixed state, every wrapper people use."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from stabmon.monitor.snapshots import find_state

read_delta = jax.jit(optax_ext.read_delta)


def make_params(dtype=jnp.float32):
    return {
        "attn": {"q": jnp.full((3, 4), 1.0, dtype), "k": jnp.full((4, 3), 2.0, dtype)},
        "norm": jnp.ones((3,), dtype),
    }


@jax.jit
def noise_like(tree, key):
    return jax.tree.map(lambda p: jax.random.normal(key, p.shape, p.dtype), tree)


def walk(tx, params, steps, seed=0):
    """Take `steps` random steps; yields (step, state, params) before each update."""
    state = tx.init(params)
    update = jax.jit(tx.update)
    for step in range(steps):
        yield step, state, params
        grads = noise_like(params, jax.random.fold_in(jax.random.key(seed), step))
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    yield steps, state, params


@pytest.mark.parametrize("source", ["params", "updates"])
def test_reading_at_a_multiple_of_every_is_the_exact_difference(source):
    tx = optax.chain(optax.sgd(0.1), optax_ext.track_delta(every=3, keep=4, source=source))
    history = []
    for step, state, params in walk(tx, make_params(), 20):
        history.append(params)
        if step % 3:
            continue
        deltas = read_delta(state, params)
        assert sorted(deltas) == [3, 6, 9, 12]
        for lag, delta in deltas.items():
            if step < lag:
                assert int(delta.age) == 0
                assert all(not np.any(x) for x in jax.tree.leaves(delta.tree))
                continue
            assert int(delta.age) == lag
            expected = jax.tree.map(lambda a, b: a - b, params, history[step - lag])
            if source == "params":
                jax.tree.map(np.testing.assert_array_equal, delta.tree, expected)
            else:
                close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6)
                jax.tree.map(close, delta.tree, expected)


def test_between_multiples_the_age_tells_what_the_difference_spans():
    tx = optax.chain(optax.sgd(0.1), optax_ext.track_delta(every=4, keep=2))
    history = []
    for step, state, params in walk(tx, make_params(), 15):
        history.append(params)
        for delta in read_delta(state, params).values():
            if age := int(delta.age):
                expected = params["norm"] - history[step - age]["norm"]
                np.testing.assert_array_equal(delta.tree["norm"], expected)
    assert {lag: int(d.age) for lag, d in read_delta(state, params).items()} == {4: 3, 8: 7}


def test_step_without_a_boundary_leaves_the_ring_untouched():
    tx = optax_ext.track_delta(every=5, keep=2)
    states = [state for _, state, _ in walk(tx, make_params(), 5)]
    for before, after in itertools.pairwise(states[1:]):
        jax.tree.map(np.testing.assert_array_equal, before.delta_ring, after.delta_ring)


def test_updates_pass_through_bit_for_bit():
    params = make_params()
    grads = jax.tree.map(lambda p: p * 0.3, params)
    for tx in (optax_ext.track_delta(every=1), optax_ext.track_delta(every=7, source="updates")):
        updates, _ = tx.update(grads, tx.init(params), params)
        jax.tree.map(np.testing.assert_array_equal, updates, grads)


def test_updates_source_sees_what_bfloat16_parameters_swallow():
    params = {"w": jnp.ones((2, 2), jnp.bfloat16)}
    seen = {}
    for source in ("params", "updates"):
        tx = optax_ext.track_delta(every=10, keep=1, source=source)
        state, now = tx.init(params), params
        for _ in range(10):
            updates, state = tx.update({"w": jnp.full((2, 2), 1e-3, jnp.bfloat16)}, state, now)
            now = optax.apply_updates(now, updates)
        seen[source] = float(optax_ext.read_delta(state, now)[10].tree["w"][0, 0])
    assert seen["params"] == 0.0
    assert seen["updates"] == pytest.approx(1e-2, rel=1e-2)


def test_only_selected_leaves_are_kept():
    tx = optax_ext.track_delta(every=1, keep=2, select="attn/q")
    params = make_params()
    state = tx.init(params)
    assert [x.shape for x in jax.tree.leaves(state.delta_ring)] == [(3, 4), (3, 4)]
    delta = optax_ext.read_delta(state, params)[1]
    assert isinstance(delta.tree["norm"], optax.MaskedNode)
    assert delta.tree["attn"]["q"].shape == (3, 4)


@pytest.mark.parametrize(
    "select",
    [
        "attn",
        lambda path, leaf: path.startswith("attn"),
        {"attn": {"q": True, "k": True}, "norm": False},
    ],
)
def test_ways_to_select(select):
    state = optax_ext.track_delta(select=select, keep=1).init(make_params())
    assert len(jax.tree.leaves(state.delta_ring)) == 2


def test_inside_masked_only_the_unmasked_part_is_tracked():
    mask = {"attn": {"q": True, "k": False}, "norm": False}
    tx = optax.masked(optax_ext.track_delta(every=1, keep=1), mask)
    *_, (_, state, params) = walk(tx, make_params(), 2)
    delta = optax_ext.read_delta(state, params)[1]
    assert isinstance(delta.tree["attn"]["k"], optax.MaskedNode)
    np.testing.assert_array_equal(delta.tree["attn"]["q"].shape, (3, 4))


def test_multi_steps_counts_applied_updates():
    inner = optax.chain(optax.sgd(0.1), optax_ext.track_delta(every=2, keep=2))
    tx = optax.MultiSteps(inner, every_k_schedule=3)
    visited = list(walk(tx, make_params(), 13))
    history = {micro // 3: params for micro, _, params in visited}
    _, state, params = visited[-1]
    assert int(find_state(state).delta_step) == 4
    delta = optax_ext.read_delta(state, params)
    assert {lag: int(d.age) for lag, d in delta.items()} == {2: 2, 4: 4}
    np.testing.assert_array_equal(delta[4].tree["norm"], history[4]["norm"] - history[0]["norm"])


def test_a_bad_number_of_snapshots_or_steps_is_refused():
    with pytest.raises(ValueError, match="expected every >= 1, got 0"):
        optax_ext.track_delta(every=0)
    with pytest.raises(ValueError, match="expected keep >= 1, got -1"):
        optax_ext.track_delta(keep=-1)
    with pytest.raises(ValueError, match="source is 'params' or 'updates', got 'weights'"):
        optax_ext.track_delta(source="weights")


def test_a_selection_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"'router' matches none of 3 leaves: attn/k, attn/q"):
        optax_ext.track_delta(select="router").init(make_params())


def test_a_mask_of_another_structure_is_refused():
    with pytest.raises(ValueError, match="expected a tree of booleans like"):
        optax_ext.track_delta(select={"attn": True}).init(make_params())


def test_update_without_params_is_refused():
    tx = optax_ext.track_delta()
    params = make_params()
    with pytest.raises(ValueError, match="got params=None; call"):
        tx.update(params, tx.init(params))


def test_a_chain_without_a_ring_is_refused_on_reading():
    params = make_params()
    with pytest.raises(ValueError, match="found 0 in a chain of EmptyState, EmptyState; end the"):
        optax_ext.read_delta(optax.sgd(0.1).init(params), params)


def test_two_rings_are_refused_on_reading():
    params = make_params()
    tx = optax.chain(optax_ext.track_delta(), optax_ext.track_delta(every=5))
    with pytest.raises(ValueError, match=r"found 2 \(every=50 keep=4, every=5 keep=4\); pass"):
        optax_ext.read_delta(tx.init(params), params)


def test_a_step_between_snapshots_copies_no_place_of_the_ring():
    params = {"w": jnp.ones((96, 80))}
    tx = optax.chain(optax.sgd(0.1), optax_ext.track_delta(every=50, keep=4))

    def step(params, state):
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, tx.init(params)).compile()
    entry = compiled.as_text().split("ENTRY")[1]
    copies = re.findall(r"= f32\[96,80\]\S* copy\(", entry)
    # The parameters themselves may be copied once, since they are both updated and snapshotted.
    assert len(copies) <= 1


@pytest.mark.parametrize("source", ["params", "updates"])
def test_a_ring_in_host_memory_reads_the_same(source):
    def last(kind):
        ring = optax_ext.track_delta(every=3, keep=2, source=source, memory_kind=kind)
        tx = optax.chain(optax.sgd(0.1), ring)
        *_, (_, state, params) = walk(tx, make_params(), 9)
        return state, params

    near, far = last(None), last("pinned_host")
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(find_state(far[0]).delta_ring)}
    assert kinds == {"pinned_host"}
    for lag, delta in read_delta(*far).items():
        jax.tree.map(np.testing.assert_array_equal, delta, read_delta(*near)[lag])
        assert {x.sharding.memory_kind for x in jax.tree.leaves(delta.tree)} == {"device"}


def test_an_unknown_memory_is_refused():
    with pytest.raises(ValueError, match="memory_kind is None or 'pinned_host', got 'disk'"):
        optax_ext.track_delta(memory_kind="disk")


def test_a_backend_without_the_memory_is_refused(monkeypatch):
    class Bare:
        def addressable_memories(self):
            return []

    monkeypatch.setattr(jax, "local_devices", lambda: [Bare()])
    with pytest.raises(ValueError, match=r"backend 'cpu' has no memory 'pinned_host', it has \[\]"):
        optax_ext.track_delta(memory_kind="pinned_host").init(make_params())


def restored(tx, params, saved):
    """The saved arrays in a state of `tx`, as a checkpoint restores them."""
    return jax.tree.unflatten(jax.tree.structure(tx.init(params)), jax.tree.leaves(saved))


@pytest.mark.parametrize(
    ("first", "second", "word"),
    [
        ({"every": 3}, {"every": 5}, "every 3, now 5"),
        ({"every": 3, "select": "q|k"}, {"every": 3, "select": "k|v"}, "select (checksum) "),
    ],
)
def test_a_ring_of_another_chain_is_not_read_and_starts_anew(first, second, word):
    params = {name: jnp.full((2, 2), float(i)) for i, name in enumerate("qkv")}
    before, after = (optax_ext.track_delta(keep=2, **kwargs) for kwargs in (first, second))
    *_, (_, saved, params) = walk(before, params, 8)
    state = restored(after, params, saved)
    assert word in find_state(state).conflict()
    assert "starts anew at step 8" in find_state(state).conflict()
    assert [int(d.age) for d in read_delta(state, params).values()] == [0, 0]
    history, update, every = {}, jax.jit(after.update), second["every"]
    for step in range(8, 8 + 3 * every):
        history[step] = params
        for lag, delta in read_delta(state, params).items():
            age = int(delta.age)
            # The first snapshot of its own is that of the first multiple of `every` from 8 on.
            assert (age > 0) == ((step - 1) // every * every - (lag - every) >= 8)
            if age:
                expected = params["k"] - history[step - age]["k"]
                np.testing.assert_array_equal(delta.tree["k"], expected)
        _, state = update(params, state, params)
        params = jax.tree.map(lambda p, step=step: p + step, params)
    assert age > 0
    assert find_state(state).conflict() is None
    assert int(find_state(state).delta_step) == 8 + 3 * every


def test_the_same_chain_goes_on_after_a_restore():
    tx = optax_ext.track_delta(every=2, keep=2)
    *_, (_, saved, params) = walk(tx, make_params(), 5)
    state = restored(tx, params, saved)
    assert find_state(state).conflict() is None
    assert [int(d.age) for d in read_delta(state, params).values()] == [1, 3]


def test_a_pickled_state_of_another_transform():
    params = make_params()
    state = optax_ext.track_delta(every=3, keep=2).init(params)
    with pytest.raises(ValueError, match="the state is of keep=2, source='params', the transform"):
        optax_ext.track_delta(every=3, keep=4).update(params, state, params)
    _, new = optax_ext.track_delta(every=5, keep=2).update(params, state, params)
    assert (new.every, new.conflict()) == (5, None)


def test_leaves_that_are_no_real_numbers_are_left_out_by_default():
    params = {
        "w": jnp.ones((2, 2)),
        "float8": jnp.ones((2, 2), jnp.float8_e4m3fn),
        "gain": 1.0,
        "none": None,
        "count": jnp.zeros((), jnp.int32),
        "phase": jnp.ones(2, jnp.complex64),
        "key": jax.random.key(0),
        "on": True,
    }
    tx = optax_ext.track_delta(every=1, keep=1)
    state = jax.jit(tx.update)(params, tx.init(params), params)[1]
    moved = params | {"w": jnp.full((2, 2), 3.0), "gain": 1.5}
    tree = read_delta(state, moved)[1].tree
    masked = {name for name in params if isinstance(tree[name], optax.MaskedNode)}
    assert masked == {"count", "phase", "key", "on"}
    assert tree["none"] is None
    assert float(tree["gain"]) == 0.5
    np.testing.assert_array_equal(tree["w"], 2)
    assert tree["float8"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("leaf", "kind"),
    [
        (jnp.zeros(3, jnp.int32), "int32"),
        (jnp.zeros(3, jnp.complex64), "complex64"),
        (jax.random.key(0), "key<fry>"),
        (3, "int"),
    ],
)
def test_a_selected_leaf_without_differences_is_named(leaf, kind):
    with pytest.raises(ValueError, match=f"track_delta: odd is {kind}, only real floating-point"):
        optax_ext.track_delta(select="odd").init({"odd": leaf})


def test_a_ring_inside_a_wrapper_that_reshapes_is_refused_on_reading():
    params = make_params()
    state = optax.flatten(optax_ext.track_delta()).init(params)
    with pytest.raises(ValueError, match=r"holds '' of shape \(27,\).*outside of .* optax.flatten"):
        optax_ext.read_delta(state, params)


def test_parameters_of_another_model_are_refused_on_reading():
    state = optax_ext.track_delta().init({"w": jnp.ones((2, 3))})
    with pytest.raises(ValueError, match=r"w has shape \(3, 2\), its snapshots have \(2, 3\)"):
        optax_ext.read_delta(state, {"w": jnp.ones((3, 2))})


def test_the_optimizer_of_flax_nnx_unconverted():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    tx = optax.chain(optax.sgd(1.0), optax_ext.track_delta(every=1, keep=1))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    delta = optax_ext.read_delta(optimizer.opt_state, nnx.state(model, nnx.Param))[1]
    np.testing.assert_allclose(delta.tree["kernel"][...], -1, rtol=1e-6)


def test_nothing_is_nan_before_there_are_snapshots():
    with jax.debug_nans(True):
        *_, (_, state, params) = walk(optax_ext.track_delta(every=2, keep=2), make_params(), 1)
        jax.block_until_ready(read_delta(state, params))
