"""What a checkpoint lacks is found wrong; layers of another kind are not."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from stabmon.checkpoints.folders import open_checkpoints
from stabmon.cli import main
from stabmon.scan.complete import missing
from stabmon.scan.health import scan
from stabmon.scan.layers import make_plan
from tests.stabmon.layout.state_dicts import MIXTRAL, torch_llama
from tests.stabmon.trees import D, H, N, layered


def deep(layers=4, mlp=None):
    """A Llama of some layers with query-key norms."""
    two = torch_llama(mlp, norm=(H, H))
    tree = {path: x for path, x in two.items() if ".layers." not in path}
    for i in range(layers):
        of_first = {p: x for p, x in two.items() if "layers.0" in p}
        tree |= {p.replace("layers.0", f"layers.{i}"): x.copy() for p, x in of_first.items()}
    return tree


def lacks(tree, folder, **config):
    save_file(tree, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"num_attention_heads": N} | config))
    return list(missing(make_plan(open_checkpoints([folder])[0])))


def test_a_whole_model_lacks_nothing(tmp_path):
    assert lacks(deep(), tmp_path, num_hidden_layers=4) == []
    assert lacks(deep(mlp=MIXTRAL), tmp_path) == []


def test_a_matrix_under_another_name_is_missing(tmp_path):
    tree = deep()
    tree["model.layers.2.mlp.up.weight"] = tree.pop("model.layers.2.mlp.up_proj.weight")
    (text,) = lacks(tree, tmp_path)
    assert text.startswith("layer 2 has no mlp_up, as other layers have; left out there: model.lay")


def test_queries_that_are_missing_in_one_layer_are_said_and_the_rest_is_scanned(tmp_path):
    tree = deep()
    del tree["model.layers.3.self_attn.q_proj.weight"]
    assert lacks(tree, tmp_path) == ["layer 3 has no q, as other layers have"]
    report = scan(open_checkpoints([tmp_path]))
    assert "layer 3 has no q" in report.problems[0]
    assert {row["layer"] for row in report.checkpoints[0].matrices} == {0, 1, 2, 3, None}


def test_a_gap_in_the_layer_numbers_is_missing(tmp_path):
    tree = {path: x for path, x in deep().items() if "layers.1." not in path}
    assert lacks(tree, tmp_path) == ["layer 1 missing"]


def test_layers_that_the_config_says_are_missing(tmp_path):
    said = lacks(deep(), tmp_path, num_hidden_layers=7)
    assert said == ["layers 4-6 missing; its config.json says 7 layers"]


def test_a_layer_of_another_kind_is_none_that_lacks_something(tmp_path):
    tree = {p: x for p, x in deep().items() if "layers.1.self_attn" not in p}
    tree["model.layers.1.conv.in_proj.weight"] = np.ones((3 * D, D), np.float32)
    assert lacks(tree, tmp_path) == []
    del tree["model.layers.1.conv.in_proj.weight"]
    assert lacks(tree, tmp_path) == ["layer 1 has no attention matrices"]


def test_a_missing_expert_is_found(tmp_path):
    tree = deep(2, MIXTRAL)
    del tree["model.layers.1.block_sparse_moe.experts.2.w1.weight"]
    assert lacks(tree, tmp_path) == ["layer 1 has 2 of 3 matrices of expert_gate"]


def test_dense_layers_before_experts_are_whole(tmp_path):
    tree = {p: x for p, x in deep(3, MIXTRAL).items() if "layers.0.block" not in p}
    dense = {p: x for p, x in deep(1).items() if "mlp" in p}
    assert lacks(tree | dense, tmp_path) == []


def test_what_is_missing_is_wrong_by_the_exit_code(tmp_path, capsys):
    tree = deep()
    del tree["model.layers.3.self_attn.q_proj.weight"]
    save_file(tree, tmp_path / "model.safetensors")
    assert main(["scan", str(tmp_path), "--heads", str(N)]) == 1
    assert "layer 3 has no q" in capsys.readouterr().out


def test_embedding_head_and_norm_scales_are_measured(tmp_path):
    tree = deep(2)
    tree["model.layers.1.self_attn.q_norm.weight"][2] = np.inf
    tree["model.embed_tokens.weight"][:] = 0
    save_file(tree, tmp_path / "model.safetensors")
    report = scan(open_checkpoints([tmp_path]))
    zero, norm = report.problems
    assert zero.endswith(": embedding is zero")
    assert norm.endswith("layers.1.self_attn.q_norm.weight has 1 entries that are not finite")
    (head,) = [row for row in report.checkpoints[0].matrices if row["role"] == "head"]
    sigma = np.linalg.svd(np.float64(tree["lm_head.weight"]), compute_uv=False)
    assert head["norm"] == pytest.approx(np.linalg.norm(sigma), rel=1e-5)
    assert head["stable_rank"] == pytest.approx(np.sum(sigma**2) / sigma[0] ** 2, rel=1e-3)
    rows = {row["path"]: row for row in report.checkpoints[0].vectors}
    norm = tree["model.norm.weight"]
    assert (rows["model.norm.weight"]["least"], rows["model.norm.weight"]["greatest"]) == (
        norm.min(),
        norm.max(),
    )


def test_a_layout_of_ones_own_is_taken_from_a_file(tmp_path, capsys):
    shapes = {f"blk.{{}}.{x}": (N * H, D) for x in ("wq", "wk")}
    save_file(layered(shapes), tmp_path / "model.safetensors")
    assert main(["scan", str(tmp_path)]) == 2
    assert "Rule('q', 'blk/*/wq'" in capsys.readouterr().err
    rules = "".join(
        f'[[rules]]\nrole = "{x}"\npath = "blk/*/w{x}"\npattern = "({n} h) d -> {n} d h"\n'
        for x, n in (("q", "n"), ("k", "k"))
    )
    (tmp_path / "mine.toml").write_text(f'name = "mine"\n{rules}')
    arguments = ["scan", str(tmp_path), "--layout", str(tmp_path / "mine.toml")]
    assert main([*arguments, "--heads", str(N), "--kv-heads", str(N), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["checkpoints"][0]
    assert found["layout"] == "mine"
    assert [row["role"] for row in found["matrices"]] == ["q", "k"] * 2
