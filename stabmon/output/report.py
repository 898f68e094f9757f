"""`report.html`: verdict, lead-time table and curves of one or more runs, in a single file.

What lives here: `write_report`, which puts the page together. What does not: which curves there
are (`panels`), how they are drawn (`figures`), what the alarms amount to (`verdict`), the other
parts of the page (`sections`), its looks and behaviour (`page/`).

The file carries Plotly with it, asks the network for nothing (its content security policy forbids
it) and opens from disk. All text that comes from a run is escaped.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from stabmon.output.contracts import contract_line
from stabmon.output.figures import layer_figure, line_figure, share_colors
from stabmon.output.panels import Panel, default_panels
from stabmon.output.provenance import provenance
from stabmon.output.sections import event_list, lead_table, legend, notes, set_up, story_table
from stabmon.output.styles import Style, styles
from stabmon.output.verdict import alarm_table, default_verdict, story
from stabmon.quantities import split_key
from stabmon.recovery.replay import replay_events
from stabmon.runs.foreign.load import load
from stabmon.runs.run import Run

_MAPS = 3
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
)
_NOTHING = '<p class="note">No samples to show yet.</p>'
_FOOTER = "Written by stabmon. The page is complete in itself: pass it on as a file."


def write_report(
    runs: Sequence[Run | str | Path],
    out: str | Path,
    *,
    title: str | None = None,
    verdict: str | None = None,
    table: Sequence[Mapping[str, Any]] | None = None,
    panels: Sequence[Panel] | None = None,
) -> Path:
    """Writes a self-contained page about `runs` and returns its path.

    Args:
        runs: Runs, their folders or other trainers' logs, to be shown in the same charts; a clean
            one first. A log of another trainer that nothing has judged is judged here.
        out: The file, or a folder in which it is to be `report.html`.
        title: Above the verdict; the names of the runs by default.
        verdict: The sentence in large type; by default what the alarms in the runs amount to.
        table: Rows of the lead-time table: `monitor`; perhaps its `key`; `first`, the step of its
            first alarm (None: never); `after`, steps from the onset to it, and `lead`, steps from
            it to the loss's first alarm (None: there is none), with `lead_is_bound` true where the
            loss never alarmed; and any further columns. By default the first alarm of each
            quantity in the runs' own events.
        panels: Charts; by default those that the keys of the runs suggest.

    Raises:
        ValueError: If there are no runs.
        FileNotFoundError: If there is no such run.
        ImportError: If Plotly is not installed.

    Example:
        >>> import tempfile
        >>> from stabmon.runs.runlog import RunLog
        >>> folder = Path(tempfile.mkdtemp()) / "clean"
        >>> with RunLog.open(folder, {"seed": 0}) as log:
        ...     log.sample(10, {"symptoms/global/loss/value": 2.5})
        >>> write_report([folder], folder).name
        'report.html'
    """
    if not runs:
        raise ValueError("no runs to report on: give at least one folder such as runs/NAME")
    plotly = _plotly()
    loaded = _distinct([_judged(x if isinstance(x, Run) else load(x)) for x in runs])
    title = title or " · ".join(run.name for run in loaded)
    rows = alarm_table(loaded) if table is None else table
    chosen = default_panels(loaded) if panels is None else panels
    drawn, last = styles(loaded), max(1, *map(_last_step, loaded))
    cards, charts = _line_cards(chosen, drawn, last)
    maps, map_charts = _map_cards(chosen, drawn, last)
    body = [
        f'<header><p class="eyebrow">{escape(title)}</p>',
        f"<h1>{escape(verdict or default_verdict(loaded))}</h1>",
        f'<p class="facts">{escape(_facts(loaded, last))}</p></header><main>',
        *(
            notes([*provenance(run), *filter(None, [contract_line(run)])], run.name)
            for run in loaded
        ),
        story_table(story(loaded)),
        lead_table(rows, loaded, last),
        f"<section><h2>Evidence</h2>{legend(drawn, chosen)}",
        f'<div class="grid">{"".join(cards) or _NOTHING}</div></section>',
        f'<h2>Layer by layer</h2><div class="grid">{"".join(maps)}</div>' if maps else "",
        "<h2>Record</h2>",
        event_list(loaded),
        *(set_up(run) for run in loaded),
        f"</main><footer>{_FOOTER}</footer>",
    ]
    out = Path(out)
    out = out / "report.html" if out.is_dir() else out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(_page(title, "".join(body), plotly, charts + map_charts), encoding="utf-8")
    return out


def _judged(run: Run) -> Run:
    """A run with its events; those of a log that brings none, as the standard alarms say."""
    unjudged = run.source.foreign and not run.events
    return replace(run, events=tuple(replay_events(run))) if unjudged else run


def _distinct(runs: list[Run]) -> list[Run]:
    """Runs of the same name are told apart by their parents' folders."""
    names = [run.name for run in runs]
    return [
        replace(run, name=f"{run.folder.resolve().parent.name}/{run.name}")
        if names.count(run.name) > 1
        else run
        for run in runs
    ]


