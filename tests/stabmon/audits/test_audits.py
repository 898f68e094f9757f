"""Each audit convicts a fault that is planted, names its place, and acquits the clean case."""

import importlib.util
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stabmon
from stabmon.audits import AUDITS, Outcome, Standing
from stabmon.audits.case import tokens_of
from stabmon.audits.repeat import digest

_SPEC = importlib.util.spec_from_file_location("audit_model", Path(__file__).parent / "model.py")
model = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(model)
case = model.case


@pytest.fixture(autouse=True)
def _standard_promotion():
    """Optimizers of Optax need it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def says(name, outcome, **changes):
    verdict = AUDITS[name](case(**changes))
    assert verdict.outcome is outcome, verdict
    return verdict


def convicts(name, **changes):
    return says(name, Outcome.CONVICTED, **changes)


def acquits(name, **changes):
    return says(name, Outcome.ACQUITTED, **changes)


# Precision.


@jax.custom_vjp
def coarse(logits):
    """Logits, of whose gradient the low bits are cut off."""
    return logits


coarse.defvjp(
    lambda x: (x, None),
    lambda _, g: ((jnp.trunc(g * 2**7 / jnp.max(jnp.abs(g))) / 2**7 * jnp.max(jnp.abs(g)),)),
)


def one_layer(logits, i):
    damaged = coarse(logits[:, 1:])
    return jnp.concatenate([logits[:, :1], damaged], axis=1) if i == 1 else logits


def low_loss(params, batch):
    return model.entropy(model.forward(params, batch[0], one_layer), batch[1])


def bf16_loss(params, batch):
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    return model.entropy(model.forward(low, batch[0]).astype(jnp.float32), batch[1])


def test_precision_names_layer_and_head_of_a_coarse_backward():
    verdict = convicts("precision", loss=low_loss, reference=model.loss_fn)
    assert (verdict.cause, verdict.layer, verdict.head) == ("attention numerics", 1, 1)


def test_precision_error_is_that_of_the_two_gradients():
    # In float64 the cut falls elsewhere: the oracle takes the same float32 gradients.
    verdict = convicts("precision", loss=low_loss, reference=model.loss_fn)
    params, batch = model.init_params(), model.batch_of(0)
    right, bad = (jax.jit(jax.grad(f))(params, batch) for f in (model.loss_fn, low_loss))
    errors = []
    for role in "qk":
        trees = (tree["layers"]["attn"][role]["kernel"] for tree in (right, bad))
        a, b = (np.asarray(x, np.float64)[1, :, 1] for x in trees)
        errors.append(np.linalg.norm(a - b) / np.linalg.norm(a))
    assert verdict.numbers["error"] == pytest.approx(max(errors), rel=1e-3)


def test_precision_acquits_float32_against_float64():
    acquits("precision")


def test_precision_acquits_bfloat16_that_is_meant_and_convicts_it_where_it_is_not():
    acquits("precision", loss=bf16_loss, reference=model.loss_fn, precision="bfloat16")
    convicts("precision", loss=bf16_loss, reference=model.loss_fn)


# The same bits.


def test_repeat_convicts_noise_that_has_no_key_and_acquits_the_clean_step():
    rng = np.random.default_rng(0)
    drawn = lambda: np.float32(1 + 1e-3 * rng.random())

    def noisy(params, batch):
        gain = jax.pure_callback(drawn, jax.ShapeDtypeStruct((), jnp.float32))
        return model.loss_fn(params, batch) * jax.lax.stop_gradient(gain)

    convicts("repeat", loss=noisy)
    acquits("repeat")


def test_digest_sees_a_bit_and_an_exchange():
    x = jnp.arange(1.0, 9.0)
    flipped = jax.lax.bitcast_convert_type(
        jax.lax.bitcast_convert_type(x, jnp.uint32)
        .at[3]
        .set(jax.lax.bitcast_convert_type(x, jnp.uint32)[3] ^ jnp.uint32(1 << 31)),
        jnp.float32,
    )
    assert int(digest(x)) not in {int(digest(flipped)), int(digest(x[::-1]))}


def test_replicas_names_the_leaf_of_which_a_copy_has_drifted():
    mesh = jax.make_mesh((8,), ("data",))
    place = jax.sharding.NamedSharding(mesh, jax.P())
    params = jax.device_put(model.init_params(), place)
    acquits("replicas", params=params)
    embedding = params["embed"]["embedding"]
    copies = [x.data.at[0, 0].add(1e-6 * (x.device.id == 5)) for x in embedding.addressable_shards]
    drifted = jax.make_array_from_single_device_arrays(embedding.shape, place, copies)
    verdict = convicts("replicas", params=params | {"embed": {"embedding": drifted}})
    assert verdict.path == "embed/embedding"
    says("replicas", Outcome.UNDECIDED)


# What a position sees, and what it is asked for.


def leaky(params, batch):
    return model.forward(params, batch[0], causal=False)


def alone(params, batch):
    return model.forward(params, batch[0], lambda x, i: x + 1e9 * jnp.eye(model.T)[None, None])


def across(params, batch):
    logits = model.logits_fn(params, batch)
    return logits + 0.1 * jnp.mean(logits, axis=0, keepdims=True)


def test_causality_convicts_leaks_and_blindness():
    acquits("causality")
    assert convicts("causality", logits=leaky).cause == "leak"
    assert "sequence" in convicts("causality", logits=across).sentence
    assert convicts("causality", logits=alone).cause == "blind mask"


def test_causality_convicts_packed_documents_that_see_each_other():
    inputs, targets = model.batch_of(0)
    segments = jnp.where(jnp.arange(model.T)[None] < 8, 1, 2) + jnp.zeros_like(inputs)
    packed = {"inputs": inputs, "targets": targets, "segment_ids": segments}

    def masked(params, batch):
        same = batch["segment_ids"][:, :, None] == batch["segment_ids"][:, None]
        fence = lambda logits, i: jnp.where(same[:, None], logits, -1e9)
        return model.forward(params, batch["inputs"], fence)

    unmasked = lambda params, batch: model.forward(params, batch["inputs"])
    acquits("causality", batch=packed, logits=masked)
    assert "documents" in convicts("causality", batch=packed, logits=unmasked).sentence


@pytest.mark.parametrize(("shift", "cause"), [(2, "shifted targets"), (0, "leak")])
def test_targets_convicts_labels_of_another_shift(shift, cause):
    inputs, targets = model.batch_of(0)
    whole = jnp.concatenate([inputs, targets[:, -1:]], axis=1)
    wrong = whole[:, : -3 + 1], whole[:, shift : model.T - 1 + shift]
    assert convicts("targets", batch=wrong, logits=None).cause == cause


def test_targets_convicts_a_loss_that_shifts_again_and_acquits_the_right_one():
    twice = lambda w, b: model.entropy(model.logits_fn(w, b)[:, :-1], b[1][:, 1:])
    assert "+2" in convicts("targets", loss=twice).sentence
    acquits("targets")
    acquits("targets", loss=lambda w, b: model.loss_fn(w, b) + 0.01)


# Data.


def text(seed):
    x, y = model.batch_of(seed, 16, 64)
    return x, y


def healthy():
    return [text(seed) for seed in range(1, 7)]


def dirty(share):
    rng = np.random.default_rng(5)
    rows = np.concatenate([np.asarray(text(0)[0])[:, :1], text(0)[1]], axis=1)
    noise = rng.integers(0, model.V, rows.shape)
    rows = np.where(rng.random(rows.shape) < share, noise, rows).astype(np.int32)
    return jnp.asarray(rows[:, :-1]), jnp.asarray(rows[:, 1:])


def test_batch_convicts_what_is_not_text_and_acquits_text():
    acquits("batch", batch=text(0), healthy=healthy())
    assert convicts("batch", batch=dirty(0.1), healthy=healthy()).cause == "dirty data"
    rows = np.asarray(text(0)[0])
    order = np.random.default_rng(0).permuted(rows.ravel()).reshape(rows.shape)
    pair = lambda x: (jnp.asarray(x[:, :-1]), jnp.asarray(x[:, 1:]))
    assert convicts("batch", batch=pair(order), healthy=healthy()).cause == "shuffled"
    assert convicts("batch", batch=pair(np.resize(rows[:8], rows.shape))).cause == "repeated data"
    again = convicts("batch", batch=healthy()[2], healthy=healthy())
    assert again.cause == "repeated data"


# The optimizer.


def trained(tx, steps=20, **changes):
    """A case after some steps of an optimizer."""
    params = model.init_params()
    state = tx.init(params)

    @jax.jit
    def step(params, state, batch):
        grads = jax.grad(model.loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for i in range(steps):
        params, state = step(params, state, model.batch_of(i))
    known = {"params": params, "tx": tx, "opt_state": state, "step": steps, "schedule": 1e-3}
    return known | changes


def matrices(params):
    return jax.tree_util.tree_map_with_path(lambda p, _: "scale" not in str(p), params)


def test_optimizer_reads_rate_and_decay_of_adamw():
    tx = optax.adamw(1e-3, weight_decay=0.1, mask=matrices)
    decayed = lambda path, leaf: "scale" not in path
    verdict = acquits("optimizer", **trained(tx, decay=0.1, decayed=decayed))
    assert verdict.numbers["rate"] == pytest.approx(1e-3, rel=1e-3)
    assert verdict.numbers["decay"] == pytest.approx(0.1, rel=1e-2)


def test_optimizer_convicts_wrong_rate_decay_and_mask():
    tx = optax.adamw(3e-3, weight_decay=0.1)
    assert convicts("optimizer", **trained(tx)).cause == "rate"
    strong = optax.adamw(1e-3, weight_decay=20.0)
    assert convicts("optimizer", **trained(strong, decay=0.1)).cause == "decay"
    other = lambda params: jax.tree.map(lambda x: not x, matrices(params))
    mask = optax.adamw(1e-3, weight_decay=0.1, mask=other)
    assert "wrong way" in convicts("optimizer", **trained(mask)).sentence


def test_optimizer_convicts_frozen_leaves_lost_moments_counters_and_scale():
    def freeze(params):
        frozen = lambda path, _: "stop" if "'up'" in jax.tree_util.keystr(path) else "go"
        return jax.tree_util.tree_map_with_path(frozen, params)

    tx = optax.multi_transform({"go": optax.adamw(1e-3), "stop": optax.set_to_zero()}, freeze)
    verdict = convicts("optimizer", **trained(tx))
    assert (verdict.cause, verdict.path) == ("frozen leaf", "layers/mlp/up/kernel")
    tx = optax.adamw(1e-3)
    known = trained(tx)
    lost = known | {"opt_state": tx.init(known["params"])}
    assert convicts("optimizer", **lost).cause == "counter"
    adam = known["opt_state"][0]._replace(nu=jax.tree.map(jnp.zeros_like, known["opt_state"][0].nu))
    empty = known | {"opt_state": (adam, *known["opt_state"][1:])}
    assert convicts("optimizer", **empty).cause == "lost moments"
    small = optax.chain(optax.scale(1e-9), optax.adamw(1e-3))
    assert convicts("optimizer", **trained(small)).cause == "scale"


# Weights and modules.


def changed(path, edit):
    params = model.init_params()
    *parents, last = path.split("/")
    node = params
    for name in parents:
        node = node[name]
    node[last] = edit(node[last])
    return params


def test_weights_convicts_a_bit_flip_a_dead_head_and_a_broken_tie():
    acquits("weights", snapshot=model.init_params(1))
    q = "layers/attn/q/kernel"
    verdict = convicts("weights", params=changed(q, lambda x: x.at[1, 3, 1, 2].set(100.0)))
    assert (verdict.cause, verdict.path, verdict.layer, verdict.head) == ("bit flip", q, 1, 1)
    small = changed(q, lambda x: x.at[0, 3, 1, 2].add(0.5))
    acquits("weights", params=small)
    verdict = convicts("weights", params=small, snapshot=model.init_params())
    assert (verdict.cause, verdict.layer) == ("bit flip", 0)
    verdict = convicts("weights", params=changed(q, lambda x: x.at[1, :, 1].set(0.0)))
    assert (verdict.cause, verdict.layer, verdict.head) == ("dead head", 1, 1)
    tie = convicts("weights", tied=[(q, "layers/attn/k/kernel")])
    assert tie.cause == "broken tie"


def test_modules_names_the_layer_that_is_bypassed_or_dead():
    acquits("modules")

    def bypassed(params, batch):
        return model.entropy(model.forward(params, batch[0], use_mlp=(True, False)), batch[1])

    verdict = convicts("modules", loss=bypassed)
    assert (verdict.cause, verdict.layer) == ("bypassed", 1)
    params = changed("layers/mlp/down/kernel", lambda x: x.at[0].set(0.0))
    verdict = convicts("modules", params=params, step=100)
    assert (verdict.cause, verdict.layer) == ("dead", 0)

    def cut(params, batch):
        q = jax.lax.stop_gradient(params["layers"]["attn"]["q"])
        attn = params["layers"]["attn"] | {"q": q}
        layers = params["layers"] | {"attn": attn}
        return model.loss_fn(params | {"layers": layers}, batch)

    assert convicts("modules", loss=cut).cause == "no gradient"


def test_init_convicts_a_model_that_is_not_as_fresh_ones_are():
    acquits("init")
    large = changed("embed/embedding", lambda x: 100 * x)
    assert convicts("init", params=large).cause == "initialisation"
    copy = changed("layers/attn/v/kernel", lambda x: x.at[1].set(x[0]))
    assert convicts("init", params=copy).cause == "copies"
    says("init", Outcome.UNDECIDED, step=5)


# All of them.


def test_audit_runs_those_named_and_says_how_sure_a_suspicion_is():
    found = stabmon.audit(model.loss_fn, model.init_params(), model.batch_of(0), ["weights"])
    assert "acquitted" in str(found)
    assert found.standing("learning rate")[0] is Standing.SUSPECTED
    assert found.standing()[0] is Standing.UNKNOWN
    bad = changed("layers/attn/q/kernel", lambda x: x.at[1, 3, 1, 2].set(jnp.nan))
    found = stabmon.audit(model.loss_fn, bad, model.batch_of(0), ["weights"])
    assert found.standing()[0] is Standing.PROVED
    with pytest.raises(ValueError, match="unknown audit 'wheight'"):
        stabmon.audit(model.loss_fn, bad, model.batch_of(0), ["wheight"])


def test_tokens_are_read_from_each_form_and_put_back():
    x, y = model.batch_of(0)
    whole = jnp.concatenate([x, y[:, -1:]], axis=1)
    for batch in ((x, y), whole, {"tokens": whole}, {"input_ids": x, "labels": y}):
        tokens = tokens_of(batch)
        chex.assert_trees_all_equal((tokens.inputs, tokens.targets), (x, y))
        assert int(tokens_of(tokens.replaced(0 * x)).inputs.sum()) == 0
    assert tokens_of(jnp.ones((3, 4))) is None
