"""How does a router of experts show a wrong learning rate, batch or balance loss?

Question: in a small mixture of experts the learning rate is raised tenfold or fortyfold, the batch
cut to an eighth, the balance loss switched off, or two of these at once, from one step on. What
becomes of router entropy, load and margins, of the similarity and ε of the router's rows, and of Δ2
beside them; which monitor alarms first, and when against the loss? And how do margins grow and
spread with learning rate and batch, from one and the same state?

    python -m experiments.router_fault                               every arm
    python -m experiments.router_fault --arms clean "batch ÷8"       some of them
    python -m experiments.router_fault --rejudge                     judge recorded runs anew

About 25 minutes on one core. Rows go to `runs/router_fault.jsonl`, a run whose row is there is not
measured again, and one that is recorded not trained again; figure: `runs/router_fault.html`.
Results: `experiments/README.md`.

Each arm has the data, initialisation and compiled program of the clean run of its seed. Two judges:
the default alarms, which know the run's own steps 100–300 only, and bands of clean runs of other
seeds (|z| > 5 in two samples running), which tell for each metric when it left them. The last rows
branch the final state of each clean run (`router_growth.py`). Tables: `router_tables.py`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console

import stabmon
from experiments.checkpoints import Checkpoints, TrainState
from experiments.data import batches, load_corpus
from experiments.moe_faults import (
    ARMS,
    MoEConfig,
    first_alarms,
    judged,
    late_mean,
    run_one,
    settings_of,
    thinned,
)
from experiments.placement import ALONE
from experiments.router_growth import Branch, measure
from experiments.router_tables import CURVES, LATE, draw, headline, tables
from experiments.rows import Row, append_row, measured, rows_there
from experiments.step import make_step
from experiments.train import HELD_OUT
from experiments.train import Config as TrainConfig
from experiments.verdicts import CLEAN, judge
from models.gpt import apply
from stabmon.alarms.detectors import BandDetector
from stabmon.alarms.lead import replay
from stabmon.alarms.reference import Judged, Reference, learn
from stabmon.alarms.signatures import Fault
from stabmon.output.runlog import Run
from stabmon.tiers import router_metrics

# Its name for people: the key, and whether the run's own level is taken off first.
MONITORS: dict[str, tuple[str, Judged]] = {
    "router entropy": ("router/global/entropy/mean", "own"),
    "router margin": ("router/global/margin/mean", "own"),
    "max violation": ("router/global/max_violation/mean", "own"),
    "effective experts": ("router/global/effective_experts/mean", "own"),
    "router similarity": ("router/global/similarity/mean", "own"),
    "Δ2 spectrum": ("delta200/global/delta2/entropy/p10", "reference"),
    "ΔW_q spectrum": ("delta200/global/query/entropy/p10", "reference"),
    "radial alignment of W_q": ("delta200/global/q/radial_alignment/mean", "reference"),
    "attention entropy": ("attention/global/entropy/mean", "own"),
    "update ratio": ("symptoms/global/update_ratio/value", "reference"),
    "gradient norm": ("symptoms/global/grad_norm/value", "reference"),
    "training loss": ("symptoms/global/loss/value", "reference"),
    "held-out loss": (HELD_OUT, "reference"),
}
TRUTHS = {
    "learning rate ×10": Fault.LEARNING_RATE,
    "learning rate ×40": Fault.LEARNING_RATE,
    "batch ÷8": Fault.BALANCE,
    "balance loss off": Fault.BALANCE,
    "batch ÷8, balance loss off": Fault.BALANCE,
    "attention": Fault.ATTENTION,
}
ROUTER_ARMS = tuple(arm for arm in ARMS if not arm.startswith("attention"))
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
        branch_steps: Steps after it.
        replicas: Data orders of each branch.
        rejudge: Whether recorded runs are judged and measured anew.
        runs: Where runs, rows and figure lie.
    """

    arms: tuple[str, ...] = ROUTER_ARMS
    seeds: tuple[int, ...] = (700, 701, 702)
    reference_seeds: tuple[int, ...] = (710, 711, 712, 713)
    moe: MoEConfig = field(default_factory=MoEConfig)
    branches: tuple[Branch, ...] = BRANCHES
    branch_steps: int = 40
    replicas: int = 6
    rejudge: bool = False
    runs: Path = Path("runs")


@dataclass(frozen=True)
class Result:
    """All rows asked for, the file they lie in, and the figure."""

    rows: list[Row]
    file: Path
    figure: Path


def main(config: Config) -> Result:
    """Run what is not there yet, print the tables and draw the figure."""
    if shared := sorted(set(config.seeds) & set(config.reference_seeds)):
        raise ValueError(f"seeds {shared} are in the reference: they would judge themselves")
    file = config.runs / "router_fault.jsonl"
    judging = Judging(config.moe, config.reference_seeds, config.runs)
    rows = judging.rows(file, [(a, s) for s in config.seeds for a in config.arms], config.rejudge)
    for seed in config.seeds:
        for branch in config.branches:
            settings = growth_settings(config, branch, seed)
            rows.append(measured(file, settings, lambda s=settings: grow(config, s)))
    figure = draw(rows, config.runs / "router_fault.html")
    Console(soft_wrap=True).print(f"{headline(rows)}\n\n{tables(rows)}", markup=False)
    return Result(rows, file, figure)


