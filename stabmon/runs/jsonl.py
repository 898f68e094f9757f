"""JSON lines on disk: one object a line, written whole, read back whatever state the file is in.

What lives here: `read_jsonl`, and the lines beneath a run's log (`append`, `mend`, `Tail`, `plain`
and `floats`). What does not: what the lines mean, which is `runlog`'s and `follow`'s. No JAX.

JSON has no non-finite numbers: they are written as the strings "NaN", "Infinity" and "-Infinity",
and are read back as floats.
"""

import json
import math
import os
import re
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_BLOCK = 1 << 16
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class Tail:
    r"""The new objects of a JSON-lines file at each call of `rows`.

    A torn last line waits until it is whole. A file that became shorter, because a resumed run cut
    a torn line off it, is read on from its end; one that was replaced, from its beginning.

    Attributes:
        skipped: Numbers, from 1, of the lines that are no JSON objects.
        torn: Number of a last line that is not whole, None without one.
        offset: Where the next line begins, in bytes.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
        >>> tail = Tail(path)
        >>> _ = path.write_text('{"step": 1}\n{"st')
        >>> list(tail.rows()), list(tail.rows())
        ([(1, 0, {'step': 1})], [])
        >>> _ = path.write_text('{"step": 1}\n{"step": 2}\n')
        >>> list(tail.rows())
        [(2, 12, {'step': 2})]
    """

    def __init__(self, path: Path) -> None:
        """Begins at the beginning of a file, which need not be there yet."""
        self._path = path
        self._inode, self._line = 0, 0
        self.offset = 0
        self.skipped: list[int] = []
        self.torn: int | None = None

    def rows(self, end: int | None = None) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Yields line number, offset in bytes and object of each line since the last call.

        Args:
            end: Bytes of the file that count; None: all.
        """
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode:
                self._inode, self.offset, self._line = status.st_ino, 0, 0
            self.offset = file.seek(min(self.offset, status.st_size))
            self.torn = None
            for line in file:
                if end is not None and self.offset >= end:
                    break
                row, whole = parse(line), line.endswith(b"\n")
                if row is None and not whole:
                    self.torn = self._line + 1 if line.strip() else None
                    break
                number, start = self._line + 1, self.offset
                self.offset += len(line)
                self._line += whole
                if row is not None:
                    yield number, start, row
                elif line.strip():
                    self.skipped.append(number)


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Returns the objects of a JSON-lines file; none if it does not exist.

    Lines that are no JSON objects, such as the torn last line of a run that was killed or is being
    written, are skipped with one `UserWarning` that names the file and counts them.

    Args:
        path: The file.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "events.jsonl"
        >>> _ = path.write_text('{"kind": "alarm", "value": "Infinity"}')
        >>> read_jsonl(path)
        [{'kind': 'alarm', 'value': inf}]
    """
    tail = Tail(Path(path))
    found = [floats(row) for _, _, row in tail.rows()]
    warn_skipped(Path(path), [*tail.skipped, *([tail.torn] if tail.torn else [])])
    return found


def backwards(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yields the lines from the last to the first: offset in bytes, and object or None.

    Args:
        path: The file; missing is as good as empty.
    """
    start, line = _tail(path)
    while line:
        yield start, parse(line)
        start, line = _tail(path, start)


def mend(path: Path) -> None:
    """Cuts torn lines off the end; a last line that only lacks its line break gets it.

    Args:
        path: The file; missing is as good as empty.
    """
    while True:
        start, line = _tail(path)
        if not line or parse(line) is not None:
            break
        os.truncate(path, start)
    if line and not line.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")


def append(descriptor: int, row: Mapping[str, Any]) -> None:
    """Appends one line in a single write; if the disk is full, nothing of it.

    Args:
        descriptor: Open file in append mode that nobody else writes.
        row: Anything that `plain` can turn into JSON.

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
    """Returns `value` as JSON can hold it: what JSON does not know becomes text.

    Dataclasses and namespaces become objects, arrays and sets lists, data types and enumerations
    their names, functions and classes where they are defined. The text is the same in every
    process, so that a resumed run has the configuration that it had.

    Args:
        value: Anything.

    Example:
        >>> plain({"folder": Path("runs"), "values": np.array([1.0, np.nan]), "type": np.float32})
        {'folder': 'runs', 'values': [1.0, 'NaN'], 'type': 'float32'}
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, int | str):
        return int(value) if isinstance(value, int) else str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Namespace):
        return plain(vars(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=str)
    if not isinstance(value, type) and hasattr(value, "tolist"):
        listed = value.tolist()
        return plain(listed) if isinstance(listed, list | float | int | str) else str(listed)
    return _named(value)


def _named(value: Any) -> str:
    """A data type, a function, a class or any other object as text without its address."""
    if isinstance(value, np.dtype) or hasattr(value, "dtype"):
        try:
            return np.dtype(getattr(value, "dtype", value)).name
        except TypeError:
            pass
    if isinstance(value, type) and issubclass(value, np.generic):
        return np.dtype(value).name
    if name := getattr(value, "__qualname__", None):
        return f"{value.__module__}.{name}"
    return _ADDRESS.sub("", str(value))


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


def number(value: Any) -> float:
    """Returns a number that was read from JSON, also one that is not finite.

    Args:
        value: What `json.loads` returned.

    Raises:
        TypeError: It is no number.
        OverflowError: It has too many digits.
    """
    if isinstance(value, str):
        value = _NON_FINITE.get(value, value)
    if isinstance(value, float | int):
        return float(value)
    raise TypeError(f"{value!r} is no number")


def warn_skipped(path: Path, lines: Sequence[int], what: str = "JSON objects") -> None:
    """Warns that lines were skipped, if any were: how many, and the first of them.

    Args:
        path: The file.
        lines: Their numbers, from 1.
        what: What they are not.
    """
    if lines:
        some = ", ".join(f"{line:,}" for line in lines[:5]) + ", …" * (len(lines) > 5)
        count = f"{len(lines):,} line{'s' * (len(lines) > 1)}"
        text = f"{path}: {count} skipped, not {what} (torn while written?): line {some}"
        warnings.warn(text, UserWarning, stacklevel=3)


def parse(line: bytes) -> dict[str, Any] | None:
    """Returns the JSON object on a line, None if there is none.

    Non-finite numbers are still text; `floats` and `number` turn them back.

    Args:
        line: Bytes of the line, with or without its line break.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _tail(path: Path, end: int | None = None) -> tuple[int, bytes]:
    """Where the last line before `end` begins, and the line with its line break if it has one."""
    if not path.exists():
        return 0, b""
    with path.open("rb") as file:
        start = file.seek(0, os.SEEK_END) if end is None else end
        tail = b""
        while start > 0 and b"\n" not in tail[:-1]:
            block = min(_BLOCK, start)
            start = file.seek(start - block)
            tail = file.read(block) + tail
    line_start = tail[:-1].rfind(b"\n") + 1
    return start + line_start, tail[line_start:]
