"""The parts of a report's page that are not charts: lead-time table, legend, events, set-up.

What lives here: HTML of these parts, with every text escaped. What does not: what the table says
(`verdict`), charts (`figures`), the page that holds the parts (`report`).
"""

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from stabmon.output.panels import Panel
from stabmon.output.styles import FAULT, INK, MUTED, Style
from stabmon.output.verdict import first_onset
from stabmon.runs.jsonl import plain
from stabmon.runs.run import Run

HEADINGS = {
    "run": "Run",
    "monitor": "Monitor",
    "first": "First alarm, step",
    "after": "Steps after onset",
    "lead": "Lead over the loss",
}
_FOLDED = ("key", "lead_is_bound")  # shown within the cells of other columns
_EVENTS, _STORY = 200, 24


def lead_table(rows: Sequence[Mapping[str, Any]], runs: Sequence[Run], last_step: int) -> str:
    """Returns the lead-time table, with a track from the onset to the alarm in each row.

    Args:
        rows: Rows as `write_report` describes them.
        runs: The runs that are shown; the first fault of any of them is marked on the tracks.
        last_step: Right end of the tracks.
    """
    if not rows:
        return ""
    columns = list(dict.fromkeys(key for row in rows for key in row if key not in _FOLDED))
    columns.sort(key=lambda key: key != "monitor")  # a stable sort: the rest as it came
    onset = min((step for run in runs if (step := first_onset(run)) is not None), default=None)
    head = "".join(
        f'<th scope="col">{escape(HEADINGS.get(key, key.replace("_", " ")))}</th>'
        for key in columns
    )
    body = ""
    for row in rows:
        cells = [_cell(key, row, onset, last_step) for key in columns]
        body += f"<tr>{''.join(cells)}</tr>"
    return (
        f"<h2>Who noticed when</h2>"
        f'<div class="card scroll"><table class="lead"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table>"
        f'<p class="note">Dot: first alarm. Bar: its lead over the loss. '
        f"Upright stroke: the fault sets in.</p></div>"
    )


