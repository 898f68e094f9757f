"""What a layout refuses instead of slicing it wrongly, and what it says then."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.core import freeze
from flax.training.train_state import TrainState

import stabmon
from stabmon.layout import Rule
from stabmon.layout.file import read_layout
from stabmon.layout.layout import shortened
from tests.stabmon import trees
from tests.stabmon.layout.state_dicts import torch_llama
from tests.stabmon.trees import D, H, K, N

ATTN = "model.layers.{}.self_attn"


def llama(**more):
    """Two layers, with more leaves in each attention module."""
    tree = torch_llama()
    for i in range(2):
        tree |= {f"{ATTN.format(i)}.{x.replace('__', '.')}": leaf for x, leaf in more.items()}
    return tree


@pytest.mark.parametrize(
    "name",
    [
        "q_ln__weight",
        "qk_rms__weight",
        "sqk",
        "temperature",
        "q_proj__lora_A__weight",
        "q_conv__weight",
    ],
)
def test_what_lies_beside_queries_and_keys_without_a_rule_is_refused(name):
    path = f"{ATTN.format(0)}.{name}".replace("__", r"\.")
    with pytest.raises(ValueError, match=rf"{path} .* and 1 more beside queries and keys"):
        stabmon.find_layout(llama(**{name: np.ones(H)}), heads=N)


@pytest.mark.parametrize(
    "name", ["q_proj__bias", "sinks", "rotary_emb__inv_freq", "v_norm__weight", "o_norm__weight"]
)
def test_biases_positions_and_norms_of_values_are_left_out(name):
    layout = stabmon.find_layout(llama(**{name: np.ones(H)}), heads=N)
    assert f"{ATTN.format(0)}.{name.replace('__', '.')}" in dict(layout.left_out)


def test_a_norm_of_queries_outside_of_the_attention_module_is_refused():
    tree = torch_llama() | {"model.layers.1.query_norm.weight": np.ones(H)}
    with pytest.raises(ValueError, match=r"layers\.1\.query_norm\.weight \(4,\) beside queries"):
        stabmon.find_layout(tree, heads=N)


def test_a_rule_or_a_path_to_ignore_settles_it():
    tree = llama(q_ln__weight=np.arange(1.0, H + 1), k_ln__weight=np.ones(H))
    rules = tuple(Rule(f"{x}_scale", f"layers/*/self_attn/{x}_ln/weight", "h -> h") for x in "qk")
    layout = stabmon.find_layout(tree, heads=N, rules=rules)
    q = layout.collect(tree)["q"]
    weight = tree[f"{ATTN.format(1)}.q_proj.weight"][:H].T
    np.testing.assert_allclose(q[1, 0], weight * np.arange(1, H + 1), rtol=1e-6)
    ignored = stabmon.find_layout(tree, heads=N, ignores=("layers/*/self_attn/?_ln/weight",))
    np.testing.assert_array_equal(ignored.collect(tree)["q"][1, 0], weight)


def test_a_rule_that_matches_nothing_is_refused():
    rules = (Rule("q_scale", "layers/*/attention/q_norm/weight", "h -> h"),)
    with pytest.raises(ValueError, match=r"nothing in the tree matches the rule for 'q_scale'"):
        stabmon.find_layout(torch_llama(), heads=N, rules=rules)


def test_a_declared_layout_is_checked_against_a_tree():
    params = trees.scanned()
    layout = stabmon.find_layout(params)
    layout.check(params)
    idle = replace(layout, rules=(*layout.rules, Rule("router", "layers/gate", "l d e -> l e d")))
    with pytest.raises(ValueError, match=r"matches the rule for 'router', 'layers/gate'"):
        idle.check(params)


@pytest.mark.parametrize(
    ("role", "path"), [("q", "layers/*/attn/value/kernel"), ("k", "h/*/q_proj/weight")]
)
def test_a_role_pointed_at_another_is_refused(role, path):
    with pytest.raises(ValueError, match=rf"role '{role}', but the path names role '[vq]'"):
        Rule(role, path, "d n h -> n d h")


def test_keys_of_fewer_layers_than_queries_are_refused():
    tree = torch_llama()
    tree["model.layers.1.self_attn.key.weight"] = tree.pop("model.layers.1.self_attn.k_proj.weight")
    layout = stabmon.find_layout(torch_llama(), heads=N)
    with pytest.raises(ValueError, match=r"q in layers 0-1, k in layer 0; a matrix is missing"):
        layout.collect(tree, ["q", "k"])
    with pytest.raises(ValueError, match=r"of different layers"):
        stabmon.find_layout(tree, heads=N)
    assert layout.collect(tree, ["q"])["q"].shape[0] == 2


def test_a_change_of_some_layers_is_refused():
    tree = torch_llama()
    layout = stabmon.find_layout(tree, heads=N)
    delta = {path: x for path, x in tree.items() if "layers.0" in path}
    with pytest.raises(ValueError, match=r"the change holds 'q' in layer 0, the parameters in"):
        layout.difference(tree, delta, ["q"])


def test_layers_that_share_their_keys_are_refused():
    tree = torch_llama(norm=(H, H), gemma=True)
    tree |= {f"model.layers.{i}.laurel.linear_left.weight": np.ones((3, D)) for i in range(2)}
    with pytest.raises(ValueError, match=r"'Hugging Face Gemma 3n': its last layers take their"):
        stabmon.find_layout(tree)


def test_integers_are_no_weights():
    tree = torch_llama()
    tree["model.layers.0.self_attn.q_proj.weight"] = np.ones((N * H, D), np.int8)
    with pytest.raises(ValueError, match=r"q_proj\.weight is of dtype int8: quantised"):
        stabmon.find_layout(tree, heads=N)


def test_the_error_says_what_nearly_fitted_and_which_rules_to_write():
    attn = {"wq": (D, N * H), "wk": (D, K * H), "wo": (N * H, D)}
    shapes = {f"blocks/{{}}/attn/{x}/kernel": shape for x, shape in attn.items()}
    tree = trees.layered(shapes | {"blocks/{}/mlp/up/kernel": (D, 20)})
    with pytest.raises(ValueError, match="nearest is") as caught:
        stabmon.find_layout(tree)
    text = str(caught.value)
    assert "Rule('q', 'blocks/*/attn/wq/kernel', 'd (n h) -> n d h')" in text
    assert "Rule('o', 'blocks/*/attn/wo/kernel', '(n h) d -> n h d')" in text
    assert "Rule('mlp_up', 'blocks/*/mlp/up/kernel', 'd f -> d f')" in text
    assert "blocks/*/attn/wk/kernel (24, 8)" in text
    written = eval(f"(lambda Rule, Layout: {text[text.index('Layout(') :].replace(', …', ',')})")
    layout = stabmon.find_layout(tree, [written(Rule, stabmon.Layout)], heads=N, kv_heads=K)
    assert layout.collect(tree)["k"].shape == (2, K, D, H)


def attention():
    """One block of Flax's attention."""

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.MultiHeadDotProductAttention(6)(x, x)

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            return Block()(Block()(x))

    return Model().init(jax.random.key(0), np.ones((1, 3, D), np.float32))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attn = nnx.MultiHeadAttention(
            N, D, normalize_qk=True, decode=False, dropout_rate=0.1, rngs=rngs
        )


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block(rngs), Block(rngs)])


