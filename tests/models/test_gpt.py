"""The whole model: its parameter tree, its function, its gradients, what it compiles to."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from models.config import GPTConfig
from models.gpt import GPT, apply, init_params
from tests.models import oracle

SMALL = GPTConfig(vocabulary=11, layers=2, model=8, heads=4, context=6)
OTHER = dataclasses.replace(
    SMALL,
    kv_heads=2,
    head_dim=4,
    feedforward=12,
    norm="layernorm",
    positions="rope",
    activation="swiglu",
    qk_norm=True,
    tied=False,
    backend="flash",
)
TOKENS = np.random.default_rng(0).integers(0, 11, (2, 6))


def halve(o, do, gate):
    return jnp.where(gate > 0, o / 2, o), do


def shapes(tree):
    """Path -> shape."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): x.shape for p, x in leaves}


def abstract(config):
    """The parameter tree's shapes and dtypes, nothing computed."""
    return jax.eval_shape(lambda: init_params(config, 0))


def lively(config, seed=0):
    """Parameters far from their initialisation: larger logits, uneven norm scales."""
    rng = np.random.default_rng(seed)

    def draw(path, x):
        centre = 1.0 if path[-1].key == "scale" else 0.0
        return jnp.asarray(rng.normal(centre, 0.4, x.shape), x.dtype)

    return jax.tree.map_with_path(draw, abstract(config))


def differing(a, b):
    """Paths at which two trees differ in any bit."""
    flat = lambda tree: jax.tree.leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for (path, x), (_, y) in zip(flat(a), flat(b), strict=True)
        if not np.array_equal(x, y)
    }


BASE = {
    "embed/embedding": (11, 8),
    "norm/scale": (8,),
    "layers/attn_norm/scale": (2, 8),
    "layers/mlp_norm/scale": (2, 8),
    "layers/attn/q/kernel": (2, 8, 4, 2),
    "layers/attn/k/kernel": (2, 8, 4, 2),
    "layers/attn/v/kernel": (2, 8, 4, 2),
    "layers/attn/o/kernel": (2, 4, 2, 8),
    "layers/mlp/up/kernel": (2, 8, 32),
    "layers/mlp/down/kernel": (2, 32, 8),
}
LEARNED = {"positions/embedding": (6, 8)}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, BASE | LEARNED),
        ({"norm": "layernorm", "backend": "flash", "dtype": "bfloat16"}, BASE | LEARNED),
        ({"positions": "none"}, BASE),
        ({"positions": "rope"}, BASE),
        ({"tied": False}, BASE | LEARNED | {"head/kernel": (8, 11)}),
        ({"activation": "swiglu"}, BASE | LEARNED | {"layers/mlp/gate/kernel": (2, 8, 32)}),
        (
            {"qk_norm": True},
            BASE
            | LEARNED
            | {"layers/attn/q_norm/scale": (2, 2), "layers/attn/k_norm/scale": (2, 2)},
        ),
        (
            {"kv_heads": 1, "head_dim": 3, "feedforward": 5, "layers": 1},
            {
                **{p: (1, *s[1:]) if p.startswith("layers") else s for p, s in BASE.items()},
                **LEARNED,
                "layers/attn/q/kernel": (1, 8, 4, 3),
                "layers/attn/k/kernel": (1, 8, 1, 3),
                "layers/attn/v/kernel": (1, 8, 1, 3),
                "layers/attn/o/kernel": (1, 4, 3, 8),
                "layers/mlp/up/kernel": (1, 8, 5),
                "layers/mlp/down/kernel": (1, 5, 8),
            },
        ),
    ],
)
def test_parameter_tree(fields, expected):
    config = dataclasses.replace(SMALL, **fields)
    params = abstract(config)
    assert shapes(params) == expected
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}


def test_param_dtype():
    config = dataclasses.replace(SMALL, param_dtype="bfloat16")
    params = abstract(config)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}