def story_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns what was found and what was done, in order; the first rows if there are many.

    Args:
        rows: Rows of `verdict.story`.
    """
    if not rows:
        return ""
    columns = list(rows[0])
    words = lambda key: "" if key == "step" else ' class="words"'
    head = "".join(f'<th{words(key)} scope="col">{key}</th>' for key in columns)
    body = "".join(
        "<tr>" + "".join(f"<td{words(k)}>{escape(_text(row[k]))}</td>" for k in columns) + "</tr>"
        for row in rows[:_STORY]
    )
    left_out = len(rows) - _STORY
    note = f'<p class="note">and {left_out:,} more, in the record</p>' if left_out > 0 else ""
    return (
        f'<h2>What was found, what was done</h2><div class="card scroll"><table class="story">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}</div>"
    )


def legend(drawn: Sequence[Style], panels: Sequence[Panel]) -> str:
    """Returns the legend: runs, which it switches on and off, and what the marks mean.

    Args:
        drawn: The runs with their styles.
        panels: The charts; what none of them has is left out.
    """
    items = [
        f'<button type="button" aria-pressed="true" data-run="{escape(style.run.name)}">'
        f"{_line(style.color, _dashes(style.dash))}&ensp;{escape(style.run.name)}</button>"
        for style in drawn
    ]
    if any(panel.low_key and panel.high_key for panel in panels):
        box = f'<rect y="1" width="26" height="12" fill="{MUTED}" fill-opacity=".25"/>'
        items.append(f"<span>{_picture(box)}10 to 90 % of layers and heads</span>")
    if any(panel.low_key and not panel.high_key for panel in panels):
        items.append(f"<span>{_line(MUTED, '2 2', 1.0)}10th percentile</span>")
    if any(panel.worst_key for panel in panels):
        items.append(f"<span>{_line(MUTED, '1 2.5', 1.5)}worst head</span>")
    if any(style.run.faults for style in drawn):
        box = f'<rect width="26" height="14" fill="{FAULT}" fill-opacity=".12"/>'
        edge = f'<path d="M1 0V14" stroke="{FAULT}" stroke-width="2"/>'
        items.append(f"<span>{_picture(box + edge)}fault on</span>")
    kinds = {event.get("kind") for style in drawn for event in style.run.events}
    if "alarm" in kinds:
        mark = f'<path d="M6 2H20L13 13Z" fill="{MUTED}" stroke="{INK}"/>'
        items.append(f"<span>{_picture(mark)}first alarm</span>")
    if kinds - {"alarm", "finished"}:
        mark = f'<path d="M13 0V14" stroke="{MUTED}" stroke-dasharray="2 2"/>'
        items.append(f"<span>{_picture(mark)}action</span>")
    return f'<div class="legend">{"".join(items)}</div>'


def event_list(runs: Sequence[Run]) -> str:
    """Returns all alarms and actions of the runs by step, folded away.

    Args:
        runs: The runs that are shown.
    """
    found = [(event, run.name) for run in runs for event in run.events]
    if not found:
        return ""
    found.sort(key=lambda pair: _step(pair[0]))
    rows = "".join(
        f"<tr><td>{escape(_text(event.get('step')))}</td>"
        + "".join(
            f'<td class="words">{escape(_text(value))}</td>'
            for value in (name, event.get("kind"), _rest(event))
        )
        + "</tr>"
        for event, name in found[:_EVENTS]
    )
    left_out = len(found) - _EVENTS
    note = f'<p class="note">and {left_out:,} later ones</p>' if left_out > 0 else ""
    head = "".join(
        f'<th class="words" scope="col">{name}</th>' for name in ("run", "event", "what")
    )
    return (
        f'<details class="card"><summary>All events ({len(found):,})</summary><div class="scroll">'
        f'<table><thead><tr><th scope="col">step</th>{head}</tr></thead><tbody>{rows}</tbody>'
        f"</table></div>{note}</details>"
    )


def notes(sentences: Sequence[str], name: str) -> str:
    """Returns what is to be known about a run's log before its curves are read.

    Args:
        sentences: As of `provenance` and `contract_line`; empty ones are left out.
        name: Of the run.
    """
    text = " ".join(escape(sentence) for sentence in sentences if sentence)
    if not text:
        return ""
    return f'<p class="note"><b>{escape(name)}</b> {text}</p>'


def set_up(run: Run) -> str:
    """Returns a run's configuration and faults, folded away.

    Args:
        run: The run.
    """
    shown = {"config": run.config, "faults": list(run.faults)}
    text = json.dumps(plain(shown), indent=2, ensure_ascii=False)
    summary = f"Set-up of {escape(run.name)}"
    return f'<details class="card"><summary>{summary}</summary><pre>{escape(text)}</pre></details>'


def _cell(column: str, row: Mapping[str, Any], onset: int | None, last_step: int) -> str:
    """One cell of the lead-time table."""
    value = row.get(column)
    if column == "monitor":
        key = f'<span class="key">{escape(str(row["key"]))}</span>' if "key" in row else ""
        track = _track(row.get("first"), row.get("lead"), onset, last_step)
        return f"<td>{escape(_text(value))}{key}{track}</td>"
    if value is None:
        return f'<td class="never">{"never" if column == "first" else "&ndash;"}</td>'
    if column == "lead" and isinstance(value, int) and value > 0:
        bound = "≥ " if row.get("lead_is_bound") else ""
        return f'<td class="ahead">{bound}{escape(_text(value))}</td>'
    return f"<td>{escape(_text(value))}</td>"


def _track(alarm: Any, lead: Any, onset: int | None, last_step: int) -> str:
    """The run's way from left to right: the onset, the alarm, and the lead as a bar from it."""
    place = lambda step: f"{100 * min(max(step / last_step, 0), 1):.2f}%"
    marks = "" if onset is None else f'<u style="left:{place(onset)}"></u>'
    if isinstance(alarm, int):
        if isinstance(lead, int) and lead > 0:
            marks += f'<i style="left:{place(alarm)};width:{place(lead)}"></i>'
        marks += f'<b style="left:{place(alarm)}"></b>'
    return f'<span class="track" aria-hidden="true">{marks}</span>'


def _text(value: Any) -> str:
    """A value for a person to read."""
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _rest(event: Mapping[str, Any]) -> str:
    """What an event says besides when and what kind."""
    known = ("kind", "step", "time", "metrics_bytes")
    return ", ".join(f"{k} {_text(v)}" for k, v in event.items() if k not in known)


def _step(event: Mapping[str, Any]) -> float:
    """An event's step, for sorting; one without comes first."""
    step = event.get("step")
    return float(step) if isinstance(step, int | float) else -1.0


def _dashes(dash: str) -> str:
    """Plotly's dash as an SVG dash array."""
    return "" if dash == "solid" else dash.replace("px", "").replace(",", " ")


def _line(color: str, dashes: str, width: float = 2.5) -> str:
    """A piece of line as it stands in the charts."""
    path = (
        f'<path d="M0 7H26" stroke="{color}" stroke-width="{width}" stroke-dasharray="{dashes}"/>'
    )
    return _picture(path)


def _picture(inside: str) -> str:
    """A small drawing in the legend."""
    return f'<svg width="26" height="14" aria-hidden="true">{inside}</svg>'
