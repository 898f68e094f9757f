"""Latent attention against the composed projections of each head, in float64."""

import dataclasses
from functools import lru_cache

import jax
import numpy as np
import pytest
from flax import nnx

from models.config import GPTConfig
from models.mla import LatentAttention
from tests.models import oracle
from tests.models.quick import quick_jit

B, T, D = 2, 7, 6
NOPE = GPTConfig(
    model=D, heads=3, head_dim=4, attention="mla", query_rank=5, kv_rank=2, positions="none"
)
ROPE = dataclasses.replace(NOPE, positions="rope", rope_dim=2)


@lru_cache
def module(config):
    """The shapes of its parameters, and the module as a function of parameters and input."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: LatentAttention(config)))
    call = quick_jit(lambda params, x: nnx.merge(graphdef, params)(x, capture=True))
    return nnx.to_pure_dict(state), call


def draw(config, seed=0):
    """Parameters with norm scales far from one, and an input."""
    rng = np.random.default_rng(seed)
    fill = lambda x: rng.normal(0.3, 0.7, x.shape).astype(np.float32)
    params = jax.tree.map(fill, module(config)[0])
    return params, rng.normal(size=(B, T, D)).astype(np.float32)


@pytest.mark.parametrize("config", [NOPE, ROPE], ids=["nope", "rope"])
def test_equals_the_composed_projections(config):
    params, x = draw(config)
    _, call = module(config)
    y, captured = call(params, x)
    expected, seen = oracle.latent_attention(config, oracle.as_float64(params), np.float64(x))
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    assert captured.keys() == seen.keys()
    for name, array in seen.items():
        np.testing.assert_allclose(captured[name], array, rtol=1e-4, atol=1e-5, err_msg=name)
    if config is NOPE:
        # Without RoPE attention knows no order: the last token sees the others as a set.
        swapped = x[:, [1, 0, *range(2, T)]]
        np.testing.assert_allclose(call(params, swapped)[0][:, 2:], y[:, 2:], rtol=1e-4, atol=1e-5)
    else:
        # A rotated part of zeros leaves scores of NoPE alone, at the scale of the whole head.
        params["q_rope"]["kernel"][:] = 0
        blind = oracle.as_float64(params)
        blind["q_up"] = {"kernel": blind["q_up"]["kernel"] * (4 / 6) ** 0.5}
        expected, _ = oracle.latent_attention(NOPE, blind, np.float64(x))
        np.testing.assert_allclose(call(params, x)[0], expected, rtol=1e-4, atol=1e-5)


def test_zero_input_gives_zero():
    params, x = draw(ROPE)
    y, captured = module(ROPE)[1](params, 0 * x)
    np.testing.assert_array_equal(y, np.zeros(x.shape))
    uniform = np.log(np.arange(1, T + 1)).mean()
    np.testing.assert_allclose(captured["attention_entropy"], np.full(3, uniform), rtol=1e-6)
