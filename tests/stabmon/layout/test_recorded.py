"""Heads in the parameters of other libraries, against indexing; stacks in true layer order."""

import numpy as np
import pytest

import stabmon
from tests.stabmon.layout.recorded_jax import RECORDED
from tests.stabmon.trees import D, H, K, N

NORMED = ("hunyuan", "cohere", "stablelm", "lfm2", "phi", "persimmon", "tunix", "flax")


@pytest.mark.parametrize("name", RECORDED)
def test_a_head_is_where_the_library_keeps_it(name):
    recorded = RECORDED[name]
    leaves = recorded.leaves()
    layout = stabmon.find_layout(leaves, **recorded.sizes)
    found = layout.collect(leaves, ["q", "k"])
    np.testing.assert_allclose(found["q"][1, 4], recorded.q(leaves), rtol=1e-6)
    keys = min(1, found["k"].shape[1] - 1)
    np.testing.assert_allclose(found["k"][1, keys], recorded.k(leaves), rtol=1e-6)
    assert layout.name == recorded.layout
    assert layout.qk_norm == (name in NORMED)
    for path, _ in layout.left_out:
        assert any(word in path for word in recorded.left_out), path


def at(layer, name):
    """Where MaxText's blocks of two keep a layer: the leaf, and the place on its layer axis."""
    if layer == 6:
        return f"params/decoder/layers_remainder/layers_0/self_attention/{name}/kernel", None
    return f"params/decoder/layers/layers_{layer % 2}/self_attention/{name}/kernel", layer // 2


def test_blocks_of_layers_and_what_remains_are_in_true_order():
    leaves = RECORDED["maxtext-blocks"].leaves()
    layout = stabmon.find_layout(leaves)
    found = layout.collect(leaves)
    assert layout.layers(leaves) == {"q": tuple(range(7)), "k": tuple(range(7))}
    for layer in range(7):
        path, i = at(layer, "key")
        kernel = leaves[path] if i is None else leaves[path][:, i]
        np.testing.assert_array_equal(found["k"][layer], kernel.swapaxes(0, 1))


def test_pairs_of_stacks_are_interleaved():
    shapes = {"query": (D, 3, N, H), "key": (D, 3, K, H)}
    rng = np.random.default_rng(0)
    leaves = {
        f"layers/self_attention_{kind}/{name}/kernel": rng.normal(size=shape)
        for kind in ("local", "global")
        for name, shape in shapes.items()
    }
    layout = stabmon.find_layout(leaves)
    q = layout.collect(leaves)["q"]
    assert q.shape == (6, N, D, H)
    for layer in range(6):
        kind = ("local", "global")[layer % 2]
        kernel = leaves[f"layers/self_attention_{kind}/query/kernel"][:, layer // 2]
        np.testing.assert_allclose(q[layer], kernel.swapaxes(0, 1), rtol=1e-6)


def test_a_stack_after_another_is_numbered_on():
    recorded = RECORDED["maxtext-deepseek"]
    leaves = recorded.leaves()
    layers = stabmon.find_layout(leaves).layers(leaves)
    assert layers["q_up"] == (0, 1, 2)
    assert layers["router"] == (1, 2)


def test_both_stacks_of_t5_come_one_after_the_other():
    leaves = {
        f"{stack}.block.{i}.layer.0.SelfAttention.{x}.weight": np.full(
            (N * H, D), 10.0 * (stack == "decoder") + i
        )
        for stack, count in (("encoder", 2), ("decoder", 3))
        for i in range(count)
        for x in "qkvo"
    }
    leaves |= {
        f"decoder.block.{i}.layer.1.EncDecAttention.{x}.weight": np.ones((N * H, D))
        for i in range(3)
        for x in "qkvo"
    }
    layout = stabmon.find_layout(leaves, heads=N)
    assert layout.name == "Hugging Face T5"
    q = layout.collect(leaves)["q"]
    np.testing.assert_array_equal(q[:, 0, 0, 0], [0, 1, 10, 11, 12])
    assert all("EncDec" in path for path, _ in layout.left_out)


def test_as_many_key_heads_are_read_alike_by_bloom_and_falcon():
    leaves = RECORDED["bloom"].leaves()
    del leaves["transformer.word_embeddings.weight"]
    q = stabmon.find_layout(leaves, heads=N).collect(leaves)["q"]
    np.testing.assert_array_equal(q[1, 4], RECORDED["bloom"].q(leaves))


def test_a_difference_under_a_layer_norm_is_centred_and_scaled():
    recorded = RECORDED["phi"]
    now, then = recorded.leaves(), recorded.leaves()
    name = "model.layers.1.self_attn.q_proj.weight"
    now[name] = now[name] + 1 + np.arange(N * H)[:, None] % 3
    layout = stabmon.find_layout(now, heads=N)
    delta = {path: now[path] - then[path] for path in now}
    moved = layout.difference(now, delta, ["q"])[1]["q"]
    np.testing.assert_allclose(moved[1, 4], recorded.q(now) - recorded.q(then), atol=1e-4)
    assert not np.any(moved[0])
