"""Norms, feed-forward layer and RoPE against their formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.config import GPTConfig
from models.layers import MLP, Norm, Projection, rope
from tests.models.oracle import gelu, norm, silu
from tests.models.quick import quick_jit

turn = quick_jit(rope)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 2, 8)])
def test_norm(kind, shape):
    layer = Norm(8, kind, GPTConfig())
    scale = normal(1, 8)
    layer.scale[...] = jnp.asarray(scale)
    x = 5 * normal(2, *shape) + 3
    np.testing.assert_allclose(quick_jit(layer)(x), norm(x, scale, kind), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_norm_of_zero_is_zero_and_keeps_bfloat16(kind):
    y = quick_jit(Norm(8, kind, GPTConfig()))(jnp.zeros((2, 8), jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    assert not np.any(y)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_mlp(activation):
    mlp = MLP(GPTConfig(model=4, heads=2, feedforward=6, activation=activation))
    for seed, param in enumerate(jax.tree.leaves(nnx.state(mlp), is_leaf=is_param)):
        param[...] = jnp.asarray(normal(seed, *param.shape))
    x = normal(9, 2, 3, 4)
    up, down = np.asarray(mlp.up.kernel[...]), np.asarray(mlp.down.kernel[...])
    if activation == "gelu":
        hidden = gelu(x @ up)
    else:
        hidden = silu(x @ np.asarray(mlp.gate.kernel[...])) * (x @ up)
    np.testing.assert_allclose(quick_jit(mlp)(x), hidden @ down, rtol=1e-5, atol=1e-5)


def is_param(x):
    return isinstance(x, nnx.Param)


def test_projection_computes_in_the_dtype_of_the_forward_pass():
    layer = Projection("BTD,DF->BTF", (4, 6), 1.0, GPTConfig(dtype="bfloat16"))
    assert layer.kernel.dtype == jnp.float32
    x = jax.ShapeDtypeStruct((1, 2, 4), jnp.bfloat16)
    assert jax.eval_shape(layer, x).dtype == jnp.bfloat16


def test_rope_inner_products_depend_on_distance_only():
    t, h = 7, 6
    q, k = normal(0, h), normal(1, h)
    q_t = turn(np.broadcast_to(q, (1, t, 1, h)))[0, :, 0]
    k_s = turn(np.broadcast_to(k, (1, t, 1, h)))[0, :, 0]
    logits = np.asarray(q_t) @ np.asarray(k_s).T
    for distance in range(-t + 1, t):
        diagonal = np.diagonal(logits, distance)
        np.testing.assert_allclose(diagonal, np.full_like(diagonal, diagonal[0]), atol=2e-6)
    assert np.ptp(logits[0]) > 0.1


def test_rope_is_a_rotation_by_position():
    x = normal(2, 2, 5, 3, 4)
    y = np.asarray(turn(x))
    np.testing.assert_array_equal(y[:, 0], x[:, 0])
    pairs = np.hypot(x[..., :2], x[..., 2:])
    np.testing.assert_allclose(np.hypot(y[..., :2], y[..., 2:]), pairs, rtol=1e-6)
    angle = np.angle((y[..., :2] + 1j * y[..., 2:]) / (x[..., :2] + 1j * x[..., 2:]))
    expected = np.arange(5.0)[None, :, None, None] * np.array([1.0, 0.01])
    expected = np.angle(np.exp(1j * np.broadcast_to(expected, angle.shape)))
    np.testing.assert_allclose(angle, expected, atol=1e-6)


def test_rope_keeps_bfloat16():
    x = jax.ShapeDtypeStruct((1, 2, 1, 4), jnp.bfloat16)
    assert jax.eval_shape(rope, x).dtype == jnp.bfloat16
