"""What programs for accelerators are made of: lowered for TPU and CUDA on the machine at hand."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import export

import optax_ext
import stabmon

PLATFORMS = ("tpu", "cuda")
L, D, N, H, F, E, T = 2, 512, 4, 64, 1024, 8, 600


def shapes():
    """Parameters of a stack of layers with experts, as shapes alone."""
    of = lambda *shape: jax.ShapeDtypeStruct((L, *shape), jnp.float32)
    attn = {name: {"kernel": of(D, N, H)} for name in "qkv"} | {"o": {"kernel": of(N, H, D)}}
    return {"layers": {"attn": attn, "router": {"kernel": of(D, E)}, "mlp": {"up": of(D, F)}}}


def lowered(f, platform, *args):
    return export.export(jax.jit(f), platforms=[platform])(*args).mlir_module()


def library_calls(text):
    return {name.lower() for name in re.findall(r"custom_call @(\w+)", text)}


def assert_no_decomposition_but_cholesky(text):
    unwanted = ("svd", "qr", "householder", "eig", "syev", "orgqr", "geqrf")
    assert not [name for name in library_calls(text) if any(word in name for word in unwanted)]


@pytest.fixture(scope="module")
def layout():
    return stabmon.find_layout(shapes())


@pytest.mark.parametrize("platform", PLATFORMS)
def test_monitors_need_neither_svd_nor_qr(layout, platform):
    params = shapes()
    ring = optax_ext.track_delta(50, 4, select=layout.selects("qk"))
    monitor = stabmon.Monitor(layout, jacobian=100, detail="full", lags=(50, 200))
    seen = {
        "residual": jax.ShapeDtypeStruct((L, 2, T, D), jnp.float32),
        "attention_entropy": jax.ShapeDtypeStruct((L, N), jnp.float32),
    }

    def measure(params, state, seen, h):
        turn = lambda h: jnp.tanh(h) * 2
        stats = lambda: stabmon.jacobian_alignment([turn, turn], h)
        return monitor(
            jnp.int32(0), params, state, seen, jacobian=stats, grads=params, updates=params
        )

    h = jax.ShapeDtypeStruct((64,), jnp.float32)
    text = lowered(measure, platform, params, jax.eval_shape(ring.init, params), seen, h)
    assert_no_decomposition_but_cholesky(text)
    assert "cholesky" in text or "potrf" in text


@pytest.mark.parametrize("method", ["auto", "polar", "svd"])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_msign_needs_neither_svd_nor_qr(layout, platform, method):
    params = shapes()
    tx = optax.chain(optax.sgd(1.0), optax_ext.msign(1, "attention", method, layout=layout))
    text = lowered(tx.update, platform, params, jax.eval_shape(tx.init, params), params)
    assert_no_decomposition_but_cholesky(text)


def test_auto_carries_one_method_to_a_tpu():
    """The products of one loop, each written out as a loop of bfloat16 ones."""
    w = jax.ShapeDtypeStruct((4, 512, 512), jnp.float32)
    text = lowered(optax_ext.matrix_sign, "tpu", w)
    assert text.count("stablehlo.while") == 4
    assert not library_calls(text)


def test_both_platforms_of_one_export_share_the_way():
    text = export.export(jax.jit(stabmon.spectral_entropy), platforms=PLATFORMS)(
        jax.ShapeDtypeStruct((96, 64), jnp.float32)
    ).mlir_module()
    assert text.count("stablehlo.while") == 2
    assert not library_calls(text)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_check_sees_a_decomposition(platform):
    text = lowered(jnp.linalg.svd, platform, jax.ShapeDtypeStruct((64, 64), jnp.float32))
    with pytest.raises(AssertionError):
        assert_no_decomposition_but_cholesky(text)
