"""Training runs and rows of results: measured once, and found again by their settings.

A run is a folder `runs/<name>`; a row is an object on a line of `runs/<experiment>.jsonl` that
holds under "settings" what it was measured with. What is there already is not measured again, so an
interrupted experiment goes on where it stopped. Not here: what rows mean (each experiment's), who
gathers them all (`evidence.py`), the lines themselves (`stabmon.runs.jsonl`).
"""

import fcntl
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.loop.session import identity
from experiments.train import Config as TrainConfig
from experiments.train import train
from stabmon.runs.jsonl import append, mend, plain, read_jsonl
from stabmon.runs.run import Run, load_run

Row = dict[str, Any]
# A row stays what it is wherever it was measured.
_PLACES = ("runs",)


def recorded(settings: TrainConfig) -> Run:
    """The recorded run of `settings`; it is trained first unless it is there.

    Two experiments that need the same run at the same time train it once.

    Raises:
        SystemExit: The training was interrupted; the next call goes on with it.
    """
    folder = settings.runs / settings.name
    settings.runs.mkdir(parents=True, exist_ok=True)
    with (settings.runs / f"{settings.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _over(folder, settings.steps):
            print(settings.name, flush=True)
            train(settings)
    if not _over(folder, settings.steps):
        raise SystemExit(f"{settings.name}: interrupted, the same command goes on with it")
    return load_run(folder)


def _over(folder: Path, steps: int) -> bool:
    """Whether a run of at least `steps` steps is there, or one that the recovery stopped."""
    events = load_run(folder).events if (folder / "config.json").exists() else ()
    return any(
        x["kind"] == "stopped" or (x["kind"] == "finished" and x["step"] >= steps) for x in events
    )


def held_out(run: Run) -> float:
    """Held-out loss at the end of a run, NaN where the recovery stopped it."""
    ends = [x["held_out"] for x in run.events if x["kind"] == "finished"]
    return float(ends[-1]) if ends else math.nan


def mean_from(run: Run, key: str, first: int) -> float:
    """Mean of a metric's samples from a step on, NaN if one of them is not finite."""
    at, values = run.metrics[key]
    return float(values[at >= first].mean())


def largest(run: Run, key: str) -> float:
    """The largest sample, infinite where one is not finite."""
    values = run.metrics[key][1]
    return float(values.max()) if np.isfinite(values).all() else math.inf


def settings_row(settings: TrainConfig, **more: Any) -> Row:
    """What tells a run from others, its length included, and `more`; for a row."""
    return plain(identity(settings) | {"steps": settings.steps} | more)


def measured(
    file: Path, settings: Any, measure: Callable[[], Mapping[str, Any]], again: bool = False
) -> Row:
    """The row of `settings`: the one that is there, else a new one, which is appended.

    Args:
        file: The rows.
        settings: A dataclass or mapping; the row holds it under "settings".
        measure: Gives the rest of the row.
        again: Whether it is measured even if it is there; the newest row counts.
    """
    if not again and (there := rows_there(file, [settings])):
        return there[0]
    held = {k: v for k, v in _mapping(settings).items() if k not in _PLACES}
    append_row(file, {**measure(), "settings": held})
    return rows_there(file, [settings])[0]


def rows_there(file: Path, settings: Iterable[Any]) -> list[Row]:
    """The rows that were measured with one of `settings`, in that order; of several the last.

    Args:
        file: The rows; a missing file is an empty one.
        settings: Dataclasses or mappings.
    """
    found = {key(row["settings"]): row for row in read_jsonl(file) if "settings" in row}
    return [found[name] for name in map(key, settings) if name in found]


def append_row(file: Path, row: Mapping[str, Any]) -> None:
    """Adds one row in a single write, after the last whole line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    mend(file)
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        append(descriptor, row)
    finally:
        os.close(descriptor)


def latest(rows: Iterable[Row]) -> list[Row]:
    """Rows without those that were measured again later with the same settings."""
    kept: dict[str, Row] = {}
    for i, row in enumerate(rows):
        name = key(row["settings"]) if "settings" in row else f"row {i}"
        kept.pop(name, None)
        kept[name] = row
    return list(kept.values())


def key(settings: Any) -> str:
    """What tells settings apart, without the folder that runs lie in.

    Args:
        settings: A dataclass, or the mapping that a row holds of it.

    >>> key({"seed": 1, "runs": "here"}) == key({"runs": "there", "seed": 1})
    True
    """
    kept = {name: value for name, value in _mapping(settings).items() if name not in _PLACES}
    return json.dumps(plain(kept), sort_keys=True)


def _mapping(settings: Any) -> Mapping[str, Any]:
    if isinstance(settings, Mapping):
        return settings
    if not is_dataclass(settings) or isinstance(settings, type):
        raise TypeError(f"settings are a dataclass or a mapping, got {type(settings).__name__}")
    return asdict(settings)