@dataclass
class Judging:
    """Rows of recorded runs, judged by alarms and by bands of clean runs.

    Attributes:
        moe: What all arms share.
        reference_seeds: Of the clean runs of the bands.
        runs: Where runs lie.
    """

    moe: MoEConfig
    reference_seeds: tuple[int, ...]
    runs: Path
    _reference: Reference | None = None

    def rows(self, file: Path, plan: list[tuple[str, int]], again: bool = False) -> list[Row]:
        """The rows of (arm, seed), in order; those that are missing, or all, are measured."""
        found = []
        for arm, seed in plan:
            run = settings_of(self.moe, arm, seed, self.runs)
            settings = asdict(run) | {"runs": "", "reference": list(self.reference_seeds)}
            if again and rows_there(file, [settings]):
                append_row(file, self.row(arm, seed, run) | {"settings": settings})
            found.append(measured(file, settings, lambda a=arm, s=seed, r=run: self.row(a, s, r)))
        return found

    def row(self, arm: str, seed: int, settings: TrainConfig) -> Row:
        """What came of one run."""
        moe = self.moe
        run = judged(run_one(settings), moe.optimizer.warmup, moe.window)
        clean = arm == CLEAN
        onset = moe.steps if clean else moe.onset
        start = moe.optimizer.warmup + moe.window
        truth = CLEAN if clean else str(TRUTHS.get(arm, Fault.SEVERAL))
        verdict = judge(run, arm, seed, truth, onset, moe.steps, start)
        bands = replay(run, BandDetector(self.reference()))
        after = {
            name: bands[key].step - moe.onset if key in bands else None
            for name, (key, _) in MONITORS.items()
        }
        first = first_alarms(run, start if clean else moe.onset)
        return {
            "kind": "run",
            "arm": arm,
            "seed": seed,
            "onset": moe.onset,
            "steps": moe.steps,
            "verdict": asdict(verdict),
            "parts": [x.get("parts", []) for x in run.events if x["kind"] == "diagnosis"][-1:],
            "first": [list(x) for x in first[:6]],
            "bands": after,
            "late": {name: late_mean(run, key) for name, key in LATE.items()},
            "text": on_text(settings),
            "curves": thinned(run, CURVES, 50),
        }

    def reference(self) -> Reference:
        """The bands, learned once from the clean runs of other seeds."""
        if self._reference is None:
            clean = [settings_of(self.moe, CLEAN, x, self.runs) for x in self.reference_seeds]
            last = self.moe.onset - 1
            window = (self.moe.optimizer.warmup, last)
            recorded: list[Run] = [run_one(settings) for settings in clean]
            self._reference = learn(recorded, dict(MONITORS.values()), window)
        return self._reference


def final_state(settings: TrainConfig) -> TrainState:
    """The last checkpoint of a run."""
    scaled = settings.disturbances is not None
    init, _, _ = make_step(
        settings.model, settings.optimizer, settings.monitor, settings.fault, ALONE, scaled
    )
    saved = Checkpoints(settings.runs / settings.name / "checkpoints")
    state = saved.restore(init(settings.seed))
    saved.close()
    return state


def on_text(settings: TrainConfig) -> dict[str, float]:
    """The router at the end of a run, on held-out text that is always the same; means of layers."""
    params, model = final_state(settings).params, settings.model
    data = batches(
        load_corpus(settings.data), seed=0, batch=32, context=model.context, split="held_out"
    )
    seen = apply(model, params, np.asarray(data[0])[:, :-1], capture=True)[1]
    layout = stabmon.find_layout(params)
    few = {"router_logits": seen["router_logits"]}
    found = router_metrics(layout, params, few, model.top_k, model.auxiliary_weight)
    return {name: float(np.mean(np.asarray(x))) for name, x in found.items()}


def growth_settings(config: Config, branch: Branch, seed: int) -> dict[str, Any]:
    """What a row of the branches is measured with."""
    run = settings_of(config.moe, CLEAN, seed, config.runs)
    return {
        "run": asdict(run) | {"runs": ""},
        "branch": asdict(branch),
        "steps": config.branch_steps,
        "replicas": config.replicas,
    }


def grow(config: Config, settings: Mapping[str, Any]) -> Row:
    """The row of one branch."""
    branch, seed = Branch(**settings["branch"]), settings["run"]["seed"]
    run = settings_of(config.moe, CLEAN, seed, config.runs)
    run_one(run)
    corpus = load_corpus(run.data)
    found = measure(run, final_state(run), branch, corpus, config.branch_steps, config.replicas)
    return {"kind": "growth", "seed": seed, **settings["branch"], **found}


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
