"""How does a router of experts show a wrong learning rate, batch or balance loss?

Question: in a small mixture of experts the learning rate is raised tenfold or fortyfold, the batch
cut to an eighth, the balance loss switched off, or two of these at once, from one step on. What
becomes of router entropy, load and margins, of the similarity and ε of the router's rows, and of Δ2
beside them; which monitor alarms first, and when against the loss? And how do margins grow and
spread with learning rate and batch, from one and the same state?

    python -m experiments.router_fault                               the arms of the tables
    python -m experiments.router_fault --arms clean "batch ÷8"       some of them
    python -m experiments.router_fault --rejudge                     judge recorded runs anew

About 12 minutes on one core. Rows go to `runs/router_fault.jsonl`, a run whose row is there is not
measured again, and one that is recorded not trained again; figure: `runs/router_fault.html`.
Results: `experiments/README.md`.

Each arm has the data, initialisation and compiled program of the clean run of its seed. Runs are
judged twice: by the default alarms, which know the run's own steps 100–300 only, and by bands of
clean runs of other seeds (|z| > 5 in two samples running), which tell for each metric when it left
them. The last rows branch the final state of each clean run (`router_growth.py`). Claims are those
of arXiv 2606.28116.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from math import isfinite, nan
from statistics import mean
from typing import Any

import plotly.graph_objects as go
import tyro

from experiments.data import Corpus, load_corpus
from experiments.loop.checkpoints import TrainState
from experiments.support.arms import CLEAN
from experiments.support.ending import Result, ended
from experiments.support.figures import curves
from experiments.support.judging import WORDS, Claim, claim, claims_table, overall
from experiments.support.moe import (
    AFTER,
    CURVES,
    MoEConfig,
    bands_table,
    judged_rows,
    parts_of,
    train_config,
)
from experiments.support.recorded import Row, measured, recorded, settings_row
from experiments.support.router_growth import Branch, exponents, measure
from experiments.support.states import final_state
from experiments.support.tables import each, listed, table
from experiments.train import Config as TrainConfig

ROUTER_ARMS = (
    "clean",
    "learning rate ×10",
    "learning rate ×40",
    "batch ÷8",
    "balance loss off",
    "learning rate ×10, balance loss off",
    "learning rate ×10, batch ÷8",
    "batch ÷8, balance loss off",
)
BRANCHES = (
    *(Branch(rate=x) for x in (1.0, 3.0, 10.0, 40.0)),
    *(Branch(batch=x) for x in (2.0, 4.0, 8.0, 16.0)),
    Branch(rate=10.0, batch=8.0),
    Branch(auxiliary=0.0),
    Branch(rate=10.0, auxiliary=0.0),
)
# Metrics of the router on held-out text, and of the margins after a branch, as tables call them.
_TEXT = {"router entropy": "entropy", "max violation": "max_violation", "dead": "dead"}
_TEXT |= {"effective experts": "effective_experts", "margin": "margin"}
_TEXT |= {"similarity": "similarity", "ε": "conditioning"}
_GROWTH = {"growth": "growth", "drift": "drift", "noise": "noise", "kept": "same winner"}


@dataclass(frozen=True)
class Config:
    """What to run.

    Attributes:
        arms: Of `arms.ARMS`.
        seeds: Of initialisation and data order; none of the reference's.
        moe: What all arms share.
        branches: After the branch of each clean run's last state.
        marks: Steps after it at which margins are taken, ascending.
        replicas: Data orders of each branch.
        rejudge: Whether recorded runs are judged and measured anew.
    """

    arms: tuple[str, ...] = ROUTER_ARMS
    seeds: tuple[int, ...] = (700, 701, 702)
    moe: MoEConfig = field(default_factory=MoEConfig)
    branches: tuple[Branch, ...] = BRANCHES
    marks: tuple[int, ...] = (10, 30)
    replicas: int = 4
    rejudge: bool = False


def main(config: Config) -> Result:
    """Run what is not there yet, print the tables and draw the figure."""
    file = config.moe.base.runs / "router_fault.jsonl"
    rows = judged_rows(config.moe, file, config.arms, config.seeds, config.rejudge)
    for seed in config.seeds:
        for branch in config.branches:
            settings = growth_settings(config, branch, seed)
            rows.append(measured(file, settings, partial(grow, config, settings)))
    return ended(file, rows, headline, tables, figure)


def growth_settings(config: Config, branch: Branch, seed: int) -> Row:
    """What a row of the branches is measured with."""
    run = settings_row(train_config(config.moe, CLEAN, seed))
    about = {"marks": list(config.marks), "replicas": config.replicas}
    return {"run": run, "branch": asdict(branch)} | about


def grow(config: Config, settings: Mapping[str, Any]) -> Row:
    """The row of one branch."""
    branch, seed = Branch(**settings["branch"]), settings["run"]["seed"]
    run = train_config(config.moe, CLEAN, seed)
    state, corpus = _trunk(run)
    found = measure(run, state, branch, corpus, config.marks, config.replicas)
    return {"kind": "growth", "seed": seed, **settings["branch"], "after": found}


@lru_cache(maxsize=1)
def _trunk(run: TrainConfig) -> tuple[TrainState, Corpus]:
    """The last state of a run that is trained if need be, and its data."""
    recorded(run)
    return final_state(run), load_corpus(run.data)


def tables(rows: list[Row]) -> str:
    """The end state, first alarms, bands, growth and noise, claims."""
    runs, growth = _split(rows)
    after = {"seeds": each("seed")} | {x: each(f"after/{x}", ".2f") for x in AFTER}
    after |= {"held-out loss at the end": each("held_out", ".2f")}
    end = {head: each(f"text/{name}", ".2f") for head, name in _TEXT.items()}
    for name in ("Δ2 p10", "Δ2 min", "ΔW_q p10", "radial alignment"):
        end[name] = each(f"late/{name}", ".2f")
    what = lambda row: row["first"][0][1].replace("/global", "") if row["first"] else None
    alarms = {
        "first alarm after onset": each("verdict/first_alarm"),
        "what it was": each(what),
        "loss alarms": each("verdict/loss_alarm"),
        "named at the end": each(_named),
        "false alarms": each(lambda row: len(row["verdict"]["false_alarms"])),
    }
    parts = ["*From the onset to the end, means by seed.*", table(runs, "arm", after)]
    parts += ["*End of the run: the router on held-out text, the rest late means.*"]
    parts += [table(runs, "arm", end)]
    parts += ["*What the default alarms said.*", table(runs, "arm", alarms)]
    parts += ["*First step outside the bands of clean runs, after the onset.*", bands_table(runs)]
    if growth:
        parts += ["*Margins after the branch, by seed.*", growth_table(growth)]
    head = "runs for it, and the changes against the clean run"
    return "\n\n".join([*parts, "*Claims.*", claims_table(claims(rows), head)])


def headline(rows: list[Row]) -> str:
    """The verdict and the numbers that it rests on."""
    found, runs = claims(rows), _split(rows)[0]
    counts = [sum(x.verdict == word for x in found) for word in WORDS]

    def entropy(arm: str) -> float:
        values = [row["after"]["router entropy"] for row in runs if row["arm"] == arm]
        return mean(values) if values else nan

    return (
        f"{overall(found)}: of {len(found)} claims {counts[0]} reproduce, {counts[1]} partly, "
        f"{counts[2]} not at this size; router entropy {entropy('clean'):.2f} clean, "
        f"{entropy('learning rate ×10'):.2f} and {entropy('learning rate ×40'):.2f} at ten and "
        f"forty times the rate, {entropy('batch ÷8'):.2f} at an eighth of the batch"
    )


def figure(rows: list[Row]) -> go.Figure:
    """The curves of all runs."""
    return curves(_split(rows)[0], CURVES)


def growth_table(rows: list[Row]) -> str:
    """Growth, drift and noise of each branch, at each mark; their exponents."""
    marks = list(rows[0]["after"])
    columns = {
        f"{head}, {mark} steps": each(f"after/{mark}/{name}", "+.2f" if name == "growth" else ".2f")
        for mark in marks
        for name, head in _GROWTH.items()
    }
    by = {
        "learning rate": lambda row: f"×{row['rate']:g}",
        "batch": lambda row: f"÷{row['batch']:g}",
        "balance loss": lambda row: "on" if row["auxiliary"] else "off",
    }
    parts = [table(rows, by, columns)]
    for mark in marks:
        axes = zip(("learning rate", "1/batch"), exponents(rows, mark).values(), strict=True)
        said = [
            ", ".join(f"{name} in the {axis} {listed(x, '.2f')}" for name, x in of.items())
            for axis, of in axes
        ]
        parts.append(f"Exponents after {mark} steps, by seed: {'; '.join(said)}.")
    return "\n\n".join(parts)


def claims(rows: list[Row]) -> list[Claim]:
    """Each claim of the paper that the rows can speak to."""
    runs, growth = _split(rows)
    clean = {row["seed"]: row for row in runs if row["arm"] == CLEAN}

    def against(arm: str, of: Callable[[Row], float], base: str = CLEAN) -> list[float]:
        bases = {row["seed"]: row for row in runs if row["arm"] == base}
        pairs = [(r, bases[r["seed"]]) for r in runs if r["arm"] == arm and r["seed"] in bases]
        return [of(row) - of(other) for row, other in pairs]

    entropy = lambda row: row["after"]["router entropy"]
    on_text = lambda name: lambda row: row["text"][name]
    delta = lambda row: row["late"]["Δ2 p10"]
    rates = ("learning rate ×10", "learning rate ×40")
    both = "learning rate ×10, balance loss off"
    off = ("balance loss off", both, "batch ÷8, balance loss off")
    rise, fall = (lambda x: x > 0), (lambda x: x < 0)
    parts = lambda arms, of: {arm: against(arm, of) for arm in arms}
    margin = lambda row: row["after"]["margin"]
    spread, alike, apart = (on_text(x) for x in ("max_violation", "similarity", "conditioning"))
    batch, lower = ["batch ÷8"], {both: against(both, entropy, rates[0])}
    made = [
        claim("A higher learning rate lowers router entropy", parts(rates, entropy), fall),
        claim("A higher learning rate widens margins", parts(rates, margin), rise),
        claim("A smaller batch lowers router entropy", parts(batch, entropy), fall),
        claim("Without the balance loss the learning rate lowers entropy more", lower, fall),
        claim("Without the balance loss the load is less even", parts(off, spread), rise),
        claim(
            "Similarity of the router's rows rises as it collapses",
            parts((*rates, both), alike),
            rise,
        ),
        claim("ε of the router's rows falls as it collapses", parts((*rates, both), apart), fall),
    ]
    if len(clean) > 1:
        values = [delta(row) for row in clean.values()]
        width = max(values) - min(values)
        words = "Spectra of attention updates do not react to learning rate and batch"
        within = f" within clean runs' {width:.2f}"
        of = parts((*rates, "batch ÷8"), delta)
        made.append(claim(words, of, lambda x: abs(x) <= width, within))
    if growth:
        made += growth_claims(growth)
    return [x for x in made if x.held]


def growth_claims(growth: list[Row]) -> list[Claim]:
    """The claims about the margins after a branch, at the first mark."""
    mark = min(growth[0]["after"], key=int)
    of = lambda rate: {
        row["seed"]: row["after"][mark]["growth"]
        for row in growth
        if (row["rate"], row["batch"], row["auxiliary"]) == (rate, 1.0, 1.0)
    }
    base = of(1.0)
    faster = {
        f"×{rate:g}": [x - base[seed] for seed, x in of(rate).items() if seed in base]
        for rate in (3.0, 10.0, 40.0)
    }
    found = exponents(growth, mark)
    finite = lambda axis, name: {name: [x for x in found[axis][name] if isfinite(x)]}
    rises = lambda x: x > 0
    grows = f"The winner's margin grows faster at a higher rate, {mark} steps"
    drift = "What margins' changes have in common rises with the rate (exponent)"
    noise = "Margin noise rises as the batch shrinks (exponent)"
    return [
        claim(grows, faster, rises),
        claim(drift, finite("rate", "drift"), rises),
        claim(noise, finite("batch", "noise"), rises),
    ]


def _split(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """The runs, and the branches."""
    return [r for r in rows if r["kind"] == "run"], [r for r in rows if r["kind"] == "growth"]


def _named(row: Row) -> str:
    """The diagnosis at the end, and whether it names nothing but what is wrong."""
    named, parts = row["verdict"]["named"], parts_of(row)
    found = set(parts or [named])
    right = found <= set(row["faults"]) if row["faults"] else named == CLEAN
    return named + (f" ({', '.join(parts)})" if parts else "") + (" ✓" if right else " ✗")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
