"""Are an attention fault and a wrong learning rate at the same time told apart?

Question: in a small mixture of experts O and dO lose 7 mantissa bits in the attention backward, the
learning rate is raised tenfold or fortyfold, or both, from one step on. Does each fault leave its
own signature in the metrics, does the combined run show both, and what does the attribution of the
alarms say in each?

    python -m experiments.combined_fault              every arm
    python -m experiments.combined_fault --rejudge    judge recorded runs anew

About 6 minutes on one core, 3 where `router_fault.py` was run before: clean and learning-rate
arms are the same runs, which are trained once. Rows go to `runs/combined_fault.jsonl`, a run whose
row is there is not measured again; figure: `runs/combined_fault.html`. Results:
`experiments/README.md`.

A metric counts as moved where it left the bands of clean runs of other seeds (|z| > 5 in two
samples running). Two pairs of signatures are tried: that of the paper (arXiv 2606.28116), spectra
of updates for the attention and router entropy for the learning rate; and the radial alignment of
W_q, upwards, with the update ratio. The arms share data, initialisation and compiled program; the
alarms see the run's own steps 100–300 only.
"""

from dataclasses import dataclass, field
from pathlib import Path

import plotly.graph_objects as go
import tyro

from experiments.support.ending import Result, ended
from experiments.support.figures import arms_of, curves
from experiments.support.markdown import head, line, numbers, steps
from experiments.support.moe_faults import MoEConfig
from experiments.support.moe_judging import CURVES, Judging
from experiments.support.rows import Row
from experiments.support.verdicts import CLEAN
from stabmon.alarms.signatures import Fault

COMBINED_ARMS = (
    "clean",
    "attention",
    "learning rate ×10",
    "learning rate ×40",
    "attention, learning rate ×10",
    "attention, learning rate ×40",
)
# Metrics of which one has left its band to that side: the signature is there.
Signature = tuple[tuple[str, str], ...]
SIGNATURES: dict[str, dict[str, Signature]] = {
    "spectra and router": {
        "attention": (("Δ2 spectrum", "down"), ("ΔW_q spectrum", "down")),
        "learning rate": (("router entropy", "down"),),
    },
    "alignment and update size": {
        "attention": (("radial alignment of W_q", "up"),),
        "learning rate": (("update ratio", "up"),),
    },
}
FAULTS = ("attention", "learning rate")


@dataclass(frozen=True)
class Config:
    """What to run.

    Attributes:
        arms: Of `moe_faults.ARMS`.
        seeds: Of initialisation and data order.
        reference_seeds: Clean runs that the bands are learned from; none of `seeds`.
        moe: What all arms share.
        rejudge: Whether recorded runs are judged anew.
        runs: Where runs, rows and figure lie.
    """

    arms: tuple[str, ...] = COMBINED_ARMS
    seeds: tuple[int, ...] = (700, 701, 702)
    reference_seeds: tuple[int, ...] = (710, 711, 712, 713)
    moe: MoEConfig = field(default_factory=MoEConfig)
    rejudge: bool = False
    runs: Path = Path("runs")


def main(config: Config) -> Result:
    """Run what is not there yet, print the tables and draw the figure."""
    file = config.runs / "combined_fault.jsonl"
    judging = Judging(config.moe, config.reference_seeds, config.runs)
    rows = judging.rows(file, [(a, s) for s in config.seeds for a in config.arms], config.rejudge)
    return ended(file, rows, headline, tables, figure)


def tables(rows: list[Row]) -> str:
    """Both signatures in the metrics, when each left its band, and what the attribution said."""
    parts = ["*Means of the last 100 steps, by seed.*", metrics_markdown(rows)]
    parts += ["*First step outside the bands of clean runs, after the onset.*"]
    parts += [bands_markdown(rows), "*Signatures and attribution, by seed.*"]
    parts += [attribution_markdown(rows)]
    return "\n\n".join(parts)


