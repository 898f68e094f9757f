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

Each arm has the data, initialisation and compiled program of the clean run of its seed. Two judges:
the default alarms, which know the run's own steps 100–300 only, and bands of clean runs of other
seeds (|z| > 5 in two samples running), which tell for each metric when it left them. The last rows
branch the final state of each clean run (`router_growth.py`). Tables: `router_tables.py`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import tyro

from experiments.loop.checkpoints import TrainState
from experiments.loop.data import Corpus, load_corpus
from experiments.loop.session import identity
from experiments.support.ending import Result, ended
from experiments.support.moe_faults import MoEConfig, run_one, settings_of
from experiments.support.moe_judging import Judging, final_state
from experiments.support.router_growth import Branch, measure
from experiments.support.router_tables import figure, headline, tables
from experiments.support.rows import Row, measured
from experiments.support.verdicts import CLEAN
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


@dataclass(frozen=True)
class Config:
    """What to run.

    Attributes:
        arms: Of `moe_faults.ARMS`.
        seeds: Of initialisation and data order.
        reference_seeds: Clean runs that the bands are learned from; none of `seeds`.
        moe: What all arms share.
        branches: After the branch of each clean run's last state.
        marks: Steps after it at which margins are taken, ascending.
        replicas: Data orders of each branch.
        rejudge: Whether recorded runs are judged and measured anew.
        runs: Where runs, rows and figure lie.
    """

    arms: tuple[str, ...] = ROUTER_ARMS
    seeds: tuple[int, ...] = (700, 701, 702)
    reference_seeds: tuple[int, ...] = (710, 711, 712, 713)
    moe: MoEConfig = field(default_factory=MoEConfig)
    branches: tuple[Branch, ...] = BRANCHES
    marks: tuple[int, ...] = (10, 30)
    replicas: int = 4
    rejudge: bool = False
    runs: Path = Path("runs")


def main(config: Config) -> Result:
    """Run what is not there yet, print the tables and draw the figure."""
    file = config.runs / "router_fault.jsonl"
    judging = Judging(config.moe, config.reference_seeds, config.runs)
    rows = judging.rows(file, [(a, s) for s in config.seeds for a in config.arms], config.rejudge)
    for seed in config.seeds:
        for branch in config.branches:
            settings = growth_settings(config, branch, seed)
            rows.append(measured(file, settings, lambda s=settings: grow(config, s)))
    return ended(file, rows, headline, tables, figure)


def growth_settings(config: Config, branch: Branch, seed: int) -> dict[str, Any]:
    """What a row of the branches is measured with."""
    run = settings_of(config.moe, CLEAN, seed, config.runs)
    return {
        "run": identity(run) | {"steps": run.steps},
        "branch": asdict(branch),
        "marks": list(config.marks),
        "replicas": config.replicas,
    }


def grow(config: Config, settings: Mapping[str, Any]) -> Row:
    """The row of one branch."""
    branch, seed = Branch(**settings["branch"]), settings["run"]["seed"]
    run = settings_of(config.moe, CLEAN, seed, config.runs)
    state, corpus = _trunk(run)
    found = measure(run, state, branch, corpus, config.marks, config.replicas)
    return {"kind": "growth", "seed": seed, **settings["branch"], "after": found}


@lru_cache(maxsize=1)
def _trunk(run: TrainConfig) -> tuple[TrainState, Corpus]:
    """The last state of a run that is trained if need be, and its data."""
    run_one(run)
    return final_state(run), load_corpus(run.data)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
