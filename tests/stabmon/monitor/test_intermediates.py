"""What a forward pass shows: found under its names, refused where it does not fit, masked."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
import stabmon
from stabmon.metrics.expert_load import balance_gradient_ratio
from stabmon.monitor.intermediates import collect_intermediates, read_intermediates
from tests.models.quick import quick_jit

L, N, D, E, B, T = 2, 4, 16, 3, 2, 6
PARAMS = {
    "layers": {
        "attn": {"q": {"kernel": jnp.ones((L, D, N, 4))}},
        "moe": {"router": {"kernel": jax.random.normal(jax.random.key(0), (L, D, E))}},
    }
}
RULES = (
    stabmon.Rule("q", "layers/attn/q/kernel", "l d n h -> l n d h"),
    stabmon.Rule("router", "layers/moe/router/kernel", "l d e -> l e d"),
)
OFF = {"delta": 0, "weights": 0, "symptoms": 0}
LAYOUT = stabmon.Layout("own", RULES)
MONITOR = stabmon.Monitor(LAYOUT, router=1, activations=1, detail="full", **OFF)


def draw(*shape):
    return jax.random.normal(jax.random.key(len(shape)), shape)


def measure(seen, monitor=MONITOR):
    return quick_jit(lambda seen: monitor(0, PARAMS, (), seen))(seen).flatten()


WRONG = [
    (
        {"attention_entropi": draw(L, N)},
        "unknown name 'attention_entropi'; did you mean 'attention",
    ),
    ({"attention_entropy": draw(N)}, r"expected attention_entropy \(L, N\).*got shape \(4,\)"),
    ({"attention_entropy": draw(L, B, N, T, T)}, r"reduce logits with stabmon.attention_entropy"),
    ({"attention_entropy": draw(N, L)}, r"q has L=2, N=4"),
    ({"router_logits": draw(T, E)}, r"expected router_logits \(L, ..., E\), got shape \(6, 3\)"),
    ({"router_logits": draw(B + 1, T, E)}, r"router has L=2, E=3"),
    ({"residual": draw(L + 1, B, T, D)}, r"nothing before or after"),
    ({"router_logits": draw(L, T, E), "router_probabilities": draw(L, T, E)}, "give one"),
    ({"dropped": jnp.zeros(L, jnp.int32)}, "dropped has dtype int32; expected a floating dtype"),
    ({"mask": jnp.ones((B, T))}, "write mask > 0"),
    ({"mask": jnp.ones((B, T), bool), "residual": draw(L, B, T + 1, D)}, r"has tokens \(2, 7\)"),
]


@pytest.mark.parametrize(("seen", "message"), WRONG, ids=[*map(str, range(len(WRONG)))])
def test_what_does_not_fit_is_refused_with_what_would(seen, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: MONITOR(0, PARAMS, (), seen))


def test_what_a_function_returns_is_refused_too():
    seen = lambda: {"logits": draw(L, T, E)}
    with pytest.raises(ValueError, match="unknown name 'logits'"):
        jax.eval_shape(lambda: MONITOR(0, PARAMS, (), seen))


def test_gradients_of_another_structure_are_refused():
    monitor = stabmon.Monitor(LAYOUT, delta=0, symptoms=1)
    other = {"layers": {"attn": {"k": {"kernel": jnp.ones((L, D, N, 4))}}}}
    with pytest.raises(ValueError, match="grads: 'layers/attn/k/kernel' is not among the param"):
        jax.eval_shape(lambda: monitor(0, PARAMS, (), grads=other))
    other = jax.tree.map(lambda x: x[0], PARAMS)
    with pytest.raises(ValueError, match=r"updates: layers/attn/q/kernel has shape \(16, 4, 4\)"):
        jax.eval_shape(lambda: monitor(0, PARAMS, (), updates=other))


def test_of_gradients_of_some_parameters_the_right_one_is_named():
    monitor = stabmon.Monitor(LAYOUT, delta=0, weights=0, router=0, symptoms=1)
    grads = {"layers": {"moe": {"router": {"kernel": jnp.full((L, D, E), jnp.nan)}}}}
    readings = monitor(0, PARAMS, (), grads=grads, due=("symptoms",))
    assert readings.offender() == "layers/moe/router/kernel"


def test_probabilities_are_no_logits():
    logits = draw(L, B, T, E)
    got = measure({"router_probabilities": jax.nn.softmax(logits)})
    expected = measure({"router_logits": logits})
    assert expected.keys() - got.keys() == {k for k in expected if "/z/" in k}
    for key in got:
        np.testing.assert_allclose(got[key], expected[key], rtol=1e-4, atol=1e-5, err_msg=key)


def test_a_probability_of_zero_is_defined():
    sure = jnp.broadcast_to(jnp.eye(E)[0], (L, B, T, E))
    got = measure({"router_probabilities": sure})
    assert got["router/global/entropy/mean"] == pytest.approx(0, abs=1e-6)


def test_padding_counts_nowhere():
    """Equal to what the tokens that count give by themselves."""
    logits, residual = draw(L, B, T, E), draw(L, B, T, D)
    mask = np.zeros((B, T), bool)
    mask[0, :4] = mask[1, :3] = True
    junk = lambda x: jnp.where(mask[None, :, :, None], x, 1e6)
    seen = {"router_logits": junk(logits), "residual": junk(residual), "mask": jnp.asarray(mask)}
    gradient = jnp.asarray([[0.1, 0.2, 0.3]] * L)
    got = measure(seen | {"router_lm_gradient": gradient})
    chosen, rows = np.asarray(logits)[:, mask], np.asarray(residual)[:, mask]
    alone = measure({"router_logits": chosen, "residual": rows, "router_lm_gradient": gradient})
    for key in (k for k in alone if "repeated_tokens" not in k):
        np.testing.assert_allclose(got[key], alone[key], rtol=1e-4, atol=1e-5, err_msg=key)
    front = stabmon.rank_ratio(np.asarray(residual)[1][:, :3].reshape(-1, D))
    key = "activations/layer_01/rank_ratio_front/value"
    np.testing.assert_allclose(got[key], front, rtol=1e-4)
    want = balance_gradient_ratio(chosen[1], 2, gradient[1], 1e-2)
    np.testing.assert_allclose(got["router/layer_01/balance_ratio/value"], want, rtol=1e-5)


def test_of_many_tokens_a_mask_leaves_the_same_choice():
    monitor = stabmon.Monitor(LAYOUT, router=0, tokens=3, detail="full", activations=1, **OFF)
    residual, mask = draw(L, B, T, D), np.zeros((B, T), bool)
    mask[:, 1:] = True
    got = measure({"residual": residual, "mask": jnp.asarray(mask)}, monitor)
    rows = np.asarray(residual)[:, mask]
    want = measure({"residual": rows}, monitor)
    for name in ("rank_ratio/value", "layer_correlation/value"):
        key = f"activations/layer_00/{name}"
        np.testing.assert_allclose(got[key], want[key], rtol=1e-4, atol=1e-5)


def test_a_batch_of_padding_alone_is_no_sample():
    seen = {"residual": draw(L, B, T, D), "mask": jnp.zeros((B, T), bool)}
    assert measure(seen) == {}


def test_padding_without_a_mask_is_noticed():
    tokens = jnp.asarray([[5, 7, 0, 0, 0, 0], [1, 2, 3, 0, 0, 0]])
    got = measure({"residual": draw(L, B, T, D), "tokens": tokens})
    assert got["activations/global/repeated_tokens/value"] == pytest.approx(7 / 12)
    assert not any("repeated" in key for key in measure({"residual": draw(L, B, T, D)}))


def test_a_list_of_layers_is_stacked():
    entropy, mask = draw(L, N), jnp.ones((B, T), bool)
    got = read_intermediates([{"attention_entropy": x, "mask": mask} for x in entropy])
    np.testing.assert_array_equal(got["attention_entropy"], entropy)
    assert got["mask"].shape == (B, T)


def test_layers_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"differs between layers: \[\(2,\), \(3,\)\]"):
        read_intermediates([{"attention_entropy": jnp.ones(n)} for n in (2, 3)])


def test_sown_arrays_are_found_by_name_and_others_by_pattern():
    layers = {
        f"h_{i}": {
            "attn": {"attention_entropy": (jnp.full(N, i),)},
            "__call__": (draw(B, T, D) + i,),
        }
        for i in (10, 0, 2)
    }
    got = collect_intermediates(
        layers | {"head": {"__call__": (draw(B, T, 9),)}}, residual=r"h_\d+/__"
    )
    assert got["attention_entropy"][:, 0].tolist() == [0, 2, 10]
    np.testing.assert_allclose(got["residual"][2], draw(B, T, D) + 10)


def test_a_scanned_stack_stays_and_several_follow_one_another():
    stack = {"local": {"attention_entropy": (draw(L, N),)}}
    assert collect_intermediates(stack)["attention_entropy"].shape == (L, N)
    two = stack | {"whole": {"attention_entropy": (draw(L, N) + 1,)}}
    np.testing.assert_allclose(collect_intermediates(two)["attention_entropy"][L:], draw(L, N) + 1)


def test_a_collection_goes_into_the_monitor_as_it_is():
    sown = {f"layer_{i}": {"attention_entropy": (draw(N),)} for i in range(L)}
    assert measure(sown)["attention/global/entropy/min"] == pytest.approx(float(draw(N).min()))


def test_a_collection_without_anything_known_is_refused():
    with pytest.raises(ValueError, match=r"none of the names .* captured: h_0/aux"):
        collect_intermediates({"h_0": {"aux": (jnp.ones(3),)}})
    with pytest.raises(ValueError, match="h_0/attention_entrop is near to 'attention_entropy'"):
        collect_intermediates({"h_0": {"attention_entrop": (jnp.ones(3),)}})
    with pytest.raises(ValueError, match="residual='blocks' matches no path of h_0/dropped"):
        collect_intermediates({"h_0": {"dropped": (jnp.ones(()),)}}, residual="blocks")


ATTENTION = {"layers": {"attn": {x: {"kernel": jnp.ones((1, 4, 2, 2))} for x in "qk"}}}


def ring_monitor():
    return stabmon.Monitor(
        stabmon.find_layout(ATTENTION), delta=4, router=0, activations=0, weights=0, symptoms=1
    )


def test_a_skipped_step_costs_no_sample_of_the_spectra():
    """The ring counts applied updates: at the caller's step 5 it stands at 4."""
    tx = optax.apply_if_finite(
        optax.chain(optax.sgd(0.1), optax_ext.track_delta(every=4, keep=1)), 5
    )
    state, monitor, spoken = tx.init(ATTENTION), ring_monitor(), []
    measure = quick_jit(lambda i, state: monitor(i, ATTENTION, state, loss=1.0))
    update = jax.jit(tx.update)
    for i in range(10):
        readings = measure(i, state)
        spoken.append(any(key.startswith("delta4") for key in readings.flatten()))
        bad = jnp.nan if i == 2 else 1.0
        _, state = update(jax.tree.map(lambda x, bad=bad: x * bad, ATTENTION), state, ATTENTION)
    assert [i for i, hit in enumerate(spoken) if hit] == [5, 9]


def test_spectra_named_where_no_lag_is_exact_are_an_error():
    tx = optax_ext.track_delta(every=4, keep=1)
    state = tx.init(ATTENTION)
    for _ in range(3):
        _, state = tx.update(ATTENTION, state, ATTENTION)
    monitor = ring_monitor()
    with pytest.raises(ValueError, match="named at step 4, but the snapshot ring has counted 3"):
        monitor(4, ATTENTION, state, due=("delta",))
    readings = jax.jit(lambda i, state: monitor(i, ATTENTION, state, due=("delta",)))(4, state)
    assert "the snapshot ring counts 3 updates at step 4" in readings.notes({})["ring"]