def test_initialisation():
    config = GPTConfig(model=64, layers=8, tied=False, qk_norm=True, activation="swiglu")
    params = init_params(config, 0)
    attn, mlp = params["layers"]["attn"], params["layers"]["mlp"]
    stds = {
        0.125: [attn["q"], attn["k"], attn["v"], mlp["up"], mlp["gate"]],
        0.125 / 4: [attn["o"], mlp["down"]],
        0.02: [params["embed"], params["positions"], params["head"]],
    }
    for std, modules in stds.items():
        for (weights,) in (module.values() for module in modules):
            weights = np.asarray(weights)
            assert abs(np.std(weights) / std - 1) < 0.04
            assert abs(np.mean(weights)) < 4 * std / weights.size**0.5
    for scale in (params["norm"], attn["q_norm"], params["layers"]["mlp_norm"]):
        assert np.all(np.asarray(scale["scale"]) == 1)


def test_initialisation_draws_every_number_once():
    leaves = [np.ravel(x) for x in jax.tree.leaves(init_params(SMALL, 0)) if np.ptp(x) > 0]
    numbers = np.concatenate([x / np.linalg.norm(x) * x.size**0.5 for x in leaves])
    assert len(np.unique(numbers)) > 0.999 * len(numbers)


def test_options_of_the_initialisation():
    params = init_params(dataclasses.replace(SMALL, zero_query=True, std=0.5, model=64), 0)
    attn = params["layers"]["attn"]
    assert not np.any(attn["q"]["kernel"])
    assert abs(np.std(attn["k"]["kernel"]) / 0.5 - 1) < 0.1
    assert abs(np.std(attn["o"]["kernel"]) / 0.25 - 1) < 0.1


def test_seed_decides():
    same, traced = init_params(SMALL, 3), jax.jit(init_params, static_argnums=0)(SMALL, 3)
    for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(traced), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    other = init_params(SMALL, 4)
    assert np.all(np.asarray(same["embed"]["embedding"]) != other["embed"]["embedding"])


@pytest.mark.parametrize("config", [SMALL, OTHER], ids=["default", "other"])
def test_logits_and_intermediates_equal_the_oracle(config):
    params = lively(config)
    logits, captured = jax.jit(lambda p: apply(config, p, TOKENS, capture=True))(params)
    expected_logits, expected = oracle.gpt(config, params, TOKENS)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected_logits, rtol=1e-4, atol=1e-4)
    assert captured.keys() == expected.keys()
    for name, array in expected.items():
        assert captured[name].shape == array.shape, name
        np.testing.assert_allclose(captured[name], array, rtol=1e-4, atol=1e-4, err_msg=name)


def test_module_and_function_agree():
    model = GPT(SMALL, rngs=nnx.Rngs(5))
    logits = apply(SMALL, init_params(SMALL, 5), TOKENS)
    np.testing.assert_array_equal(model(jnp.asarray(TOKENS)), logits)


@pytest.mark.parametrize("config", [SMALL, OTHER], ids=["default", "other"])
def test_gradient_of_the_module_against_differences_of_the_oracle(config):
    model = GPT(config)
    nnx.update(model, lively(config))
    loss = lambda model: jnp.sum(jnp.sin(model(jnp.asarray(TOKENS))))
    grads = oracle.as_float64(nnx.to_pure_dict(nnx.jit(nnx.grad(loss))(model)))
    params = oracle.as_float64(lively(config))
    rng = np.random.default_rng(1)
    direction = jax.tree.map(lambda x: rng.normal(size=x.shape), params)

    def at(step):
        moved = jax.tree.map(lambda x, d: x + step * d, params, direction)
        return np.sin(oracle.gpt(config, moved, TOKENS)[0]).sum()

    slopes = jax.tree.map(lambda g, d: np.sum(g * d), grads, direction)
    np.testing.assert_allclose(
        sum(jax.tree.leaves(slopes)), (at(1e-5) - at(-1e-5)) / 2e-5, rtol=1e-4
    )


@pytest.mark.parametrize("config", [SMALL, OTHER], ids=["plain", "flash"])
def test_no_logit_depends_on_a_later_token(config):
    # With a vocabulary row per position, the gradient by row is the gradient by position.
    config = dataclasses.replace(config, tied=False)
    params = lively(config)
    tokens = jnp.arange(6)[None]

    def logits(table):
        return apply(config, params | {"embed": {"embedding": table}}, tokens)[0].sum(-1)

    jacobian = jax.jit(jax.jacrev(logits))(params["embed"]["embedding"])[:, :6]
    reach = np.abs(jacobian).max(-1)
    assert np.all(reach[np.triu_indices(6, 1)] == 0)
    assert np.all(reach[np.tril_indices(6)] > 0)


