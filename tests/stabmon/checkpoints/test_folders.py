"""What a person may name, and what Orbax leaves on disk."""

import json

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import save_file

from stabmon.checkpoints.folders import checkpoint_steps, open_checkpoints

W = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
TREE = {"layers": {"attn": {"q": {"kernel": W}}}, "norm": {"scale": jnp.ones(3, jnp.bfloat16)}}


@pytest.fixture(scope="module")
def managed(tmp_path_factory):
    """Checkpoints of a manager: items params, optimizer and meta at steps 5 and 10."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    with ocp.CheckpointManager(folder) as manager:
        for step in (5, 10):
            items = {
                "params": ocp.args.StandardSave(TREE),
                "optimizer": ocp.args.StandardSave({"mu": W}),
                "meta": ocp.args.JsonSave({"step": step}),
            }
            manager.save(step, args=ocp.args.Composite(**items))
            manager.wait_until_finished()
    (folder / "15.orbax-checkpoint-tmp-15").mkdir()
    return folder


def test_a_managers_folder_stands_for_its_whole_checkpoints(managed):
    found = open_checkpoints([managed])
    assert [(x.name, x.step) for x in found] == [("5", 5), ("10", 10)]
    assert found[0].leaves == {
        "layers/attn/q/kernel": ((2, 3, 4), "float32"),
        "norm/scale": ((3,), "bfloat16"),
    }
    assert found[0].skipped == ()
    assert list(checkpoint_steps(managed)) == [5, 10]


def test_a_run_stands_for_its_checkpoints(managed):
    (managed.parent / "config.json").write_text("{}")
    assert [x.step for x in open_checkpoints([managed.parent])] == [5, 10]


def test_orbax_arrays_are_read_in_stretches(managed):
    one = open_checkpoints([managed / "10" / "params"])[0]
    np.testing.assert_array_equal(one.read("layers/attn/q/kernel", 1, 1, 3), W[:, 1:3])
    np.testing.assert_array_equal(one.read("layers/attn/q/kernel"), W)
    assert one.read("norm/scale").dtype == jnp.bfloat16


def test_an_orbax_array_that_is_cut_short_is_an_error(managed, tmp_path):
    copy = tmp_path / "7"
    for path in (managed / "10" / "params").rglob("*"):
        if path.is_file():
            target = copy / path.relative_to(managed / "10" / "params")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes()[: 3 if path.parent.name == "d" else None])
    with pytest.raises(ValueError, match="cannot be read, copy it again"):
        open_checkpoints([copy])[0].read("layers/attn/q/kernel")


def test_metadata_that_describes_nothing_is_refused(tmp_path):
    (tmp_path / "_METADATA").write_text('{"tree_metadata": 3}')
    with pytest.raises(ValueError, match="describes no tree of arrays"):
        open_checkpoints([tmp_path])


def test_a_whole_training_state_is_cut_down_to_its_parameters(tmp_path):
    state = {"params": TREE, "opt_state": {"mu": TREE}, "step": np.int32(3)}
    with ocp.StandardCheckpointer() as writer:
        writer.save(tmp_path / "3", state)
    one = open_checkpoints([tmp_path / "3"])[0]
    assert sorted(one.leaves) == ["params/layers/attn/q/kernel", "params/norm/scale"]
    assert ("opt_state/mu/norm/scale", "not under params/") in one.skipped


def test_the_value_of_a_flax_variable_is_no_step_and_folders_may_have_any_name(tmp_path):
    folder = tmp_path / "odd name #1 50%25?" / "3"
    with ocp.StandardCheckpointer() as writer:
        writer.save(tmp_path / "3", {"q": {"kernel": {"value": W}}})
    folder.parent.mkdir()
    (tmp_path / "3").rename(folder)
    one = open_checkpoints([folder])[0]
    assert list(one.leaves) == ["q/kernel"]
    np.testing.assert_array_equal(one.read("q/kernel"), W)


def test_heads_come_from_the_config_beside_the_weights(tmp_path):
    save_file({"w": W, "id": np.arange(3)}, tmp_path / "model.safetensors")
    config = {"num_attention_heads": 4, "num_key_value_heads": "many"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    one = open_checkpoints([tmp_path])[0]
    assert (one.heads, one.kv_heads) == (4, None)
    assert one.skipped == (("id", "its dtype I64 is not read: quantised, or no weight"),)


def test_a_pickle_is_not_opened(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(b"\x80\x04cos\nsystem\n.")
    with pytest.raises(ValueError, match="pickled files can run code"):
        open_checkpoints([path])


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is no checkpoint and holds none: give a"):
        open_checkpoints([tmp_path])


def test_a_missing_path_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nix does not exist"):
        open_checkpoints([tmp_path / "nix"])
