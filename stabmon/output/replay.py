"""`stabmon replay`: the standard alarms on recorded runs, as tables or JSON.

What lives here: reading the runs and printing. What does not: the replay
(`stabmon.recovery.replay`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from stabmon.output.terminal import show_json, table
from stabmon.recovery.replay import replay_events, standard_watcher
from stabmon.runs.foreign.load import load
from stabmon.runs.jsonl import plain


def replay_runs(
    folders: Sequence[Path], warmup: int = 100, window: int = 200, attempt: int | None = None
) -> dict[str, list[dict[str, Any]]]:
    """Returns {name of the run: alarms, diagnoses and advice in order}.

    Args:
        folders: Folders of runs, or other trainers' logs.
        warmup: Steps of learning-rate warm-up, which are not judged.
        window: Steps of the healthy window after it.
        attempt: 1 is a run as it was before its first rewind; None the newest.

    Raises:
        FileNotFoundError: There is no such run.
        ValueError: A negative warm-up, no window, or no log that is known.
    """
    found = {}
    for folder in folders:
        run = load(folder, attempt=attempt)
        found[str(folder)] = replay_events(run, standard_watcher(run, warmup, window))
    return found


def show_replay(
    console: Console, found: Mapping[str, Sequence[Mapping[str, Any]]], as_json: bool = False
) -> None:
    """Prints it.

    Args:
        console: Where to.
        found: As of `replay_runs`.
        as_json: JSON instead of tables.
    """
    if as_json:
        show_json(console, plain(found))
        return
    columns = ("step", "event", "what", "value", "expected", "z")
    for name, rows in found.items():
        if not rows:
            console.print(f"No alarm in {name}.", markup=False, highlight=False)
            continue
        lines = [
            (x["step"], x["kind"], _what(x), *(x.get(k) for k in ("value", "reference", "z")))
            for x in rows
        ]
        console.print(table(f"What the standard alarms say of {name}", lines, columns, words=3))


def _what(row: Mapping[str, Any]) -> str:
    """An event in a few words."""
    if row["kind"] == "diagnosis":
        return f"{row['fault']} (confidence {row['confidence']:.2f})"
    if row["kind"] == "incident":
        return f"{row['number']} {row['change']}: {row['fault']}, since step {row['opened']}"
    if row["kind"] == "action":
        return f"{row['action']}: {row['reason']}"
    return f"{row['rule']}: {row['key']}"
