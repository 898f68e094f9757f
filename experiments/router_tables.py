"""Tables, headline and figure of `router_fault.py`, from its rows alone."""

from collections.abc import Callable, Iterable
from math import isfinite, nan
from pathlib import Path
from statistics import mean
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from experiments.router_growth import slope
from experiments.rows import Row

# Means of the last 100 steps.
LATE = {
    "router entropy": "router/global/entropy/mean",
    "max violation": "router/global/max_violation/mean",
    "dead": "router/global/dead/mean",
    "effective experts": "router/global/effective_experts/mean",
    "margin": "router/global/margin/mean",
    "similarity": "router/global/similarity/mean",
    "Δ2 p10": "delta200/global/delta2/entropy/p10",
    "Δ2 min": "delta200/global/delta2/entropy/min",
    "ΔW_q p10": "delta200/global/query/entropy/p10",
    "loss": "symptoms/global/loss/value",
}
CURVES = (
    "router/global/entropy/mean",
    "router/global/margin/mean",
    "router/global/max_violation/mean",
    "router/global/similarity/mean",
    "delta200/global/delta2/entropy/p10",
    "evaluation/global/loss/value",
)
_TEXT = {
    "router entropy": "entropy",
    "max violation": "max_violation",
    "dead": "dead",
    "effective experts": "effective_experts",
    "margin": "margin",
    "similarity": "similarity",
    "ε": "conditioning",
}


def tables(rows: list[Row]) -> str:
    """All tables: the end state, first alarms, bands, growth and noise, claims."""
    runs = [row for row in rows if row["kind"] == "run"]
    growth = [row for row in rows if row["kind"] == "growth"]
    parts = ["*End of the run, by seed.*", end_markdown(runs)]
    parts += ["*What the default alarms said.*", alarms_markdown(runs)]
    parts += ["*First step outside the bands of clean runs, after the onset.*"]
    parts += [bands_markdown(runs)]
    if growth:
        parts += ["*Margins after the branch, means over seeds (by seed).*"]
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
    entropy = lambda arm: _mean(_text(runs, arm, "entropy"))
    return (
        f"{whole}: of {len(verdicts)} claims {counted['reproduces']} reproduce, "
        f"{counted['partly']} partly, {counted['not at this size']} not at this size; router "
        f"entropy {entropy('clean'):.2f} clean, {entropy('learning rate ×10'):.2f} at ten times "
        f"and {entropy('learning rate ×40'):.2f} at forty times the learning rate, "
        f"{entropy('batch ÷8'):.2f} at an eighth of the batch"
    )


def end_markdown(runs: list[Row]) -> str:
    """Router, Δ2 and loss at the end: the router on held-out text, the rest late means."""
    names = [*_TEXT, "Δ2 p10", "Δ2 min", "held-out loss"]
    lines = _head(["arm", "seeds", *names])
    for arm in _arms(runs):
        of = [row for row in runs if row["arm"] == arm]
        cells = [arm, ", ".join(str(row["seed"]) for row in of)]
        cells += [_list([row["text"][key] for row in of]) for key in _TEXT.values()]
        cells += [_list([row["late"][name] for row in of]) for name in ("Δ2 p10", "Δ2 min")]
        cells += [_list([_held_out(row) for row in of])]
        lines.append(_line(cells))
    return "\n".join(lines)


def alarms_markdown(runs: list[Row]) -> str:
    """First alarm, the loss's, and the diagnosis; steps after the onset."""
    names = ["first alarm after onset", "what it was", "loss alarms", "named at the end"]
    lines = _head(["arm", *names, "false alarms"])
    for arm in _arms(runs):
        of = [row for row in runs if row["arm"] == arm]
        verdicts = [row["verdict"] for row in of]
        cells = [
            arm,
            ", ".join(_step(x["first_alarm"]) for x in verdicts),
            ", ".join(_what(row) for row in of),
            ", ".join(_step(x["loss_alarm"]) for x in verdicts),
            ", ".join(_named(row) for row in of),
            ", ".join(str(x["false_alarms"]) for x in verdicts),
        ]
        lines.append(_line(cells))
    return "\n".join(lines)


