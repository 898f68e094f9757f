"""Layouts: where matrices lie, what is left out, and errors instead of wrong slices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import stabmon
from models.config import GPTConfig
from models.gpt import GPT, init_params
from stabmon.layout import selection

CONFIG = GPTConfig(layers=3, model=8, heads=4, kv_heads=2, head_dim=2, feedforward=12)


def test_our_own_model_is_found_with_what_is_left_out():
    params = init_params(CONFIG, 0)
    layout = stabmon.find_layout(params)
    shapes = {role: x.shape for role, x in layout.collect(params).items()}
    assert shapes == {
        "q": (3, 4, 8, 2),
        "k": (3, 2, 8, 2),
        "v": (3, 2, 8, 2),
        "o": (3, 4, 2, 8),
        "mlp_up": (3, 8, 12),
        "mlp_down": (3, 12, 8),
    }
    left_out = dict(layout.left_out)
    assert left_out["embed/embedding"] == "no rule for shape (256, 8)"
    assert not any("kernel" in path for path in left_out)


def test_each_head_is_the_slice_it_should_be():
    params = init_params(CONFIG, 0)
    q = stabmon.find_layout(params).collect(params)["q"]
    kernel = params["layers"]["attn"]["q"]["kernel"]
    np.testing.assert_array_equal(q[2, 1], kernel[2, :, 1, :])


def test_a_flax_state_and_a_wrapper_are_seen_through():
    state = nnx.state(GPT(CONFIG), nnx.Param)
    layout = stabmon.find_layout({"params": {"model": state}})
    assert layout.collect({"params": {"model": state}})["q"].shape == (3, 4, 8, 2)


def test_separate_layers_are_stacked_in_numerical_order():
    rules = (
        stabmon.Rule("q", "h/*/q", "d n h -> n d h"),
        stabmon.Rule("k", "h/*/k", "d n h -> n d h"),
    )
    layer = lambda i: {name: jnp.full((4, 2, 3), float(i)) for name in "qk"}
    params = {"h": {str(i): layer(i) for i in (0, 1, 2, 10)}}
    q = stabmon.Layout("mine", rules).collect(params)["q"]
    np.testing.assert_array_equal(q[:, 0, 0, 0], [0, 1, 2, 10])


def test_an_unknown_tree_is_reported():
    with pytest.raises(ValueError, match=r"no preset layout .* among 1 leaves: tower/w \(4, 4\)"):
        stabmon.find_layout({"tower": {"w": jnp.ones((4, 4))}})


def test_a_leaf_of_another_rank_is_an_error_not_a_slice():
    layout = stabmon.find_layout(init_params(CONFIG, 0))
    params = {"layers": {"attn": {"q": {"kernel": jnp.ones((3, 8, 8))}}}}
    with pytest.raises(ValueError, match=r"has shape \(3, 8, 8\), expected axes 'l d n h'"):
        layout.collect(params)


def test_a_fused_matrix_of_the_wrong_head_count_is_an_error():
    rules = (stabmon.Rule("q", "h/*/q", "d (n h) -> n d h"),)
    layout = stabmon.Layout("flat", rules, sizes=(("n", 3),))
    with pytest.raises(ValueError, match=r"of shape \(8, 8\) does not fit"):
        layout.collect({"h": {"0": {"q": jnp.ones((8, 8))}}})


def test_a_rule_for_an_unknown_role_is_refused():
    with pytest.raises(ValueError, match="unknown role 'query'; one of q, k, v"):
        stabmon.Rule("query", "h/*/q", "d n h -> n d h")


def test_a_rule_to_other_axes_is_refused():
    with pytest.raises(ValueError, match=r"expected a pattern '… -> n d h', got 'd n h -> d n h'"):
        stabmon.Rule("q", "h/*/q", "d n h -> d n h")


def test_groups_select_leaves():
    params = init_params(CONFIG, 0)
    layout = stabmon.find_layout(params)
    chosen = selection(params, layout.selects("attention"))
    assert sum(jax.tree.leaves(chosen)) == 4
    assert chosen["layers"]["attn"]["o"]["kernel"]


def test_an_unknown_group_is_refused():
    layout = stabmon.find_layout(init_params(CONFIG, 0))
    with pytest.raises(ValueError, match="unknown group of matrices 'attn'; one of attention"):
        layout.selects("attn")
