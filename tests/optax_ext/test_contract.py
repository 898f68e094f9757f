"""What every transform of `optax_ext` keeps to, whatever it does. Add a new one to `FACTORIES`.

Its own behaviour is tested in its own file; here: structure, wrappers, compilation, sharding,
checkpoints.
"""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optax_ext._clip import qk_clip
from optax_ext._delta import track_delta
from optax_ext._monitored import monitored
from optax_ext._msign import msign
from optax_ext._recovery import scale_by_control
from optax_ext._skip import skip_spikes
from stabmon import Monitor, find_layout


def clipped():
    """`qk_clip` with the largest logits filled in."""
    tx, logits = qk_clip(1.0), jnp.full((8, 2), 2.0)

    def update(updates, state, params=None, **extra_args):
        return tx.update(updates, state, params, max_attention_logits=logits, **extra_args)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def measured():
    """`monitored` around a chain of its own."""
    monitor = Monitor(find_layout(draw(0)), delta=2, weights=0, router=0, activations=0, symptoms=1)
    return monitored(optax.chain(optax.sgd(1e-2), track_delta(every=2, keep=2)), monitor)


FACTORIES = {
    "monitored": measured,
    "msign": functools.partial(msign, period=2, method=lambda x: 2 * x),
    "msign staggered": functools.partial(msign, period=2, stagger=True, method=lambda x: 2 * x),
    "msign triggered": functools.partial(msign, period=1, trigger=0.5, method=lambda x: 2 * x),
    "qk_clip": clipped,
    "scale_by_control": scale_by_control,
    "skip_spikes": lambda: skip_spikes(optax.sgd(1e-2, momentum=0.9)),
    "track_delta": functools.partial(track_delta, every=2, keep=2, select="q"),
    "track_delta of updates": functools.partial(track_delta, every=2, keep=1, source="updates"),
}
PARAMLESS = ("scale_by_control", "skip_spikes")
SHAPES = {
    "layers": {
        "attn": {"q": {"kernel": (8, 8, 2, 4)}, "k": {"kernel": (8, 8, 2, 4)}},
        "mlp": {"up": {"kernel": (8, 8, 8)}},
    },
    "norm": {"scale": (8,)},
}
every_factory = pytest.mark.parametrize("factory", list(FACTORIES.values()), ids=list(FACTORIES))


def draw(seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    leaf = lambda shape: jnp.asarray(rng.normal(size=shape), dtype)
    return jax.tree.map(leaf, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def form(tree):
    return jax.tree.map(lambda x: (jnp.shape(x), jnp.asarray(x).dtype), tree), jax.tree.structure(
        tree
    )


def abstract(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree), jax.tree.structure(tree)


def stepped(tx):
    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    return step


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@every_factory
def test_update_keeps_the_form_of_state_and_updates(factory, dtype):
    tx, params = factory(), draw(0, dtype)
    state = tx.init(params)
    updates, new = jax.eval_shape(tx.update, params, state, params)
    assert abstract(new) == form(state)
    assert abstract(updates) == form(params)


@every_factory
def test_a_step_under_jaxs_own_checks(factory):
    """NaN is looked for and no dtype promoted: a healthy step passes."""
    tx, params = factory(), draw(0)
    state = jax.jit(tx.init)(params)
    update = jax.jit(lambda u, s, p: tx.update(u, s, p))
    with jax.debug_nans(True), jax.numpy_dtype_promotion("strict"):
        new = jax.block_until_ready(update(params, state, params))
    assert form(new[1]) == form(state)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@every_factory
def test_the_form_stays_with_64_bits(factory, dtype):
    with jax.enable_x64(True):
        tx, params = factory(), draw(0, dtype)
        state = tx.init(params)
        updates, new = jax.eval_shape(tx.update, params, state, params)
        assert abstract(new) == form(state)
        assert abstract(updates) == form(params)


@every_factory
def test_scan_in_a_chain_equals_a_donating_loop_that_compiles_once(factory):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2), factory())
    step, params = stepped(tx), draw(0)
    grads = [draw(i) for i in range(1, 5)]
    scanned, _ = jax.jit(functools.partial(jax.lax.scan, step))(
        (params, tx.init(params)), jax.tree.map(lambda *x: jnp.stack(x), *grads)
    )
    compiled = jax.jit(lambda carry, grads: step(carry, grads)[0], donate_argnums=0)
    looped = jax.tree.map(jnp.copy, (params, jax.jit(tx.init)(params)))
    for each in grads:
        looped = compiled(looped, each)
    assert compiled._cache_size() == 1
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, scanned, looped)


