"""TensorBoard's event files as rows.

What lives here: `read_tensorboard`. What does not: the bytes (`wire`), what tags mean (`names`).

A run that was started again may say from which step on its earlier events are void; they are left
out, as TensorBoard does.

References:
    Fields: tensorboard/compat/proto/{event,summary,tensor}.proto
"""

import re
import struct
from pathlib import Path

import numpy as np

from stabmon.runs.foreign.log import Log, Row
from stabmon.runs.foreign.wire import fields, signed, tfrecords

MARK = "tfevents"
_STARTED = 1
_PART = re.compile(r"train|eval|val|test|dev|held", re.I)
_TYPES = {1: "<f4", 2: "<f8", 3: "<i4", 9: "<i8"}
_LISTS = {1: (5, "<f4"), 2: (6, "<f8")}


def event_files(folder: Path) -> list[Path]:
    """Returns the event files in a folder and the folders within it, the earliest first.

    Args:
        folder: Where to look.
    """
    return sorted(x for x in folder.rglob(f"*{MARK}*") if x.is_file())


def read_tensorboard(path: Path) -> Log:
    """Returns the scalars of an event file, or of all those of a folder.

    Args:
        path: The file or the folder. Folders within it, such as "train" and "validation", are of
            one run; their tags get the folder's name in front.

    Raises:
        ValueError: Folders within it are several runs, one beside the other.
    """
    files = [path] if path.is_file() else event_files(path)
    several = len({x.parent for x in files}) > 1
    rows: list[Row] = []
    skipped = 0
    folders: dict[str, set[str]] = {}
    for file in files:
        where = file.parent.relative_to(path).as_posix() if several else ""
        prefix = "" if where in ("", ".") else f"{where}/"
        for record in tfrecords(file):
            try:
                step, started, scalars = _event(record)
            except (ValueError, struct.error):
                skipped += 1
                continue
            if started:
                rows = [row for row in rows if row[0] < step]
            _join(rows, step, {prefix + tag: value for tag, value in scalars.items()})
            for tag in scalars:
                folders.setdefault(tag, set()).add(where)
    for tag, of in folders.items():
        if len(of) > 1 and not all(_PART.search(x) for x in of):
            names = ", ".join(sorted(of)[:8])
            raise ValueError(f"{path} holds several runs ({tag} is in {names}): give one of them")
    return Log("TensorBoard log", rows, skipped=skipped)


def _join(rows: list[Row], step: int, values: dict[str, float]) -> None:
    """Appends scalars, those of one step that follow each other as one row."""
    if values and rows and rows[-1][0] == step and not rows[-1][1].keys() & values.keys():
        rows[-1][1].update(values)
    elif values:
        rows.append((step, values))


def _event(record: bytes) -> tuple[int, bool, dict[str, float]]:
    """Step of an event, whether a writer says that it starts there, and its scalars."""
    step, started = 0, False
    scalars = {}
    for number, value in fields(record):
        if number == 2:
            step = signed(value)
        elif number == 5 and isinstance(value, bytes):
            for part, summary in fields(value):
                if part == 1 and isinstance(summary, bytes):
                    scalars |= _scalar(summary)
        elif number == 7 and isinstance(value, bytes):
            started = (1, _STARTED) in fields(value)
    return step, started, scalars


def _scalar(summary: bytes) -> dict[str, float]:
    """Tag and value of one entry of a summary, if it is a number."""
    tag, found = "", None
    for number, value in fields(summary):
        if number == 1 and isinstance(value, bytes):
            tag = value.decode(errors="replace")
        elif number == 2 and isinstance(value, bytes):
            (found,) = struct.unpack("<f", value)
        elif number == 8 and isinstance(value, bytes):
            found = _tensor(value)
    return {} if found is None else {tag: found}


def _tensor(message: bytes) -> float | None:
    """The number in a tensor of one entry, None for any other."""
    parts = dict(fields(message))
    kind, content = parts.get(1), parts.get(4)
    if not isinstance(kind, int):
        return None
    dtype = _TYPES.get(kind)
    if not content and kind in _LISTS:
        number, dtype = _LISTS[kind]
        content = parts.get(number)
    if dtype is None or not isinstance(content, bytes) or len(content) != np.dtype(dtype).itemsize:
        return None
    return float(np.frombuffer(content, dtype)[0])