def bands_markdown(runs: list[Row]) -> str:
    """A line for each metric, a column for each arm, seed by seed."""
    arms = _arms(runs)
    lines = _head(["metric", *arms])
    for name in runs[0]["bands"]:
        of = lambda arm, name=name: [row["bands"][name] for row in runs if row["arm"] == arm]
        lines.append(_line([name, *(", ".join(map(_step, of(arm))) for arm in arms)]))
    return "\n".join(lines)


def growth_markdown(rows: list[Row]) -> str:
    """Growth, drift and noise of each branch."""
    lines = _head(
        ["learning rate", "batch", "balance loss", "growth", "drift", "noise", "same winner"]
    )
    for branch in dict.fromkeys(map(_branch, rows)):
        of = [row for row in rows if _branch(row) == branch]
        rate, batch, auxiliary = branch
        cells = [f"×{rate:g}", f"÷{batch:g}", "on" if auxiliary else "off"]
        for name in ("growth", "drift", "noise", "kept"):
            values = [row[name] for row in of]
            sign = "+" if name == "growth" else ""
            cells.append(f"{mean(values):{sign}.3f} ({_list(values, 3)})")
        lines.append(_line(cells))
    rate, batch = exponents(rows)
    lines += ["", f"Exponents, seed by seed: {_exponents('learning rate', rate)}; "]
    lines[-1] += f"{_exponents('1/batch', batch)}."
    return "\n".join(lines)


