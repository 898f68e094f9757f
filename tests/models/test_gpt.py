"""The whole model: its function, its gradients, what it compiles to."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from models.gpt import GPT, apply, init_params
from models.moe import auxiliary_loss
from tests.models import oracle
from tests.models.quick import quick_jit
from tests.models.whole import (
    OTHER,
    ROUTED,
    SMALL,
    TOKENS,
    abstract,
    differing,
    halve,
    lively,
    run,
)

CONFIGS = {"default": SMALL, "other": OTHER, "routed": ROUTED}
each = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@each
def test_everything_returned_equals_the_oracle(config):
    params = lively(config)
    returned, _ = run(config, params)
    expected = oracle.gpt(config, params, TOKENS)
    assert returned[0].dtype == jnp.float32
    np.testing.assert_allclose(returned[0], expected[0], rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(returned[1:], expected[1:], strict=True):
        assert ours.keys() == theirs.keys()
        for name, array in theirs.items():
            assert ours[name].shape == array.shape, name
            np.testing.assert_allclose(ours[name], array, rtol=1e-4, atol=1e-4, err_msg=name)


def test_module_called_by_itself():
    model = GPT(SMALL, rngs=nnx.Rngs(5))
    assert not differing(nnx.to_pure_dict(nnx.state(model)), init_params(SMALL, 5))
    params = lively(SMALL)
    nnx.update(model, params)
    (logits, *_), _ = run(SMALL, params)
    called = nnx.jit(lambda model: model(jnp.asarray(TOKENS)))(model)
    np.testing.assert_allclose(called, logits, rtol=1e-5, atol=1e-5)


@each
def test_gradient_against_differences_of_the_oracle(config):
    rng = np.random.default_rng(1)
    dlogits = rng.normal(size=(2, 6, 11)).astype(np.float32)
    _, grads = run(config, lively(config), dlogits=dlogits)
    params = oracle.as_float64(lively(config))
    direction = jax.tree.map(lambda x: rng.normal(size=x.shape), params)

    def at(step):
        moved = jax.tree.map(lambda x, d: x + step * d, params, direction)
        logits, losses, _ = oracle.gpt(config, moved, TOKENS)
        auxiliary = config.auxiliary_weight * losses["balance"] + config.z_weight * losses["z"]
        return np.sum(dlogits * logits) + np.sum(auxiliary)

    slopes = jax.tree.map(lambda g, d: np.sum(np.float64(g) * d), grads, direction)
    np.testing.assert_allclose(
        sum(jax.tree.leaves(slopes)), (at(1e-5) - at(-1e-5)) / 2e-5, rtol=1e-4
    )


@each
def test_no_logit_depends_on_a_later_token(config):
    # Every position has a table row of its own, so the gradient by row is that by position.
    tokens = np.array([[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 6]])
    table = "positions" if config.positions == "learned" else "embed"
    reach = np.zeros((6, 6))
    for t in range(6):
        dlogits = np.zeros((2, 6, 11), np.float32)
        dlogits[0, t] = np.random.default_rng(t).normal(size=11)
        _, grads = run(config, lively(config), tokens, dlogits, weight=0.0)
        gradient = np.abs(grads[table]["embedding"]).max(-1)
        reach[t] = gradient[:6]
        assert not np.any(gradient[6:])  # nor on another sequence
    assert np.all(reach[np.triu_indices(6, 1)] == 0)
    assert np.all(reach[np.tril_indices(6)] > 0)


def test_gate_of_each_layer():
    params = lively(OTHER)
    dlogits = np.random.default_rng(2).normal(size=(2, 6, 11)).astype(np.float32)
    grads = lambda *gate_L: run(OTHER, params, dlogits=dlogits, gate_L=gate_L)[1]
    clean = grads(0.0, 0.0)
    first = {f"layers/attn/{name}" for name in ("q/kernel", "k/kernel", "q_norm/scale")}
    first |= {"layers/attn/k_norm/scale"}
    upstream = {"embed/embedding", "layers/attn_norm/scale"}
    assert differing(grads(1.0, 0.0), clean) == first | upstream
    faulty = grads(0.0, 1.0)
    for name in ("v", "o"):
        ours, theirs = (g["layers"]["attn"][name]["kernel"] for g in (faulty, clean))
        np.testing.assert_array_equal(ours[1], theirs[1])
    for name in ("q", "k"):
        ours, theirs = (g["layers"]["attn"][name]["kernel"] for g in (faulty, clean))
        assert np.all(np.asarray(ours[1] != theirs[1]))


def test_intermediates_stand_outside_the_gradient():
    def total(params):
        _, captured = apply(SMALL, params, TOKENS, capture=True)
        return sum(jnp.sum(x) for x in captured.values())

    for gradient in jax.tree.leaves(quick_jit(jax.grad(total))(lively(SMALL))):
        np.testing.assert_array_equal(gradient, np.zeros(gradient.shape))


def equations(jaxpr):
    """Every equation of a program, those of inner programs too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def test_without_capture_the_program_has_nothing_extra():
    params = abstract(SMALL)
    trace = lambda capture: jax.make_jaxpr(lambda p: apply(SMALL, p, TOKENS, capture=capture))(
        params
    )
    bare, full = trace(False).jaxpr, trace(True).jaxpr
    assert len(bare.outvars) == 1
    assert len(full.outvars) == 8
    (scan,) = (e for e in equations(bare) if e.primitive.name == "scan")
    assert len(scan.outvars) == 1
    count = lambda jaxpr: sum(e.primitive.name == "exp" for e in equations(jaxpr))
    assert count(bare) == 1
    assert count(full) > 1


