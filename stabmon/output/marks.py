"""What is marked in the charts: the first alarm on its curve, injected faults, actions.

What lives here: these marks as Plotly shapes, annotations and traces. What does not: the curves
(`figures`). Text that came from a run is HTML-escaped, since Plotly reads some tags.
"""

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from stabmon.output.panels import Panel
from stabmon.output.styles import FAULT, INK, Style, numbers
from stabmon.quantities import split_key


def alarm(panel: Panel, style: Style) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Returns the run's first alarm about the panel's quantity: a triangle and a word, or None.

    Args:
        panel: The chart.
        style: The run.
    """
    place = _place(panel, style)
    return None if place is None else (_arrow(style, *place), _word(style, *place, log=panel.log))


def _place(panel: Panel, style: Style) -> tuple[int, float] | None:
    """Step of the run's first alarm about the panel's quantity, and the height of the curve there.

    The curve is the one the alarm speaks of, or else the mean; where that is not finite, its
    highest finite value.
    """
    wanted, metrics = split_key(panel.mean_key), style.run.metrics
    shown = (panel.mean_key, panel.low_key, panel.high_key, panel.worst_key)
    for event in style.run.events:
        parts = split_key(str(event.get("key", "")))
        if event.get("kind") != "alarm" or not isinstance(event.get("step"), int):
            continue
        if parts is None or wanted is None or parts.quantity != wanted.quantity:
            continue
        key = next((key for key in shown if key == event["key"]), None) or panel.mean_key
        steps, values = metrics.get(key, (np.zeros(0), np.zeros(0)))
        if not np.isfinite(values).any():
            return None
        height = np.interp(event["step"], steps, values)
        finite = values[np.isfinite(values)]
        return event["step"], float(height if np.isfinite(height) else finite.max())
    return None


def _arrow(style: Style, step: int, height: float) -> dict[str, Any]:
    """A triangle on the curve."""
    marker = {"symbol": "triangle-down", "size": 12, "color": style.color}
    trace = {"type": "scatter", "mode": "markers", "x": [step], "y": numbers(np.array([height]))}
    marker |= {"line": {"color": INK, "width": 1.5}}
    return trace | {"marker": marker, "hoverinfo": "skip", "run": style.run.name}


def _word(style: Style, step: int, height: float, *, log: bool) -> dict[str, Any]:
    """The step of the alarm above its triangle."""
    y = float(np.log10(height)) if log and height > 0 else height
    box = {"bgcolor": "rgba(255,255,255,0.85)", "borderpad": 2, "showarrow": False}
    place = {"x": step, "y": y, "yanchor": "bottom", "yshift": 8}
    font = {"color": INK, "size": 12, "weight": 600}
    return place | box | {"text": f"alarm {step}", "font": font, "name": style.run.name}


def marks(
    drawn: Sequence[Style], last_step: int, *, on_map: bool = False
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns shapes and annotations: faults shaded and named, actions as dotted lines.

    Args:
        drawn: The runs.
        last_step: Where a fault without an end ends.
        on_map: For a layer map: a white line instead of shading.
    """
    shapes, annotations = [], []
    for onset, end, kind in dict.fromkeys(_faults(drawn)):
        edges = {"type": "rect", "yref": "paper", "x0": onset, "y0": 0, "y1": 1, "layer": "below"}
        fill = {"x1": end if end is not None else last_step, "fillcolor": "rgba(138,90,0,0.07)"}
        if not on_map:
            shapes.append(edges | fill | {"line": {"width": 0}})
        shapes.append(_vertical(onset, {"color": "#ffffff" if on_map else FAULT, "width": 1.5}))
        text = {
            "text": f"{escape(kind, quote=False)} fault on",
            "font": {"color": FAULT, "size": 11},
        }
        annotations.append(_above(onset) | text)
    for style in drawn:
        for event in style.run.events:
            action = event.get("kind") not in ("alarm", "finished")
            if action and isinstance(event.get("step"), int):
                line = {"color": style.color, "width": 1, "dash": "dot"}
                shapes.append(_vertical(event["step"], line))
    return shapes, annotations


def _faults(drawn: Sequence[Style]) -> list[tuple[int, int | None, str]]:
    """Onset, end and kind of every fault that has an onset."""
    return [
        (fault["onset"], fault.get("end"), str(fault.get("kind", "")))
        for style in drawn
        for fault in style.run.faults
        if isinstance(fault.get("onset"), int)
    ]


def _vertical(step: int, line: dict[str, Any]) -> dict[str, Any]:
    """A line over the whole height."""
    place = {"type": "line", "yref": "paper", "x0": step, "x1": step, "y0": 0, "y1": 1}
    return place | {"line": line}


def _above(step: int) -> dict[str, Any]:
    """A word above the chart, beginning at a step."""
    place = {"x": step, "y": 1, "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
    return place | {"showarrow": False, "borderpad": 1}
