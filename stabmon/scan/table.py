"""A scan for people and for programs: tables by role, what was left out, JSON.

What lives here: `show`, `as_json`. What does not: the measuring (`health`).
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from rich.console import Console, RenderableType
from rich.text import Text

from stabmon.checkpoints.source import Checkpoint
from stabmon.output.terminal import printable, short, table
from stabmon.scan.health import Change, Health, Report
from stabmon.scan.measure import Row, place

_LINES = 12
_STATS = ("norm", "spectral_norm", "stable_rank", "relative_stable_rank", "effective_rank")
_EVERY = ("‖W‖", "σ₁", "stable rank", "/ Gaussian", "effective rank")


def show(console: Console, report: Report, *, every: bool = False) -> None:
    """Prints the tables, what was left out, and what is wrong.

    Args:
        console: Where to.
        report: The scan.
        every: A row for each matrix instead of one for each role.
    """
    for health in report.checkpoints:
        console.print(_every(health) if every else _by_role(health))
        if health.vectors:
            console.print(_vectors(health))
        _left_out(console, health)
    for change in report.changes:
        title = f"{change.before.name} → {change.after.name}"
        console.print(_moves(change, title))
        if change.heads:
            console.print(_increments(change.heads, f"{title}, increments of the QK product"))
    for text in report.problems[:_LINES]:
        console.print(Text(f"wrong: {printable(text)}", "bold red"))
    if len(report.problems) > _LINES:
        console.print(f"… and {len(report.problems) - _LINES} more; --json has all")
    if not report.problems:
        console.print("nothing wrong found")


def as_json(report: Report) -> dict[str, Any]:
    """Returns the report as JSON can hold it.

    Args:
        report: The scan.
    """
    return {
        "healthy": not report.problems,
        "problems": report.problems,
        "checkpoints": [
            {
                **_identity(health.checkpoint),
                "layout": health.layout,
                "matrices": health.matrices,
                "vectors": health.vectors,
                "skipped": [{"path": path, "reason": text} for path, text in health.skipped],
            }
            for health in report.checkpoints
        ],
        "changes": [
            {
                "before": _identity(change.before),
                "after": _identity(change.after),
                "matrices": change.matrices,
                "heads": change.heads,
            }
            for change in report.changes
        ],
    }


def _identity(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"name": checkpoint.name, "path": checkpoint.path, "step": checkpoint.step}


def _every(health: Health) -> RenderableType:
    """A row for each matrix."""
    rows = [(place(row), *(row[name] for name in _STATS)) for row in health.matrices]
    return table(_title(health), rows, ("matrix", *_EVERY))


def _by_role(health: Health) -> RenderableType:
    """A row for each role: the middle, and the worst with its layer."""
    rows = []
    for role, group in _groups(health.matrices):
        worst = min(group, key=lambda row: _or_least(row["relative_stable_rank"]))
        ranks = [row["effective_rank"] for row in group if row["effective_rank"] is not None]
        rows.append(
            (
                *(role, len(group), "×".join(map(str, group[0]["shape"]))),
                *(_median(group, name) for name in ("norm", "spectral_norm", "stable_rank")),
                *(_median(group, "relative_stable_rank"), _at(worst, "relative_stable_rank")),
                float(np.median(ranks)) if ranks else None,
            )
        )
    columns = ("role", "n", "shape", "‖W‖", "σ₁", "stable rank", "/ Gaussian")
    return table(_title(health), rows, (*columns, "lowest (layer)", "eff. rank"))


def _vectors(health: Health) -> RenderableType:
    """A row for each kind of norm scales and other arrays: extreme entries over the layers."""
    kinds: dict[str, list[Row]] = {}
    for row in health.vectors:
        kinds.setdefault(_folded(row["path"]), []).append(row)
    rows = [
        (
            *(kind, len(group), "×".join(map(str, group[0]["shape"]))),
            *(_median(group, "norm"), min(x["least"] for x in group)),
            max(x["greatest"] for x in group),
        )
        for kind, group in list(kinds.items())[:_LINES]
    ]
    more = f"; {len(kinds) - _LINES} kinds more in --json" if len(kinds) > _LINES else ""
    columns = ("in no matrix", "n", "shape", "‖x‖", "least", "greatest")
    return table(f"{health.checkpoint.name}, norm scales and others{more}", rows, columns)


def _folded(path: str) -> str:
    """A path with its numbers as *."""
    return re.sub(r"(?<![^./_])\d+(?=[./]|$)", "*", path)


def _title(health: Health) -> str:
    return f"{health.checkpoint.name}, layout {health.layout}; medians over layers"


def _moves(change: Change, title: str) -> RenderableType:
    """A row for each role: how far its matrices moved, and in how many directions."""
    rows = []
    for role, group in _groups(change.matrices):
        far = max(group, key=lambda row: -_or_least(-row["relative_norm"]))
        low = min(group, key=lambda row: _or_least(row["stable_rank"]))
        moved = (_median(group, "relative_norm"), _at(far, "relative_norm"))
        rank = (_median(group, "stable_rank"), _at(low, "stable_rank"))
        rows.append((role, _median(group, "norm"), *moved, *rank))
    columns = ("role", "‖ΔW‖", "‖ΔW‖/‖W‖", "highest (layer)", "stable rank", "lowest (layer)")
    return table(title, rows, columns)


def _increments(heads: Sequence[Row], title: str) -> RenderableType:
    """A row for each of the increments: size, effective rank, and the head where it is lowest."""
    names = {"delta1": "Δ1", "delta2": "Δ2", "delta3": "Δ3", "query": "ΔW_q", "key": "ΔW_k"}
    rows = []
    for name, shown in names.items():
        rank = f"{name}/effective_rank"
        low = min(heads, key=lambda row: _or_least(row[rank]))
        middle = (_median(heads, f"{name}/norm"), _median(heads, rank))
        p10 = float(np.percentile([row[rank] for row in heads], 10))
        rows.append((shown, *middle, p10, _at(low, rank)))
    columns = ("increment", "norm", "effective rank", "10 %", "lowest (layer.head)")
    return table(title, rows, columns)


def _left_out(console: Console, health: Health) -> None:
    """What is in no matrix, layers folded together."""
    if not health.skipped:
        return
    counts: dict[tuple[str, str], int] = {}
    for path, reason in health.skipped:
        key = _folded(path), reason
        counts[key] = counts.get(key, 0) + 1
    console.print(f"left out, {len(health.skipped)} in all:")
    for (path, reason), count in list(counts.items())[:_LINES]:
        times = f" ×{count}" if count > 1 else ""
        console.print(Text(f"  {printable(path)}{times}: {printable(reason)}", "dim"))
    if len(counts) > _LINES:
        console.print(Text(f"  … and {len(counts) - _LINES} kinds more; --json has all", "dim"))


def _groups(rows: Sequence[Row]) -> Iterable[tuple[str, list[Row]]]:
    """Rows by role."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["role"], []).append(row)
    return groups.items()


def _median(rows: Sequence[Row], name: str) -> float:
    return float(np.median([row[name] for row in rows]))


def _at(row: Row, name: str) -> str:
    """A value, and the layer it is in, with the head or expert if there is one."""
    unit = next((f".{row[x]}" for x in ("head", "expert") if row.get(x) is not None), "")
    return short(row[name]) + ("" if row["layer"] is None else f" ({row['layer']}{unit})")


def _or_least(value: float) -> float:
    """A value for sorting; what is not a number comes first."""
    return value if value == value else -np.inf
