"""The picture of an experiment with arms: a panel for each curve, a line for each arm."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from experiments.support.rows import Row

COLOURS = ("#888888", "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b")


def draw_curves(rows: Sequence[Row], names: Iterable[str], path: Path) -> Path:
    """A panel for each name, a line for each arm of the smallest seed."""
    names = list(names)
    first = min((row["seed"] for row in rows), default=0)
    columns = 4
    figure = make_subplots(-(-len(names) // columns), columns, subplot_titles=names)
    for i, row in enumerate(row for row in rows if row["seed"] == first):
        for j, name in enumerate(names):
            x, y = row["curves"][name]
            curve = go.Scatter(
                x=x,
                y=y,
                name=row["arm"],
                legendgroup=row["arm"],
                showlegend=j == 0,
                line={"color": COLOURS[i % len(COLOURS)]},
            )
            figure.add_trace(curve, row=j // columns + 1, col=j % columns + 1)
    figure.update_xaxes(title="step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.write_html(path)
    return path


def arms_of(rows: Iterable[Row]) -> list[str]:
    """The arms there are, in the order in which they first come."""
    return list(dict.fromkeys(row["arm"] for row in rows))
