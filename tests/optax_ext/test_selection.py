"""Which matrices `select` and `layout` mean, and that views take leaves apart and back together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_ext._grouping import pieces, slots
from optax_ext._selection import find_matrices
from stabmon.layout import PRESETS, Layout, Rule, find_layout

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


def chosen(*args, **kwargs):
    return [view.path for view in find_matrices(*args, **kwargs)]


def test_by_default_attention_and_mlp_matrices_and_nothing_else():
    views = {v.path: v for v in find_matrices(SCANNED)}
    assert {path: (v.count, v.matrix) for path, v in views.items()} == {
        "layers/attn/q/kernel": (L, (D, N * H)),
        "layers/attn/k/kernel": (L, (D, N * H)),
        "layers/attn/o/kernel": (L, (N * H, D)),
        "layers/mlp/up/kernel": (L, (D, F)),
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


def test_per_head_blocks():
    views = {v.path: v for v in find_matrices(SCANNED, "attention", per_head=True)}
    q, o = views["layers/attn/q/kernel"], views["layers/attn/o/kernel"]
    assert (q.count, q.matrix) == (L * N, (D, H))
    assert (o.count, o.matrix) == (L * N, (H, D))
    assert q.names[:4] == tuple(
        f"layers/attn/q/kernel[{i}, {j}]" for i, j in ((0, 0), (0, 1), (0, 2), (1, 0))
    )
    leaf = jnp.arange(L * D * N * H, dtype=jnp.float32).reshape(L, D, N, H)
    np.testing.assert_array_equal(q.split(leaf)[N + 1], leaf[1, :, 1, :])


def test_a_layout_with_one_leaf_a_layer_and_outputs_first():
    tree = shapes({"h": {str(i): {n: {"weight": (N * H, D)} for n in "qk"} for i in range(2)}})
    views = find_matrices(tree, layout=HF)
    assert (views[0].path, views[0].count, views[0].matrix) == ("h/0/k/weight", 1, (D, N * H))
    leaf = jnp.arange(N * H * D, dtype=jnp.float32).reshape(N * H, D)
    np.testing.assert_array_equal(views[0].split(leaf)[0], leaf)
    head = find_matrices(tree, "q", HF, per_head=True)[0]
    np.testing.assert_array_equal(head.split(leaf)[1], leaf[H : 2 * H].T)


def test_a_fused_projection_is_split_before_and_joined_after():
    layout = {"h/*/qkv": ("d (three n h) -> three d (n h)", {"three": 3, "n": N})}
    tree = {"h": {"0": {"qkv": jnp.arange(D * 3 * N * H, dtype=jnp.float32).reshape(D, -1)}}}
    (view,) = find_matrices(tree, layout=layout)
    assert (view.count, view.matrix) == (3, (D, N * H))
    leaf = tree["h"]["0"]["qkv"]
    np.testing.assert_array_equal(view.split(leaf)[1].T, leaf[:, N * H : 2 * N * H])


def test_roles_need_a_layout_and_take_fused_leaves_whole():
    tree = shapes({"h": {"0": {"attn": {"c_attn": {"weight": (D, 3 * N * H)}}}}})
    layout = find_layout(tree, heads=N)
    with pytest.raises(ValueError, match=r"holds k, q, v in one leaf, but only k, q is selected"):
        find_matrices(tree, ("q", "k"), layout)
    with pytest.raises(ValueError, match=r"which a mapping of patterns does not know"):
        find_matrices(tree, "attention", {"*": "d f -> d f"})
    with pytest.raises(ValueError, match=r"find_layout\(params, heads=…\)"):
        find_matrices(tree)


def arange(*shape):
    return jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)


@pytest.mark.parametrize(
    ("path", "shape", "per_head", "expected"),
    [
        # Fused side by side: [Q K V]; interleaved by head: [q₀ k₀ v₀ q₁ …].
        ("h/0/attn/c_attn/weight", (D, 3 * N * H), False, lambda x: x[:, N * H : 2 * N * H]),
        ("h/0/attn/c_attn/weight", (D, 3 * N * H), True, lambda x: x[:, N * H :][:, :H]),
        (
            "layers/0/attention/query_key_value/weight",
            (3 * N * H, D),
            False,
            lambda x: x.reshape(N, 3, H, D)[:, 1].reshape(N * H, D),
        ),
        ("blocks/stacked/attn/c_attn/weight", (1, D, 3, N, H), True, lambda x: x[0, :, 1, 0]),
    ],
)
def test_known_fused_projections(path, shape, per_head, expected):
    tree = {path: arange(*shape)}
    views = find_matrices(tree, layout=find_layout(tree, heads=N), per_head=per_head)
    (view,) = views
    assert view.count == (3 * N if per_head else 3)
    got = view.split(tree[path])[N if per_head else 1]
    want = np.asarray(expected(tree[path]))
    np.testing.assert_array_equal(got, want if want.shape == got.shape else want.T)


def test_latent_attention_takes_whole_projections():
    attn = "layers/0/self_attn/"
    layout = next(x for x in PRESETS if x.name == "DeepSeek")
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
        "q_proj/weight": (D, N * (H + 2)),
        "kv_a_proj_with_mqa/weight": (D, 7),
        "kv_b_proj/weight": (5, 2 * N * H),
        "o_proj/weight": (N * H, D),
    }
    layout = Layout("with sizes", layout.rules, (("n", N), ("h", H), ("p", 2), ("v", H)))
    heads = {v.path: v for v in find_matrices(tree, "q", layout, per_head=True)}
    assert heads[f"{attn}q_proj/weight"].matrix == (D, H + 2)


@pytest.mark.parametrize("per_head", [False, True])
def test_split_and_join_take_and_put_agree(per_head):
    rng = np.random.default_rng(0)
    for view in find_matrices(SCANNED, ("attention", "mlp"), per_head=per_head):
        leaf = jnp.asarray(rng.normal(size=view.leaf_shape), jnp.float32)
        stack = view.split(leaf)
        assert stack.shape == (view.count, *view.tall)
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
            r"w of shape \(3, 4, 4\) is selected, .* write layout=\{'w': 'l d f -> l d f'\}",
        ),
        (lambda: find_matrices(SCANNED, ("q", "nope")), r"unknown roles \['nope'\]"),
        (lambda: find_matrices(shapes({"w": (3, 4)}), "attention"), r"finds query and key"),
        (lambda: find_matrices(SCANNED, "nothing here"), r"matches none of 8 leaves"),
        (lambda: find_matrices(SCANNED, layout={"x": "m n -> m n"}), r"matches none of 8 leaves"),
        (
            lambda: find_matrices(shapes({"w": (3, 4)}), layout={"w": "m -> m"}),
            r"rows columns', got",
        ),
        (lambda: find_matrices(shapes({"w": (3, 4)}), layout={"w": "l m n -> l m n"}), r"not fit"),
        (
            lambda: find_matrices(shapes({"w": (3, 8)}), layout={"w": "m (a n) -> a m n"}),
            r"an axis of 8 for \(a n\) with sizes \{\}; write the sizes",
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
    fresh = [(p.group, i) for p in cut for i in range(p.start + p.stale, p.start + p.size)]
    assert sorted(fresh) == [(g, i) for g, count in enumerate(counts) for i in range(count)]
    table = slots(len(cut), period)
    assert sorted(table[table >= 0].tolist()) == list(range(len(cut)))
    assert table.shape[1] == period
    if period >= sum(counts):
        assert all(p.size == 1 for p in cut)
        due = np.flatnonzero(table[0] >= 0)
        assert np.ptp(np.diff(np.r_[due, due[0] + period])) <= 1
