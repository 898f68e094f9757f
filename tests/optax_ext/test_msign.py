"""`msign` on a small scanned GPT tree, against float64 NumPy; selection is in test_matrices.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_ext._msign import MsignState, msign, msign_names

LAYERS, MODEL, HEADS, HEAD_DIM, FF = 2, 8, 2, 4, 16
SHAPES = {
    "layers/attn/q/kernel": (LAYERS, MODEL, HEADS, HEAD_DIM),
    "layers/attn/k/kernel": (LAYERS, MODEL, HEADS, HEAD_DIM),
    "layers/attn/o/kernel": (LAYERS, HEADS, HEAD_DIM, MODEL),
    "layers/mlp/up/kernel": (LAYERS, MODEL, FF),
    "layers/mlp/down/kernel": (LAYERS, FF, MODEL),
    "layers/norm/scale": (LAYERS, MODEL),
    "embed/embedding": (11, MODEL),
}
ATTENTION = 3 * LAYERS
MATRICES = 5 * LAYERS


def sign(x):
    """Newton–Schulz in a loop: quick to compile. The real methods have their own tests."""

    def step(_, x):
        return 1.5 * x - 0.5 * x @ jnp.swapaxes(x, 1, 2) @ x

    return jax.lax.fori_loop(0, 50, step, x)


def nested(flat):
    tree = {}
    for path, leaf in flat.items():
        *parents, name = path.split("/")
        at = functools.reduce(lambda node, key: node.setdefault(key, {}), parents, tree)
        at[name] = leaf
    return tree


def flat(tree):
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): leaf for p, leaf in leaves}


def draw(seed, scale=1.0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return nested({k: jnp.asarray(scale * rng.normal(size=s), dtype) for k, s in SHAPES.items()})


def matrices(path, leaf):
    """All matrices of a leaf in float64, written out by hand."""
    x = np.asarray(leaf, np.float64)
    if "/o/" in path:
        return list(x.reshape(LAYERS, HEADS * HEAD_DIM, MODEL))
    if "attn" in path:
        return list(x.reshape(LAYERS, MODEL, HEADS * HEAD_DIM))
    return list(x)


def restored(w, blend=1.0):
    u, s, vt = np.linalg.svd(w, full_matrices=False)
    mixed = (1 - blend) * s / np.linalg.norm(s) + blend / len(s) ** 0.5
    return (u * (np.linalg.norm(s) * mixed / np.linalg.norm(mixed))) @ vt


def stable_rank(w):
    s = np.linalg.svd(w, compute_uv=False)
    return np.sum(s**2) / s[0] ** 2


def same(a, b):
    return bool(jnp.array_equal(a, b, equal_nan=True))


def stepper(tx):
    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, updates

    return step


def run(tx, steps, params=None, scale=0.1):
    """Parameters and updates of every step, and the last state."""
    params = draw(0) if params is None else params
    state, step, history = tx.init(params), stepper(tx), []
    for i in range(steps):
        params, state, updates = step(params, state, draw(100 + i, scale))
        history.append((params, updates))
    return history, state


def test_restores_each_matrix_at_the_period_and_nothing_else():
    base = optax.adamw(1e-2, weight_decay=0.1)
    tx = optax.chain(base, msign(period=3, method=sign))
    history, state = run(tx, 6)
    expected, base_state = draw(0), base.init(draw(0))
    base_step = stepper(base)
    for i, (params, updates) in enumerate(history):
        before = expected
        expected, base_state, base_updates = base_step(before, base_state, draw(100 + i, 0.1))
        for path, leaf in flat(updates).items():
            if (i + 1) % 3 == 0 and ("attn" in path or "mlp" in path):
                new, old = flat(params)[path], flat(expected)[path]
                for got, w in zip(matrices(path, new), matrices(path, old), strict=True):
                    np.testing.assert_allclose(got, restored(w), atol=2e-5)
                    assert np.linalg.norm(got) == pytest.approx(np.linalg.norm(w), rel=1e-5)
                    s = np.linalg.svd(got, compute_uv=False)
                    np.testing.assert_allclose(s, s[0], rtol=1e-5)
            else:
                assert same(leaf, flat(base_updates)[path])
        expected = params
    assert int(state[-1].msign_step) == 6
    np.testing.assert_array_equal(state[-1].msign_last, 6)
    np.testing.assert_allclose(state[-1].msign_rank_after, MODEL, rtol=1e-4)


def test_state_tells_how_far_the_stable_rank_moved():
    params = draw(0)
    zero = jax.tree.map(jnp.zeros_like, params)
    tx = msign(period=1, method=sign)
    _, state = jax.jit(tx.update)(zero, tx.init(params), params)
    names = msign_names(params)
    for path, leaf in flat(params).items():
        if "attn" in path or "mlp" in path:
            for i, w in enumerate(matrices(path, leaf)):
                got = float(state.msign_rank_before[names.index(f"{path}[{i}]")])
                # Power iteration approaches σ₁ from below.
                assert stable_rank(w) * (1 - 1e-5) <= got <= stable_rank(w) * 1.1


@pytest.mark.parametrize("method", ["newton_schulz", "polar", "svd"])
def test_every_method_restores(method):
    params = draw(0)
    zero = jax.tree.map(jnp.zeros_like, params)
    tx = msign(period=1, select="q", method=method)
    updates, _ = jax.jit(tx.update)(zero, tx.init(params), params)
    new = optax.apply_updates(params, updates)
    path = "layers/attn/q/kernel"
    for got, w in zip(*(matrices(path, flat(x)[path]) for x in (new, params)), strict=True):
        np.testing.assert_allclose(got, restored(w), atol=1e-4)


def test_the_decomposition_stands_in_one_conditional():
    tx = msign(period=5, method=sign)
    params = draw(0)
    jaxpr = jax.make_jaxpr(tx.update)(params, tx.init(params), params)
    outside = {eqn.primitive.name for eqn in jaxpr.eqns}
    assert [eqn.primitive.name for eqn in jaxpr.eqns].count("cond") == 1
    assert "while" not in outside
    assert "dot_general" not in outside
    assert not any(
        eqn.outvars[0].aval.ndim > 1 for eqn in jaxpr.eqns if eqn.primitive.name != "cond"
    )


def test_steps_named_outside_of_jit_do_what_the_conditional_does():
    tx = optax.chain(optax.adam(1e-2), msign(period=3, select="attention", method=sign))

    @functools.partial(jax.jit, static_argnames="due")
    def step(params, state, due):
        updates, state = tx.update(draw(1), state, params, msign_due=due)
        return optax.apply_updates(params, updates), state

    params = draw(0)
    told, found = (params, tx.init(params)), (params, tx.init(params))
    for i in range(7):
        told, found = step(*told, due=(i + 1) % 3 == 0), step(*found, due=None)
        for (path, a), (_, b) in zip(flat(told).items(), flat(found).items(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=f"{i} {path}")
    assert told[1][1].msign_step == 7
    assert set(told[1][1].msign_last.tolist()) == {6}
    text = step.lower(*told, due=False).as_text()
    assert not any(word in text for word in ("stablehlo.case", "stablehlo.if", "stablehlo.while"))


@pytest.mark.parametrize(
    ("arguments", "due", "message"),
    [
        ({}, jnp.asarray(True), "expected msign_due to be a Python bool, got"),
        ({"stagger": True}, True, "leave it out with stagger"),
    ],
)
def test_steps_that_cannot_be_named_are_refused(arguments, due, message):
    params, tx = draw(0), msign(**arguments)
    with pytest.raises(ValueError, match=message):
        tx.update(params, tx.init(params), params, msign_due=due)


def test_stagger_restores_each_matrix_once_a_period_and_at_most_one_share_a_step():
    period = 4
    tx = msign(period=period, method=sign, stagger=True)
    history, state = run(tx, 2 * period, scale=0.01)
    before = draw(0)
    touched = {}
    for i, (params, updates) in enumerate(history):
        count = 0
        for path, leaf in flat(updates).items():
            gradient = flat(draw(100 + i, 0.01))[path]
            if "attn" not in path and "mlp" not in path:
                assert same(leaf, gradient)
                continue
            old = flat(before)[path]
            for layer in range(LAYERS):
                if same(leaf[layer], gradient[layer]):
                    continue
                count += 1
                touched.setdefault((path, layer), []).append(i + 1)
                w = matrices(path, old + gradient)[layer]
                got = matrices(path, flat(params)[path])[layer]
                np.testing.assert_allclose(got, restored(w), atol=2e-5)
        assert count <= -(-MATRICES // period)
        before = params
    assert len(touched) == MATRICES
    assert all(b - a == period for a, b in touched.values())
    names = msign_names(before)
    for (path, layer), steps in touched.items():
        assert int(state.msign_last[names.index(f"{path}[{layer}]")]) == steps[-1]


def test_stagger_spreads_few_matrices_evenly():
    tx = msign(period=12, select=("q", "k"), method=sign, stagger=True)
    _, state = run(tx, 12)
    np.testing.assert_array_equal(np.sort(state.msign_last), [3, 6, 9, 12])


@pytest.mark.parametrize("stagger", [False, True])
def test_trigger_acts_on_fallen_matrices_only_and_lets_go_of_recovered_ones(stagger):
    """Reference at the first check; treatment below 0.6 of it, until above 0.8 before treatment."""
    tx = msign(period=1, method=sign, trigger=0.6, stagger=stagger)
    update = jax.jit(tx.update)
    spectra = {"healthy": (3, 3, 3, 3), "low": (3, 1, 1, 1), "between": (3, 2.4, 2.4, 2.4)}
    params = {name: jnp.diag(jnp.array(spectra["healthy"], jnp.float32)) for name in "ab"}
    zero = jax.tree.map(jnp.zeros_like, params)
    state = tx.init(params)
    restored_at = []
    for step, kind in enumerate(["healthy", "between", "low", "between", "healthy", "between"], 1):
        params = {**params, "a": jnp.diag(jnp.array(spectra[kind], jnp.float32))}
        updates, state = update(zero, state, params)
        if np.any(updates["a"]):
            restored_at.append(step)
        assert not np.any(updates["b"])
    assert restored_at == [3, 4]
    np.testing.assert_allclose(state.msign_reference, 4, rtol=1e-4)
    np.testing.assert_array_equal(state.msign_last, [4, 0])


def test_blend_mixes_and_keeps_the_norm():
    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)), jnp.float32)}
    zero = jax.tree.map(jnp.zeros_like, params)
    tx = msign(period=1, method=sign, blend=0.25)
    updates, state = jax.jit(tx.update)(zero, tx.init(params), params)
    new = np.asarray(params["w"] + updates["w"], np.float64)
    np.testing.assert_allclose(new, restored(np.asarray(params["w"], np.float64), 0.25), atol=1e-5)
    assert float(state.msign_rank_after[0]) == pytest.approx(stable_rank(new), rel=0.05)


def test_condition_says_down_to_where_singular_values_are_level():
    rng = np.random.default_rng(0)
    u, v = (np.linalg.qr(rng.normal(size=(12, 12)))[0] for _ in range(2))
    w = (u * np.geomspace(1, 1e-5, 12)) @ v.T
    params = {"w": jnp.asarray(w, jnp.float32)}
    zero = jax.tree.map(jnp.zeros_like, params)
    least = {}
    for condition in (None, 1e6):
        tx = msign(period=1, method="newton_schulz", condition=condition)
        updates, _ = jax.jit(tx.update)(zero, tx.init(params), params)
        s = np.linalg.svd(np.asarray(params["w"] + updates["w"], np.float64), compute_uv=False)
        least[condition] = s[-1] / s[0]
    assert least[None] < 0.95
    assert least[1e6] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("stagger", [False, True])
def test_zero_and_non_finite_matrices_keep_the_update(stagger):
    params = draw(0)
    q = params["layers"]["attn"]["q"]
    q["kernel"] = q["kernel"].at[0].set(0).at[1, 0, 0, 0].set(jnp.nan)
    updates = draw(1, 0.1)
    base = updates["layers"]["attn"]["q"]["kernel"] = (
        updates["layers"]["attn"]["q"]["kernel"].at[0].set(0)
    )
    tx = msign(period=1, select=("q", "k"), method=sign, stagger=stagger)
    new, state = jax.jit(tx.update)(updates, tx.init(params), params)
    assert same(new["layers"]["attn"]["q"]["kernel"], base)
    assert not same(new["layers"]["attn"]["k"]["kernel"], updates["layers"]["attn"]["k"]["kernel"])
    order = msign_names(params, ("q", "k"))
    skipped = dict(zip(order, np.asarray(state.msign_skipped).tolist(), strict=True))
    assert skipped["layers/attn/q/kernel[1]"] == 1
    assert sum(skipped.values()) == 1
    last = dict(zip(order, np.asarray(state.msign_last).tolist(), strict=True))
    assert [last[f"layers/attn/{x}/kernel[{i}]"] for x in "qk" for i in (0, 1)] == [0, 0, 1, 1]


def test_a_method_that_fails_is_skipped_and_counted():
    params = {"w": jnp.eye(3)}
    tx = msign(period=1, method=lambda x: x * jnp.nan)
    updates, state = jax.jit(tx.update)({"w": jnp.ones((3, 3))}, tx.init(params), params)
    assert same(updates["w"], jnp.ones((3, 3)))
    assert int(state.msign_skipped[0]) == 1


def test_bfloat16_parameters():
    params, updates = draw(0, dtype=jnp.bfloat16), draw(1, 0.01, jnp.bfloat16)
    tx = msign(period=1, method=sign)
    new, _ = jax.jit(tx.update)(updates, tx.init(params), params)
    after = optax.apply_updates(params, new)
    for path, leaf in flat(after).items():
        assert leaf.dtype == jnp.bfloat16
        if "attn" in path or "mlp" in path:
            for w in matrices(path, leaf):
                s = np.linalg.svd(w, compute_uv=False)
                np.testing.assert_allclose(s, s.mean(), rtol=0.02)


def test_multi_steps_counts_applied_updates():
    tx = optax.MultiSteps(optax.chain(optax.sgd(1.0), msign(2, "mlp", sign)), 3)
    history, state = run(tx, 12)
    assert int(state.inner_opt_state[-1].msign_step) == 4
    singular = [
        np.linalg.svd(np.asarray(params["layers"]["mlp"]["up"]["kernel"]), compute_uv=False)
        for params, _ in history
    ]
    level = [bool(np.allclose(s, s[:, :1], rtol=1e-4)) for s in singular]
    assert level == [False] * 5 + [True] * 3 + [False] * 3 + [True]


def wrapped():
    """Each way of building a chain that people use, with `msign(period=2)` inside."""
    inner = functools.partial(msign, period=2, select="mlp", method=sign)
    injected = optax.inject_hyperparams(msign, static_args=("period", "select", "method"))
    blocks = lambda params: jax.tree.map_with_path(
        lambda path, _: "layers" if path[0].key == "layers" else "rest", params
    )
    mask = lambda params: jax.tree.map(lambda label: label == "layers", blocks(params))
    return {
        "named_chain": optax.named_chain(("base", optax.sgd(0.1)), ("restore", inner())),
        "masked": optax.chain(optax.sgd(0.1), optax.masked(inner(), mask)),
        "partition": optax.partition(
            {"layers": optax.chain(optax.sgd(0.1), inner()), "rest": optax.sgd(0.1)}, blocks
        ),
        "inject_hyperparams": optax.chain(
            optax.sgd(0.1), injected(period=2, select="mlp", method=sign, blend=lambda count: 1.0)
        ),
        "schedule and decay": optax.chain(
            optax.add_decayed_weights(0.0),
            optax.sgd(optax.linear_schedule(0.1, 0.1, 10)),
            inner(),
        ),
        "ema": optax.chain(optax.sgd(0.1), optax.ema(0.0), inner()),
    }


@functools.cache
def unwrapped():
    return run(optax.chain(optax.sgd(0.1), msign(period=2, select="mlp", method=sign)), 2)[0]


@pytest.mark.parametrize("name", list(wrapped()))
def test_inside_what_people_chain_it_in(name):
    history, _ = run(wrapped()[name], 2)
    for got, want in zip(history, unwrapped(), strict=True):
        for path, leaf in flat(got[0]).items():
            np.testing.assert_allclose(leaf, flat(want[0])[path], atol=1e-6)


def test_vmap_over_an_ensemble():
    tx = msign(period=1, select="mlp", method=sign)
    members = [draw(0), draw(1)]
    params = jax.tree.map(lambda *x: jnp.stack(x), *members)
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(jax.vmap(tx.update, in_axes=(0, None, 0)))(
        zero, tx.init(members[0]), params
    )
    for i, member in enumerate(members):
        path = "layers/mlp/up/kernel"
        new = flat(member)[path] + flat(updates)[path][i]
        for got, w in zip(matrices(path, new), matrices(path, flat(member)[path]), strict=True):
            np.testing.assert_allclose(got, restored(w), atol=2e-5)


def test_state_is_a_named_tuple_of_unique_fields():
    state = msign().init(draw(0))
    assert isinstance(state, MsignState)
    assert all(name.startswith("msign_") for name in state._fields)
    assert all(x.shape in ((), (MATRICES,)) for x in state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"period": 0}, r"expected period >= 1, got 0"),
        ({"period": True}, r"static_args=\('period', …\)"),
        ({"method": "muon"}, r"msign: expected method .* got 'muon'"),
        ({"trigger": 1.5}, r"trigger in \(0, 1\) or None, got 1.5"),
        ({"blend": 0.0}, r"blend in \(0, 1\], got 0.0"),
        ({"condition": 1.0}, r"expected 1 < condition <= .*, got 1.0"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        msign(**arguments)


def test_needs_params():
    tx = msign()
    params = {"w": jnp.ones((2, 2))}
    with pytest.raises(ValueError, match=r"call update\(updates, state, params\)"):
        tx.update(params, tx.init(params))
