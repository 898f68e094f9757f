"""Monitors and transforms on eight devices: the numbers of one device, and little communication."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding

import optax_ext
import stabmon
from models.config import GPTConfig
from models.gpt import apply, init_params
from models.sharding import PLACES, batch_spec, shardings, specs
from tests.models.quick import quick_jit

slow = pytest.mark.slow
# No two axes of the same length: a shape in a compiled program tells what it is.
CONFIG = GPTConfig(
    layers=2, model=48, heads=4, kv_heads=2, head_dim=7, feedforward=40, context=8, vocabulary=64
)
ROUTED = GPTConfig(
    layers=2, model=48, heads=4, head_dim=7, feedforward=40, context=8, vocabulary=64, experts=8
)
EVERY, LAG = 2, 4
TIERS = ("router", "delta", "activations", "weights", "symptoms")


def draw(config, seed, scale=1e-2):
    noise = lambda x: scale * jax.random.normal(jax.random.key(seed), x.shape)
    return jax.tree.map(noise, init_params(config, 0))


def make(config):
    params = init_params(config, 0)
    layout = stabmon.find_layout(params)
    tx = optax.chain(
        optax.adamw(1e-2),
        optax_ext.msign(period=3, select="attention", layout=layout, method="newton_schulz"),
        optax_ext.track_delta(EVERY, 2, select=layout.selects("qk", "router")),
    )
    monitor = stabmon.Monitor(layout, router=1, delta=EVERY, activations=1, weights=1, symptoms=1)
    return params, tx, monitor


def trained(config, place=lambda tree: tree):
    """Parameters, optimizer state and readings after as many updates as the lag is long."""
    params, tx, monitor = make(config)
    params = place(params)
    state = jax.jit(tx.init)(params)

    @quick_jit
    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for seed in range(LAG):
        params, state = update(params, state, place(draw(config, seed)))
    return params, state, monitor


def measured(monitor, params, state, grads, config, tokens, tiers):
    capture = lambda: apply(config, params, tokens, capture=True)[1]
    return monitor(LAG, params, state, capture, grads=grads, updates=grads, due=tiers)


TOKENS = np.arange(8 * 8).reshape(8, 8) * 7 % 64


@pytest.fixture(scope="module")
def alone():
    """Parameters and readings on one device, by model."""
    results = {}
    for config in (CONFIG, ROUTED):
        params, state, monitor = trained(config)
        run = quick_jit(measured, static_argnums=(0, 4, 6))
        readings = run(monitor, params, state, draw(config, 9), config, TOKENS, TIERS)
        results[config] = params, readings.flatten()
    return results


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(got[key], value, rtol=2e-3, atol=2e-4, err_msg=key)


@pytest.mark.parametrize(
    ("parallelism", "config", "shape"),
    [
        pytest.param("data", CONFIG, (8, 1), marks=slow),
        pytest.param("fsdp", CONFIG, (8, 1), marks=slow),
        pytest.param("tensor", CONFIG, (1, 2), marks=slow),
        pytest.param("expert", ROUTED, (1, 8), marks=slow),
        ("mixed", ROUTED, (4, 2)),
    ],
)
def test_sharded_numbers_are_those_of_one_device(alone, parallelism, config, shape):
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        where = shardings(init_params(config, 0), parallelism, mesh)
        params, state, monitor = trained(config, lambda tree: jax.device_put(tree, where))
        tokens = jax.device_put(TOKENS, NamedSharding(mesh, batch_spec(parallelism)))
        grads = jax.device_put(draw(config, 9), where)
        run = quick_jit(measured, static_argnums=(0, 4, 6))
        got = run(monitor, params, state, grads, config, tokens, TIERS).flatten()
        held = state[-1].delta_ring[0]["layers"]["attn"]["q"]["kernel"]
        assert held.sharding.is_equivalent_to(where["layers"]["attn"]["q"]["kernel"], 4)
    expected_params, expected = alone[config]
    assert_same(got, expected)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(expected_params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("parallelism", "config", "shape"),
    [
        pytest.param("fsdp", CONFIG, (8, 1), marks=slow),
        pytest.param("tensor", CONFIG, (1, 2), marks=slow),
        pytest.param("expert", ROUTED, (1, 8), marks=slow),
        ("mixed", CONFIG, (4, 2)),
    ],
)
def test_a_mesh_with_explicit_axes_gives_the_same(alone, parallelism, config, shape):
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    tiers = ("delta", "weights", "symptoms") if parallelism == "mixed" else ("delta", "weights")
    with jax.set_mesh(mesh):
        where = shardings(init_params(config, 0), parallelism, mesh)
        params, state, monitor = trained(config, lambda tree: jax.device_put(tree, where))
        grads = jax.device_put(draw(config, 9), where)
        run = lambda p, s, g: monitor(LAG, p, s, grads=g, updates=g, due=tiers)
        got = quick_jit(run)(params, state, grads).flatten()
    expected = alone[config][1]
    assert_same(got, {k: v for k, v in expected.items() if k in got})
    assert len(got) > 15


def test_inside_shard_map_and_pmap_each_device_measures_its_copy(alone):
    params, state, monitor = trained(CONFIG)
    tiers = ("delta", "weights")
    run = lambda p, s: monitor(LAG, p, s, due=tiers).values
    expected = quick_jit(run)(params, state)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    whole = jax.P()
    mapped = jax.shard_map(run, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    copies = lambda tree: jax.tree.map(lambda x: jnp.stack([x] * 8), tree)
    inside = {"shard_map": quick_jit(mapped)(params, state)}
    inside["pmap"] = jax.tree.map(lambda x: x[5], jax.pmap(run)(copies(params), copies(state)))
    for name, got in inside.items():
        for key, values in expected.items():
            np.testing.assert_allclose(got[key], values, rtol=2e-3, atol=2e-4, err_msg=name)


def collectives(text):
    """(kind, shape) of every collective in a compiled program."""
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    found = re.findall(rf"= \(?(\w+\[[\d,]*\])[^=]*? ({kinds})(?:-start)?\(", text)
    return [(kind, [int(n) for n in re.findall(r"\d+", s.split("[")[1])]) for s, kind in found]


def lowered(tiers):
    """The compiled program of a mixed-parallel training step that measures `tiers`."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    params, _, monitor = make(CONFIG)
    tx = optax_ext.track_delta(EVERY, 2, select=monitor.layout.selects("qk"))
    where = shardings(params, "mixed", mesh)

    def step(params, state, grads):
        readings = None
        if tiers:
            readings = monitor(LAG, params, state, grads=grads, updates=grads, due=tiers)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, readings

    with jax.set_mesh(mesh):
        params = jax.device_put(params, where)
        state = jax.jit(tx.init)(params)
        return quick_jit(step).lower(params, state, params).compile().as_text()