@every_factory
def test_state_stands_inside_multi_steps_and_masked(factory):
    mask = lambda params: {"layers": True, "norm": False}
    wrapped = optax.MultiSteps(optax.masked(factory(), mask), 2).gradient_transformation()
    params = draw(0)
    state = wrapped.init(params)
    updates, new = jax.eval_shape(wrapped.update, params, state, params)
    assert abstract(new) == form(state)
    assert abstract(updates) == form(params)


@every_factory
def test_map_params(factory):
    """Placeholders survive `init`, and a leaf-wise map finds every parameter-like part."""
    tx, params = optax.chain(optax.adam(1e-2), factory()), draw(0)
    state = tx.init(params)
    mapped = optax.tree.map_params(tx, lambda x: x.astype(jnp.bfloat16), state)
    assert jax.tree.structure(mapped) == jax.tree.structure(state)
    assert mapped[0][0].mu["norm"]["scale"].dtype == jnp.bfloat16


@every_factory
def test_ignores_extra_arguments(factory):
    tx, params = factory(), draw(0)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    update = lambda *args: tx.update(*args, value=jnp.float32(0), unknown="x")
    jax.eval_shape(update, params, tx.init(params), params)


@pytest.mark.parametrize("factory", [f for name, f in FACTORIES.items() if name not in PARAMLESS])
def test_needs_params(factory):
    tx, params = factory(), draw(0)
    with pytest.raises(ValueError, match="params"):
        tx.update(params, tx.init(params))


@every_factory
def test_state_is_found_by_names_that_nothing_else_has(factory):
    state = optax.named_chain(("base", optax.adamw(1e-2)), ("ours", factory())).init(draw(0))
    if dataclasses.is_dataclass(state["ours"]):
        names = [field.name for field in dataclasses.fields(state["ours"])]
        assert not any(optax.tree.get_all_with_path(state["base"], name) for name in names)
    else:
        names = state["ours"]._fields
        assert all(len(optax.tree.get_all_with_path(state, name)) == 1 for name in names)


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (PartitionSpec("x"), AxisType.Auto),
        (PartitionSpec(None, "x"), AxisType.Auto),
        (PartitionSpec(None, "x"), AxisType.Explicit),
    ],
    ids=["layer", "row", "row explicit"],
)
@every_factory
def test_keeps_sharding(factory, spec, kind):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    place = lambda x: jax.device_put(
        x, NamedSharding(mesh, spec if x.ndim > 1 else PartitionSpec())
    )
    tx, params = factory(), jax.tree.map(place, draw(0))
    with jax.set_mesh(mesh) if kind == AxisType.Explicit else contextlib.nullcontext():
        state = jax.jit(tx.init)(params)
        updates, new = jax.jit(tx.update)(params, state, params)
    for a, b in zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    assert form(new) == form(state)


@every_factory
def test_a_checkpoint_restores_the_state_and_refuses_another_chain(factory, tmp_path):
    """Adding or dropping a stage between save and restore is an error, never silent."""
    with_it = optax.chain(optax.adam(1e-2), factory())
    without, params = optax.chain(optax.adam(1e-2)), draw(0)
    state = jax.tree.map(jnp.ones_like, with_it.init(params))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "with", state)
        checkpointer.save(tmp_path / "without", without.init(params))
        checkpointer.wait_until_finished()
        like = jax.eval_shape(with_it.init, params)
        restored = checkpointer.restore(tmp_path / "with", like)
        jax.tree.map(np.testing.assert_array_equal, restored, state)
        with pytest.raises(ValueError, match=r"(?i)structure|mismatch"):
            checkpointer.restore(tmp_path / "without", like)
        with pytest.raises(ValueError, match=r"(?i)structure|mismatch"):
            checkpointer.restore(tmp_path / "with", jax.eval_shape(without.init, params))
