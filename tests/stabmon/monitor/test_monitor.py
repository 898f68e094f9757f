"""The monitor on a whole tree: right numbers, right times, a fixed structure."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
import stabmon
from models.config import GPTConfig
from models.gpt import apply, init_params
from stabmon.metrics.expert_load import balance_gradient_ratio
from stabmon.metrics.jacobian import jacobian_alignment
from tests.models.quick import quick_jit

CONFIG = GPTConfig(layers=2, model=16, heads=4, kv_heads=2, context=8, vocabulary=32)


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, 0)


def make(params, **options):
    cadences = {"router": 0, "delta": 5, "activations": 2, "weights": 4, "symptoms": 1}
    tx = optax.chain(optax.sgd(0.5), optax_ext.track_delta(every=5, keep=2, select="attn"))
    return stabmon.Monitor(stabmon.find_layout(params), **(cadences | options)), tx


NO_PLANT = np.zeros((16, 4), np.float32)
DRIFT = np.full((16, 4), 0.05, np.float32)


def stepping(monitor, tx):
    """A training step with noise for gradients, that measures what is due."""

    @quick_jit
    def step(params, state, i, plant):
        tokens = jax.random.randint(jax.random.fold_in(jax.random.key(1), i), (2, 8), 0, 32)
        noise = lambda p: jax.random.normal(jax.random.fold_in(jax.random.key(2), i), p.shape)
        grads = jax.tree.map(lambda p: 1e-3 * noise(p), params)
        q = grads["layers"]["attn"]["q"]
        q["kernel"] = q["kernel"].at[1, :, 2].add(plant)
        updates, new_state = tx.update(grads, state, params)
        readings = monitor(
            i,
            params,
            state,
            lambda: apply(CONFIG, params, tokens, capture=True)[1],
            grads=grads,
            updates=updates,
            loss=jnp.float32(1.5),
        )
        return optax.apply_updates(params, updates), new_state, readings

    return step


def run(step, tx, params, steps, plant=NO_PLANT):
    """Readings of every step; `plant` is added to the gradients of layer 1, query head 2."""
    state, out = tx.init(params), []
    for i in range(steps):
        params, state, readings = step(params, state, jnp.int32(i), plant)
        out.append((params, readings))
    assert step._cache_size() == 1
    return out


@pytest.fixture(scope="module")
def full(params):
    """Everything measured in full, by one compiled step that several tests run."""
    monitor, tx = make(params, detail="full", lags=(5, 10))
    return monitor, tx, stepping(monitor, tx)


@pytest.fixture(scope="module")
def noise(full, params):
    """Eleven steps without a plant."""
    _, tx, step = full
    return run(step, tx, params, 11)


@pytest.fixture(scope="module")
def drift(full, params):
    """Eleven steps with a drift of rank one."""
    _, tx, step = full
    return run(step, tx, params, 11, DRIFT)


def test_each_tier_speaks_at_its_cadence_and_only_when_its_lag_is_full(full, noise):
    spoken = [{k.split("/")[0] for k in readings.flatten()} for _, readings in noise]
    assert spoken[0] == {"weights", "attention", "activations", "symptoms"}
    assert spoken[1] == {"symptoms"}
    assert spoken[2] == {"attention", "activations", "symptoms"}
    assert spoken[5] == {"delta5", "symptoms"}
    assert spoken[10] == {"delta5", "delta10", "attention", "activations", "symptoms"}
    assert [full[0].due(i) for i in (1, 5)] == [("symptoms",), ("delta", "symptoms")]


def test_nothing_is_due_where_nothing_is_measured(params):
    monitor, _ = make(params, symptoms=0, activations=0)
    assert [monitor.due(i) for i in (3, 4, 5)] == [(), ("weights",), ("delta",)]


def test_tiers_named_outside_of_jit_are_measured_and_no_others(full, noise, params):
    monitor, tx, _ = full
    now, under_conditionals = noise[9][0], noise[10][1].flatten()
    state = tx.init(params)
    for past, _ in [(params, None), *noise[:9]]:
        _, state = tx.update(jax.tree.map(jnp.zeros_like, past), state, past)
    outright = jax.jit(lambda p, s: monitor(10, p, s, due=("delta",)))(now, state).flatten()
    expected = {k: v for k, v in under_conditionals.items() if k.startswith("delta")}
    assert outright.keys() == expected.keys()
    np.testing.assert_allclose([*outright.values()], [*expected.values()], rtol=1e-3, atol=1e-4)


def test_a_lag_that_is_not_full_is_not_valid_though_named(params):
    monitor, tx = make(params)
    readings = jax.jit(lambda p, s: monitor(0, p, s, due=("delta",)))(params, tx.init(params))
    assert readings.flatten() == {}


def test_an_unknown_tier_is_refused(params):
    monitor, tx = make(params)
    with pytest.raises(
        ValueError, match=r"due: no tiers \['deltas'\]; some of \['router', 'delta'"
    ):
        monitor(0, params, tx.init(params), due=("deltas",))


def test_lag_exponents_tell_drift_from_noise(noise, drift):
    flat = drift[10][1].flatten()
    even = noise[10][1].flatten()["delta10/global/query/lag_exponent/mean"]
    assert even == pytest.approx(0.5, abs=0.2)
    assert flat["delta10/layer_01/query/lag_exponent/max"] == pytest.approx(1.0, abs=0.02)
    assert flat["delta10/layer_01/query/lag_exponent/worst_head"] == 2


def test_no_decomposition_waits_for_the_pool_it_runs_on(params):
    """A batched LAPACK call of JAX does; two at once can stop a CPU with two threads for ever."""
    monitor, tx = make(params, detail="full", router=1)
    capture = lambda p: apply(CONFIG, p, jnp.zeros((1, 8), jnp.int32), capture=True)[1]
    measure = jax.jit(lambda p, s: monitor(0, p, s, lambda: capture(p), grads=p, updates=p))
    text = measure.lower(params, tx.init(params)).compile().as_text()
    calls = [line for line in text.splitlines() if 'custom_call_target="lapack_' in line]
    shapes = [re.findall(r"f32\[([\d,]*)\]", line.split("custom-call(")[0])[0] for line in calls]
    assert len(shapes) > 5
    assert max(shape.count(",") for shape in shapes) == 1


def test_depth_of_a_stacked_tree_does_not_grow_the_program():
    sizes = []
    for layers in (2, 24):
        config = GPTConfig(layers=layers, model=32, heads=4, context=8)
        params = jax.eval_shape(lambda c=config: init_params(c, 0))
        monitor, tx = make(params, detail="full")
        state = jax.eval_shape(tx.init, params)
        measure = jax.jit(lambda p, s, m=monitor: m(0, p, s, grads=p, updates=p))
        sizes.append(len(measure.lower(params, state).as_text().splitlines()))
    assert sizes[1] <= 1.01 * sizes[0]


def test_delta_equals_the_metric_of_the_right_head(noise, params):
    flat = noise[5][1].flatten()
    then, now = params["layers"]["attn"], noise[4][0]["layers"]["attn"]
    expected = stabmon.qk_increment(
        then["q"]["kernel"][1, :, 3],
        then["k"]["kernel"][1, :, 1],
        now["q"]["kernel"][1, :, 3],
        now["k"]["kernel"][1, :, 1],
    )
    by_head = [
        stabmon.qk_increment(
            then["q"]["kernel"][1, :, n],
            then["k"]["kernel"][1, :, n // 2],
            now["q"]["kernel"][1, :, n],
            now["k"]["kernel"][1, :, n // 2],
        ).delta2.effective_rank
        for n in range(4)
    ]
    np.testing.assert_allclose(by_head[3], expected.delta2.effective_rank)
    prefix = "delta5/layer_01/delta2/effective_rank"
    np.testing.assert_allclose(flat[f"{prefix}/mean"], np.mean(by_head), rtol=1e-3)
    np.testing.assert_allclose(flat[f"{prefix}/min"], np.min(by_head), rtol=1e-3)
    assert flat[f"{prefix}/worst_head"] == np.argmin(by_head)


def test_a_planted_rank_one_drift_is_found_in_its_layer_and_head(params):
    monitor, tx = make(params, lags=(5,), activations=0, weights=0, symptoms=0)
    flat = run(stepping(monitor, tx), tx, params, 6, DRIFT)[5][1].flatten()
    assert flat["delta5/global/delta2/effective_rank/worst_layer"] == 1
    assert flat["delta5/global/delta2/effective_rank/worst_head"] == 2
    assert flat["delta5/global/delta2/effective_rank/min"] < 2.5
    assert flat["delta5/global/delta2/effective_rank/mean"] > 3.5


def test_weights_and_symptoms_equal_numpy(noise, params):
    flat = noise[0][1].flatten()
    q = np.asarray(params["layers"]["attn"]["q"]["kernel"], np.float64)[1].reshape(16, 16)
    sigma = np.linalg.svd(q, compute_uv=False)
    np.testing.assert_allclose(
        flat["weights/layer_01/q/stable_rank/value"], (sigma**2).sum() / sigma[0] ** 2, rtol=1e-3
    )
    total = np.sqrt(sum(np.sum(np.square(p, dtype=np.float64)) for p in jax.tree.leaves(params)))
    np.testing.assert_allclose(flat["symptoms/global/param_norm/value"], total, rtol=1e-5)
    assert flat["symptoms/global/loss/value"] == 1.5
    np.testing.assert_allclose(
        flat["symptoms/global/update_norm/value"],
        0.5 * flat["symptoms/global/grad_norm/value"],
        rtol=1e-5,
    )


def test_weights_are_measured_as_they_are_stored():
    """Factors of latent attention one by one; equal shapes share a batch and are not mixed up."""
    config = GPTConfig(layers=2, model=16, heads=4, attention="mla", context=8, experts=2)
    params = init_params(config, 0)
    monitor = stabmon.Monitor(stabmon.find_layout(params), delta=0, weights=1, detail="full")
    flat = jax.jit(lambda p: monitor(0, p, (), due=("weights",)))(params).flatten()
    attn, moe = params["layers"]["attn"], params["layers"]["moe"]
    stored = {
        "q_up/stable_rank/value": attn["q_up"]["kernel"][1].reshape(8, 16),
        "k_up/stable_rank/value": attn["k_up"]["kernel"][1].reshape(4, 16),
        "o/stable_rank/value": attn["o"]["kernel"][1].reshape(16, 16),
        "kv_down/stable_rank/value": attn["kv_down"]["kernel"][1],
        "expert_up/stable_rank/mean": moe["up"]["kernel"][1],
        "expert_down/stable_rank/mean": moe["down"]["kernel"][1],
    }
    for key, w in stored.items():
        sigma = np.linalg.svd(np.asarray(w, np.float64), compute_uv=False)
        rank = np.mean((sigma**2).sum(-1) / sigma[..., 0] ** 2)
        np.testing.assert_allclose(flat[f"weights/layer_01/{key}"], rank, rtol=2e-3, err_msg=key)
    gaussian = stabmon.gaussian_stable_rank(8, 16)
    q_up = flat["weights/layer_01/q_up/stable_rank/value"]
    assert flat["weights/layer_01/q_up/relative_stable_rank/value"] == pytest.approx(
        q_up / gaussian
    )


def test_the_first_non_finite_leaf_is_named(full, noise, params):
    _, tx, step = full
    plant = NO_PLANT.copy()
    plant[3, 1] = np.nan
    steps = run(step, tx, params, 2, plant)
    assert steps[0][1].offender() == "layers/attn/q/kernel"
    # The gradient's entry and the update's.
    assert steps[0][1].flatten()["symptoms/global/nonfinite/value"] == 2.0
    assert noise[0][1].offender() is None


def test_brief_is_bounded_whatever_the_depth():
    counts = []
    for layers in (1, 3):
        config = GPTConfig(layers=layers, model=16, heads=4, context=8)
        params = init_params(config, 0)
        monitor, tx = make(params)
        tokens = jnp.zeros((1, 8), jnp.int32)
        capture = lambda p=params, c=config, t=tokens: apply(c, p, t, capture=True)[1]
        readings = jax.eval_shape(
            lambda p=params, m=monitor, t=tx, c=capture: m(
                0, p, t.init(p), c, grads=p, updates=p, loss=1.0
            )
        )
        counts.append(sum(len(keys) for _, keys in readings.keys))
    assert counts[0] == counts[1] <= 60


def test_include_and_exclude(params):
    monitor, tx = make(params, include=r"^symptoms/(loss|grad_norm)", exclude="grad")
    flat = run(stepping(monitor, tx), tx, params, 1)[0][1].flatten()
    assert list(flat) == ["symptoms/global/loss/value"]


def test_patterns_that_leave_nothing_are_refused(params):
    monitor, tx = make(params, include="delta99")
    with pytest.raises(ValueError, match="would measure nothing"):
        run(stepping(monitor, tx), tx, params, 1)


def test_a_negative_cadence_is_refused(params):
    with pytest.raises(ValueError, match=r"delta: expected a cadence >= 0 \(0 is off\), got -5"):
        make(params, delta=-5)


def test_an_unknown_detail_is_refused(params):
    with pytest.raises(ValueError, match="detail is 'brief' or 'full', got 'all'"):
        make(params, detail="all")


def test_a_bad_pattern_is_refused(params):
    with pytest.raises(ValueError, match="include: no regular expression"):
        make(params, include="(")


def test_a_cadence_between_snapshots_is_refused(params):
    monitor, tx = make(params, delta=7)
    with pytest.raises(ValueError, match=r"no multiple of track_delta's every=5.*use delta=10"):
        run(stepping(monitor, tx), tx, params, 1)


def test_an_untracked_lag_is_refused(params):
    monitor, tx = make(params, lags=(5, 20))
    with pytest.raises(ValueError, match=r"lags \[20\] are not tracked; one of \(5, 10\)"):
        run(stepping(monitor, tx), tx, params, 1)


def test_kv_heads_that_do_not_divide_are_refused():
    attn = {"q": {"kernel": jnp.ones((1, 8, 3, 2))}, "k": {"kernel": jnp.ones((1, 8, 2, 2))}}
    params = {"layers": {"attn": attn}}
    tx = optax_ext.track_delta(every=5, keep=1)

    def measure():
        monitor = stabmon.Monitor(stabmon.find_layout(params), delta=5)
        return monitor(0, params, tx.init(params))

    with pytest.raises(ValueError, match="3 query heads do not divide over 2 kv heads"):
        measure()


def test_a_chain_without_a_ring_is_refused(params):
    monitor = stabmon.Monitor(stabmon.find_layout(params))
    with pytest.raises(ValueError, match="end the chain with it"):
        monitor(0, params, optax.sgd(0.1).init(params))


def test_the_jacobian_tier_needs_its_function(params):
    monitor, tx = make(params, jacobian=3)
    with pytest.raises(ValueError, match="the Jacobian tier needs jacobian=lambda"):
        run(stepping(monitor, tx), tx, params, 1)


def test_the_jacobian_tier_measures_what_it_is_given(params):
    layers = [lambda h: 3.0 * h.at[0].mul(2.0), lambda h: h.at[1].mul(5.0)]
    monitor, tx = make(params, jacobian=2, delta=0, weights=0, symptoms=0, activations=0)
    state = tx.init(params)
    stats = lambda: jacobian_alignment(layers, jnp.ones(3))
    flat = jax.jit(lambda i: monitor(i, params, state, jacobian=stats))(2).flatten()
    assert flat["jacobian/global/norm/max"] == pytest.approx(6.0, rel=1e-3)
    assert flat["jacobian/global/converged/value"] == 1.0
    assert jax.jit(lambda i: monitor(i, params, state, jacobian=stats))(1).flatten() == {}


def test_router_and_activation_tiers_equal_their_metrics():
    keys = jax.random.split(jax.random.key(0), 3)
    router = jax.random.normal(keys[0], (2, 16, 4))
    params = {"layers": {"moe": {"router": {"kernel": router}}}}
    rules = (stabmon.Rule("router", "layers/moe/router/kernel", "l d e -> l e d"),)
    monitor = stabmon.Monitor(
        stabmon.Layout("router", rules),
        router=1,
        delta=0,
        weights=0,
        symptoms=0,
        activations=1,
        detail="full",
    )
    logits = jax.random.normal(keys[1], (2, 2, 8, 4))
    residual = jax.random.normal(keys[2], (2, 2, 8, 16))
    seen = {"router_logits": logits, "residual": residual, "dropped": jnp.array([0.0, 0.25])}
    seen["router_lm_gradient"] = jnp.array([[0.3, 0.4, 0.0, 0.0]] * 2)
    seen["attention_entropy"] = jnp.array([[0.1, 2.0], [3.0, 2.0]])
    flat = jax.jit(lambda: monitor(0, params, (), seen))().flatten()
    close = lambda key, value: np.testing.assert_allclose(flat[key], value, rtol=1e-5, atol=1e-6)
    close("router/layer_01/similarity/value", stabmon.router_similarity(router[1].T))
    close("router/layer_01/entropy/value", stabmon.routing_entropy(logits[1]))
    close("router/layer_00/max_violation/value", stabmon.expert_load(logits[0], 2).max_violation)
    close("activations/layer_01/rank_ratio/value", stabmon.rank_ratio(residual[1]))
    close("activations/layer_00/rank_ratio_back/value", stabmon.rank_ratio(residual[0][:, 4:]))
    ratio = balance_gradient_ratio(logits[1], 2, jnp.array([0.3, 0.4, 0.0, 0.0]), 1e-2)
    close("router/layer_01/balance_ratio/value", ratio)
    close("router/global/dropped/max", 0.25)
    close("attention/layer_00/sharp_heads/value", 0.5)
    close("attention/global/sharp_heads/mean", 0.25)
    assert -1 <= flat["activations/global/layer_correlation/max"] <= 1
