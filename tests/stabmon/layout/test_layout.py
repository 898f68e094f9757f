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
from tests.stabmon import trees
from tests.stabmon.layout import state_dicts
from tests.stabmon.trees import D, H, K, N

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
    assert left_out["norm/scale"] == "no rule for shape (8,)"
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
    with pytest.raises(ValueError, match=r"no layout finds .* among 1 leaves.* tower/w \(4, 4\)"):
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


@pytest.mark.parametrize(
    ("tree", "axes"),
    [
        (state_dicts.torch_llama, r"'\(n h\) d'"),
        (state_dicts.gpt2, r"'d \(three n h\)'"),
        (state_dicts.gpt_neox, r"'\(n three h\) d'"),
        (state_dicts.deepseek, r"'d \(n v\)'"),
    ],
)
def test_a_head_count_that_shapes_do_not_tell_is_asked_for(tree, axes):
    with pytest.raises(
        ValueError, match=rf"shapes do not tell the size of n.*{axes}; write .*heads=…"
    ):
        stabmon.find_layout(tree())


def test_a_norm_over_all_heads_does_not_pass_for_one_head():
    params = state_dicts.torch_llama(norm=(N * H, N * H), kv_heads=N)
    with pytest.raises(ValueError, match=r"shapes do not tell the size of n.*heads=…"):
        stabmon.find_layout(params)


@pytest.mark.parametrize(
    ("tree", "sizes", "message"),
    [
        (
            state_dicts.gpt2(),
            {"heads": 5},
            r"c_proj\.weight of shape \(24, 24\) does not fit '\(n h\) d': 24 is no '\(n h\)' with "
            r"n = 5 \(as given\); check heads= and kv_heads=",
        ),
        (
            state_dicts.torch_llama(),
            {"heads": 4},
            r"k_proj\.weight of shape \(8, 24\) does not fit '\(k h\) d': 8 is no '\(k h\)' with "
            r"h = 6 \(from model\.layers\.0\.self_attn\.q_proj\.weight",
        ),
        (state_dicts.torch_llama(), {"heads": N, "kv_heads": 1}, r"k = 1 \(as given\)"),
        (state_dicts.torch_llama(norm=(H, H)), {"heads": 3}, r"q_norm|q_proj"),
        (
            state_dicts.torch_llama(kv_heads=4),
            {"heads": N},
            r"6 query heads do not divide over 4 kv heads \(.*k_proj\.weight of shape \(16, 24\)",
        ),
        (state_dicts.deepseek(), {"heads": 5}, r"54 is no '\(n h\+v\)' with n = 5"),
    ],
)
def test_a_wrong_head_count_is_an_error_not_a_slice(tree, sizes, message):
    with pytest.raises(ValueError, match=message):
        stabmon.find_layout(tree, **sizes)


def transposed(tree, word):
    return {path: x.T if word in path and x.ndim == 2 else x for path, x in tree.items()}


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        (transposed(state_dicts.gpt2(), "c_attn"), r"c_attn\.weight of shape \(72, 24\)"),
        (transposed(state_dicts.gpt_neox(), "key_value"), r"key_value\.weight of shape \(24, 72\)"),
        (transposed(state_dicts.torch_llama(), "k_proj"), r"k_proj\.weight of shape \(24, 8\)"),
        (transposed(state_dicts.torch_llama(), "_proj"), r"_proj\.weight of shape"),
        (
            transposed(state_dicts.torch_llama(state_dicts.MIXTRAL), "gate"),
            r"gate\.weight of shape",
        ),
    ],
)
def test_a_transposed_matrix_is_an_error(tree, path):
    with pytest.raises(ValueError, match=rf"does not fit .*{path}|{path}.* does not fit"):
        stabmon.find_layout(tree, heads=N)


def test_a_transposed_router_of_our_own_model_is_an_error():
    params = trees.scanned(moe=True)
    router = params["layers"]["moe"]["router"]
    router["kernel"] = router["kernel"].swapaxes(1, 2)
    with pytest.raises(
        ValueError, match=r"router/kernel of shape \(2, 3, 24\) does not fit 'l d e'"
    ):
        stabmon.find_layout(params)


def test_layers_scanned_over_another_axis_are_an_error():
    params = jax.tree.map(lambda x: x.swapaxes(0, 1) if x.ndim > 2 else x, trees.maxtext())
    with pytest.raises(ValueError, match=r"layout 'MaxText'.* does not fit"):
        stabmon.find_layout(params)


