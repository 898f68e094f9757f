"""Why does a bfloat16 flash attention drift, and what stops it?

Question: where several P̄ = exp(S − m) of a row are exactly 1, P̄ V adds values of one sign that lie
on one grid, so that their sum often falls on a rounding tie, which the small remaining terms always
break to the same side. How large is that bias by the number of P̄ = 1 and by how far the other
logits lie below; does it reach δ = rowsum(dO ∘ O); which remedies stop it; and does counting rows
with a repeated maximum predict it?

    python -m experiments.flash_rounding

15 seconds on one core. No model is trained: logits, values and dO are drawn. Rows:
`runs/flash_rounding.jsonl`, figure: `runs/flash_rounding.html`. Results: `experiments/README.md`.
Tables: `flash_tables.py`.

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
import tyro

from experiments.support.ending import Result, ended
from experiments.support.flash_tables import HEALS, figure, headline, tables
from models.flash import softmax_shift
from stabmon import repeated_maximum
from stabmon.runs.jsonl import plain

CASES = (("same", None), ("same", 2.0), ("same", 8.0), ("either", None))
REMEDIES = ("none", "factors of P̄ V in float32", *HEALS, "β = 2", "β = 8")


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


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