def exponents(rows: list[Row]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Exponents of drift and noise by seed: in the learning rate, and in one over the batch."""
    found: tuple[dict[str, list[float]], dict[str, list[float]]] = ({}, {})
    for into, axis in zip(found, ("rate", "batch"), strict=True):
        other = "batch" if axis == "rate" else "rate"
        on_axis = [r for r in rows if r[other] == 1 and r["auxiliary"] == 1]
        for name in ("drift", "noise"):
            for seed in dict.fromkeys(row["seed"] for row in on_axis):
                of = [row for row in on_axis if row["seed"] == seed]
                if len(of) > 1:
                    fitted = slope([row[axis] for row in of], [row[name] for row in of])
                    into.setdefault(name, []).append(fitted)
    return found


def claims(rows: list[Row]) -> list[tuple[str, str, str]]:
    """(claim, verdict, numbers) for each claim of the paper that the rows can speak to."""
    runs = [row for row in rows if row["kind"] == "run"]
    growth = [row for row in rows if row["kind"] == "growth"]
    clean = {row["seed"]: row for row in runs if row["arm"] == "clean"}

    def against(arm: str, of: Callable[[Row], float], base: str = "clean") -> list[float]:
        bases = {row["seed"]: row for row in runs if row["arm"] == base}
        pairs = [(r, bases[r["seed"]]) for r in runs if r["arm"] == arm and r["seed"] in bases]
        return [of(row) - of(other) for row, other in pairs]

    entropy = lambda row: row["text"]["entropy"]
    margin = lambda row: row["text"]["margin"]
    spread = lambda row: row["text"]["max_violation"]
    delta = lambda row: row["late"]["Δ2 p10"]
    found: list[tuple[str, str, str]] = []

    def claim(words: str, parts: dict[str, list[float]], sign: int) -> None:
        if not any(parts.values()):
            return
        changes = [sign * x for values in parts.values() for x in values]
        held = sum(x > 0 for x in changes)
        share = "reproduces" if held == len(changes) else "partly" if held else "not at this size"
        numbers = "; ".join(f"{k}: {_list(v, 2, '+')}" for k, v in parts.items() if v)
        found.append((words, share, f"{held} of {len(changes)}: {numbers}"))

    rates = ("learning rate ×10", "learning rate ×40")
    claim(
        "A higher learning rate lowers router entropy", {x: against(x, entropy) for x in rates}, -1
    )
    claim("A higher learning rate widens margins", {x: against(x, margin) for x in rates}, 1)
    claim("A smaller batch lowers router entropy", {"batch ÷8": against("batch ÷8", entropy)}, -1)
    both = "learning rate ×10, balance loss off"
    claim(
        "Without the balance loss the learning rate lowers entropy more",
        {both: against(both, entropy, rates[0])},
        -1,
    )
    off = ("balance loss off", both, "batch ÷8, balance loss off")
    claim("Without the balance loss the load is less even", {x: against(x, spread) for x in off}, 1)
    claim(
        "Similarity of the router's rows rises as it collapses",
        {x: against(x, lambda row: row["text"]["similarity"]) for x in rates},
        1,
    )
    claim(
        "ε of the router's rows falls as it collapses",
        {x: against(x, lambda row: row["text"]["conditioning"]) for x in rates},
        -1,
    )
    blind = {x: against(x, delta) for x in (*rates, "batch ÷8") if against(x, delta)}
    if blind and len(clean) > 1:
        values = [delta(row) for row in clean.values()]
        width = max(values) - min(values)
        held = sum(abs(x) <= width for part in blind.values() for x in part)
        count = sum(map(len, blind.values()))
        word = "reproduces" if held == count else "partly" if held else "not at this size"
        numbers = "; ".join(f"{k}: {_list(v, 2, '+')}" for k, v in blind.items())
        words = "Spectra of attention updates do not react to learning rate and batch"
        found.append((words, word, f"{held} of {count} within clean runs' {width:.2f}: {numbers}"))
    if growth:
        rate, batch = exponents(growth)
        up = lambda values: [x for x in values if isfinite(x)]
        claim(
            "Coherent growth of margins rises with the learning rate (exponent)",
            {"drift": up(rate.get("drift", []))},
            1,
        )
        claim(
            "Margin noise rises as the batch shrinks (exponent)",
            {"noise": up(batch.get("noise", []))},
            1,
        )
    return found


def claims_markdown(rows: list[Row]) -> str:
    """A line for each claim."""
    lines = _head(["claim", "verdict", "runs for it, and the changes against the clean run"])
    return "\n".join([*lines, *(_line(list(row)) for row in claims(rows))])


def draw(rows: list[Row], path: Path) -> Path:
    """A panel for each curve; all arms of the first seed."""
    runs = [row for row in rows if row["kind"] == "run"]
    first = min(row["seed"] for row in runs)
    figure = make_subplots(2, 3, subplot_titles=CURVES)
    colours = ("#888888", "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")
    for i, row in enumerate(row for row in runs if row["seed"] == first):
        for j, key in enumerate(CURVES):
            x, y = row["curves"][key]
            line = go.Scatter(
                x=x,
                y=y,
                name=row["arm"],
                legendgroup=row["arm"],
                showlegend=j == 0,
                line={"color": colours[i % len(colours)]},
            )
            figure.add_trace(line, row=j // 3 + 1, col=j % 3 + 1)
    figure.update_xaxes(title="step")
    figure.write_html(path)
    return path


def _branch(row: Row) -> tuple[float, float, float]:
    return row["rate"], row["batch"], row["auxiliary"]


def _exponents(axis: str, found: dict[str, list[float]]) -> str:
    return ", ".join(f"{name} in the {axis} {_list(x)}" for name, x in found.items())


def _text(runs: Iterable[Row], arm: str, key: str) -> list[float]:
    return [row["text"][key] for row in runs if row["arm"] == arm]


def _held_out(row: Row) -> float:
    return float(row["curves"]["evaluation/global/loss/value"][1][-1])


def _arms(runs: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["arm"] for row in runs))


def _what(row: Row) -> str:
    return "–" if not row["first"] else f"{row['first'][0][1].replace('/global', '')}"


def _named(row: Row) -> str:
    verdict = row["verdict"]
    parts = f" ({', '.join(row['parts'][0])})" if row["parts"] and row["parts"][0] else ""
    return verdict["named"] + parts + (" ✓" if verdict["named"] == verdict["truth"] else " ✗")


def _step(x: int | None) -> str:
    return "–" if x is None else str(x)


def _list(values: Iterable[float], digits: int = 2, sign: str = "") -> str:
    return ", ".join(f"{float(x):{sign}.{digits}f}" for x in values)


def _mean(values: list[float]) -> float:
    return mean(values) if values else nan


def _head(cells: list[str]) -> list[str]:
    return [_line(cells), "|---" * len(cells) + "|"]


def _line(cells: list[Any]) -> str:
    return "| " + " | ".join(str(x) for x in cells) + " |"
