"""Orbax checkpoints: the tree from their `_METADATA`, entries through TensorStore on demand.

What lives here: `open_orbax`. What does not: saving and restoring, which are Orbax's own; other
formats (`shards`). Only arrays are read, no objects are made from what a checkpoint says.

A leaf that holds all layers is stored in chunks, by default one for each shard. A part of a chunk
cannot be decoded alone, so reading it layer by layer takes as much memory as its largest chunk.
"""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from stabmon.checkpoints.source import Leaf

_CACHE = 2 << 30
_ITEMS = ("params", "model", "default", "state")
_ARRAYS = ("jax.Array", "np.ndarray")

Fetch = Callable[[str, int, int, int], np.ndarray]


def find_item(folder: Path) -> Path | None:
    """Returns the part of a checkpoint that holds its parameters, None if it is none of Orbax.

    Args:
        folder: A checkpoint or one item of it.

    Raises:
        ValueError: It has several items, none of them called params, model, default or state.
    """
    if (folder / "_METADATA").is_file():
        return folder
    inside = [x.name for x in sorted(folder.iterdir()) if (x / "_METADATA").is_file()]
    items = [name for name in inside if not name[-1].isdigit()]  # those are checkpoints by step
    known = [name for name in _ITEMS if name in items] or items
    if len(known) > 1 and known[0] not in _ITEMS:
        raise ValueError(f"{folder} has items {items}: give the one with the parameters")
    return folder / known[0] if known else None


def open_orbax(item: Path) -> tuple[dict[str, Leaf], Fetch]:
    """Returns the arrays of one item by path, and a function that reads a stretch of one.

    Args:
        item: Folder with a `_METADATA`.

    Raises:
        ValueError: `_METADATA` or an array's own metadata cannot be read.
        ImportError: TensorStore is not installed.
    """
    try:
        tensorstore: Any = import_module("tensorstore")
    except ImportError as error:
        raise ImportError(
            'Orbax checkpoints need TensorStore: pip install "stabmon[cli]"'
        ) from error
    try:
        metadata = json.loads((item / "_METADATA").read_bytes())
        rows = metadata["tree_metadata"].values()
        names = [
            [str(step["key"]) for step in row["key_metadata"]]
            for row in rows
            if row["value_metadata"]["value_type"] in _ARRAYS
        ]
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{item / '_METADATA'} describes no tree of arrays: {error!r}") from error
    driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
    ocdbt = metadata.get("use_ocdbt", True)
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHE}})

    def store(name: list[str]) -> Any:
        file = ".".join(name)
        if not ocdbt and ("/" in file or "\\" in file or not file.strip(".")):
            raise ValueError(f"{item} names an array outside of its folder, {file!r}: not opened")
        base = {"driver": "file", "path": f"{item.resolve()}/"}
        inside = {"driver": "ocdbt", "base": base, "path": f"{file}/"}
        beside = {"driver": "file", "path": f"{item.resolve()}/{file}/"}
        spec = {"driver": driver, "kvstore": inside if ocdbt else beside}
        return tensorstore.open(spec, open=True, read=True, context=context)

    opened = {_path(name): store(name) for name in names}
    arrays = {path: _result(item, path, future) for path, future in opened.items()}
    leaves = {path: Leaf(tuple(x.shape), x.dtype.name) for path, x in arrays.items()}

    def fetch(path: str, axis: int, start: int, stop: int) -> np.ndarray:
        array = arrays[path]
        part = array[(slice(None),) * axis + (slice(start, stop),)] if leaves[path].shape else array
        return np.asarray(_result(item, path, part.read()))

    return leaves, fetch


def _path(name: list[str]) -> str:
    """An array's path; the `value` under a Flax variable is no step."""
    return "/".join(name[:-1] if name[-1:] == ["value"] and len(name) > 1 else name)


def _result(item: Path, path: str, future: Any) -> Any:
    """What TensorStore was asked for."""
    try:
        return future.result()
    except Exception as error:
        reason = str(error).split(" [")[0][:300]
        raise ValueError(f"{item}: {path!r} cannot be read, copy it again: {reason}") from error
