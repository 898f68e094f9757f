"""Pictures of experiments: panels of curves, and the files that pictures are written to.

A page (HTML, to zoom into) lies beside an experiment's rows; an image (SVG) is what
`experiments/README.md` shows, and wants `pip install "stabmon[figures]"` and Chrome or Chromium.
What is drawn is each experiment's `figure(rows)`.
"""

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from experiments.support.recorded import Row
from stabmon.runs.run import Run

# Okabe and Ito's, which the colour-blind tell apart, grey first: for what is healthy.
COLOURS = ("#777777", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
WIDTH, PANEL_HEIGHT = 1100, 300


def colour(i: int) -> str:
    """The colour of the i-th arm; after the last the first comes again."""
    return COLOURS[i % len(COLOURS)]


def panels(titles: Sequence[str], columns: int = 4, **options: Any) -> go.Figure:
    """An empty figure with a panel for each title, row by row, and a legend beneath."""
    rows = -(-len(titles) // columns)
    columns = min(columns, max(len(titles), 1))
    figure = make_subplots(rows or 1, columns, subplot_titles=titles, **options)
    figure.update_layout(
        template="plotly_white",
        width=WIDTH,
        height=PANEL_HEIGHT * max(rows, 1) + 110,
        margin={"t": 50, "b": 40, "l": 60, "r": 20},
        legend={"orientation": "h", "y": -0.14 / max(rows, 1) - 0.06, "yanchor": "top"},
    )
    figure.update_annotations(font_size=13)
    return figure


def curves(rows: Sequence[Row], names: Iterable[str]) -> go.Figure:
    """A panel for each name, a line for each run, a colour for each arm."""
    names, arms = list(names), arms_of(rows)
    columns = 4 if len(names) > 3 else max(len(names), 1)
    figure = panels(names, columns)
    seen: set[str] = set()
    for row in rows:
        arm = row["arm"]
        for j, name in enumerate(names):
            style = {"color": colour(arms.index(arm))}
            curve = line(row["curves"][name], arm, f"{arm}, seed {row['seed']}", seen, **style)
            figure.add_trace(curve, row=j // columns + 1, col=j % columns + 1)
    figure.update_xaxes(title="step")
    return figure


def line(
    points: Sequence[Sequence[float]], name: str, text: str, seen: set[str], **style: Any
) -> go.Scatter:
    """The curve of one run.

    Args:
        points: Steps and values.
        name: In the legend, where it stands once; all curves of a name are shown and hidden as one.
        text: Shown at the pointer.
        seen: Names that the figure's legend has; this one is added.
        style: Of the line: color, dash, width.
    """
    first = name not in seen
    seen.add(name)
    return go.Scatter(
        x=points[0],
        y=points[1],
        name=name,
        legendgroup=name,
        showlegend=first,
        mode="lines",
        text=text,
        line={"width": 1.2} | style,
    )


def arms_of(rows: Iterable[Row]) -> list[str]:
    """The arms there are, in the order in which they first come."""
    return list(dict.fromkeys(row["arm"] for row in rows))


def curve(run: Run, key: str, every: int) -> list[list[float]]:
    """A metric for a row: steps, and values to four digits, a sample each `every` steps."""
    at, values = run.metrics[key]
    kept = at % every == 0
    return [at[kept].tolist(), [float(f"{x:.4g}") for x in values[kept]]]


def write_page(figure: go.Figure, path: Path) -> Path:
    """Writes the figure as an HTML file that is complete in itself."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.write_html(path)
    return path


def write_images(figures: Mapping[Path, go.Figure]) -> None:
    """Writes each figure as an image, of the kind that its path ends with.

    Raises:
        RuntimeError: Kaleido is not installed, found no Chrome or Chromium, or failed in it.
    """
    if find_spec("kaleido") is None:
        raise RuntimeError('images need Kaleido: pip install "stabmon[figures]"')
    for path, figure in figures.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            figure.write_image(path)
        except Exception as error:
            raise RuntimeError(f"{path.name}: images need Chrome or Chromium: {error}") from error