def test_a_sampled_step_moves_gram_cores_and_no_matrix():
    found = collectives(lowered(("delta", "weights", "symptoms")))
    assert found
    whole = {CONFIG.model, CONFIG.feedforward_F}
    sizes = {n // parts for n in whole for parts in (1, 2, 4)}
    assert not any(sizes & set(shape) for kind, shape in found if kind != "all-reduce")
    # What is summed is at most four vectors a matrix, for power iteration.
    summed = [shape for kind, shape in found if kind == "all-reduce" and sizes & set(shape)]
    assert all(shape[-2] == 4 for shape in summed)
    delta = collectives(lowered(("delta",)))
    cores = CONFIG.layers * (CONFIG.heads + CONFIG.kv_heads_K) * (2 * CONFIG.head_dim_H) ** 2
    # Each side's two Gram matrices are summed and gathered, its three factors and the cores
    # gathered: nothing else of any size.
    assert sum(np.prod(shape) for _, shape in delta) <= 8 * cores


def test_activations_are_sampled_without_gathering_tokens():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    params, _, monitor = make(CONFIG)
    monitor = replace(monitor, router=0, delta=0, weights=0, symptoms=0, tokens=16, detail="full")
    batch = NamedSharding(mesh, jax.P(None, "data"))
    shape = (CONFIG.layers, 8, CONFIG.context, CONFIG.model)
    residual = jax.random.normal(jax.random.key(0), shape)
    measure = jax.jit(lambda params, x: monitor(1, params, None, {"residual": x}))
    alone = measure(params, residual).flatten()
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, shardings(params, "mixed", mesh))
        lain = jax.device_put(residual, batch)
        found = collectives(measure.lower(placed, lain).compile().as_text())
        apart = measure(placed, lain).flatten()
    np.testing.assert_allclose(*[[x[key] for key in alone] for x in (alone, apart)], rtol=1e-5)
    parts = {CONFIG.model // n for n in (1, 2, 4, 8)}
    moved = [shape for kind, shape in found if parts & set(shape)]
    assert moved
    assert all(kind == "all-to-all" for kind, shape in found if parts & set(shape))
    assert sum(np.prod(shape) for shape in moved) <= CONFIG.layers * CONFIG.model * (16 + 2 * 8)


def restoring(config, where, kind=AxisType.Auto, mesh=None, **options):
    """Collectives of a compiled restoration of all attention matrices, by `msign(1, …)`."""
    mesh = mesh or jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    params = init_params(config, 0)
    where = where(params, mesh)
    tx = optax_ext.msign(1, "attention", **({"method": "newton_schulz"} | options))

    def step(params, updates, state):
        updates, state = tx.update(updates, state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh):
        placed = jax.device_put(params, where)
        jitted = jax.jit(step, out_shardings=(where, None))
        return collectives(jitted.lower(placed, placed, tx.init(placed)).compile().as_text())


def mixed(params, mesh):
    return shardings(params, "mixed", mesh)


# Square matrices that read the stream and others that write into it, in one stack.
SQUARE = GPTConfig(layers=3, model=64, heads=4, context=8, vocabulary=64)


@pytest.mark.parametrize("config", [CONFIG, SQUARE, ROUTED])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_msign_sends_matrices_once_in_and_once_out(config, kind):
    shapes = 2 if config.kv_heads and config.kv_heads < config.heads else 1
    found = restoring(config, mixed, kind)
    part = config.model * config.head_dim_H // 8  # of a matrix, on a device
    moved = [(kind, shape) for kind, shape in found if np.prod(shape) >= part]
    # One for each of two mesh axes, in and out.
    assert [kind for kind, _ in moved] == ["all-to-all"] * 4 * shapes
    # All else is as long as the list of matrices.
    small = [np.prod(shape) for kind, shape in found if np.prod(shape) < part]
    assert all(size <= 4 * config.layers + 8 for size in small)


def test_msign_multiplies_without_communicating():
    def loop(turns):
        """Newton–Schulz written out, so that a product that communicates shows each time."""

        def sign(x):
            for _ in range(turns):
                x = 1.5 * x - 0.5 * x @ jnp.swapaxes(x, 1, 2) @ x
            return x

        return sign

    few, many = (restoring(CONFIG, mixed, method=loop(turns)) for turns in (2, 12))
    assert len(few) == len(many) > 0


def test_msign_moves_nothing_where_layers_lie_apart():
    mesh = jax.make_mesh((8,), ("stage",), axis_types=(AxisType.Auto,))
    apart = NamedSharding(mesh, jax.P("stage"))
    config = GPTConfig(layers=8, model=64, heads=4, context=8, vocabulary=64)

    def by_layer(params, mesh):
        whole = NamedSharding(mesh, jax.P())
        layered = lambda path, x: apart if "layers" in str(path[0]) else whole
        return jax.tree_util.tree_map_with_path(layered, params)

    found = restoring(config, by_layer, mesh=mesh, sharding=apart)
    assert all(np.prod(shape) <= 4 * config.layers for _, shape in found)


def test_an_unsampled_step_adds_no_collective():
    assert collectives(lowered(())) == []


def test_specs_name_an_axis_that_does_not_divide():
    mesh = jax.make_mesh((1, 8), ("data", "model"))
    with pytest.raises(ValueError, match="k/kernel: its axis K of 2 does not divide over 8"):
        specs(init_params(CONFIG, 0), "tensor", mesh)


def test_every_matrix_of_the_model_has_its_axes():
    for config in (CONFIG, ROUTED, GPTConfig(attention="mla", positions="rope", shared_experts=0)):
        mesh = jax.make_mesh((1, 1), ("data", "model"))
        params = jax.eval_shape(lambda c=config: init_params(c, 0))
        tree = specs(params, "mixed", mesh)
        flat = jax.tree.leaves_with_path(tree, is_leaf=lambda x: isinstance(x, jax.P))
        bare = {jax.tree_util.keystr(k, simple=True, separator="/") for k, s in flat if not len(s)}
        assert all("scale" in name for name in bare)
    assert set(PLACES) == {"data", "fsdp", "tensor", "expert", "mixed"}
