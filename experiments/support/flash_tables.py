"""Tables, headline and figure of `flash_rounding.py`, from its rows alone."""

from typing import Any

import numpy as np
import plotly.graph_objects as go

from experiments.support.figures import colour, panels

HEALS = ("O in float32", "P̄ V in float32", "δ = rowsum(dP ∘ P)")
CLEAR = 4.0


def tables(rows: list[dict[str, Any]]) -> str:
    """Errors of P̄ V and of δ, and what the monitor counts."""
    bias, remedies, heads = parts(rows)
    gaps = list(dict.fromkeys(row["gap"] for row in bias))
    columns = " | ".join(f"gap {gap:g}" for gap in gaps)
    lines = [
        "Error of P̄ V in units of its last bfloat16 place, away from zero positive; in brackets "
        f"|z| < {CLEAR:g}:\n",
        f"| values | softmax | P̄ = 1 | {columns} |",
        "|---" * (3 + len(gaps)) + "|",
    ]
    for sign, beta, ones in dict.fromkeys((r["sign"], r["beta"], r["ones"]) for r in bias):
        of = [r for r in bias if (r["sign"], r["beta"], r["ones"]) == (sign, beta, ones)]
        marks = [f"{r['ulp']:+.3f}" if abs(r["z"]) >= CLEAR else f"({r['ulp']:+.3f})" for r in of]
        values = "one sign" if sign == "same" else "either sign"
        name = "plain" if beta is None else f"β = {beta:g}"
        lines.append(f"| {values} | {name} | {ones} | " + " | ".join(marks) + " |")
    lines += [
        "\nError of δ = rowsum(dO ∘ O) where two P̄ are 1 and dO leans to the sign of the values, "
        "relative to mean |δ|, z in brackets:\n",
        f"| remedy | {columns} |",
        "|---" * (1 + len(gaps)) + "|",
    ]
    for remedy in dict.fromkeys(row["remedy"] for row in remedies):
        of = [r for r in remedies if r["remedy"] == remedy]
        cells = [f"{r['mean']:+.1e} ({r['z']:+.0f})" for r in of]
        lines.append(f"| {remedy} | " + " | ".join(cells) + " |")
    lines += [
        "\nHeads that repeat the maximum in more and more of their rows (gap 12), and one whose "
        "two largest logits differ a little:\n",
        "| rows with an equal maximum | logits apart | rows counted | error of δ (z) |",
        "|---" * 4 + "|",
    ]
    for r in (heads[0], heads[(len(heads) - 1) // 2], *heads[-2:]):
        share, error = f"{100 * r['share'] * (r['apart'] == 0):.0f} %", f"{r['delta_error']:+.1e}"
        counted = f"{r['apart']:g} | {r['repeated']:.0f}"
        lines.append(f"| {share} | {counted} | {error} ({r['z']:+.0f}) |")
    return "\n".join(lines)


def headline(rows: list[dict[str, Any]]) -> str:
    """Whether the bias is there, heals, and is predicted."""
    bias, remedies, _ = parts(rows)
    two = [r for r in bias if r["sign"] == "same" and r["beta"] is None and r["ones"] == 2]
    there = [r["gap"] for r in two if r["z"] > CLEAR]
    error = {(r["remedy"], r["gap"]): r for r in remedies}
    last = max(r["gap"] for r in remedies)
    plain_error, healed = error["none", last], [error[x, last] for x in HEALS]
    heals = sum(abs(r["mean"]) < plain_error["mean"] / 20 for r in healed)
    r = correlation(rows)
    good = bool(there) and heals == len(HEALS) and r > 0.9
    where = f"from a gap of {min(there):g} on" if there else "nowhere"
    return (
        f"{'reproduces' if good else 'partly'}: two P̄ = 1 bias P̄ V {where} "
        f"({max(x['ulp'] for x in two):+.2f} places at most); "
        f"{heals} of {len(HEALS)} remedies heal, β = 2: error of δ {plain_error['mean']:+.1e} → "
        f"{error['β = 2', last]['mean']:+.1e}; "
        f"monitor and error correlate at {r:.3f}"
    )


def parts(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Rows of the bias, of the remedies, and of the heads."""
    return [[r for r in rows if r["table"] == name] for name in ("bias", "remedies", "heads")]


def correlation(rows: list[dict[str, Any]]) -> float:
    """Over heads with equal maxima, of the monitor's count and the error of δ."""
    heads = [r for r in parts(rows)[2] if r["apart"] == 0]
    counted, drift = [x["repeated"] for x in heads], [x["delta_error"] for x in heads]
    return float(np.corrcoef(counted, drift)[0, 1])


def figure(rows: list[dict[str, Any]]) -> go.Figure:
    """Bias over the gap with two P̄ = 1 by softmax; error of δ over the monitor's count."""
    bias, _, heads = parts(rows)
    titles = ("bias of P̄ V, two P̄ = 1, last places", "error of δ by rows with a repeated maximum")
    drawn = panels(titles, columns=2)
    for i, beta in enumerate(dict.fromkeys(r["beta"] for r in bias)):
        of = [r for r in bias if (r["sign"], r["beta"], r["ones"]) == ("same", beta, 2)]
        name = "plain" if beta is None else f"β = {beta:g}"
        x, y = [r["gap"] for r in of], [r["ulp"] for r in of]
        line = {"color": colour((2, 1, 3)[i % 3])}
        drawn.add_trace(go.Scatter(x=x, y=y, name=name, line=line), row=1, col=1)
    x, y = [r["repeated"] for r in heads], [r["delta_error"] for r in heads]
    text, marker = [f"logits {r['apart']:g} apart" for r in heads], {"color": colour(0)}
    points = go.Scatter(x=x, y=y, text=text, mode="markers", name="heads", marker=marker)
    drawn.add_trace(points, row=1, col=2)
    drawn.update_xaxes(title="other logits below the maximum by", col=1)
    drawn.update_xaxes(title="rows with a repeated maximum", col=2)
    return drawn
