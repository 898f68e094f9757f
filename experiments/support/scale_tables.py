"""Tables, headline and figure of `scale_presets.py`, from its rows alone."""

from math import isfinite

import plotly.graph_objects as go

from experiments.support.figures import curves
from experiments.support.rows import Row

GIB = 2**30


def tables(rows: list[Row]) -> str:
    """What compiled and stepped, and NanoGPT-5M's course."""
    presets, runs = _split(rows)
    lines = [
        "| preset | parameters | paper: layers, context, tokens a step, rate | memory of the "
        "compiled full step, one sequence | two steps taken with | loss; uniform is "
        "| peak memory |",
        "|---" * 7 + "|",
    ]
    for row in presets:
        full, less = row["full"], row["reduced"]
        cells = [
            row["preset"],
            f"{row['parameters'] / 1e6:,.1f}M",
            f"{full['layers']}, {full['context']}, {row['paper']['tokens']:,}, "
            f"{row['paper']['rate']:g}",
            f"{row['full_bytes'] / GIB:.1f} GiB",
            f"{less['layers']} layers, {less['batch']} × {less['context']} tokens, "
            f"{row['reduced_parameters'] / 1e6:,.0f}M",
            f"{', '.join(f'{x:.2f}' for x in row['losses'])}; {row['uniform']:.2f}",
            f"{row['peak_bytes'] / GIB:.1f} GiB",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    for row in runs:
        settings = row["settings"]
        share = 100 * row["tokens"] / row["paper_tokens"]
        lines += [
            f"\nNanoGPT-5M on bytes, {settings['layers']} layers, {row['parameters'] / 1e6:.2f}M "
            f"parameters, seed {row['seed']}: {settings['steps']:,} steps, {row['tokens']:,} "
            f"tokens, {share:.1g} % of what the paper had seen when AdamW failed:\n",
            *_course(row["curves"]),
        ]
    return "\n".join(lines)


def headline(rows: list[Row]) -> str:
    """How many take their steps, and how far NanoGPT-5M came."""
    presets, runs = _split(rows)
    went = sum(
        row["moved"] and all(isfinite(x) for x in row["losses"]) and row["full_bytes"] > 0
        for row in presets
    )
    text = f"{went} of {len(presets)} presets compile in full and take two reduced steps"
    if not runs:
        return f"partly: {text}; NanoGPT-5M was not run"
    row = runs[-1]
    rank = [row["curves"][f"stable rank of W_{x}"][1] for x in ("k", "up")]
    loss = row["curves"]["held-out loss"][1]
    failed = not isfinite(row["held_out"]) or row["held_out"] > min(loss) + 0.5
    verdict = "partly" if failed or went < len(presets) else "not at this size"
    return (
        f"{verdict}: {text}; NanoGPT-5M {'fails' if failed else 'does not fail'} within "
        f"{100 * row['tokens'] / row['paper_tokens']:.1g} % of the paper's tokens: held-out loss "
        f"{loss[0]:.2f} → {row['held_out']:.2f}, stable rank of W_k {rank[0][0]:.1f} → "
        f"{rank[0][-1]:.1f}, of W_up {rank[1][0]:.1f} → {rank[1][-1]:.1f}"
    )


def figure(rows: list[Row]) -> go.Figure:
    """NanoGPT-5M's curves, a panel each; empty where it was not run."""
    _, runs = _split(rows)
    return curves([row | {"arm": row["run"]} for row in runs], runs[0]["curves"] if runs else ())


def _split(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    return [r for r in rows if "preset" in r], [r for r in rows if "run" in r]


def _course(curves: dict[str, list[list[float]]]) -> list[str]:
    """Each curve at the first two and eight more of the steps of the held-out loss, about."""
    steps = curves["held-out loss"][0]
    shown = sorted({*steps[:2], *steps[:: max(1, -(-len(steps) // 8))]})
    lines = [
        "| step | " + " | ".join(f"{s:g}" for s in shown) + " |",
        "|---" * (len(shown) + 1) + "|",
    ]
    for name, (at, values) in curves.items():
        there = dict(zip(at, values, strict=True))
        cells = [f"{there[s]:.3g}" if s in there else "" for s in shown]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines
