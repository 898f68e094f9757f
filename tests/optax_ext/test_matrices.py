"""Which matrices `select` and `layout` mean, how leaves are taken apart, and who is due when."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_ext._matrices import find_matrices as _find_matrices
from optax_ext._stacks import pieces, slots
from stabmon.layout import LIBRARIES, Layout, Rule, find_layout

L, D, N, H, F, E = 2, 6, 3, 4, 10, 5


def shapes(tree):
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32), tree, is_leaf=lambda x: isinstance(x, tuple)
    )


SCANNED = shapes(
    {
        "embed": {"embedding": (17, D)},
        "layers": {
            "attn": {
                "q": {"kernel": (L, D, N, H)},
                "k": {"kernel": (L, D, N, H)},
                "o": {"kernel": (L, N, H, D)},
            },
            "mlp": {"up": {"kernel": (L, D, F)}},
            "moe": {"router": {"kernel": (L, D, E)}, "down": {"kernel": (L, E, F, D)}},
            "norm": {"scale": (L, D)},
        },
    }
)
HF = Layout(
    "rows are outputs",
    (
        Rule("q", "h/*/q/weight", "(n h) d -> n d h"),
        Rule("k", "h/*/k/weight", "(n h) d -> n d h"),
    ),
    sizes=(("n", N),),
)


INTERLEAVED = (Rule(("q", "k", "v"), "layers/*/qkv", "(n three h) d -> three n d h"),)
NEOX = shapes({"layers": {"0": {"qkv": (3 * N * H, D)}}})


def find_matrices(params, select=None, layout=None):
    return _find_matrices(params, select, layout)


def chosen(*args, **kwargs):
    return [view.path for view in find_matrices(*args, **kwargs)]


def test_by_default_attention_and_mlp_matrices_and_nothing_else():
    views = {v.path: v for v in find_matrices(SCANNED)}
    assert {path: (v.count, v.matrix) for path, v in views.items()} == {
        "layers/attn/q/kernel": (L, (N * H, D)),
        "layers/attn/k/kernel": (L, (N * H, D)),
        "layers/attn/o/kernel": (L, (N * H, D)),
        "layers/mlp/up/kernel": (L, (F, D)),
        "layers/moe/down/kernel": (L * E, (F, D)),
    }


@pytest.mark.parametrize(
    ("select", "count"),
    [
        ("attention", 3),
        ("mlp", 2),
        ("all", 6),
        (("q", "mlp_up"), 2),
        ("attn/[qk]/", 2),
        (lambda path, leaf: "moe" in path and leaf.ndim == 4, 1),
        (jax.tree.map_with_path(lambda path, _: "up" in str(path), SCANNED), 1),
    ],
)
def test_select(select, count):
    assert len(chosen(SCANNED, select)) == count


def test_named_embeddings_are_one_matrix():
    (view,) = find_matrices(SCANNED, "embed")
    assert (view.count, view.matrix) == (1, (17, D))


def test_a_layout_with_one_leaf_a_layer_and_outputs_first():
    tree = shapes({"h": {str(i): {n: {"weight": (N * H, D)} for n in "qk"} for i in range(2)}})
    views = find_matrices(tree, layout=HF)
    assert (views[0].path, views[0].count, views[0].matrix) == ("h/0/k/weight", 1, (N * H, D))
    leaf = jnp.arange(N * H * D, dtype=jnp.float32).reshape(N * H, D)
    np.testing.assert_array_equal(views[0].split(leaf)[0], leaf)


def test_a_fused_leaf_is_taken_whole():
    tree = shapes({"h": {"0": {"attn": {"c_attn": {"weight": (D, 3 * N * H)}}}}})
    layout = find_layout(tree, heads=N)
    with pytest.raises(ValueError, match=r"holds k, q, v in one leaf, but only k, q is selected"):
        find_matrices(tree, ("q", "k"), layout)
    with pytest.raises(ValueError, match=r"find_layout\(params, heads=…\)"):
        find_matrices(tree)


def arange(*shape):
    return jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)


@pytest.mark.parametrize(
    ("path", "shape", "expected"),
    [
        # Fused side by side: [Q K V]; interleaved by head: [q₀ k₀ v₀ q₁ …]; an axis of its own.
        ("h/0/attn/c_attn/weight", (D, 3 * N * H), lambda x: x[:, N * H : 2 * N * H]),
        (
            "layers/0/attention/query_key_value/weight",
            (3 * N * H, D),
            lambda x: x.reshape(N, 3, H, D)[:, 1].reshape(N * H, D),
        ),
        ("blocks/stacked/attn/c_attn/weight", (1, D, 3, N, H), lambda x: x[0, :, 1].reshape(D, -1)),
    ],
)
def test_known_fused_projections(path, shape, expected):
    tree = {path: arange(*shape)}
    (view,) = find_matrices(tree, layout=find_layout(tree, heads=N))
    assert view.count == 3
    got, want = view.split(tree[path])[1], np.asarray(expected(tree[path]))
    np.testing.assert_array_equal(got, want if want.shape == got.shape else want.T)


def test_latent_attention_takes_whole_projections():
    attn = "layers/0/self_attn/"
    layout = next(x for x in LIBRARIES if x.name == "DeepSeek")
    tree = shapes(
        {
            f"{attn}q_proj/weight": (N * (H + 2), D),
            f"{attn}kv_a_proj_with_mqa/weight": (5 + 2, D),
            f"{attn}kv_b_proj/weight": (N * (H + H), 5),
            f"{attn}kv_a_layernorm/weight": (5,),
            f"{attn}o_proj/weight": (D, N * H),
        }
    )
    sizes = {v.path.removeprefix(attn): v.matrix for v in find_matrices(tree, layout=layout)}
    assert sizes == {
        "q_proj/weight": (N * (H + 2), D),
        "kv_a_proj_with_mqa/weight": (7, D),
        "kv_b_proj/weight": (2 * N * H, 5),
        "o_proj/weight": (N * H, D),
    }


def test_a_stack_of_square_matrices_has_the_model_axis_first_in_all():
    attn = {x: {"kernel": (L, D, 2, D // 2)} for x in "qk"}
    tree = shapes({"layers": {"attn": attn | {"o": {"kernel": (L, 2, D // 2, D)}}}})
    leaf = {"q": arange(L, D, 2, D // 2), "o": arange(L, 2, D // 2, D)}
    for view in find_matrices(tree, ("q", "o")):
        name = view.path.split("/")[2]
        first = leaf[name][0].reshape(D, D)
        np.testing.assert_array_equal(view.split(leaf[name])[0], first.T if name == "o" else first)


def test_split_and_join_take_and_put_agree():
    rng = np.random.default_rng(0)
    for view in find_matrices(SCANNED, ("attention", "mlp")):
        leaf = jnp.asarray(rng.normal(size=view.shape), jnp.float32)
        stack = view.split(leaf)
        assert stack.shape == (view.count, *view.matrix)
        np.testing.assert_array_equal(view.join(stack), leaf)
        empty = jnp.zeros_like(leaf)
        for i in range(view.count):
            np.testing.assert_array_equal(view.take(leaf, jnp.int32(i)), stack[i])
            empty = view.put(empty, jnp.int32(i), stack[i])
        np.testing.assert_array_equal(empty, leaf)


def test_unknown_tree_of_plain_matrices():
    tree = shapes({"dense": {"w": (3, 4), "b": (4,)}, "wte": (9, 3), "lm_head": {"w": (3, 9)}})
    assert chosen(tree) == ["dense/w", "lm_head/w"][:1]
    assert chosen(tree, "lm_head") == ["lm_head/w"]


def test_an_empty_tree_has_no_matrices():
    assert find_matrices({}) == ()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: find_matrices(shapes({"w": (3, 4, 4), "b": (3, 4)})),
            r"told from stacked vectors by their shape \(w \(3, 4, 4\)\); write layout=",
        ),
        (
            lambda: find_matrices(shapes({"w": (3, 4, 4)}), "w"),
            r"w of shape \(3, 4, 4\) is selected, .* layout=stabmon.Layout\('mine', .*Rule",
        ),
        (lambda: find_matrices(SCANNED, ("q", "nope")), r"unknown roles \['nope'\]"),
        (lambda: find_matrices(shapes({"w": (3, 4)}), "attention"), r"finds query and key"),
        (lambda: find_matrices(SCANNED, "nothing here"), r"matches none of 8 leaves"),
        (lambda: find_matrices(shapes({"w": (3, 4)}), None, HF), r"None matches none of 1 leaves"),
        (
            lambda: find_matrices({"count": jnp.zeros((3, 4), jnp.int32)}, "count"),
            r"count is int32\[3, 4\]; only real floating-point",
        ),
        (
            lambda: find_matrices({"phase": jnp.zeros((3, 4), jnp.complex64)}, "phase"),
            r"phase is complex64\[3, 4\]; only real floating-point",
        ),
        (
            lambda: find_matrices(NEOX, None, Layout("no sizes", INTERLEAVED)),
            r"an axis of 36 for \(n three h\), with sizes \{'three': 3\}; .*heads=",
        ),
    ],
)
def test_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("period", [1, 2, 3, 7, 24, 100])
@pytest.mark.parametrize("counts", [(16, 8), (1,), (3, 3, 3), (5, 1)])
def test_every_matrix_is_in_one_piece_and_every_piece_in_one_slot(counts, period):
    cut = pieces(counts, period)
    fresh = [(p.stack, i) for p in cut for i in range(p.start + p.stale, p.start + p.size)]
    assert sorted(fresh) == [(g, i) for g, count in enumerate(counts) for i in range(count)]
    table = slots(len(cut), period)
    assert sorted(table[table >= 0].tolist()) == list(range(len(cut)))
    assert table.shape[1] == period
    if period >= sum(counts):
        assert all(p.size == 1 for p in cut)
        due = np.flatnonzero(table[0] >= 0)
        assert np.ptp(np.diff(np.r_[due, due[0] + period])) <= 1


def test_roles_that_lie_end_to_end_in_one_leaf_are_refused():
    rule = Rule(("q", "k", "v"), "h/*/qkv", "d (n+k+k h) -> n d h")
    layout = Layout("mine", (rule,), sizes=(("n", 2), ("k", 1), ("h", 3)))
    with pytest.raises(ValueError, match=r"h/0/qkv holds q, k, v end to end in one leaf"):
        find_matrices({"h": {"0": {"qkv": jnp.ones((5, 12))}}}, None, layout)


def test_a_stack_of_every_other_layer_is_a_stack():
    rule = Rule("q", "local/q", "d l n h -> l n d h", layers=(0, 2))
    (found,) = find_matrices(
        {"local": {"q": jnp.ones((9, 4, 2, 3))}}, None, Layout("mine", (rule,))
    )
    assert (found.stack, found.matrix) == ((4,), (9, 6))
