"""Safetensors as the library writes them, and every lie that a header can tell."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from stabmon.checkpoints.shards import fetch, open_safetensors, read_header

W = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


@pytest.fixture
def file(tmp_path):
    """One file, in several dtypes."""
    tensors = {"w": W, "half": W.astype(ml_dtypes.bfloat16), "one": np.float32([7.0]).reshape(())}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def lie(path, size=16, **entry):
    """A file whose header says `entry` of "w", which is 16 bytes long."""
    header = {"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | entry}
    return written(path, json.dumps(header).encode(), size)


def written(path, text, size=16):
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * size)
    return path


def test_stretches_equal_slices_of_what_was_saved(file):
    found = open_safetensors(file)
    assert found["half"].leaf == ((2, 3, 4), "bfloat16")
    for name, axis, start, stop in (("w", 0, 0, 2), ("w", 1, 1, 3), ("half", 2, 3, 4)):
        cut = (slice(None),) * axis + (slice(start, stop),)
        part = fetch(found[name], axis, start, stop)
        np.testing.assert_array_equal(part.astype(np.float32), W[cut])
    assert fetch(found["one"], 0, 0, 1) == np.float32(7.0)


def test_shards_are_read_by_their_index(tmp_path):
    save_file({"a": W}, tmp_path / "model-1.safetensors")
    save_file({"b": 2 * W}, tmp_path / "model-2.safetensors")
    places = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    for path in (tmp_path, index):
        found = open_safetensors(path)
        np.testing.assert_array_equal(fetch(found["b"], 0, 1, 2), 2 * W[1:])


def test_a_file_that_ends_while_it_is_read_is_an_error(file):
    found = open_safetensors(file)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match="ended while it was read"):
        [fetch(tensor, 0, 0, 1 if not tensor.leaf.shape else 2) for tensor in found.values()]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"shape": [1 << 40, 1 << 40]}, "the header lies about 'w': shape .* is 4,835,703,278,"),
        ({"data_offsets": [0, 8]}, "is 16 bytes, its offsets 0 to 8 hold 8"),
        ({"data_offsets": [16, 0]}, "the header lies about 'w'"),
        ({"data_offsets": [16, 32]}, "cut short, or its header lies: 'w' ends at byte 32 of 16"),
        ({"data_offsets": [-16, 0]}, "has no dtype, shape and data_offsets"),
        ({"shape": [True, 4]}, "has no dtype, shape and data_offsets"),
        ({"dtype": "pickle"}, "has no dtype, shape and data_offsets"),
        ({"shape": None}, "has no dtype, shape and data_offsets"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, entry, message):
    path = lie(tmp_path / "model.safetensors", **entry)
    with pytest.raises(ValueError, match=message):
        read_header(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[1]", "its header is no JSON object, but list"),
        (b"{", "its header cannot be read as JSON"),
        (b"[" * 100_000, "its header cannot be read as JSON"),
        (b'{"w": {}, "w": {}}', "a name stands twice"),
        (b'{"w": 3}', "'w' has no dtype, shape and data_offsets that can be read, but 3"),
        (b"{}", "its arrays are 0 bytes, the file has 16 for them"),
    ],
)
def test_a_header_that_is_none_is_refused(tmp_path, text, message):
    path = written(tmp_path / "model.safetensors", text)
    with pytest.raises(ValueError, match=message):
        read_header(path)


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"\xff" * 8 + b"{}", b"\xff\xff" + bytes(6)])
def test_a_file_that_is_cut_short_is_refused(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="no whole safetensors file"):
        read_header(path)


def test_arrays_that_overlap_are_refused(tmp_path):
    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    text = json.dumps({"a": entry, "b": entry}).encode()
    with pytest.raises(ValueError, match="'a' and 'b' overlap"):
        read_header(written(tmp_path / "model.safetensors", text, 32))


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "a/b.safetensors", ".."])
def test_an_index_that_points_outside_is_refused(tmp_path, name):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(ValueError, match=r"outside of its folder.*not opened|lacks 1 shards"):
        open_safetensors(tmp_path)


def test_an_index_that_names_what_is_not_there_is_refused(file):
    index = file.with_name("model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": {"x": file.name}}))
    with pytest.raises(ValueError, match=r"'x' is not in model.safetensors, as it says"):
        open_safetensors(file.parent)


def test_a_missing_shard_is_named(file):
    index = file.with_name("model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": {"w": file.name, "x": "model-2.safetensors"}}))
    with pytest.raises(ValueError, match=r"lacks 1 shards, 'model-2.safetensors' first"):
        open_safetensors(file.parent)


def test_an_array_in_two_files_without_an_index_is_refused(file):
    save_file({"w": W}, file.with_name("other.safetensors"))
    with pytest.raises(ValueError, match="'w' is both in"):
        open_safetensors(file.parent)
