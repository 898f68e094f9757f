"""Weights & Biases' offline runs as rows.

What lives here: `read_wandb`. What does not: the bytes (`wire`), exports as CSV (`tables`).

References:
    Fields: wandb/proto/wandb_internal.proto
"""

import json
from pathlib import Path
from typing import Any

from stabmon.runs.foreign.log import Log, Row
from stabmon.runs.foreign.names import step_name
from stabmon.runs.foreign.tables import number_of
from stabmon.runs.foreign.wire import fields, leveldb_records

SUFFIX = ".wandb"
_HISTORY, _CONFIG, _RUN = 2, 5, 17
_RUN_CONFIG = 4
_KEY, _NESTED, _JSON = 1, 2, 16


def run_files(folder: Path) -> list[Path]:
    """Returns the offline runs in a folder and the folders within it, each once.

    Args:
        folder: Where to look.
    """
    return sorted({x.resolve() for x in folder.rglob(f"*{SUFFIX}")})


def read_wandb(path: Path, step: str | None = None) -> Log:
    """Returns the history of an offline run.

    Args:
        path: The `.wandb` file.
        step: What counts steps; None: a count of the trainer's own if there is one, else the
            logger's.

    Raises:
        ValueError: The history lacks `step`.
    """
    history: list[dict[str, Any]] = []
    config: dict[str, Any] = {}
    skipped = 0
    for record in leveldb_records(path):
        try:
            for number, value in fields(record):
                if number == _HISTORY and isinstance(value, bytes):
                    history.append(_items(value))
                elif number == _CONFIG and isinstance(value, bytes):
                    config |= _items(value)
                elif number == _RUN and isinstance(value, bytes):
                    for part, inner in fields(value):
                        if part == _RUN_CONFIG and isinstance(inner, bytes):
                            config |= _items(inner)
        except ValueError:
            skipped += 1
    names = list(dict.fromkeys(name for row in history for name in row))
    chosen = step or step_name(names) or "_step"
    if history and chosen not in names:
        raise ValueError(f"{path}: its history has no {chosen}; it has {', '.join(names[:20])}")
    rows: list[Row] = []
    for row in history:
        at = number_of(row.pop(chosen, None))
        numbers = {name: number_of(x) for name, x in row.items() if not name.startswith("_")}
        known = {name: x for name, x in numbers.items() if x is not None}
        if at is not None and at.is_integer() and known:
            rows.append((int(at), known))
    config.pop("_wandb", None)
    return Log("Weights & Biases run", rows, config=config, skipped=skipped)


def _items(message: bytes) -> dict[str, Any]:
    """Names and values of a record of history or configuration."""
    found = {}
    for number, item in fields(message):
        if number != 1 or not isinstance(item, bytes):
            continue
        names: list[str] = []
        value = None
        for part, content in fields(item):
            if part in (_KEY, _NESTED) and isinstance(content, bytes):
                names.append(content.decode(errors="replace"))
            elif part == _JSON and isinstance(content, bytes):
                value = json.loads(content)
        found["/".join(x for x in names if x)] = value
    return found
