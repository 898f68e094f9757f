"""Rows of another trainer's log on their way to a run.

What lives here: `Log`, and `as_run`: the columns of each key, and one timeline of what a trainer
that was started again wrote twice. What does not: reading files.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stabmon.quantities import LOSS
from stabmon.runs.columns import Columns
from stabmon.runs.foreign.names import chosen
from stabmon.runs.run import Run, Source

Row = tuple[int, dict[str, float]]


@dataclass(frozen=True)
class Log:
    """What was read of a log.

    Attributes:
        kind: What such a log is called.
        rows: Steps with column → value, in the order they were written.
        means: Whether a loss is the mean over the steps since the row before; None: unknown.
        config: What the log says about the run's set-up.
        skipped: Lines that could not be read.
    """

    kind: str
    rows: list[Row]
    means: bool | None = None
    config: dict[str, Any] = field(default_factory=dict)
    skipped: int = 0


def as_run(log: Log, path: Path, told: Mapping[str, str]) -> Run:
    """Returns the run that a log tells of.

    Args:
        log: Its rows.
        path: Where it lies.
        told: Short name or key → column, where the names do not tell.

    Raises:
        ValueError: It has no rows, or no column that is known.
    """
    names = list(dict.fromkeys(name for _, values in log.rows for name in values))
    if not names:
        raise ValueError(f"{path} looks like a {log.kind}, but no row has a step and a number")
    keys = chosen(names, told)
    if not keys:
        raise ValueError(
            f"{path} looks like a {log.kind}, but none of its columns is known: "
            f"{', '.join(names[:20])}; say which is which, such as --map loss={names[0]}"
        )
    columns, attempts = Columns(), 1
    for (step, values), cut in zip(log.rows, _goes_back(log.rows, keys), strict=True):
        if cut:
            columns.cut(step - 1)
            attempts += 1
        known = {key: values[name] for key, name in keys.items() if name in values}
        if known:
            columns.add(step, known)
    used = set(keys.values())
    left_out = tuple(name for name in names if name not in used)
    source = Source(log.kind, str(path), log.means, keys, left_out)
    config = {"trainer": log.config} if log.config else {}
    metrics = columns.series()
    name = path.resolve().stem if path.is_file() else path.resolve().name
    run = Run(name, path, config, metrics, (), (), source, attempts, log.skipped)
    # The mean over one step is no mean.
    return replace(run, source=replace(source, means=False)) if run.spacing == 1 else run


def _goes_back(rows: list[Row], keys: Mapping[str, str]) -> list[bool]:
    """For each row whether training went back there, to an earlier checkpoint.

    It did if the training loss of a step comes again after that of a later one, or if two rows
    running lie before a later one. A single row that comes late has only been written late.
    """
    named = keys.get(LOSS)
    at = [i for i, (_, values) in enumerate(rows) if named is None or named in values]
    back = [False] * len(rows)
    newest, seen = -1, set()
    for place, i in enumerate(at):
        step = rows[i][0]
        following = rows[at[place + 1]][0] if place + 1 < len(at) else newest + 1
        if step < newest and (step in seen or step <= following <= newest):
            back[i] = True
            seen = {x for x in seen if x < step}
            newest = step
        seen.add(step)
        newest = max(newest, step)
    return back
