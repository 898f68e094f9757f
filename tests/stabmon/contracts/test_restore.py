"""Ten ways in which a checkpoint comes back wrong are each told; on another mesh it is the same."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from stabmon.contracts.restore import compared, state_digest
from stabmon.runs.run import load_run
from tests.stabmon.watch.loop import build, run


def made(seed):
    keys = jax.random.split(jax.random.key(seed), 4)
    draw = lambda key: jax.random.normal(key, (2, 8, 4))
    return {
        "params": {"q": draw(keys[0]), "k": draw(keys[1])},
        "mu": {"q": draw(keys[2]), "k": draw(keys[3])},
        "step": jnp.int32(500 * seed),
        "key": jax.random.key(seed),
    }


def having(path, value):
    """A change of one leaf of the state."""

    def change(state):
        first, *rest = path.split("/")
        if rest:
            return state | {first: state[first] | {rest[0]: value(state[first][rest[0]])}}
        return state | {first: value(state[first])}

    return change


INJECTORS = {
    "missing": (lambda s: {k: v for k, v in s.items() if k != "key"}, {"key": "missing"}),
    "permuted": (having("params/q", lambda x: x[::-1]), {"params/q": "in another order"}),
    "swapped": (
        lambda s: s | {"params": {"q": s["params"]["k"], "k": s["params"]["q"]}},
        {"params/k": "saved as params/q", "params/q": "saved as params/k"},
    ),
    "cast": (having("mu/k", lambda x: x.astype(jnp.bfloat16)), {"mu/k": "and is bfloat16"}),
    "rounded": (
        having("params/k", lambda x: x.astype(jnp.bfloat16).astype(jnp.float32)),
        {"params/k": "rounded to a lower precision"},
    ),
    "stale": (lambda s: s | {"mu": made(1)["mu"]}, {"mu/k": "of step 500", "mu/q": "of step 500"}),
    "counter": (having("step", jnp.zeros_like), {"step": "was 1,000 and is 0"}),
    "stream": (having("key", lambda _: jax.random.key(9)), {"key": "random stream"}),
    "zeros": (having("mu/q", jnp.zeros_like), {"mu/q": "all zeros"}),
    "shard": (
        having("params/q", lambda x: x.at[:, :2].set(0)),
        {"params/q": "25% of it have become zeros"},
    ),
    "shape": (having("params/q", lambda x: x[:1]), {"params/q": "had shape [2, 8, 4]"}),
}


@pytest.mark.parametrize("name", INJECTORS)
def test_each_is_told_with_its_leaf(name):
    change, expected = INJECTORS[name]
    saved, older = state_digest(made(2)), {500: state_digest(made(1))}
    found = compared(saved, state_digest(change(made(2))), older)
    assert found.keys() == expected.keys()
    assert all(words in found[leaf] for leaf, words in expected.items())


def test_on_another_mesh_nothing_is():
    saved = state_digest(made(2))
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    place = lambda x: jax.device_put(x, NamedSharding(mesh, P("a", "b") if x.ndim == 3 else P()))
    assert compared(saved, state_digest(jax.tree.map(place, made(2)))) == {}


@pytest.mark.parametrize("broken", [False, True])
def test_a_run_that_goes_on_says_what_came_back_wrong(tmp_path, broken):
    states = {}
    options = {"save": states.__setitem__, "restore": states.__getitem__}
    watch, tx, state = build(tmp_path, **options)
    with watch:
        run(watch, tx, state, 10)
    if broken:
        head = states[10].params["head"]
        states[10] = states[10]._replace(params=states[10].params | {"head": head[::-1]})
    watch, tx, state = build(tmp_path, **options)
    with watch:
        run(watch, tx, watch.resume(state), 20)
    rows = [row for row in load_run(tmp_path).events if row.get("contract") == "restore"]
    told = [(row["leaf"], row["since"], row["sentence"]) for row in rows]
    assert told == [("params/head", 10, "its entries are in another order")] * broken


@pytest.mark.parametrize("count", [7, 8])
def test_a_count_in_pythons_own_numbers_is_compared_by_value(count):
    told = compared(state_digest({"step": jnp.int32(7)}), state_digest({"step": count}))
    assert told == ({} if count == 7 else {"step": "it was 7 and is 8"})
