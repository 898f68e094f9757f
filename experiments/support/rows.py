"""The rows of an experiment's results: written one at a time, and not measured twice.

A row is an object on a line of `runs/<experiment>.jsonl`. Under "settings" it holds what it was
measured with; a row that is there with the same settings is not measured again, so an experiment
goes on where it was interrupted. What rows mean is each experiment's; who gathers them all,
`evidence.py`'s; the lines themselves, `stabmon.runs.jsonl`'s.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from stabmon.runs.jsonl import append, mend, plain, read_jsonl

Row = dict[str, Any]
# A row stays what it is wherever it was measured.
_PLACES = ("runs",)


def key(settings: Any) -> str:
    """What tells settings apart, without the folder they lie in.

    Args:
        settings: A dataclass, or the mapping that a row holds of it.

    >>> key({"seed": 1, "runs": "here"}) == key({"runs": "there", "seed": 1})
    True
    """
    held: Mapping[str, Any] = settings if isinstance(settings, Mapping) else _mapping(settings)
    kept = {name: value for name, value in held.items() if name not in _PLACES}
    return json.dumps(plain(kept), sort_keys=True)


def append_row(file: Path, row: Mapping[str, Any]) -> None:
    """Adds one row in a single write, behind the last whole line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    mend(file)
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        append(descriptor, row)
    finally:
        os.close(descriptor)


def rows_there(file: Path, settings: Iterable[Any]) -> list[Row]:
    """The rows that were measured with one of `settings`, in that order; of several the last.

    Args:
        file: The rows; missing is as good as empty.
        settings: Dataclasses or mappings.
    """
    found = {key(row["settings"]): row for row in read_jsonl(file) if "settings" in row}
    return [found[name] for name in map(key, settings) if name in found]


def measured(file: Path, settings: Any, measure: Callable[[], Mapping[str, Any]]) -> Row:
    """The row of `settings`: the one that is there, else a new one, which is appended.

    Args:
        file: The rows.
        settings: A dataclass or mapping; the row holds it under "settings".
        measure: Gives the rest of the row.
    """
    if there := rows_there(file, [settings]):
        return there[0]
    held = settings if isinstance(settings, Mapping) else _mapping(settings)
    append_row(file, {**measure(), "settings": {k: v for k, v in held.items() if k not in _PLACES}})
    return rows_there(file, [settings])[0]


def latest(rows: Iterable[Row]) -> list[Row]:
    """Rows without those that were measured again later with the same settings."""
    kept: dict[str, Row] = {}
    for i, row in enumerate(rows):
        name = key(row["settings"]) if "settings" in row else f"row {i}"
        kept.pop(name, None)
        kept[name] = row
    return list(kept.values())


def _mapping(settings: Any) -> dict[str, Any]:
    if not is_dataclass(settings) or isinstance(settings, type):
        raise TypeError(f"settings are a dataclass or a mapping, got {type(settings).__name__}")
    return asdict(settings)
