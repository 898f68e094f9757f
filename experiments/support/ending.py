"""How an experiment ends: headline and tables on the terminal, its figure beside its rows."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import plotly.graph_objects as go
from rich.console import Console

from experiments.support.figures import write_page
from experiments.support.recorded import Row


@dataclass(frozen=True)
class Result:
    """What an experiment comes to: all rows asked for, the file they lie in, and the figure."""

    rows: list[Row]
    file: Path
    figure: Path


def ended(
    file: Path,
    rows: list[Row],
    headline: Callable[[list[Row]], str],
    tables: Callable[[list[Row]], str],
    figure: Callable[[list[Row]], go.Figure],
) -> Result:
    """Prints what the rows say and writes the figure, `<name>.html` beside `<name>.jsonl`."""
    text = f"{headline(rows)}\n\n{tables(rows)}"
    Console(soft_wrap=True).print(text, markup=False)
    return Result(rows, file, write_page(figure(rows), file.with_suffix(".html")))
