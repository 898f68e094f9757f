"""Presets: a change of one head, put where a library keeps it, is found there and nowhere else."""

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import stabmon
from stabmon.layout import leaves_with_paths
from tests.stabmon import trees as jaxlib
from tests.stabmon.layout import state_dicts as torch
from tests.stabmon.layout.made import LIBRARIES
from tests.stabmon.trees import C, D, E, F, H, L, N, Tree, V


def stored(tree: Tree, folder) -> Tree:
    """State dicts from a safetensors file, other trees as they are."""
    if not all(isinstance(leaf, np.ndarray) for leaf in tree.values()):
        return tree
    save_file(tree, folder / "model.safetensors")
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("role", ["q", "k", "v"])
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_change_of_one_head_is_found_there_and_nowhere_else(name, role, tmp_path):
    library = LIBRARIES[name]
    before, after = library.tree(), library.tree()
    layer, head = 1, 4 if role == "q" else 1
    rows, columns = library.latent[role != "q"], library.value if role == "v" else H
    rng = np.random.default_rng(1)
    change = rng.integers(-2, 3, (rows, 2)) @ rng.integers(1, 4, (2, columns))
    library.plant(after, role, layer, head, change.astype(np.float32))

    layout = stabmon.find_layout(stored(before, tmp_path), **library.sizes)
    then, now = layout.collect(before, [role])[role], layout.collect(after, [role])[role]
    moved = np.asarray(now) - np.asarray(then)
    expected = np.zeros((L, library.heads[role != "q"], D, columns))
    expected[layer, head] = library.effect(before, role, layer, head, change)
    np.testing.assert_array_equal(moved, expected)
    assert layout.name == library.layout
    assert np.linalg.matrix_rank(moved[layer, head]) == 2

    delta = jax.tree.map(np.subtract, after, before)
    np.testing.assert_array_equal(layout.difference(after, delta, [role])[1][role], expected)


@pytest.mark.parametrize("name", LIBRARIES)
def test_every_matrix_has_its_shape(name):
    library = LIBRARIES[name]
    heads, keys = library.heads
    tree = library.tree()
    shapes = {
        role: x.shape
        for role, x in stabmon.find_layout(tree, **library.sizes).collect(tree).items()
    }
    f = 4 * D if name == "gpt2" else F
    expected = {"q": (L, heads, D, H), "k": (L, keys, D, H), "v": (L, keys, D, library.value)}
    expected |= {"o": (L, heads, library.value, D)}
    if "router" in shapes:
        expected |= {"router": (L, E, D), "expert_down": (L, E, f, D)}
        expected |= {"expert_up": (L, E, D, f), "expert_gate": (L, E, D, f)}
    else:
        expected |= {"mlp_up": (L, D, f), "mlp_down": (L, f, D)}
        expected |= {"mlp_gate": (L, D, f)} if "mlp_gate" in shapes else {}
    assert shapes == expected


def torch_weight(tree: Tree, name: str) -> np.ndarray:
    return next(leaf for path, leaf in tree.items() if path.endswith(f".1.{name}.weight"))


def torch_experts(block, name):
    weight = lambda tree, e: torch_weight(tree, f"{block}.experts.{e}.{name}").T
    return lambda tree: np.stack([weight(tree, e) for e in range(E)])


def maxtext(path):
    return lambda tree: jaxlib.get(tree["params"]["decoder"]["layers"], path)[:, 1]


def levanter(path):
    return lambda tree: jaxlib.get(tree["transformer"]["layers"]["stacked"], path)[1]


