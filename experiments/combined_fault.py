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

import plotly.graph_objects as go
import tyro

from experiments.support.arms import CLEAN
from experiments.support.ending import Result, ended
from experiments.support.figures import curves
from experiments.support.moe import CURVES, MoEConfig, bands_table, judged_rows, parts_of
from experiments.support.recorded import Row
from experiments.support.tables import each, table
from stabmon.alarms.signatures import Fault

COMBINED_ARMS = (
    "clean",
    "attention",
    "learning rate ×10",
    "learning rate ×40",
    "attention, learning rate ×10",
    "attention, learning rate ×40",
)
# What tells a fault by bands alone: one of these metrics has left its band to that side.
SIGNS: dict[str, dict[str, tuple[tuple[str, str], ...]]] = {
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
        arms: Of `arms.ARMS`.
        seeds: Of initialisation and data order; none of the reference's.
        moe: What all arms share.
        rejudge: Whether recorded runs are judged anew.
    """

    arms: tuple[str, ...] = COMBINED_ARMS
    seeds: tuple[int, ...] = (700, 701, 702)
    moe: MoEConfig = field(default_factory=MoEConfig)
    rejudge: bool = False


def main(config: Config) -> Result:
    """Run what is not there yet, print the tables and draw the figure."""
    file = config.moe.base.runs / "combined_fault.jsonl"
    rows = judged_rows(config.moe, file, config.arms, config.seeds, config.rejudge)
    return ended(file, rows, headline, tables, figure)


def tables(rows: list[Row]) -> str:
    """Both kinds of signs in the metrics, when each left its band, and what was named."""
    late = {"seeds": each("seed")}
    for name in ("radial alignment", "Δ2 p10", "ΔW_q p10", "router entropy"):
        late[name] = each(f"late/{name}", ".2f")
    late |= {"update ratio": each("late/update ratio", ".4f")}
    late |= {"held-out loss": each("held_out", ".2f")}
    shown = lambda pair: each(lambda row: " + ".join(sorted(signs(row, pair))) or "none", join="; ")
    named = {
        **{pair: shown(pair) for pair in SIGNS},
        "first named": each("verdict/first_named", join="; "),
        "named at the end": each(_named, join="; "),
        "first alarm": each("verdict/first_alarm"),
        "loss alarms": each("verdict/loss_alarm"),
    }
    parts = ["*Means of the last 100 steps, by seed.*", table(rows, "arm", late)]
    parts += ["*First step outside the bands of clean runs, after the onset.*", bands_table(rows)]
    parts += ["*Signatures and attribution, by seed.*", table(rows, "arm", named)]
    return "\n\n".join(parts)


def headline(rows: list[Row]) -> str:
    """How often each pair of signatures tells what is wrong, and what was named."""
    faulty = [row for row in rows if wanted(row["arm"])]
    both = [row for row in faulty if len(wanted(row["arm"])) == 2]
    alone = [row for row in faulty if len(wanted(row["arm"])) == 1]
    shown = lambda of, pair: sum(signs(row, pair) == wanted(row["arm"]) for row in of)
    first, second = SIGNS
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


def signs(row: Row, pair: str) -> set[str]:
    """Faults whose sign, of one pair, is outside the bands at some step after the onset."""
    moved = {
        (name, row["directions"][name])
        for name, step in row["bands"].items()
        if step is not None and step >= 0
    }
    return {fault for fault, sides in SIGNS[pair].items() if moved & set(sides)}


def wanted(arm: str) -> set[str]:
    """Faults that an arm has."""
    return {fault for fault in FAULTS if fault in arm}


def right(row: Row) -> bool:
    """Whether the diagnosis at the end is the truth; of two faults, also their names."""
    named, faults = row["verdict"]["named"], row["faults"]
    if len(faults) < 2:
        return named == (faults[0] if faults else CLEAN)
    return named == Fault.SEVERAL and set(parts_of(row)) >= set(faults)


def _named(row: Row) -> str:
    parts = parts_of(row)
    said = f" ({', '.join(parts)})" if parts else ""
    return f"{row['verdict']['named']}{said}{' ✓' if right(row) else ' ✗'}"


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
