"""Tables of numbers: Hugging Face's `trainer_state.json`, CSV, JSON and JSON lines.

What lives here: reading these as rows. What does not: what the columns mean (`names`).

Weights & Biases exports a chart as CSV with columns `RUN - METRIC`, `RUN - METRIC__MIN` and
`RUN - METRIC__MAX`; the run's name and the two bounds are left out.
"""

import csv
import json
import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from stabmon.runs.foreign.log import Log, Row
from stabmon.runs.foreign.names import STEP, step_name
from stabmon.runs.jsonl import parse

_WRAPPERS = ("metrics", "values", "scalars", "data", "logs")
_SET_UP = ("max_steps", "logging_steps", "eval_steps", "num_train_epochs", "train_batch_size")


def read_json(path: Path, told: Mapping[str, str]) -> Log:
    """Returns the rows of a JSON file.

    Known are a trainer's state, a list of rows, a column a list, and Megatron's reference values,
    {name: {"values": {step: value}}}.

    Args:
        path: The file.
        told: Short name → column; "step" is looked up here.

    Raises:
        ValueError: It is no JSON, or of another shape.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if isinstance(found, dict) and isinstance(found.get("log_history"), list):
        # The last row holds the mean of the whole run.
        rows = [x for x in _objects(found["log_history"]) if "train_runtime" not in x]
        config = {name: found[name] for name in _SET_UP if name in found}
        return Log("Hugging Face trainer state", _rows(path, rows, told), True, config)
    if isinstance(found, list):
        return Log("JSON table", _rows(path, _objects(found), told))
    if isinstance(found, dict) and (by_step := _by_step(found)):
        return Log("table of reference values", by_step)
    if isinstance(found, dict) and found and all(isinstance(x, list) for x in found.values()):
        rows = [dict(zip(found, row, strict=False)) for row in zip(*found.values(), strict=False)]
        return Log("JSON table", _rows(path, rows, told))
    what = f"an object of {', '.join(list(found)[:8])}" if isinstance(found, dict) else "no object"
    raise ValueError(
        f"{path} is JSON, {what}, and no log that is known: expected log_history "
        "(trainer_state.json), a list of rows with a step, or a list for each column"
    )


def read_jsonl_table(path: Path, told: Mapping[str, str]) -> Log:
    """Returns the rows of a file with an object on each line.

    Args:
        path: The file.
        told: Short name → column; "step" is looked up here.

    Raises:
        ValueError: No line is an object, or no column counts steps.
    """
    rows, skipped = [], 0
    with path.open("rb") as file:
        for line in file:
            row = parse(line)
            if row is not None:
                rows.append(row)
            elif line.strip():
                skipped += 1
    if not rows:
        raise ValueError(f"{path}: none of its {skipped:,} lines is a JSON object")
    return Log("JSON lines", _rows(path, rows, told), skipped=skipped)


def read_csv(path: Path, told: Mapping[str, str]) -> Log:
    """Returns the rows of a table with a header, separated by commas, semicolons or tabs.

    Args:
        path: The file.
        told: Short name → column; "step" is looked up here.

    Raises:
        ValueError: It is empty, no column counts steps, or it holds several runs.
    """
    with path.open(encoding="utf-8-sig", newline="", errors="replace") as file:
        header = file.readline()
        separator = max(",;\t", key=header.count)
        file.seek(0)
        rows = list(csv.DictReader(file, delimiter=separator))
    if not rows:
        raise ValueError(f"{path} has no rows under its header {header.strip()!r}")
    prefixes = {name.split(" - ")[0] for name in rows[0] if " - " in str(name)}
    if not prefixes:
        return Log("CSV table", _rows(path, rows, told))
    if len(prefixes) > 1:
        raise ValueError(
            f"{path} holds {len(prefixes)} runs, {', '.join(sorted(prefixes))}: export one of them"
        )
    kept = [
        {
            str(name).split(" - ", 1)[-1]: value
            for name, value in row.items()
            if not str(name).endswith(("__MIN", "__MAX"))
        }
        for row in rows
    ]
    return Log("Weights & Biases export", _rows(path, kept, told))


def _objects(rows: Iterable[Any]) -> list[dict[str, Any]]:
    """Those of the rows that are objects."""
    return [row for row in rows if isinstance(row, dict)]


def _rows(path: Path, rows: Iterable[Mapping[Any, Any]], told: Mapping[str, str]) -> list[Row]:
    """Steps and numbers of rows; those without either are left out."""
    flat = [_flat(row) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    step = told.get(STEP) or step_name(names)
    if step is None or step not in names:
        lacks = "no column that counts steps" if step is None else f"no column {step}"
        raise ValueError(
            f"{path} has {lacks}; it has {', '.join(names[:20])}: say which, --map step=COLUMN"
        )
    found = []
    for row in flat:
        at = number_of(row.pop(step, None))
        values = {name: number_of(value) for name, value in row.items()}
        numbers = {name: value for name, value in values.items() if value is not None}
        if at is not None and at.is_integer() and abs(at) < 2**63 and numbers:
            found.append((int(at), numbers))
    steps = [at for at, _ in found]
    falling = len(steps) > 2 and all(a >= b for a, b in pairwise(steps))
    return found[::-1] if falling and steps[0] > steps[-1] else found


def _flat(row: Mapping[Any, Any]) -> dict[str, Any]:
    """A row without nesting."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            outer = "" if name in _WRAPPERS else f"{name}/"
            flat |= {f"{outer}{inner}": x for inner, x in value.items()}
        elif name is not None:
            flat[str(name)] = value
    return flat


def number_of(value: Any) -> float | None:
    """Returns a number, also one in text; None for anything else, a flag or an empty cell.

    Args:
        value: A cell of a table.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _by_step(found: Mapping[str, Any]) -> list[Row]:
    """Rows of {name: {step: value}}, or {name: {"values": {step: value}}}; text "nan" is a gap."""
    rows: dict[int, dict[str, float]] = {}
    for name, series in found.items():
        inner = series.get("values") if isinstance(series, dict) else None
        series = inner if isinstance(inner, dict) else series
        if not isinstance(series, dict) or not all(str(at).isdigit() for at in series):
            continue
        for at, value in series.items():
            number = number_of(value)
            if number is not None and not (isinstance(value, str) and math.isnan(number)):
                rows.setdefault(int(at), {})[name] = number
    return sorted(rows.items())
