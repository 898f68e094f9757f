"""Digests: equal on every mesh, told apart by layer and expert, and judged in a real run."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import stabmon
from stabmon.contracts import Contracts, digest
from stabmon.contracts.bits import bits
from stabmon.contracts.parts import find_leaves, owner
from stabmon.runs.run import load_run
from tests.stabmon import trees
from tests.stabmon.watch.loop import CADENCES, State, batch_of, init_params, loss_fn


def test_bits_are_those_of_a_mesh():
    x = jax.random.normal(jax.random.key(0), (8, 16))
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    for spec in (P(), P("a", "b"), P(None, "a"), P(("a", "b"))):
        divided = jax.device_put(x, NamedSharding(mesh, spec))
        assert int(jax.jit(bits)(divided)) == int(bits(x))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.int32, bool])
def test_bits_see_a_value_and_a_place(dtype):
    x = (
        jnp.arange(24).reshape(2, 3, 4) % 5 > 1
        if dtype is bool
        else jnp.arange(24).reshape(2, 3, 4)
    )
    x = x.astype(dtype)
    changed = x.at[1, 2, 3].set(x[0, 0, 0])
    kept = bits(x, (0,))
    assert (np.asarray(kept == bits(changed, (0,))) == [True, x[1, 2, 3] == x[0, 0, 0]]).all()
    assert int(bits(x)) != int(bits(x[::-1]))
    assert int(bits(x, ordered=False)) == int(bits(x[::-1], ordered=False))


def test_bits_of_keys_and_nothing():
    a, b = jax.random.split(jax.random.key(0))
    assert int(bits(a)) != int(bits(b))
    assert int(bits(jnp.zeros((0, 3)))) == 0


def test_leaves_are_told_apart_by_layer_and_expert():
    tree = jax.tree.map(jnp.asarray, trees.maxtext("MoeBlock_0"))
    found = {leaf.path: leaf for leaf in find_leaves(stabmon.find_layout(tree), tree)}
    experts = found["params/decoder/layers/MoeBlock_0/wi_0"]
    assert (experts.axes, experts.names) == ((0, 1), ("expert", "layer"))
    norm = found["params/decoder/layers/pre_self_attention_layer_norm/scale"]
    assert (norm.axes, norm.names) == ((1,), ("layer",))
    assert found["params/token_embedder/embedding"].axes == ()


def test_a_moment_belongs_to_the_parameter_with_the_longest_path():
    params = {"head": jnp.zeros(3), "layers": {"head": jnp.zeros(3)}}
    leaves = find_leaves(stabmon.Layout("none", ()), params)
    assert owner("0/mu/layers/head", (3,), leaves) == leaves[1]
    assert owner("0/mu/head", (3,), leaves) == leaves[0]
    assert owner("0/mu/head", (4,), leaves) is None


def test_copies_that_differ_are_named():
    params = init_params()
    layout = stabmon.find_layout(params)
    mesh = jax.make_mesh((4,), ("data",))

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    def drift(tree, by):
        return tree | {"head": tree["head"] + by[0]}

    forms = []

    @jax.jit
    def measured(params):
        row, form = digest(layout, params)
        forms.append(form)
        return row

    spread = jax.device_put(params, NamedSharding(mesh, P()))
    divided = lambda x: jax.device_put(x, NamedSharding(mesh, P("data")))
    same = measured(drift(spread, divided(jnp.zeros(4))))
    assert Contracts().observe(0, same, forms[0])[1] == []
    parted = measured(drift(spread, divided(jnp.arange(4.0))))
    assert [x[:2] for x in Contracts().observe(0, parted, forms[0])[1]] == [("replicas", "head")]


def params_in_use():
    """Parameters of the loop's model, less values that its loss does not read."""
    params = init_params()
    del params["layers"]["attn"]["v"]
    return params


def train(folder, tx, change=lambda grads: grads, params=None, **options):
    """The verdicts that a user's loop of a few lines leaves in its folder."""
    params = params_in_use() if params is None else params
    cadences = CADENCES | {"delta": 0, "contracts": 2}
    monitor = stabmon.Monitor(stabmon.find_layout(params), **cadences)
    with stabmon.Watch(folder, params, monitor=monitor, schedule=3e-3, **options) as watch:
        state = State(params, tx.init(params))

        @jax.jit
        def step(i, state, batch):
            loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
            grads = change(grads)
            with jax.numpy_dtype_promotion("standard"):
                updates, opt_state = tx.update(grads, state.opt_state, state.params)
            seen = {"grads": grads, "updates": updates, "loss": loss, "batch": batch}
            readings = watch.measure(i, state.params, state.opt_state, **seen)
            return State(optax.apply_updates(state.params, updates), opt_state), readings, loss

        for i in range(12):
            state, readings, loss = step(jnp.int32(i), state, batch_of(i))
            watch.observe(i, readings, loss=loss)
    return load_run(folder)


def test_a_users_loop_gets_all_of_it_without_another_argument(tmp_path):
    run = train(tmp_path, optax.adamw(3e-3))
    assert [row for row in run.events if row["kind"] == "contract"] == []
    asked = {key.split("/")[2] for key in run.metrics if key.startswith("contracts/")}
    assert asked >= {"moves", "gradients", "answers", "moments", "counts", "rate", "batch", "types"}
    assert {float(run.metrics[f"contracts/global/{name}/value"][1].max()) for name in asked} == {0}


def test_a_broken_one_is_an_event_and_an_incident(tmp_path):
    seen = []
    stop = lambda grads: grads | {"head": jnp.zeros_like(grads["head"])}
    tell = lambda change, incident: seen.append(incident.quantities)
    run = train(tmp_path, optax.adam(3e-3), stop, on_incident=(tell,))
    events = [row for row in run.events if row["kind"] == "contract"]
    assert [(x["contract"], x["leaf"], x["since"]) for x in events] == [("gradients", "head", 0)]
    assert events[0]["step"] == 4
    assert seen[0] == ["contracts/gradients"]


def test_a_leaf_that_the_loss_does_not_read_is_named(tmp_path):
    run = train(tmp_path, optax.adam(3e-3), params=init_params())
    found = [(x["contract"], x["leaf"]) for x in run.events if x["kind"] == "contract"]
    assert found == [("gradients", "layers/attn/v/kernel")]


def test_frozen_names_what_must_not_move(tmp_path):
    run = train(tmp_path, optax.adam(3e-3), frozen="attn/k")
    found = {(x["contract"], x["leaf"]) for x in run.events if x["kind"] == "contract"}
    assert found == {("frozen", "layers/attn/k/kernel")}
    with pytest.raises(ValueError, match="matches none of 3 leaves: head"):
        stabmon.Watch(tmp_path / "other", params_in_use(), frozen="embed")