def test_gradient_of_the_probe_is_that_of_the_mean_probabilities():
    """Shifting every token's probability of one expert alike moves their mean by as much."""
    params, shape = lively(ROUTED), (ROUTED.layers, ROUTED.experts)
    total = lambda probe: jnp.sum(apply(ROUTED, params, TOKENS, probe_LE=probe) ** 2)
    run, gradient = quick_jit(total), quick_jit(jax.grad(total))(jnp.zeros(shape))
    assert gradient.shape == shape
    step = 1e-3 * jnp.eye(ROUTED.experts)[1][None] * jnp.array([[0.0], [1.0]])
    slope = (run(step) - run(-step)) / 2e-3
    np.testing.assert_allclose(gradient[1, 1], slope, rtol=2e-2, atol=1e-2)


def test_a_probe_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"probe_LE has shape \(3, 3\); write zeros"):
        apply(ROUTED, abstract(ROUTED), TOKENS, probe_LE=jnp.zeros((3, 3)))


def test_router_losses_are_computed_on_request():
    def counts(**options):
        """Outputs, and logarithms: one in the attention, one in the z-loss, one in statistics."""
        trace = jax.make_jaxpr(lambda p: apply(ROUTED, p, TOKENS, **options))(abstract(ROUTED))
        logs = sum(e.primitive.name == "log" for e in equations(trace.jaxpr))
        return len(trace.jaxpr.outvars), logs

    assert counts() == (1, 1)
    assert counts(losses=True) == (3, 2)
    assert counts(losses=True, capture=True) == (13, 3)


@pytest.mark.parametrize(
    "config",
    [SMALL, ROUTED],
    ids=["plain", "flash-routed"],
)
def test_program_does_not_grow_with_depth(config):
    def length(layers):
        deep = dataclasses.replace(config, layers=layers, capacity_factor=None)

        def loss(params):
            logits, losses = apply(deep, params, TOKENS, losses=True)
            return jnp.sum(logits) + auxiliary_loss(deep, losses)

        return len(jax.jit(jax.grad(loss)).lower(abstract(deep)).as_text().splitlines())

    assert length(2) == length(16)


def test_function_with_an_unrolled_loop_gives_the_same_as_the_module():
    params = lively(SMALL)
    config = dataclasses.replace(SMALL, unroll=2)
    unrolled = quick_jit(lambda params: apply(config, params, TOKENS))(params)
    np.testing.assert_allclose(unrolled, run(SMALL, params)[0][0], rtol=1e-5, atol=1e-5)


def test_bfloat16_forward_keeps_float32_ends():
    config = dataclasses.replace(OTHER, dtype="bfloat16")
    params = lively(config)
    run = lambda params: apply(config, params, TOKENS, capture=True)
    logits, captured = quick_jit(run)(params)
    assert logits.dtype == jnp.float32
    assert captured["residual"].dtype == jnp.bfloat16
    assert captured["attention_entropy"].dtype == jnp.float32
    exact, *_ = oracle.gpt(config, params, TOKENS)
    assert np.linalg.norm(logits - exact) < 0.03 * np.linalg.norm(exact)
    grads = jax.eval_shape(jax.grad(lambda params: jnp.sum(run(params)[0] ** 2)), params)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


def test_bfloat16_mixture_keeps_float32_where_it_routes():
    config = dataclasses.replace(ROUTED, dtype="bfloat16")
    run = lambda params: apply(config, params, TOKENS, losses=True, capture=True)
    logits, losses, captured = jax.eval_shape(run, abstract(config))
    low = {name for name, x in captured.items() if x.dtype == jnp.bfloat16}
    assert low == {"residual", "query", "value"}
    assert {x.dtype for x in (logits, *losses.values())} == {jnp.dtype("float32")}


def test_token_out_of_range_makes_its_sequence_nan():
    tokens = np.array([[1, 2, 99, 3, 0, 0], [1, 2, 3, 4, 5, 6]])
    (logits, *_), _ = run(SMALL, lively(SMALL), tokens)
    np.testing.assert_array_equal(np.isnan(logits[0]), np.ones((6, 11), bool))
    assert np.all(np.isfinite(logits[1]))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (jnp.zeros(6, jnp.int32), r"int32 of shape \(6,\); write integers \(B, T\)"),
        (jnp.zeros((2, 6)), "tokens are float32"),
        (jnp.zeros((1, 7), jnp.int32), "7 tokens are longer than context=6; write a larger"),
    ],
)
def test_tokens_that_cannot_be(tokens, message):
    with pytest.raises(ValueError, match=message):
        apply(SMALL, abstract(SMALL), tokens)


def test_gates_that_do_not_fit():
    with pytest.raises(ValueError, match=r"gate_L has shape \(3,\); write one gate per layer"):
        apply(SMALL, abstract(SMALL), TOKENS, gate_L=np.ones(3))


def test_hook_with_the_plain_backend():
    with pytest.raises(ValueError, match="write backend='flash'"):
        jax.eval_shape(lambda params: apply(SMALL, params, TOKENS, backward=halve), abstract(SMALL))
