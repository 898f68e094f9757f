"""The parameter tree of a whole model: paths, shapes, initial values, errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.config import GPTConfig
from models.gpt import GPT, apply, init_params
from tests.models.quick import quick_jit
from tests.models.whole import ROUTED, SMALL, TOKENS, abstract

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
DENSE = {path: shape for path, shape in BASE.items() if "mlp/" not in path}
LATENT = {path: shape for path, shape in BASE.items() if "attn/" not in path} | {
    "layers/attn/q_down/kernel": (2, 8, 3),
    "layers/attn/q_norm/scale": (2, 3),
    "layers/attn/q_up/kernel": (2, 3, 4, 2),
    "layers/attn/kv_down/kernel": (2, 8, 5),
    "layers/attn/kv_norm/scale": (2, 5),
    "layers/attn/k_up/kernel": (2, 5, 4, 2),
    "layers/attn/v_up/kernel": (2, 5, 4, 2),
    "layers/attn/o/kernel": (2, 4, 2, 8),
}


def shapes(tree):
    """Path -> shape."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): x.shape for p, x in leaves}


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
        (
            {"experts": 3, "feedforward": 5},
            DENSE
            | LEARNED
            | {
                "layers/moe/router/kernel": (2, 8, 3),
                "layers/moe/up/kernel": (2, 3, 8, 5),
                "layers/moe/down/kernel": (2, 3, 5, 8),
            },
        ),
        (
            {"experts": 3, "feedforward": 5, "shared_experts": 2, "activation": "swiglu"},
            DENSE
            | LEARNED
            | {
                "layers/moe/router/kernel": (2, 8, 3),
                "layers/moe/up/kernel": (2, 3, 8, 5),
                "layers/moe/gate/kernel": (2, 3, 8, 5),
                "layers/moe/down/kernel": (2, 3, 5, 8),
                "layers/moe/shared/up/kernel": (2, 8, 10),
                "layers/moe/shared/gate/kernel": (2, 8, 10),
                "layers/moe/shared/down/kernel": (2, 10, 8),
            },
        ),
        ({"attention": "mla", "query_rank": 3, "kv_rank": 5}, LATENT | LEARNED),
        (
            {"attention": "mla", "query_rank": 3, "kv_rank": 5, "positions": "rope", "rope_dim": 6},
            LATENT
            | {"layers/attn/q_rope/kernel": (2, 3, 4, 6), "layers/attn/k_rope/kernel": (2, 8, 6)},
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
    config = GPTConfig(
        model=64, layers=8, tied=False, qk_norm=True, activation="swiglu", zero_query=True
    )
    params = quick_jit(init_params, static_argnums=0)(config, 0)
    attn, mlp = params["layers"]["attn"], params["layers"]["mlp"]
    stds = {
        0.125: [attn["k"], attn["v"], mlp["up"], mlp["gate"]],
        0.125 / 4: [attn["o"], mlp["down"]],
        0.02: [params["embed"], params["positions"], params["head"]],
    }
    for std, modules in stds.items():
        for (weights,) in (module.values() for module in modules):
            weights = np.asarray(weights)
            assert abs(np.std(weights) / std - 1) < 0.04
            assert abs(np.mean(weights)) < 4 * std / weights.size**0.5
    assert not np.any(attn["q"]["kernel"])
    for scale in (params["norm"], attn["q_norm"], params["layers"]["mlp_norm"]):
        assert np.all(np.asarray(scale["scale"]) == 1)


def test_initialisation_draws_every_number_once():
    leaves = [np.ravel(x) for x in jax.tree.leaves(init_params(SMALL, 0)) if np.ptp(x) > 0]
    numbers = np.concatenate([x / np.linalg.norm(x) * x.size**0.5 for x in leaves])
    assert len(np.unique(numbers)) > 0.999 * len(numbers)


def stds(config):
    """Module of a block -> the standard deviation that its matrix is drawn with."""
    model = nnx.eval_shape(lambda: GPT(config))
    parameters = nnx.to_flat_state(nnx.state(model.layers, nnx.Param))
    return {
        "/".join(path[:-1]): param.get_metadata("std")
        for path, param in parameters
        if "std" in param.get_metadata()
    }


@pytest.mark.parametrize("given", [None, 0.5])
@pytest.mark.parametrize("zero", [False, True])
def test_standard_deviation_of_each_matrix(given, zero):
    dense = dataclasses.replace(SMALL, activation="swiglu", std=given, zero_query=zero)
    stream = 8**-0.5 if given is None else given
    latent = lambda rank: rank**-0.5 if given is None else given
    written = stream / 4**0.5
    mlp = {"up": stream, "gate": stream, "down": written}
    assert stds(dense) == pytest.approx(
        {
            **{f"mlp/{name}": std for name, std in mlp.items()},
            "attn/q": 0 if zero else stream,
            "attn/k": stream,
            "attn/v": stream,
            "attn/o": written,
        }
    )
    routed = dataclasses.replace(
        ROUTED, activation="swiglu", shared_experts=1, std=given, zero_query=zero
    )
    assert stds(routed) == pytest.approx(
        {
            **{f"moe/{name}": std for name, std in mlp.items()},
            **{f"moe/shared/{name}": std for name, std in mlp.items()},
            "moe/router": stream,
            "attn/q_down": stream,
            "attn/q_up": 0 if zero else latent(3),
            "attn/q_rope": 0 if zero else latent(3),
            "attn/kv_down": stream,
            "attn/k_up": latent(5),
            "attn/k_rope": stream,
            "attn/v_up": latent(5),
            "attn/o": written,
        }
    )


def test_seed_decides():
    same, traced = init_params(SMALL, 3), quick_jit(init_params, static_argnums=0)(SMALL, 3)
    for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(traced), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    other = init_params(SMALL, 4)
    assert np.all(np.asarray(same["embed"]["embedding"]) != other["embed"]["embedding"])


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
