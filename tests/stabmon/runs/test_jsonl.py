"""Lines are whole or absent, whatever happens to the process or the disk."""

import json
import math
import os
import resource

import numpy as np
import pytest

from stabmon.runs.jsonl import append, last_row, mend, plain, read_jsonl


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


def test_non_finite_numbers_are_valid_json_and_come_back(path):
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    append(descriptor, {"a": np.float32("nan"), "b": [math.inf, {"c": -math.inf}], "d": 1.5})
    os.close(descriptor)

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    (row,) = read_jsonl(path)
    assert math.isnan(row["a"])
    assert row["b"] == [math.inf, {"c": -math.inf}]
    assert row["d"] == 1.5


def test_arrays_paths_and_tuples_become_plain(tmp_path):
    value = {"p": tmp_path, 3: (np.int64(4), np.arange(2)), "none": None, "flag": np.bool_(True)}
    expected = {"p": str(tmp_path), "3": [4, [0, 1]], "none": None, "flag": True}
    assert plain(value) == expected


def test_a_torn_last_line_is_skipped_with_file_and_line(path):
    path.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    with pytest.warns(UserWarning, match=r"events.jsonl, line 3 is not a JSON object"):
        assert read_jsonl(path) == [{"step": 1}, {"step": 2}]


def test_a_corrupt_line_in_the_middle_is_skipped_with_file_and_line(path):
    path.write_bytes(b'{"step": 1}\n\xff\x00\n[2]\n\n{"step": 3}\n')
    with pytest.warns(UserWarning, match="is not a JSON object") as warned:
        assert read_jsonl(path) == [{"step": 1}, {"step": 3}]
    assert [str(w.message).split(" is ")[0][-6:] for w in warned] == ["line 2", "line 3"]


def test_a_missing_file_is_an_empty_one(path):
    mend(path)
    assert not path.exists()
    assert read_jsonl(path) == []
    assert last_row(path) is None


@pytest.mark.parametrize(
    ("torn", "mended"),
    [
        ("", ""),
        ('{"a": 1}\n', '{"a": 1}\n'),
        ('{"a": 1}\n{"b"', '{"a": 1}\n'),
        ('{"a": 1}\n{"b": 2}', '{"a": 1}\n{"b": 2}\n'),
        ('{"a": 1}\n{"b": \n{"c":', '{"a": 1}\n'),
        ('{"a": 1}\n\0\0\0\0', '{"a": 1}\n'),
        ("nothing whole", ""),
        ('{"a": 1}\n{"b": "' + 200_000 * "x", '{"a": 1}\n'),
    ],
)
def test_mending_cuts_what_is_torn_and_nothing_else(path, torn, mended):
    path.write_text(torn)
    mend(path)
    assert path.read_text() == mended


@pytest.mark.parametrize("length", [10, 65_530, 65_536, 65_537, 200_000])
def test_the_last_row_is_found_across_blocks(path, length):
    lines = [json.dumps({"n": n, "text": length * "y"}) + "\n" for n in range(3)]
    path.write_text("".join(lines))
    assert last_row(path) == {"n": 2, "text": length * "y"}


def test_a_full_disk_leaves_whole_lines_only(path):
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    append(descriptor, {"step": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            append(descriptor, {"step": 2, "text": 100 * "z"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    append(descriptor, {"step": 3})
    os.close(descriptor)
    assert path.read_text() == '{"step": 1}\n{"step": 3}\n'