def test_a_leaf_that_changes_its_shape_later_is_an_error():
    params = state_dicts.torch_llama()
    layout = stabmon.find_layout(params, heads=N)
    params["model.layers.1.self_attn.k_proj.weight"] = np.ones((2 * K * H, D), np.float32)
    with pytest.raises(
        ValueError, match=r"layers\.1\.self_attn\.k_proj\.weight of shape \(16, 24\)"
    ):
        layout.collect(params)


def test_two_models_in_one_tree_are_an_error():
    tower = state_dicts.torch_llama()
    params = {f"{name}/{path}": x for name in ("text", "vision") for path, x in tower.items()}
    with pytest.raises(ValueError, match=r"are both role 'q' of layer 0; pass the subtree"):
        stabmon.find_layout(params, heads=N)


def test_a_leaf_of_the_right_path_and_another_rank_is_left_out_with_the_reason():
    params = trees.scanned()
    params["layers"]["mlp"]["up"]["kernel"] = np.ones((2, D))
    layout = stabmon.find_layout(params)
    reason = "has shape (2, 24), expected axes 'l d f'"
    assert dict(layout.left_out)["layers/mlp/up/kernel"] == reason
    assert "mlp_up" not in layout.collect(params)


def test_a_size_that_a_declared_layout_lacks_is_asked_for():
    layout = stabmon.Layout("flat", (stabmon.Rule("q", "h/*/q", "d (n h) -> n d h"),))
    with pytest.raises(ValueError, match=r"does not tell the size of n, h; write .*sizes="):
        layout.collect({"h": {"0": {"q": jnp.ones((8, 8))}}})


def test_an_axis_of_two_parts_is_cut_at_the_right_place():
    rules = (
        stabmon.Rule("q", "*/qg", "(n h+p) d -> n d h"),
        stabmon.Rule("k", "*/qg", "(n p+h) d -> n d h"),
    )
    layout = stabmon.Layout("two parts", rules, sizes=(("n", 2), ("k", 2), ("p", 1)))
    leaf = np.arange(18.0).reshape(6, 3)
    found = layout.collect({"0": {"qg": leaf}})
    np.testing.assert_array_equal(found["q"][0, 1], leaf[3:5].T)
    np.testing.assert_array_equal(found["k"][0, 1], leaf[4:6].T)


def test_experts_missing_from_a_layer_are_an_error():
    params = state_dicts.torch_llama(state_dicts.MIXTRAL)
    del params["model.layers.1.block_sparse_moe.experts.2.w1.weight"]
    layout = stabmon.find_layout(params, heads=N)
    with pytest.raises(ValueError, match=r"'expert_gate' differ in their number of experts"):
        layout.collect(params)


def test_layers_of_different_shape_are_an_error():
    params = state_dicts.torch_llama()
    params["model.layers.1.mlp.up_proj.weight"] = np.ones((7, D), np.float32)
    layout = stabmon.find_layout(params, heads=N)
    assert layout.collect(params, ["q"])["q"].shape == (2, N, D, H)
    with pytest.raises(ValueError, match=r"layers of role 'mlp_up' differ in shape"):
        layout.collect(params)


def test_an_unknown_role_is_refused():
    params = trees.scanned()
    with pytest.raises(ValueError, match=r"unknown roles \['query'\]; some of q, k, v"):
        stabmon.find_layout(params).collect(params, ["query"])


def test_an_axis_that_goes_nowhere_is_refused():
    with pytest.raises(ValueError, match=r"has an axis on one side alone"):
        stabmon.Rule("q", "h/*/q", "d n p h -> n d h")


def test_roles_of_different_axes_in_one_leaf_are_refused():
    with pytest.raises(ValueError, match=r"roles \('q', 'o'\) differ in their axes"):
        stabmon.Rule(("q", "o"), "h/*/q", "d two n h -> two n d h")


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


def test_the_group_qk_selects_what_q_and_k_are_made_of():
    params = trees.scanned_mla()
    layout = stabmon.find_layout(params)
    chosen = selection(params, layout.selects("qk", "mlp"))["layers"]
    names = {name for name, leaves in chosen["attn"].items() if any(jax.tree.leaves(leaves))}
    assert names == {"q_down", "q_norm", "q_up", "kv_down", "kv_norm", "k_up"}
    assert all(jax.tree.leaves(chosen["mlp"]))


def test_the_group_attention_selects_matrices_and_no_norm_scales():
    params = trees.scanned_mla()
    layout = stabmon.find_layout(params)
    chosen = selection(params, layout.selects("attention"))["layers"]["attn"]
    names = {name for name, leaves in chosen.items() if any(jax.tree.leaves(leaves))}
    assert names == {"q_down", "q_up", "kv_down", "k_up", "v_up", "o"}
