"""Folded and composed matrices, and how far they moved, against float64 products in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stabmon
from stabmon.layout import selection
from tests.stabmon import trees
from tests.stabmon.trees import C, D, H, K, L, N, R

LATENT = {"q_down": (L, D, R), "q_up": (L, R, N, H), "kv_down": (L, D, C), "k_up": (L, C, N, H)}


def normal(seed=0):
    """A tree with latent attention in float64, weights and norm scales of size 1."""
    rng = np.random.default_rng(seed)
    attn = {name: {"kernel": rng.normal(size=shape)} for name, shape in LATENT.items()}
    attn |= {f"{x}_norm": {"scale": rng.normal(size=(L, r))} for x, r in (("q", R), ("kv", C))}
    return {"layers": {"attn": attn}}


def product(tree, latent, up):
    attn = tree["layers"]["attn"]
    scaled = attn[f"{latent}_down"]["kernel"] * attn[f"{latent}_norm"]["scale"][:, None]
    return np.einsum("ldr,lrnh->lndh", scaled, attn[up]["kernel"])


def single(tree):
    return jax.tree.map(lambda x: x.astype(np.float32), tree)


def relative(got, expected):
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)


def test_latent_attention_is_down_scale_up():
    params = normal()
    found = stabmon.find_layout(params).collect(single(params))
    assert relative(found["q"], product(params, "q", "q_up")) < 1e-6
    assert relative(found["k"], product(params, "kv", "k_up")) < 1e-6


@pytest.mark.parametrize("size", [1e-1, 1e-3, 1e-6])
def test_a_small_difference_of_products_is_not_lost(size):
    then, step = normal(), jax.tree.map(lambda x: size * x, normal(1))
    now = jax.tree.map(np.add, then, step)
    layout = stabmon.find_layout(then)
    _, moved = layout.difference(single(now), single(step))
    expected = product(now, "q", "q_up") - product(then, "q", "q_up")
    assert relative(moved["q"], expected) < 3e-6


def test_no_change_is_exactly_zero():
    params = single(normal())
    layout = stabmon.find_layout(params)
    _, moved = layout.difference(params, jax.tree.map(np.zeros_like, params))
    assert not np.any(moved["q"])


def test_a_difference_of_masked_leaves_under_jit():
    now, step = single(normal()), single(normal(1))
    now["mask"], step["mask"] = np.ones(3, np.float32), np.ones(3, np.float32)
    layout = stabmon.find_layout(now)
    keep = selection(now, layout.selects("qk"))
    masked = jax.tree.map(lambda x, kept: x if kept else optax.MaskedNode(), step, keep)
    whole, moved = jax.jit(layout.difference)(now, masked)
    then = jax.tree.map(lambda x, dx: np.float64(x) - dx, now, step)
    assert relative(whole["k"], product(now, "kv", "k_up")) < 1e-6
    expected = product(now, "kv", "k_up") - product(then, "kv", "k_up")
    assert relative(moved["k"], expected) < 1e-5
    assert moved.keys() == {"q", "k"}


def test_a_difference_without_the_scale_is_refused():
    params = trees.scanned(norm=True)
    layout = stabmon.find_layout(params)
    delta = {"layers": {"attn": {"q": params["layers"]["attn"]["q"]}}}
    with pytest.raises(
        ValueError, match=r"'q' is the product of \['q', 'q_scale'\].*selects\('qk'\)"
    ):
        layout.difference(params, delta)


def test_a_role_that_was_not_tracked_is_absent_from_the_change():
    params = trees.scanned()
    layout = stabmon.find_layout(params)
    delta = {"layers": {"attn": {"q": params["layers"]["attn"]["q"]}}}
    now, moved = layout.difference(params, delta, ["q", "k"])
    assert now.keys() == {"q", "k"}
    np.testing.assert_array_equal(moved["q"], now["q"])
    assert moved.keys() == {"q"}


def test_half_of_a_product_is_an_error():
    params = trees.scanned_mla()
    layout = stabmon.find_layout(params)
    del params["layers"]["attn"]["kv_down"]
    with pytest.raises(ValueError, match=r"'k' is a product, but only .*'k_up'\] is in the tree"):
        layout.collect(params, ["k"])


def test_leaves_come_unfolded_on_request():
    params = trees.scanned(norm=True)
    raw = stabmon.find_layout(params).collect(params, fold=False)
    kernel = params["layers"]["attn"]["q"]["kernel"]
    np.testing.assert_array_equal(raw["q"], kernel.swapaxes(1, 2))
    factors = stabmon.find_layout(trees.scanned_mla()).collect(trees.scanned_mla(), fold=False)
    assert {"q_down", "q_up", "kv_down", "k_up", "v_up"} < factors.keys()
    assert not {"q", "k", "v"} & factors.keys()


def test_bfloat16_is_folded_in_float32():
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), trees.scanned(norm=True))
    found = stabmon.find_layout(params).collect(params, ["k"])["k"]
    attn = jax.tree.map(np.float64, params)["layers"]["attn"]
    expected = (attn["k"]["kernel"] * attn["k_norm"]["scale"][:, None, None]).swapaxes(1, 2)
    assert found.dtype == jnp.float32
    assert found.shape == (L, K, D, H)
    np.testing.assert_array_equal(found, expected)


def test_matrices_without_a_scale_keep_their_dtype():
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), trees.scanned())
    assert stabmon.find_layout(params).collect(params, ["q"])["q"].dtype == jnp.bfloat16


def test_scales_of_other_layers_are_an_error():
    params = trees.scanned(norm=True)
    layout = stabmon.find_layout(params)
    short = params["layers"]["attn"]["q_norm"]["scale"][:1]
    params["layers"]["attn"]["q_norm"]["scale"] = short
    with pytest.raises(ValueError, match=r"q_norm/scale of shape \(1, 4\) does not fit 'l h'"):
        layout.collect(params)
