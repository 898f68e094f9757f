"""The campaign's tables, headline and figure, from its rows alone.

A row is a `Verdict` (kind "verdict") or the losses of a run that was to be saved (kind "rescue").
How they come about is `campaign.py`'s.
"""

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from experiments.support.figures import WIDTH, colour
from experiments.support.verdicts import CLEAN
from stabmon.alarms.calibration import poisson_bound

Rows = Sequence[dict[str, Any]]
MOST_FALSE, LEAST_RIGHT = 1.0, 0.8


def tables(rows: Rows) -> str:
    """All tables in Markdown."""
    verdicts, saved = _of(rows, "verdict"), _of(rows, "rescue")
    parts = [cases(verdicts), confusion(verdicts), targets(verdicts)] if verdicts else []
    if false := [x for x in verdicts if x["false_alarms"] or x["false_actions"]]:
        parts.append(false_alarms(false))
    if saved:
        parts.append(rescue(saved))
    return "\n\n".join(parts)


def headline(rows: Rows) -> str:
    """One line: whether all targets are met, and the numbers that decide it."""
    verdicts, saved = _of(rows, "verdict"), _of(rows, "rescue")
    right, faulty, alarms, steps, actions = _counts(verdicts)
    met = all(x for _, _, x in _targets(verdicts))
    line = (
        f"{'met' if met else 'not met'}: {right} of {faulty} faults named right, "
        f"{alarms} false alarms and {actions} actions advised in {steps:,} clean steps "
        f"({_rate(alarms, steps):.1f} per 10,000, 95 % upper bound {_bound(alarms, steps):.1f})"
    )
    if saved:
        worst = max(x["excess"] for x in saved)
        line += f"; `--act` ends {worst:+.1%} from the clean loss at worst in {len(saved)} runs"
    return line


def cases(verdicts: Rows) -> str:
    """A line for each case: seeds, diagnoses, lags and leads, in the order of the seeds."""
    lines = [
        "| case | steps | seeds | named at the end | first named | first alarm after onset "
        "| lead over loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(x["case"] for x in verdicts):
        rows = [x for x in verdicts if x["case"] == name]
        cells = [
            ", ".join(dict.fromkeys(f"{x['steps']:,}" for x in rows)),
            ", ".join(str(x["seed"]) for x in rows),
            ", ".join(x["named"] + (" ✓" if x["right"] else " ✗") for x in rows),
            ", ".join(x["first_named"] for x in rows),
            ", ".join("–" if x["first_alarm"] is None else str(x["first_alarm"]) for x in rows),
            ", ".join(_lead(x) for x in rows),
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def confusion(verdicts: Rows) -> str:
    """Runs by what was wrong (rows) and what the alarms said at the end (columns)."""
    truths = list(dict.fromkeys(x["truth"] for x in verdicts))
    names = [*truths, *sorted({x["named"] for x in verdicts} - set(truths))]
    lines = ["| truth | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for truth in truths:
        counts = [
            sum(x["truth"] == truth and x["named"] == name for x in verdicts) for name in names
        ]
        lines.append(f"| {truth} | " + " | ".join(str(n or "") for n in counts) + " |")
    return "\n".join(lines)


def targets(verdicts: Rows) -> str:
    """What was wanted, what was measured."""
    lines = ["| target | measured | met |", "|---|---|---|"]
    lines += [f"| {a} | {b} | {'yes' if c else 'no'} |" for a, b, c in _targets(verdicts)]
    return "\n".join(lines)


def false_alarms(verdicts: Rows) -> str:
    """Each false alarm and false action."""
    lines = ["| case | seed | false alarms | actions advised |", "|---|---|---|---|"]
    for x in verdicts:
        alarms, actions = (", ".join(x[k]) or "–" for k in ("false_alarms", "false_actions"))
        lines.append(f"| {x['case']} | {x['seed']} | {alarms} | {actions} |")
    return "\n".join(lines)


def rescue(rows: Rows) -> str:
    """A line for each rescued run."""
    lines = [
        "| fault | seed | clean | without the ladder | with it | above clean | actions |",
        "|---|---|---|---|---|---|---|",
    ]
    for x in rows:
        numbers = f"{x['clean']:.3f} | {x['faulty']:.3f} | {x['act']:.3f} | {x['excess']:+.1%}"
        lines.append(f"| {x['case']} | {x['seed']} | {numbers} | {', '.join(x['actions'])} |")
    return "\n".join(lines)


def figure(rows: Rows) -> go.Figure:
    """First alarm of each faulty run after its onset, and the loss's."""
    drawn = go.Figure()
    faulty = [x for x in _of(rows, "verdict") if x["truth"] != CLEAN]
    label = lambda x: f"{x['case']}, seed {x['seed']}"
    kinds = (
        ("first alarm, named right", "first_alarm", True, "circle", colour(1)),
        ("first alarm, not named right", "first_alarm", False, "x", colour(2)),
        ("alarm of the loss", "loss_alarm", None, "line-ns-open", colour(0)),
    )
    for name, key, right, symbol, painted in kinds:
        some = [x for x in faulty if x[key] is not None and right in (None, x["right"])]
        drawn.add_scatter(
            x=[x[key] for x in some],
            y=[label(x) for x in some],
            text=[x["named"] for x in some],
            mode="markers",
            marker={"symbol": symbol, "color": painted, "size": 10},
            name=name,
        )
    drawn.update_layout(
        template="plotly_white",
        width=WIDTH,
        height=150 + 22 * len(faulty),
        margin={"t": 60, "b": 40, "r": 20},
        xaxis_title="steps after the onset of the fault",
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        yaxis={"autorange": "reversed", "categoryarray": [label(x) for x in faulty]},
    )
    return drawn


def _targets(verdicts: Rows) -> list[tuple[str, str, bool]]:
    """(target, measured, met)."""
    right, faulty, alarms, steps, actions = _counts(verdicts)
    rate, share = _rate(alarms, steps), right / max(faulty, 1)
    clean = sum(x["truth"] == CLEAN for x in verdicts)
    return [
        (
            "at most 1 false alarm per 10,000 clean steps",
            f"{rate:.1f} ({alarms} in {steps:,}; 95 % upper bound {_bound(alarms, steps):.1f})",
            rate <= MOST_FALSE,
        ),
        (
            "at least 80 % of the faults named right",
            f"{right} of {faulty}, {share:.0%}",
            share >= LEAST_RIGHT,
        ),
        ("no action in a clean run", f"{actions} advised, in {clean} clean runs", actions == 0),
    ]


def _counts(verdicts: Rows) -> tuple[int, int, int, int, int]:
    """Faults named right, faults, false alarms, clean steps, false actions; of clean runs alone."""
    clean = [x for x in verdicts if x["truth"] == CLEAN]
    faulty = [x for x in verdicts if x["truth"] != CLEAN]
    return (
        sum(x["right"] for x in faulty),
        len(faulty),
        sum(len(x["false_alarms"]) for x in clean),
        sum(x["clean_steps"] for x in clean),
        sum(len(x["false_actions"]) for x in clean),
    )


def _rate(alarms: int, steps: int) -> float:
    return alarms / max(steps, 1) * 10_000


def _bound(alarms: int, steps: int) -> float:
    return poisson_bound(alarms) / max(steps, 1) * 10_000


def _lead(x: dict[str, Any]) -> str:
    if x["lead"] is None:
        return "–"
    return f"{'> ' if x['loss_alarm'] is None else ''}{x['lead']}"


def _of(rows: Rows, kind: str) -> list[dict[str, Any]]:
    return [x for x in rows if x["kind"] == kind]
