"""Tables, headline and figure of `router_fault.py`, from its rows alone."""

from collections.abc import Iterable
from math import nan
from statistics import mean

import plotly.graph_objects as go

from experiments.support.figures import arms_of, curves
from experiments.support.markdown import head, line, numbers, steps
from experiments.support.moe_judging import AFTER, CURVES
from experiments.support.router_claims import claims, exponents
from experiments.support.rows import Row
from experiments.support.verdicts import CLEAN

_TEXT = {
    "router entropy": "entropy",
    "max violation": "max_violation",
    "dead": "dead",
    "effective experts": "effective_experts",
    "margin": "margin",
    "similarity": "similarity",
    "ε": "conditioning",
}
_GROWTH = {"growth": "growth", "drift": "drift", "noise": "noise", "kept": "same winner"}


def tables(rows: list[Row]) -> str:
    """All tables: the end state, first alarms, bands, growth and noise, claims."""
    runs = [row for row in rows if row["kind"] == "run"]
    growth = [row for row in rows if row["kind"] == "growth"]
    parts = ["*From the onset to the end, means by seed.*", after_markdown(runs)]
    parts += ["*End of the run: the router on held-out text, the rest late means.*"]
    parts += [end_markdown(runs)]
    parts += ["*What the default alarms said.*", alarms_markdown(runs)]
    parts += ["*First step outside the bands of clean runs, after the onset.*"]
    parts += [bands_markdown(runs)]
    if growth:
        parts += ["*Margins after the branch, by seed.*"]
        parts += [growth_markdown(growth)]
    parts += ["*Claims.*", claims_markdown(rows)]
    return "\n\n".join(parts)


def headline(rows: list[Row]) -> str:
    """The verdict and the numbers that it rests on."""
    verdicts = [verdict for _, verdict, _ in claims(rows)]
    counted = {word: verdicts.count(word) for word in ("reproduces", "partly", "not at this size")}
    whole = "reproduces" if counted["reproduces"] == len(verdicts) else "partly"
    if counted["not at this size"] == len(verdicts):
        whole = "not at this size"
    runs = [row for row in rows if row["kind"] == "run"]
    entropy = lambda arm: _mean(r["after"]["router entropy"] for r in runs if r["arm"] == arm)
    return (
        f"{whole}: of {len(verdicts)} claims {counted['reproduces']} reproduce, "
        f"{counted['partly']} partly, {counted['not at this size']} not at this size; router "
        f"entropy {entropy('clean'):.2f} clean, {entropy('learning rate ×10'):.2f} and "
        f"{entropy('learning rate ×40'):.2f} at ten and forty times the rate, "
        f"{entropy('batch ÷8'):.2f} at an eighth of the batch"
    )


def after_markdown(runs: list[Row]) -> str:
    """Router and loss from the onset on, on the training batches."""
    lines = head(["arm", "seeds", *AFTER, "held-out loss at the end"])
    for arm in arms_of(runs):
        of = [row for row in runs if row["arm"] == arm]
        cells = [arm, ", ".join(str(row["seed"]) for row in of)]
        cells += [numbers([row["after"][name] for row in of]) for name in AFTER]
        lines.append(line([*cells, numbers([row["held_out"] for row in of])]))
    return "\n".join(lines)


def end_markdown(runs: list[Row]) -> str:
    """The router on held-out text, and the spectra of the last steps."""
    spectra = ("Δ2 p10", "Δ2 min", "ΔW_q p10", "radial alignment")
    lines = head(["arm", *_TEXT, *spectra])
    for arm in arms_of(runs):
        of = [row for row in runs if row["arm"] == arm]
        cells = [arm, *(numbers([row["text"][key] for row in of]) for key in _TEXT.values())]
        cells += [numbers([row["late"][name] for row in of]) for name in spectra]
        lines.append(line(cells))
    return "\n".join(lines)


def alarms_markdown(runs: list[Row]) -> str:
    """First alarm, the loss's, and the diagnosis; steps after the onset."""
    names = ["first alarm after onset", "what it was", "loss alarms", "named at the end"]
    lines = head(["arm", *names, "false alarms"])
    for arm in arms_of(runs):
        of = [row for row in runs if row["arm"] == arm]
        verdicts = [row["verdict"] for row in of]
        cells = [
            arm,
            steps(x["first_alarm"] for x in verdicts),
            ", ".join(_what(row) for row in of),
            steps(x["loss_alarm"] for x in verdicts),
            ", ".join(_named(row) for row in of),
            ", ".join(str(len(x["false_alarms"])) for x in verdicts),
        ]
        lines.append(line(cells))
    return "\n".join(lines)


def bands_markdown(runs: list[Row]) -> str:
    """A line for each metric, a column for each arm, seed by seed."""
    arms = arms_of(runs)
    lines = head(["metric", *arms])
    for name in runs[0]["bands"]:
        of = lambda arm, name=name: [row["bands"][name] for row in runs if row["arm"] == arm]
        lines.append(line([name, *(steps(of(arm)) for arm in arms)]))
    return "\n".join(lines)


def growth_markdown(rows: list[Row]) -> str:
    """Growth, drift and noise of each branch, at each mark."""
    marks = list(rows[0]["after"])
    names = [f"{name}, {mark} steps" for mark in marks for name in _GROWTH.values()]
    lines = head(["learning rate", "batch", "balance loss", *names])
    for rate, batch, auxiliary in dict.fromkeys(map(_branch, rows)):
        of = [row["after"] for row in rows if _branch(row) == (rate, batch, auxiliary)]
        cells = [f"×{rate:g}", f"÷{batch:g}", "on" if auxiliary else "off"]
        for mark in marks:
            for name in _GROWTH:
                sign = "+" if name == "growth" else ""
                cells.append(numbers([x[mark][name] for x in of], sign=sign))
        lines.append(line(cells))
    for mark in marks:
        rate, batch = exponents(rows, mark)
        cells = f"{_exponents('learning rate', rate)}; {_exponents('1/batch', batch)}"
        lines += ["", f"Exponents after {mark} steps, by seed: {cells}."]
    return "\n".join(lines)


def claims_markdown(rows: list[Row]) -> str:
    """A line for each claim."""
    lines = head(["claim", "verdict", "runs for it, and the changes against the clean run"])
    return "\n".join([*lines, *(line(list(row)) for row in claims(rows))])


def figure(rows: list[Row]) -> go.Figure:
    """The curves of all runs."""
    return curves([row for row in rows if row["kind"] == "run"], CURVES)


def _branch(row: Row) -> tuple[float, float, float]:
    return row["rate"], row["batch"], row["auxiliary"]


def _exponents(axis: str, found: dict[str, list[float]]) -> str:
    return ", ".join(f"{name} in the {axis} {numbers(x)}" for name, x in found.items())


def _what(row: Row) -> str:
    return "–" if not row["first"] else f"{row['first'][0][1].replace('/global', '')}"


def _named(row: Row) -> str:
    named, parts = row["verdict"]["named"], row["parts"][0] if row["parts"] else []
    found = set(parts or [named])
    right = found <= set(row["faults"]) if row["faults"] else named == CLEAN
    return named + (f" ({', '.join(parts)})" if parts else "") + (" ✓" if right else " ✗")


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return mean(found) if found else nan
