"""Lines are whole or absent, whatever happens to the process or the disk."""

import argparse
import dataclasses
import datetime
import enum
import functools
import json
import math
import os
import resource

import jax.numpy as jnp
import numpy as np
import pytest

from stabmon.runs.jsonl import Tail, append, backwards, mend, plain, read_jsonl


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
    with pytest.warns(UserWarning, match=r"events.jsonl: 1 line skipped, not JSON .*: line 3$"):
        assert read_jsonl(path) == [{"step": 1}, {"step": 2}]


BAD = (b"\xff\x00", b"[2]", b"[" * 100_000, b'{"a": ' * 100_000, b"1" * 5_000, b"null", b'"text"')


def test_lines_that_are_no_objects_are_counted_in_one_warning(path):
    path.write_bytes(b'{"step": 1}\n\n' + b"\n".join(BAD) + b'\n{"step": 3}\n')
    expected = r"events.jsonl: 7 lines skipped, not JSON objects .*: line 3, 4, 5, 6, 7, …$"
    with pytest.warns(UserWarning, match=expected) as warned:
        assert read_jsonl(path) == [{"step": 1}, {"step": 3}]
    assert len(warned) == 1


def test_a_missing_file_is_an_empty_one(path):
    mend(path)
    assert not path.exists()
    assert read_jsonl(path) == []
    assert list(backwards(path)) == []


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
def test_lines_are_found_backwards_across_blocks(path, length):
    lines = [json.dumps({"n": n, "text": length * "y"}) + "\n" for n in range(3)]
    path.write_text("".join(lines) + "torn")
    found = list(backwards(path))
    assert [row and row["n"] for _, row in found] == [None, 2, 1, 0]
    assert [offset for offset, _ in found] == [n * len(lines[0]) for n in (3, 2, 1, 0)]


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


@dataclasses.dataclass
class Optimizer:
    name: str = "adamw"
    rate: float = math.inf


class Kind(enum.IntEnum):
    DENSE = 3


def test_any_configuration_becomes_json_that_is_the_same_in_every_process():
    loop: list = [1]
    value = {
        "dtypes": (jnp.bfloat16, np.float32, np.dtype("int8"), jnp.dtype("float16")),
        "optimizer": Optimizer(),
        "kind": Kind.DENSE,
        "names": {"b", "a"},
        "options": argparse.Namespace(seed=0),
        "schedule": math.sqrt,
        "made": lambda x: x,
        "partial": functools.partial(print, loop),
        "object": object(),
        "class": Optimizer,
        "bytes": b"x",
        7: datetime.date(2020, 1, 2),
        "array": jnp.arange(2.0),
        "complex": np.complex64(1j),
    }
    found = plain(value)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert "0x" not in json.dumps(found)
    assert found["dtypes"] == ["bfloat16", "float32", "int8", "float16"]
    assert found["optimizer"] == {"name": "adamw", "rate": "Infinity"}
    assert (found["kind"], found["names"]) == ("DENSE", ["a", "b"])
    assert (found["options"], found["schedule"]) == ({"seed": 0}, "math.sqrt")
    assert (found["7"], found["array"]) == ("2020-01-02", [0.0, 1.0])


def rows(tail):
    return [row for _, _, row in tail.rows()]


def test_a_torn_last_line_waits_until_it_is_whole(path):
    tail = Tail(path)
    assert rows(tail) == []
    path.write_text('{"step": 1}\n{"step": 2, "va')
    assert rows(tail) == [{"step": 1}]
    assert tail.torn == 2
    with path.open("a") as file:
        file.write('lue": 3}\n[4]\nnonsense\n{"x": "NaN"}\n')
    assert list(tail.rows()) == [(2, 12, {"step": 2, "value": 3}), (5, 49, {"x": "NaN"})]
    assert rows(tail) == []
    assert (tail.skipped, tail.torn) == ([3, 4], None)


def test_a_shorter_file_is_read_on_and_another_one_anew(path, tmp_path):
    tail = Tail(path)
    path.write_text('{"a": 1}\nnonsense\n')
    assert rows(tail) == [{"a": 1}]
    path.write_text('{"a": 1}\n')  # cut, as a resumed run does
    assert rows(tail) == []
    with path.open("a") as file:
        file.write('{"a": 2}\n')
    assert rows(tail) == [{"a": 2}]
    (tmp_path / "other").write_text('{"b": 1}\n')
    (tmp_path / "other").replace(path)
    assert rows(tail) == [{"b": 1}]