def test_gate_of_each_layer():
    config = dataclasses.replace(SMALL, backend="flash")
    params = lively(config)

    @jax.jit
    def grads(gate_L):
        loss = lambda p: jnp.sum(jnp.sin(apply(config, p, TOKENS, backward=halve, gate_L=gate_L)))
        return jax.grad(loss)(params)

    clean = grads(jnp.zeros(2))
    first = {"layers/attn/q/kernel", "layers/attn/k/kernel"}
    upstream = {"embed/embedding", "positions/embedding", "layers/attn_norm/scale"}
    assert differing(grads(jnp.array([1.0, 0.0])), clean) == first | upstream
    faulty = grads(jnp.array([0.0, 1.0]))
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

    for gradient in jax.tree.leaves(jax.jit(jax.grad(total))(lively(SMALL))):
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
    assert len(full.outvars) == 6
    (scan,) = (e for e in equations(bare) if e.primitive.name == "scan")
    assert len(scan.outvars) == 1
    count = lambda jaxpr: sum(e.primitive.name == "exp" for e in equations(jaxpr))
    assert count(bare) == 1
    assert count(full) > 1


@pytest.mark.parametrize("backend", ["plain", "flash"])
def test_program_does_not_grow_with_depth(backend):
    def length(layers):
        config = dataclasses.replace(SMALL, layers=layers, backend=backend)
        params = abstract(config)
        loss = lambda p: jnp.sum(apply(config, p, TOKENS))
        return len(jax.jit(jax.grad(loss)).lower(params).as_text().splitlines())

    assert length(2) == length(16)


def test_unrolled_loop_gives_the_same():
    params = lively(SMALL)
    unrolled = apply(dataclasses.replace(SMALL, unroll=2), params, TOKENS)
    np.testing.assert_allclose(unrolled, apply(SMALL, params, TOKENS), rtol=1e-5, atol=1e-5)


def test_bfloat16_forward_keeps_float32_ends():
    config = dataclasses.replace(OTHER, dtype="bfloat16")
    params = lively(config)
    run = lambda params: apply(config, params, TOKENS, capture=True)
    logits, captured = jax.jit(run)(params)
    assert logits.dtype == jnp.float32
    assert captured["residual"].dtype == jnp.bfloat16
    assert captured["attention_entropy"].dtype == jnp.float32
    exact, _ = oracle.gpt(config, params, TOKENS)
    assert np.linalg.norm(logits - exact) < 0.03 * np.linalg.norm(exact)
    grads = jax.eval_shape(jax.grad(lambda params: jnp.sum(run(params)[0] ** 2)), params)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


def test_token_out_of_range_makes_its_sequence_nan():
    logits = apply(SMALL, lively(SMALL), jnp.array([[1, 2, 99, 3], [1, 2, 3, 4]]))
    np.testing.assert_array_equal(np.isnan(logits[0]), np.ones((4, 11), bool))
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
        GPT(SMALL)(tokens)


def test_gates_that_do_not_fit():
    with pytest.raises(ValueError, match=r"gate_L has shape \(3,\); write one gate per layer"):
        GPT(SMALL)(jnp.asarray(TOKENS), gate_L=jnp.ones(3))


def test_hook_with_the_plain_backend():
    with pytest.raises(ValueError, match="write backend='flash'"):
        GPT(SMALL)(jnp.asarray(TOKENS), backward=halve)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dataclasses.replace(SMALL, tied=False), r"'head/kernel'\] has shape None, .* \(8, 11\)"),
        (dataclasses.replace(SMALL, positions="rope"), "'positions/embedding'.*says None"),
        (dataclasses.replace(SMALL, layers=3), r"has shape \(2, 8, 4, 2\).*\(3, .*init_params"),
    ],
)
def test_parameters_of_another_config(config, message):
    with pytest.raises(ValueError, match=message):
        apply(config, abstract(SMALL), TOKENS)
