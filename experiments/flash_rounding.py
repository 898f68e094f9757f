"""Why does a bfloat16 flash attention drift, and what stops it?

Question: where several P̄ = exp(S − m) of a row are exactly 1, P̄ V adds values of one sign that lie
on one grid, so that their sum often falls on a rounding tie, which the small remaining terms always
break to the same side. How large is that bias by the number of P̄ = 1 and by how far the other
logits lie below; does it reach δ = rowsum(dO ∘ O); which remedies stop it; and does counting rows
with a repeated maximum predict it?

    python -m experiments.flash_rounding

15 seconds on one core. No model is trained: logits, values and dO are drawn. Rows:
`runs/flash_rounding.jsonl`, figure: `runs/flash_rounding.html`. Results: `experiments/README.md`.

The arithmetic is that of `models.flash`: factors rounded to bfloat16, products summed in float32,
the sum rounded to bfloat16; the reference is float64 on the same bfloat16 values. Values are all
negative ("same"), or of either sign, as a control. "O in float32" leaves the sum as it is,
"P̄ V in float32" also its factors; "factors of P̄ V in float32" rounds the sum alone.

References: arXiv 2510.04212.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import plotly.graph_objects as go
import tyro

from experiments.support.ending import Result, ended
from experiments.support.figures import colour, panels
from experiments.support.recorded import Row
from experiments.support.tables import grouped, table
from models.flash import softmax_shift
from stabmon import repeated_maximum
from stabmon.runs.jsonl import plain

CASES = (("same", None), ("same", 2.0), ("same", 8.0), ("either", None))
HEALS = ("O in float32", "P̄ V in float32", "δ = rowsum(dP ∘ P)")
REMEDIES = ("none", "factors of P̄ V in float32", *HEALS, "β = 2", "β = 8")
CLEAR = 4.0


@dataclass(frozen=True)
class Config:
    """What to draw.

    Attributes:
        rows: Attention rows in each cell.
        keys: Keys of a row.
        width: Head dimension.
        ones: Numbers of P̄ = 1 in a row.
        gaps: How far the largest of the other logits lies below the maximum.
        top: Range of the maximum.
        lean: Mean of dO where its spread is 1; its sign is that of the values.
        heads: Heads of the monitor's test, each with another share of repeated rows.
        seed: Of everything.
        runs: Where rows and figure lie.
    """

    rows: int = 10_000
    keys: int = 32
    width: int = 16
    ones: tuple[int, ...] = (1, 2, 3, 4, 8)
    gaps: tuple[float, ...] = (1.0, 3.0, 6.0, 9.0, 12.0)
    top: tuple[float, float] = (1.0, 8.0)
    lean: float = 0.5
    heads: int = 16
    seed: int = 0
    runs: Path = Path("runs")


def main(config: Config) -> Result:
    """Draw, measure, print, write."""
    rng = np.random.default_rng(config.seed)
    rows = [
        {"table": "bias", "sign": sign, "ones": ones, "gap": gap, "beta": beta}
        | bias_of(config, rng, ones, gap, beta, sign)
        for sign, beta in CASES
        for ones in config.ones
        for gap in config.gaps
    ]
    rows += [
        {"table": "remedies", "gap": gap, "remedy": remedy} | delta_error(config, gap, remedy)
        for gap in config.gaps
        for remedy in REMEDIES
    ]
    rows += [one_head(config, rng, share) for share in np.linspace(0, 1, config.heads)]
    rows.append(one_head(config, rng, 1.0, apart=0.004))
    file = config.runs / "flash_rounding.jsonl"
    config.runs.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ended(file, [plain(row) for row in rows], headline, tables, figure)


def draw_rows(
    config: Config, rng: np.random.Generator, ones: int, gap: float, sign: str
) -> tuple[np.ndarray, np.ndarray]:
    """Logits (rows, S) with `ones` equal maxima, and values (rows, S, H) on the bfloat16 grid."""
    shape = (config.rows, config.keys)
    top = rng.uniform(*config.top, (config.rows, 1))
    below = top - gap - np.abs(rng.normal(size=shape))
    logits = np.where(np.arange(config.keys) < ones, top, below).astype(np.float32)
    values = -np.abs(rng.normal(1.0, 0.5, (*shape, config.width)))
    if sign == "either":
        values *= rng.choice([-1.0, 1.0], values.shape)
    return logits, low(values)


def low(x: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16, as float32."""
    return np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32))