@pytest.mark.parametrize(
    ("name", "role", "expected"),
    [
        ("llama", "o", lambda tree: torch_weight(tree, "self_attn.o_proj").T.reshape(N, H, D)),
        ("llama", "mlp_up", lambda tree: torch_weight(tree, "mlp.up_proj").T),
        ("llama", "mlp_gate", lambda tree: torch_weight(tree, "mlp.gate_proj").T),
        ("llama", "mlp_down", lambda tree: torch_weight(tree, "mlp.down_proj").T),
        ("mixtral", "router", lambda tree: torch_weight(tree, "block_sparse_moe.gate")),
        ("qwen2-moe", "expert_up", torch_experts("mlp", "up_proj")),
        ("gpt2", "o", lambda tree: torch_weight(tree, "attn.c_proj").reshape(N, H, D)),
        ("gpt2", "mlp_up", lambda tree: torch_weight(tree, "mlp.c_fc")),
        ("gpt-neox", "o", lambda tree: torch_weight(tree, "attention.dense").T.reshape(N, H, D)),
        ("gpt-neox", "mlp_down", lambda tree: torch_weight(tree, "mlp.dense_4h_to_h").T),
        ("deepseek", "o", lambda tree: torch_weight(tree, "self_attn.o_proj").T.reshape(N, V, D)),
        ("deepseek", "expert_down", torch_experts("mlp", "down_proj")),
        ("gemma", "o", lambda tree: jaxlib.get(tree, "layers/1/attn/attn_vec_einsum/w")),
        ("gemma", "mlp_gate", lambda tree: jaxlib.get(tree, "layers/1/mlp/gate_proj/kernel")),
        ("maxtext", "o", maxtext("self_attention/out/kernel")),
        ("maxtext", "mlp_gate", maxtext("mlp/wi_0/kernel")),
        ("maxtext", "mlp_up", maxtext("mlp/wi_1/kernel")),
        ("maxtext-qwen", "router", lambda tree: maxtext("moe_block/gate/kernel")(tree).T),
        ("maxtext-qwen", "expert_gate", maxtext("moe_block/wi_0")),
        ("maxtext-mixtral", "expert_down", maxtext("MoeBlock_0/wo")),
        (
            "levanter",
            "o",
            lambda tree: levanter("self_attn/o_proj/weight")(tree).transpose(1, 2, 0),
        ),
        ("levanter", "mlp_gate", lambda tree: levanter("mlp/gate_proj/weight")(tree).T),
        ("nanodo", "mlp_up", lambda tree: tree["params"]["blocks_1"]["Mlp_0"]["Dense_0"]["kernel"]),
    ],
)
def test_the_other_matrices_are_those_of_their_role(name, role, expected):
    library = LIBRARIES[name]
    tree = library.tree()
    found = stabmon.find_layout(tree, **library.sizes).collect(tree, [role])[role]
    np.testing.assert_array_equal(found[1], expected(tree))


def test_mixtral_names_its_gate_first_and_its_up_projection_third():
    tree = torch.torch_llama(torch.MIXTRAL)
    found = stabmon.find_layout(tree, heads=N).collect(tree)
    for role, name in {"expert_gate": "w1", "expert_up": "w3", "expert_down": "w2"}.items():
        expected = torch_experts("block_sparse_moe", name)(tree)
        np.testing.assert_array_equal(found[role][1], expected)


@pytest.mark.parametrize("name", LIBRARIES)
def test_what_is_left_out_are_embeddings_norms_biases_and_shared_experts(name):
    library = LIBRARIES[name]
    tree = library.tree()
    left_out = dict(stabmon.find_layout(tree, **library.sizes).left_out)
    small = ("emb", "norm", "Norm", "ln_", "wte", "wpe", "bias", "lm_head", "shared_expert", "rope")
    parts = ("kv_a_proj", "q_b_proj", "q_proj") if "deepseek" in name else ()
    assert all(any(word in path for word in (*small, *parts)) for path in left_out)
    assert set(left_out) <= {path for path, _ in leaves_with_paths(tree)}


def test_the_rotated_part_of_latent_attention_is_left_out_by_name():
    left_out = dict(stabmon.find_layout(torch.deepseek(), heads=N).left_out)
    path = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    assert left_out[path] == "its part p of 'c+p d' is in no matrix"


def test_a_change_of_a_shared_latent_is_found_in_all_heads_of_its_layer():
    before, after = torch.deepseek(), torch.deepseek()
    after["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"][:C] += 1
    after["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"][C:] += 1
    layout = stabmon.find_layout(before, heads=N)
    moved = np.asarray(layout.collect(after)["k"]) - np.asarray(layout.collect(before)["k"])
    assert np.abs(moved[0]).max(axis=(1, 2)).all()
    assert not moved[1].any()


def test_a_flax_state_is_read_like_its_dict():
    tree = jaxlib.flax_gemma()
    state = nnx.State(jax.tree.map(nnx.Param, tree))
    layout = stabmon.find_layout(state)
    np.testing.assert_array_equal(layout.collect(state)["q"], layout.collect(tree)["q"])


@jax.tree_util.register_pytree_node_class
class Named:
    """An array with axis names, as a pytree without names for its children."""

    def __init__(self, array):
        self.array = array

    def tree_flatten(self):
        return (self.array,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_named_arrays_are_read_like_their_arrays():
    tree = jaxlib.levanter()
    named = jax.tree.map(Named, tree)
    layout = stabmon.find_layout(named)
    assert layout.name == "Levanter"
    np.testing.assert_array_equal(layout.collect(named)["q"], layout.collect(tree)["q"])
