"""JSON lines on disk: one object a line, written whole, read back whatever state the file is in.

What lives here: `read_jsonl`, and the lines beneath a run's log (`append`, `mend`, `rows`, `plain`
and `floats`). What does not: what the lines mean, which is `runlog`'s. No JAX.

JSON has no non-finite numbers: they are written as the strings "NaN", "Infinity" and "-Infinity",
which `float` understands, and are read back as floats.
"""

import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_BLOCK = 1 << 16


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Returns the objects of a JSON-lines file; none if it does not exist.

    A line that is no JSON object, such as the torn last line of a run that was killed or is being
    written, is skipped with a `UserWarning` that names file and line.

    Args:
        path: The file.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "events.jsonl"
        >>> _ = path.write_text('{"kind": "alarm", "value": "Infinity"}')
        >>> read_jsonl(path)
        [{'kind': 'alarm', 'value': inf}]
    """
    return [row for _, row in rows(Path(path))]


def rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields line numbers, from 1, and the objects on them, one line in memory at a time.

    Args:
        path: The file; missing is as good as empty.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            row = _object(line)
            if row is not None:
                yield number, row
            elif line.strip():
                warn_skipped(path, number, "is not a JSON object (torn while it was written?)")


def last_row(path: Path) -> dict[str, Any] | None:
    """Returns the object on the last line, without reading the lines before it.

    Args:
        path: The file; missing is as good as empty.
    """
    return _object(_tail(path)[1])


def mend(path: Path) -> None:
    """Cuts torn lines off the end; a last line that only lacks its line break gets it.

    Args:
        path: The file; missing is as good as empty.
    """
    while True:
        start, line = _tail(path)
        if not line or _object(line) is not None:
            break
        os.truncate(path, start)
    if line and not line.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")


def append(descriptor: int, row: Mapping[str, Any]) -> None:
    """Appends one line in a single write; if the disk is full, nothing of it.

    Args:
        descriptor: Open file in append mode that nobody else writes.
        row: Numbers, strings, paths, arrays, lists and mappings of these.

    Raises:
        OSError: If the line could not be written whole. The file then ends with the line before.
    """
    line = (json.dumps(plain(row), allow_nan=False) + "\n").encode()
    before = os.fstat(descriptor).st_size
    written = 0
    try:
        while written < len(line):
            written += os.write(descriptor, line[written:])
    except OSError:
        os.ftruncate(descriptor, before)
        raise


def plain(value: Any) -> Any:
    """Returns `value` as JSON can hold it.

    Args:
        value: Strings, numbers, paths, arrays, lists and mappings of these.

    Example:
        >>> import numpy as np
        >>> plain({"folder": Path("runs"), "values": np.array([1.0, np.nan])})
        {'folder': 'runs', 'values': [1.0, 'NaN']}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return value


def floats(value: Any) -> Any:
    """Returns what was read from JSON with its non-finite numbers back in place.

    Args:
        value: What `json.loads` returned.
    """
    if isinstance(value, dict):
        return {key: floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [floats(item) for item in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def warn_skipped(path: Path, number: int, what: str) -> None:
    """Warns that a line was skipped.

    Args:
        path: The file.
        number: The line, from 1.
        what: What is wrong with it.
    """
    warnings.warn(f"{path}, line {number} {what}: skipped", UserWarning, stacklevel=3)


def _object(line: bytes) -> dict[str, Any] | None:
    """The JSON object on `line`, None if there is none."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return floats(row) if isinstance(row, dict) else None


def _tail(path: Path) -> tuple[int, bytes]:
    """Where the last line begins, and the line with its line break if it has one."""
    if not path.exists():
        return 0, b""
    with path.open("rb") as file:
        start = file.seek(0, os.SEEK_END)
        tail = b""
        while start > 0 and b"\n" not in tail[:-1]:
            block = min(_BLOCK, start)
            start = file.seek(start - block)
            tail = file.read(block) + tail
    line_start = tail[:-1].rfind(b"\n") + 1
    return start + line_start, tail[line_start:]
