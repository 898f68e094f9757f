"""Safetensors files, single or sharded: headers checked to the byte, entries read on demand.

What lives here: `read_header` and `open_safetensors`. What does not: pickled checkpoints, which can
run code and are never opened; other formats (`orbax`).

A file is 8 bytes of header length, a JSON header {name: {dtype, shape, data_offsets}}, and the
entries, C-contiguous and little-endian. A header is believed only if every array lies inside of the
file, is as long as its shape says, and no two overlap.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stabmon.checkpoints.source import Leaf, numpy_dtype

INDEX = ".safetensors.index.json"
_LONGEST = 100_000_000
_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_BITS = {
    **{"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64, "BOOL": 8, "F4": 4},
    **{"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6},
    **{f"{sign}{bits}": bits for sign in "IU" for bits in (8, 16, 32, 64)},
}


class Tensor(NamedTuple):
    """Where an array lies.

    Attributes:
        file: The file.
        start: Offset of its first byte.
        leaf: Shape and dtype.
    """

    file: Path
    start: int
    leaf: Leaf


def open_safetensors(path: Path) -> dict[str, Tensor]:
    """Returns where the arrays of a checkpoint lie, by name.

    Args:
        path: A `.safetensors` file, a `.safetensors.index.json`, or a folder with either.

    Raises:
        ValueError: A header or the index contradicts the files, or an array is there twice.
    """
    if path.is_dir():
        found = sorted(path.glob(f"*{INDEX}"))
        if len(found) > 1:
            raise ValueError(f"{path} has {len(found)} indices: name one, such as {found[0]}")
        files = sorted(path.glob("*.safetensors"))
        return _indexed(found[0]) if found else _together(files)
    return _indexed(path) if path.name.endswith(INDEX) else read_header(path)


def fetch(tensor: Tensor, axis: int, start: int, stop: int) -> np.ndarray:
    """Returns the stretch start…stop of an array along one axis; nothing else is read.

    Args:
        tensor: Where it lies; its dtype one of `FLOATING`.
        axis: The axis.
        start: First index.
        stop: Index after the last.

    Raises:
        ValueError: The file ends before the array does.
    """
    shape, dtype = tensor.leaf.shape, numpy_dtype(tensor.leaf.dtype)
    if not shape:
        return fetch(tensor._replace(leaf=Leaf((1,), tensor.leaf.dtype)), 0, 0, 1).reshape(())
    outer, inner = prod(shape[:axis]), prod(shape[axis + 1 :]) * dtype.itemsize
    stride, offset, length = shape[axis] * inner, start * inner, (stop - start) * inner
    if length == stride:
        outer, length = 1, outer * length
    rows = np.empty((outer, length), np.uint8)
    with tensor.file.open("rb", buffering=0) as file:
        for i, row in enumerate(rows):
            file.seek(tensor.start + i * stride + offset)
            view = row.data
            while view:
                count = file.readinto(view)
                if not count:
                    raise ValueError(f"{tensor.file} ended while it was read: copy it again")
                view = view[count:]
    return rows.view(dtype).reshape(*shape[:axis], stop - start, *shape[axis + 1 :])


def read_header(path: Path) -> dict[str, Tensor]:
    """Returns where the arrays of one file lie, by name; reads its header and nothing else.

    Args:
        path: The file.

    Raises:
        ValueError: The file is no safetensors file, is cut short, or its header lies.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST):
            raise ValueError(
                f"{path} is no whole safetensors file: it would have a header of {length:,} bytes, "
                f"but it has {size:,} bytes in all; copy it again"
            )
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: its header cannot be read as JSON: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path}: its header is no JSON object, but {type(header).__name__}")
    start, available = 8 + length, size - 8 - length
    tensors, spans = {}, []
    for name, entry in header.items():
        if name != "__metadata__":
            leaf, begin, end = _entry(path, name, entry, available)
            tensors[name] = Tensor(path, start + begin, leaf)
            spans.append((begin, end, name))
    _check_spans(path, sorted(spans), available)
    return tensors


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object in which no name stands twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def _entry(path: Path, name: str, entry: Any, available: int) -> tuple[Leaf, int, int]:
    """Shape and place of one array, if they agree with each other and with the file."""
    parts = entry if isinstance(entry, dict) else {}
    kind = str(parts.get("dtype"))
    shape, offsets = (_sizes(parts.get(key)) for key in ("shape", "data_offsets"))
    if kind not in _BITS or shape is None or offsets is None or len(offsets) != 2:
        raise ValueError(
            f"{path}: {name!r} has no dtype, shape and data_offsets that can be read, "
            f"but {str(entry)[:200]}"
        )
    begin, end = offsets
    expected = -(-prod(shape) * _BITS[kind] // 8)
    if end - begin != expected:
        raise ValueError(
            f"{path}: the header lies about {name!r}: shape {shape} of {kind} is "
            f"{expected:,} bytes, its offsets {begin:,} to {end:,} hold {end - begin:,}"
        )
    if end > available:
        raise ValueError(
            f"{path} is cut short, or its header lies: {name!r} ends at byte {end:,} of "
            f"{available:,}; copy the file again"
        )
    return Leaf(shape, _NAMES.get(kind, kind)), begin, end


def _sizes(value: Any) -> tuple[int, ...] | None:
    """A list of sizes or offsets, None for anything else."""
    is_list = isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)
    return tuple(value) if is_list else None