def products(
    logits: np.ndarray, values: np.ndarray, remedy: str = "none", beta: float | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """P̄ V in low precision, the same exactly, and ΣP̄ exactly; float64, (rows, H) and (rows, 1)."""
    shift = np.asarray(softmax_shift(jnp.asarray(logits), beta, "bfloat16"))
    weights = np.exp(logits - shift[:, None]).astype(np.float32)
    exact = np.einsum("rs,rsh->rh", weights.astype(np.float64), values.astype(np.float64))
    total = weights.astype(np.float64).sum(1, keepdims=True)
    factor = weights if "P̄ V in float32" in remedy else low(weights)
    summed = np.einsum("rs,rsh->rh", factor, values)
    found = summed if remedy in ("O in float32", "P̄ V in float32") else low(summed)
    return found.astype(np.float64), exact, total


def bias_of(
    config: Config, rng: np.random.Generator, ones: int, gap: float, beta: float | None, sign: str
) -> dict[str, float]:
    """Mean error of P̄ V in units of its last place, away from zero counted positive; its z."""
    logits, values = draw_rows(config, rng, ones, gap, sign)
    found, exact, _ = products(logits, values, beta=beta)
    last_place = 2.0 ** (np.floor(np.log2(np.abs(exact))) - 7)
    error = (np.abs(found) - np.abs(exact)) / last_place
    by_row = error.mean(1)
    return {"ulp": float(by_row.mean()), "z": _z(by_row)}


def delta_error(config: Config, gap: float, remedy: str) -> dict[str, float]:
    """Error of δ with two P̄ = 1, relative to mean |δ|: its mean, z, and how often it is positive.

    The same rows for every remedy.
    """
    rng = np.random.default_rng(config.seed + 1)
    logits, values = draw_rows(config, rng, 2, gap, "same")
    gradient = rng.normal(-config.lean, 1.0, (config.rows, config.width))
    beta = float(remedy.removeprefix("β = ")) if remedy.startswith("β") else None
    found, exact, total = products(logits, values, remedy, beta)
    delta = (gradient * exact / total).sum(1)
    error = (gradient * found / total).sum(1) - delta
    if remedy.startswith("δ"):
        weights = np.exp(logits - logits.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        slopes = np.einsum("rh,rsh->rs", gradient.astype(np.float32), values)
        error = (weights * slopes).sum(1) - delta
    scale = np.abs(delta).mean()
    return {
        "mean": float(error.mean() / scale),
        "spread": float(error.std() / scale),
        "z": _z(error),
        "positive": float((error > 0).mean()),
    }


def one_head(
    config: Config, rng: np.random.Generator, share: float, apart: float = 0.0
) -> dict[str, Any]:
    """A head with a share of rows that repeat their maximum: the monitor's count, the error of δ.

    With `apart` the second logit is lower by it, often the same in bfloat16, yet its P̄ is not 1.
    """
    logits, values = draw_rows(config, rng, 2, 12.0, "same")
    logits[:, 1] -= apart
    single = rng.uniform(size=config.rows) >= share
    logits[single, 1] -= 12.0
    gradient = rng.normal(-config.lean, 1.0, (config.rows, config.width))
    found, exact, total = products(logits, values)
    error = (gradient * (found - exact) / total).sum(1)
    scale = np.abs((gradient * exact / total).sum(1)).mean()
    counted = float(repeated_maximum(jnp.asarray(low(logits))[None])[0])
    row = {"table": "heads", "share": float(share), "apart": apart, "repeated": counted}
    return row | {"delta_error": float(error.mean() / scale), "z": _z(error)}


def _z(x: np.ndarray) -> float:
    """Mean over standard error; 0 where all are the same."""
    spread = float(x.std())
    return 0.0 if spread == 0 else float(x.mean() / (spread / np.sqrt(x.size)))


def tables(rows: list[Row]) -> str:
    """Errors of P̄ V and of δ, and what the monitor counts."""
    bias, remedies, heads = parts(rows)
    gaps = list(dict.fromkeys(row["gap"] for row in bias))

    def by_gap(cell):
        at = lambda of, gap: next(cell(row) for row in of if row["gap"] == gap)
        return {f"gap {gap:g}": lambda of, gap=gap: at(of, gap) for gap in gaps}

    unclear = lambda r: abs(r["z"]) < CLEAR
    places = lambda r: f"({r['ulp']:+.3f})" if unclear(r) else f"{r['ulp']:+.3f}"
    shown = [heads[0], heads[(len(heads) - 1) // 2], *heads[-2:]]
    values = lambda r: "one sign" if r["sign"] == "same" else "either sign"
    lines = {"values": values, "softmax": _softmax, "P̄ = 1": "ones"}
    repeated = {
        "rows with an equal maximum": lambda r: f"{100 * r['share'] * (not r['apart']):.0f} %",
        "logits apart": lambda r: f"{r['apart']:g}",
        "rows counted": lambda r: f"{r['repeated']:.0f}",
        "error of δ (z)": lambda r: f"{r['delta_error']:+.1e} ({r['z']:+.0f})",
    }
    found = [
        "Error of P̄ V in units of its last bfloat16 place, away from zero positive; in brackets "
        f"|z| < {CLEAR:g}:",
        table(bias, lines, by_gap(places)),
        "Error of δ = rowsum(dO ∘ O) where two P̄ are 1 and dO leans to the sign of the values, "
        "relative to mean |δ|, z in brackets:",
        table(remedies, "remedy", by_gap(lambda r: f"{r['mean']:+.1e} ({r['z']:+.0f})")),
        "Heads that repeat the maximum in more and more of their rows (gap 12), and one whose "
        "two largest logits differ a little:",
        table(shown, repeated, {}),
    ]
    return "\n\n".join(found)


def headline(rows: list[Row]) -> str:
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


def parts(rows: list[Row]) -> list[list[Row]]:
    """Rows of the bias, of the remedies, and of the heads."""
    return [[r for r in rows if r["table"] == name] for name in ("bias", "remedies", "heads")]


def correlation(rows: list[Row]) -> float:
    """Over heads with equal maxima, of the monitor's count and the error of δ."""
    heads = [r for r in parts(rows)[2] if r["apart"] == 0]
    counted, drift = [x["repeated"] for x in heads], [x["delta_error"] for x in heads]
    return float(np.corrcoef(counted, drift)[0, 1])


def figure(rows: list[Row]) -> go.Figure:
    """Bias over the gap with two P̄ = 1 by softmax; error of δ over the monitor's count."""
    bias, _, heads = parts(rows)
    titles = ("bias of P̄ V, two P̄ = 1, last places", "error of δ by rows with a repeated maximum")
    drawn = panels(titles, columns=2)
    two = [r for r in bias if r["sign"] == "same" and r["ones"] == 2]
    for i, (name, of) in enumerate(grouped(two, _softmax).items()):
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


def _softmax(row: Row) -> str:
    return "plain" if row["beta"] is None else f"β = {row['beta']:g}"


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
