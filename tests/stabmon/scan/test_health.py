"""A scan's numbers are the online monitor's, a layer at a time, and what is wrong is named."""

import itertools
import json
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import save_file

import optax_ext
import stabmon
from stabmon.checkpoints.folders import open_checkpoints
from stabmon.runs.jsonl import plain
from stabmon.scan.health import Limits, scan
from stabmon.scan.layers import make_plan
from stabmon.scan.table import as_json
from tests.stabmon.layout.state_dicts import torch_llama
from tests.stabmon.trees import H, K, L, N, levanter, nested

rng = np.random.default_rng(0)


def moved(tree):
    """A tree a small random step away."""
    step = lambda x: x + 0.1 * rng.standard_normal(x.shape).astype(np.float32)
    return jax.tree.map(step, tree)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two successive states of a Llama with query-key norms, sharded in safetensors files."""
    folder = tmp_path_factory.mktemp("llama")
    trees = [torch_llama(norm=(H, H))]
    trees.append(moved(trees[0]))
    for step, tree in enumerate(trees):
        (folder / f"step_{step}").mkdir()
        places = {path: f"model-{i % 2}.safetensors" for i, path in enumerate(sorted(tree))}
        for file in set(places.values()):
            part = {path: tree[path] for path in places if places[path] == file}
            save_file(part, folder / f"step_{step}" / file)
        index = folder / f"step_{step}" / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": places}))
    return folder, trees


def online(trees, layout):
    """What the monitor says of two successive parameter trees, with all detail."""
    tx = optax_ext.track_delta(every=1, keep=1)
    monitor = stabmon.Monitor(layout, delta=1, weights=1, symptoms=0, detail="full")
    state = tx.init(trees[0])
    _, state = tx.update(jax.tree.map(jnp.zeros_like, trees[0]), state, trees[0])
    # With a ring of one step the delta tier at step 1 sees from the first tree to the second.
    return jax.jit(lambda p, s: monitor(1, p, s))(trees[1], state).flatten()


def assert_equal_online(report, trees, layout):
    flat = online(trees, layout)
    assert_rows_equal(report.checkpoints[1].matrices, flat)
    heads = report.changes[0].heads
    assert len(heads) == L * N
    for layer, name in itertools.product(range(L), ("delta1", "delta2", "delta3", "query")):
        for stat in ("norm", "effective_rank", "stable_rank"):
            rows = [row[f"{name}/{stat}"] for row in heads if row["layer"] == layer]
            key = f"delta1/layer_{layer:02d}/{name}/{stat}/mean"
            np.testing.assert_allclose(np.mean(rows), flat[key], rtol=1e-3, err_msg=key)


def test_numbers_equal_the_monitors_on_safetensors(pair):
    folder, trees = pair
    report = scan(open_checkpoints([folder]))
    assert_equal_online(report, trees, stabmon.find_layout(trees[0]))
    assert report.problems == []


def test_numbers_equal_the_monitors_on_orbax_with_layers_in_one_leaf(tmp_path):
    tree = levanter()
    with ocp.StandardCheckpointer() as writer:
        writer.save(tmp_path / "0", tree)
    rows = scan(open_checkpoints([tmp_path])).checkpoints[0].matrices
    monitor = stabmon.Monitor(stabmon.find_layout(tree), delta=0, weights=1, detail="full")
    flat = jax.jit(lambda p: monitor(0, p, (), due=("weights",)))(tree).flatten()
    assert [row["layer"] for row in rows] == [0] * 7 + [1] * 7 + [None]
    assert_rows_equal(rows, flat)


def assert_rows_equal(rows, flat):
    for row in (row for row in rows if row["layer"] is not None):
        for name in ("norm", "spectral_norm", "stable_rank", "relative_stable_rank"):
            key = f"weights/layer_{row['layer']:02d}/{row['role']}/{name}/value"
            np.testing.assert_allclose(row[name], flat[key], rtol=1e-5, err_msg=key)


def test_effective_rank_and_changes_equal_numpy(pair):
    folder, (then, now) = pair
    report = scan(open_checkpoints([folder]))
    name = "model.layers.1.mlp.down_proj.weight"
    sigma = np.linalg.svd(now[name].astype(np.float64), compute_uv=False)
    p = sigma / sigma.sum()
    find = lambda rows: next(x for x in rows if (x["layer"], x["role"]) == (1, "mlp_down"))
    row = find(report.checkpoints[1].matrices)
    assert row["effective_rank"] == pytest.approx(np.exp(-np.sum(p * np.log(p))), rel=1e-4)
    delta = np.linalg.norm(now[name] - then[name])
    row = find(report.changes[0].matrices)
    assert row["norm"] == pytest.approx(delta, rel=1e-5)
    assert row["relative_norm"] == pytest.approx(delta / np.linalg.norm(then[name]), rel=1e-5)


def test_matrices_above_the_limit_have_no_effective_rank(pair):
    report = scan(open_checkpoints([pair[0] / "step_0"]), Limits(exact=10))
    ranks = {x["role"]: x["effective_rank"] for x in report.checkpoints[0].matrices}
    assert ranks["mlp_up"] is None
    assert ranks["k"] > 1


def test_at_most_one_layer_of_each_checkpoint_is_in_memory(pair):
    checkpoints = open_checkpoints([pair[0]])
    alive, peaks = {}, []

    def watched(checkpoint):
        def fetch(path, *stretch):
            x = checkpoint.fetch(path, *stretch)
            key = (checkpoint.name, path, *stretch)
            alive[key] = x.nbytes
            weakref.finalize(x, alive.pop, key)
            mine = {k: n for k, n in alive.items() if k[0] == checkpoint.name}
            peaks.append(sum(mine.values()))
            assert len({k[1].split(".")[2] for k in mine if ".layers." in k[1]}) <= 1
            return x

        return type(checkpoint)(**{**vars(checkpoint), "fetch": fetch})

    scan([watched(x) for x in checkpoints])
    layer = sum(x.nbytes for k, x in checkpoints[0].leaves.items() if ".layers.0." in k)
    assert 0 < max(peaks) <= layer


def test_what_is_wrong_is_named(tmp_path):
    tree = torch_llama(norm=(H, H))
    layer = "model.layers.1"
    tree[f"{layer}.self_attn.q_proj.weight"][2, 3] = np.nan
    tree[f"{layer}.mlp.up_proj.weight"][:] = 0
    tree[f"{layer}.mlp.down_proj.weight"][:] = 1
    tree["lm_head.weight"][0, :2] = np.inf
    save_file(tree, tmp_path / "model.safetensors")
    report = scan(open_checkpoints([tmp_path / "model.safetensors"]))
    assert report.problems == [
        "model.safetensors: layer 1 q is not finite",
        "model.safetensors: layer 1 mlp_up is zero",
        "model.safetensors: layer 1 mlp_down has a stable rank of 1, below 1.5: collapsed",
        "model.safetensors: head is not finite",
    ]
    text = json.dumps(plain(as_json(report)), allow_nan=False)
    assert '"healthy": false' in text
    limits = Limits(stable_rank=0, relative=9)
    assert len(scan(open_checkpoints([tmp_path]), limits).problems) == 7 * L + 1


def test_experts_in_leaves_of_their_own_are_rows_of_their_own(tmp_path):
    tree = nested({f"layers/moe/{x}/kernel": rng.standard_normal((2, 3, 4, 5)) for x in ("up",)})
    heads = {"kernel": rng.standard_normal((2, 4, 2, 3))}
    tree["layers"]["attn"] = {x: heads for x in "qkv"}
    with ocp.StandardCheckpointer() as writer:
        writer.save(tmp_path / "0", jax.tree.map(np.float32, tree))
    rows = scan(open_checkpoints([tmp_path])).checkpoints[0].matrices
    experts = [(x["layer"], x["expert"]) for x in rows if x["role"] == "expert_up"]
    assert experts == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_what_is_in_no_matrix_is_listed_with_its_reason(pair):
    report = scan(open_checkpoints([pair[0] / "step_0"]))
    assert ("model.norm.weight", "no rule for shape (24,)") in report.checkpoints[0].skipped


def test_checkpoints_of_different_models_are_not_compared(pair, tmp_path):
    save_file(torch_llama(norm=(H, H), kv_heads=3), tmp_path / "model.safetensors")
    found = open_checkpoints([pair[0] / "step_0", tmp_path])
    with pytest.raises(ValueError, match=r"not checkpoints of one model: 'model\.layers\.0\.self"):
        scan(found)


def test_heads_that_shapes_do_not_tell_are_asked_for(tmp_path):
    save_file(torch_llama(), tmp_path / "model.safetensors")
    one = open_checkpoints([tmp_path])[0]
    with pytest.raises(ValueError, match="for stabmon scan: --heads, --kv-heads"):
        make_plan(one)
    assert list(make_plan(one, heads=N, kv_heads=K).layers) == [0, 1]
