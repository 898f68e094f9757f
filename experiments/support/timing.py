"""Interleaved timing: every candidate once a round, medians over rounds, ratios in one run.

Machines are noisy; a ratio of two medians taken side by side survives what an absolute time does
not.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One line of the performance table.

    Attributes:
        what: What was measured.
        target: What was asked for, in words; empty where nothing was.
        measured: What came out, in words.
        met: Whether the target holds; None without a target.
    """

    what: str
    target: str
    measured: str
    met: bool | None = None


def interleaved(candidates: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each candidate; each is called once before, to compile.

    Args:
        candidates: {name: function without arguments}; results are waited for.
        rounds: Calls of each that count.
    """
    for run in candidates.values():
        jax.block_until_ready(run())
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - start)
    return {name: float(np.median(times)) for name, times in seconds.items()}


def as_table(title: str, rows: list[Row]) -> Table:
    """Rows for the terminal."""
    table = Table(title=title)
    for column in ("what", "target", "measured", "met"):
        table.add_column(column)
    for row in rows:
        met = {True: "yes", False: "NO", None: ""}[row.met]
        table.add_row(row.what, row.target, row.measured, met)
    return table