def _check_spans(path: Path, spans: Sequence[tuple[int, int, str]], available: int) -> None:
    """Arrays neither overlap nor leave room between or after them."""
    for (_, end, name), (begin, _, other) in pairwise(spans):
        if begin < end:
            raise ValueError(f"{path}: the header lies: {name!r} and {other!r} overlap")
    total = sum(end - begin for begin, end, _ in spans)
    if total != available:
        raise ValueError(
            f"{path}: its arrays are {total:,} bytes, the file has {available:,} for them"
        )


def _together(files: Sequence[Path]) -> dict[str, Tensor]:
    """The arrays of several files without an index; none of a numbered series is missing."""
    for file in files:
        found = re.fullmatch(r"(.*-)(\d+)(-of-)(\d+)\.safetensors", file.name)
        if found is None:
            continue
        name = lambda i, x=found: f"{x[1]}{i:0{len(x[2])}d}{x[3]}{x[4]}.safetensors"
        wanted = [name(i) for i in range(1, int(found[4]) + 1)]
        if missing := [x for x in wanted if not (file.parent / x).is_file()]:
            raise ValueError(
                f"{file.parent} lacks {len(missing)} of {len(wanted)} shards, {missing[0]!r} first"
            )
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in read_header(file).items():
            if name in tensors:
                raise ValueError(
                    f"{name!r} is both in {tensors[name].file} and {file}: give one file, not the "
                    "folder"
                )
            tensors[name] = tensor
    return tensors


def _indexed(index: Path) -> dict[str, Tensor]:
    """The arrays that an index names, each from the file that it names."""
    try:
        places = json.loads(index.read_bytes(), object_pairs_hook=_once)["weight_map"]
        names = {str(file) for file in places.values()}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{index} is no index with a weight_map: {error!r}") from error
    if outside := [name for name in names if Path(name).name != name or "\\" in name]:
        raise ValueError(f"{index} names a file outside of its folder, {outside[0]!r}: not opened")
    if missing := sorted(name for name in names if not (index.parent / name).is_file()):
        raise ValueError(f"{index.parent} lacks {len(missing)} shards, {missing[0]!r} first")
    headers: Mapping[str, dict[str, Tensor]] = {n: read_header(index.parent / n) for n in names}
    if absent := [(x, file) for x, file in places.items() if x not in headers[file]]:
        raise ValueError(f"{index}: {absent[0][0]!r} is not in {absent[0][1]}, as it says")
    return {name: headers[file][name] for name, file in places.items()}