def _plotly() -> str:
    """Plotly's program text."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError('a report needs Plotly: pip install "stabmon[cli]"') from error
    return get_plotlyjs()


def _page(title: str, body: str, plotly: str, charts: list[dict[str, Any]]) -> str:
    """The whole document."""
    folder = files("stabmon.output") / "page"
    style, script = ((folder / name).read_text("utf-8") for name in ("style.css", "page.js"))
    # A run's text must not end the element that holds the data.
    data = json.dumps(charts, allow_nan=False).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<title>{escape(title)}</title><link rel="icon" href="data:,">'
        f"<style>{style}</style></head><body>{body}<script>{plotly}</script>"
        f'<script type="application/json" id="figures">{data}</script>'
        f"<script>{script}</script></body></html>\n"
    )


def _line_cards(
    panels: Sequence[Panel], drawn: Sequence[Style], last: int
) -> tuple[list[str], list[dict[str, Any]]]:
    """A card and a figure for each panel that a run has data for."""
    cards, charts = [], []
    for panel in panels:
        having = [style for style in drawn if panel.mean_key in style.run.metrics]
        if having:
            name = f"plot{len(charts)}"
            charts.append({"id": name, **line_figure(panel, drawn, last)})
            warnings = "".join(_not_finite(panel, style.run) for style in having)
            unit = f" <small>{escape(panel.unit)}</small>" if panel.unit else ""
            heading = f"<h3>{escape(panel.title)}{unit}</h3>"
            heading += f'<span class="key">{escape(panel.mean_key)}</span>'
            plot = f'<div class="plot" id="{name}"></div>'
            cards.append(f'<section class="card">{heading}{warnings}{plot}</section>')
    return cards, charts


def _map_cards(
    panels: Sequence[Panel], drawn: Sequence[Style], last: int
) -> tuple[list[str], list[dict[str, Any]]]:
    """Layer × step maps of the first metrics that have layers, one for each run."""
    cards: list[str] = []
    charts: list[dict[str, Any]] = []
    shown: set[str] = set()  # one lag of a metric is enough
    for panel in panels:
        row = [(style, layer_figure(panel, style, last)) for style in drawn]
        row = [(style, figure) for style, figure in row if figure is not None]
        metric = _metric(panel)
        if row and len(shown) < _MAPS and metric not in shown:
            shown.add(metric)
            share_colors([figure for _, figure in row])
            for style, figure in row:
                name = f"map{len(charts)}"
                charts.append({"id": name, **figure})
                heading = f"<h3>{escape(panel.title)} · {escape(style.run.name)}</h3>"
                plot = f'<div class="map" id="{name}"></div>'
                cards.append(f'<section class="card">{heading}{plot}</section>')
    return cards, charts


def _metric(panel: Panel) -> str:
    """What a panel measures, at whatever lag."""
    key = split_key(panel.mean_key)
    return key.metric if key else panel.mean_key


def _not_finite(panel: Panel, run: Run) -> str:
    """A line that says from where on the panel's values are no numbers."""
    steps, values = run.metrics[panel.mean_key]
    broken = ~np.isfinite(values)
    if not broken.any():
        return ""
    text = f"{run.name}: {broken.sum():,} samples not finite, first at step {steps[broken][0]:,}"
    return f'<p class="warn">{escape(text)}</p>'


def _last_step(run: Run) -> int:
    """Step of a run's newest sample."""
    return max((int(steps[-1]) for steps, _ in run.metrics.values()), default=0)


def _facts(runs: Sequence[Run], last: int) -> str:
    """The set-up in a line."""
    parts = [f"{len(runs)} runs" if len(runs) > 1 else runs[0].name, f"{last:,} steps"]
    for run in runs:
        for fault in run.faults:
            end = fault.get("end")
            until = f" to {end:,}" if isinstance(end, int) else ""
            onset = fault.get("onset", "?")
            at = f"{onset:,}" if isinstance(onset, int) else str(onset)
            parts.append(
                f"{fault.get('kind', 'unknown')} fault in {run.name} from step {at}{until}"
            )
    return " · ".join(parts)