def headline(rows: list[Row]) -> str:
    """How often each pair of signatures tells what is wrong, and what was named."""
    faulty = [row for row in rows if wanted(row["arm"])]
    both = [row for row in faulty if len(wanted(row["arm"])) == 2]
    alone = [row for row in faulty if len(wanted(row["arm"])) == 1]
    shown = lambda of, pair: sum(signatures(row, pair) == wanted(row["arm"]) for row in of)
    first, second = SIGNATURES
    word = "partly"
    if shown(faulty, first) == len(faulty):
        word = "reproduces"
    elif not shown(both, first):
        word = "not at this size"
    named = (
        f"the alarms name {sum(map(right, both))} of {len(both)} runs with two faults and "
        f"{sum(map(right, alone))} of {len(alone)} with one"
    )
    told = [f"{pair} {shown(both, pair)} and {shown(alone, pair)}" for pair in (first, second)]
    return f"{word}: {named}; bands alone, by {' and by '.join(told)}"


def figure(rows: list[Row]) -> go.Figure:
    """The curves of all runs."""
    return curves(rows, CURVES)


def metrics_markdown(rows: list[Row]) -> str:
    """What each signature is made of, beside the loss."""
    names = ("radial alignment", "Δ2 p10", "ΔW_q p10", "router entropy", "update ratio")
    lines = head(["arm", "seeds", *names, "held-out loss"])
    for arm in arms_of(rows):
        of = [row for row in rows if row["arm"] == arm]
        cells = [arm, ", ".join(str(row["seed"]) for row in of)]
        for name in names:
            cells.append(numbers([row["late"][name] for row in of], 4 if "ratio" in name else 2))
        lines.append(line([*cells, numbers([row["held_out"] for row in of])]))
    return "\n".join(lines)


def bands_markdown(rows: list[Row]) -> str:
    """A line for each metric, a column for each arm, seed by seed."""
    arms = arms_of(rows)
    lines = head(["metric", *arms])
    for name in rows[0]["bands"]:
        of = lambda arm, name=name: [row["bands"][name] for row in rows if row["arm"] == arm]
        lines.append(line([name, *(steps(of(arm)) for arm in arms)]))
    return "\n".join(lines)


def attribution_markdown(rows: list[Row]) -> str:
    """Which signatures were there, what was named, and how early against the loss."""
    names = ["first named", "named at the end", "first alarm", "loss alarms"]
    lines = head(["arm", *SIGNATURES, *names])
    for arm in arms_of(rows):
        of = [row for row in rows if row["arm"] == arm]
        verdicts = [row["verdict"] for row in of]
        cells = [
            arm,
            *("; ".join(_shown(row, pair) for row in of) for pair in SIGNATURES),
            "; ".join(x["first_named"] for x in verdicts),
            "; ".join(
                f"{x['named']}{_parts(row)}{' ✓' if right(row) else ' ✗'}"
                for x, row in zip(verdicts, of, strict=True)
            ),
            steps(x["first_alarm"] for x in verdicts),
            steps(x["loss_alarm"] for x in verdicts),
        ]
        lines.append(line(cells))
    return "\n".join(lines)


def signatures(row: Row, pair: str) -> set[str]:
    """Faults whose signature, of one pair, is outside the bands at some step after the onset."""
    moved = {
        (name, row["directions"][name])
        for name, step in row["bands"].items()
        if step is not None and step >= 0
    }
    return {fault for fault, signs in SIGNATURES[pair].items() if moved & set(signs)}


def wanted(arm: str) -> set[str]:
    """Faults that an arm has."""
    return {fault for fault in FAULTS if fault in arm}


def right(row: Row) -> bool:
    """Whether the diagnosis at the end is the truth; of two faults, also their names."""
    named, faults = row["verdict"]["named"], row["faults"]
    if len(faults) < 2:
        return named == (faults[0] if faults else CLEAN)
    parts = set(row["parts"][0]) if row["parts"] else set()
    return named == Fault.SEVERAL and parts >= set(faults)


def _shown(row: Row, pair: str) -> str:
    return " + ".join(sorted(signatures(row, pair))) or "none"


def _parts(row: Row) -> str:
    parts = row["parts"][0] if row["parts"] else []
    return f" ({', '.join(parts)})" if parts else ""


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
