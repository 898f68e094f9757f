"""Panels as Plotly figures: plain dictionaries, ready to be written as JSON into a page.

What lives here: lines, bands and layer × step maps. What does not: which panels there are
(`panels`), colours (`styles`), faults and alarms (`marks`), the page around them (`report`).
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from stabmon.output.marks import alarm, marks
from stabmon.output.panels import Panel, layers_over_steps, thin
from stabmon.output.styles import GRID, INK, MUTED, Style, numbers

_FAMILY = "Inter, -apple-system, Segoe UI, Roboto, Noto Sans, Liberation Sans, Arial, sans-serif"
_FONT = {"family": _FAMILY, "size": 12}


def line_figure(panel: Panel, drawn: Sequence[Style], last_step: int) -> dict[str, Any]:
    """Returns one panel: for each run a band, the worst head, the mean and its alarms.

    Args:
        panel: Keys and scale.
        drawn: The runs with their styles; those without the panel's key are left out.
        last_step: Right edge of the horizontal axis, the same for all panels.
    """
    traces: list[dict[str, Any]] = []
    for style in drawn:
        if panel.mean_key in style.run.metrics:
            traces += _band(panel, style)
            traces += _worst(panel, style)
            traces.append(_mean(panel, style))
    shapes, words = marks(drawn, last_step)
    for style in drawn:
        found = alarm(panel, style)
        if found is not None:
            traces.append(found[0])
            words.append(found[1])
    yaxis = _log_axis(traces) if panel.log else {}
    return _figure(traces, last_step, yaxis, shapes=shapes, annotations=words)


def layer_figure(panel: Panel, style: Style, last_step: int) -> dict[str, Any] | None:
    """Returns the panel's quantity as a map of layers over steps, None without such data.

    Args:
        panel: What to show.
        style: The run.
        last_step: Right edge of the horizontal axis.
    """
    found = layers_over_steps(style.run, panel)
    if found is None:
        return None
    layers, steps, values = found
    trace = {
        "type": "heatmap",
        "x": steps.tolist(),
        "y": [str(int(name.removeprefix("layer_"))) for name in layers],
        "z": [numbers(row) for row in values],
        "colorscale": "Cividis",
        "colorbar": {"thickness": 8, "outlinewidth": 0, "tickfont": {"size": 10}},
        "hovertemplate": "layer %{y}, step %{x}<br><b>%{z:.4g}</b><extra></extra>",
    }
    yaxis = {"type": "category", "title": {"text": "layer"}}
    shapes, words = marks([style], last_step, on_map=True)
    more = {"hovermode": "closest", "shapes": shapes, "annotations": words}
    return _figure([trace], last_step, yaxis, **more)


def share_colors(figures: Sequence[dict[str, Any]]) -> None:
    """Gives layer maps of the same quantity the same colour scale, in place.

    Args:
        figures: From `layer_figure`.
    """
    values = [v for figure in figures for row in figure["data"][0]["z"] for v in row]
    finite = [v for v in values if v is not None]
    for figure in figures if finite else ():
        figure["data"][0] |= {"zmin": min(finite), "zmax": max(finite)}


def _figure(
    traces: list[dict[str, Any]], last_step: int, yaxis: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """What all charts have in common; the same margins, so that steps stand below each other."""
    axis = {"gridcolor": GRID, "zeroline": False, "ticks": "", "ticklabelstandoff": 4}
    heading = {"text": "<b>step %{x}</b>"}
    layout = {
        "font": _FONT | {"color": MUTED},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 44, "r": 14, "t": 22, "b": 26},
        "showlegend": False,
        "hovermode": "x unified",
        "hoverlabel": {"bgcolor": "#ffffff", "bordercolor": "#d0d5dd", "font": {"color": INK}},
        "xaxis": axis | {"range": [0, last_step], "unifiedhovertitle": heading},
        "yaxis": axis | {"fixedrange": True} | yaxis,
    }
    return {"data": traces, "layout": layout | more}


def _log_axis(traces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A logarithmic axis, with ticks at 1, 2, 5 where it spans less than two decades."""
    values = [y for trace in traces for y in trace["y"] if y is not None and y > 0]
    narrow = bool(values) and max(values) < 100 * min(values)
    ticks = {"dtick": "D2", "tickformat": "~g"} if narrow else {"exponentformat": "power"}
    return {"type": "log"} | ticks


def _trace(style: Style, key: str, **fields: Any) -> dict[str, Any]:
    """A line of one key of one run."""
    steps, values = thin(*style.run.metrics[key])
    trace = {"type": "scatter", "mode": "lines", "x": steps.tolist(), "y": numbers(values)}
    return trace | {"run": style.run.name} | fields


def _mean(panel: Panel, style: Style) -> dict[str, Any]:
    """The panel's main line; a series of one sample is a dot."""
    hover = f"<b>%{{y:.4g}}</b><extra>{escape(style.run.name, quote=False)}</extra>"
    line = {"color": style.color, "dash": style.dash, "width": 2}
    trace = _trace(style, panel.mean_key, line=line, hovertemplate=hover)
    return trace | ({"mode": "markers"} if len(trace["x"]) == 1 else {})


def _band(panel: Panel, style: Style) -> list[dict[str, Any]]:
    """The 10–90 percentile band, or its lower edge where the upper one was not measured."""
    low, high = (
        key if key in style.run.metrics else None for key in (panel.low_key, panel.high_key)
    )
    if low is None:
        return []
    edge = {"line": {"width": 0}, "hoverinfo": "skip"}
    if high is None:
        line = {"color": style.shade(0.6), "width": 1, "dash": "2px,2px"}
        return [_trace(style, low, **(edge | {"line": line}))]
    fill = {"fill": "tonexty", "fillcolor": style.shade(0.16)}
    return [_trace(style, low, **edge), _trace(style, high, **edge, **fill)]


def _worst(panel: Panel, style: Style) -> list[dict[str, Any]]:
    """The worst head, named by layer and head where the run says which it was."""
    key, metrics = panel.worst_key, style.run.metrics
    if key is None or key not in metrics:
        return []
    stem = key.rpartition("/")[0]
    trace = _trace(style, key, line={"color": style.color, "dash": "1px,2.5px", "width": 1.5})
    names = [""] * len(trace["x"])
    for part in ("layer", "head"):
        if f"{stem}/worst_{part}" in metrics:
            at = dict(
                zip(*(array.tolist() for array in metrics[f"{stem}/worst_{part}"]), strict=True)
            )
            names = [
                f"{name} {part} {at[step]:.0f}" if np.isfinite(at.get(step, np.nan)) else name
                for name, step in zip(names, trace["x"], strict=True)
            ]
    hover = f"%{{y:.4g}} worst%{{text}}<extra>{escape(style.run.name, quote=False)}</extra>"
    return [trace | {"text": names, "hovertemplate": hover}]