def test_any_kind_of_tree_is_read_like_its_parameters():
    variables = attention()
    params = variables["params"]
    expected = stabmon.find_layout(params).collect(params)["k"]
    assert expected.shape == (2, N, D, H)
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))
    for tree in (variables, freeze(variables), state, {"params": params, "f": len}):
        layout = stabmon.find_layout(tree)
        np.testing.assert_array_equal(layout.collect(tree)["k"], expected)


def test_an_nnx_module_is_read_like_its_state():
    model = Model()
    layout = stabmon.find_layout(model)
    assert layout.qk_norm
    for tree in (model, nnx.state(model), nnx.state(model, nnx.Param)):
        np.testing.assert_array_equal(
            layout.collect(tree)["q"][1, 4],
            _folded(model.blocks[1].attn.query.kernel[...][:, 4]),
        )


def _folded(w):
    return w - w.mean(axis=-1, keepdims=True)


def test_embedding_and_head_come_on_request_without_a_layer_axis():
    tree = torch_llama()
    layout = stabmon.find_layout(tree, heads=N)
    found = layout.collect(tree, ["embedding", "head"])
    np.testing.assert_array_equal(found["head"], tree["lm_head.weight"])
    assert found["embedding"].shape == (32, D)
    assert "embedding" not in layout.collect(tree)
    assert layout.selects("head")("lm_head.weight", None)
    assert (layout.has("head"), layout.has("router"), layout.qk_norm) == (True, False, False)


def test_a_layout_is_read_from_a_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\nignores = ["h/*/s"]\n[[rules]]\nrole = ["q", "k", "v"]\n'
        'path = "h/*/w"\npattern = "(n+k+k h) d -> n d h"\nlayers = [0, 2]\n'
    )
    rule = Rule(("q", "k", "v"), "h/*/w", "(n+k+k h) d -> n d h", layers=(0, 2))
    assert read_layout(path) == stabmon.Layout("mine", (rule,), ignores=("h/*/s",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules = 3", "has no rules"),
        ("a = [", "is no TOML"),
        ("layers = 3", r"unknown keys \['layers'\]"),
        ('[[rules]]\nrole = "q"', "rule 1 needs role, path and pattern"),
        (
            '[[rules]]\nrole = "q"\npath = "h/*/w"\npattern = "d -> d"',
            "rule 1: .*expected a pattern",
        ),
    ],
)
def test_a_file_that_is_no_layout_is_refused(text, message, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_layout(path)


def test_layer_numbers_are_written_as_runs():
    assert shortened((0, 1, 2, 5, 7, 8)) == "layers 0-2, 5, 7-8"
