"""Does MSign save a run that AdamW loses?

Question: AdamW ends far above the healthy run under an attention fault, in a GPT-2-like model
("fault"), the same with a mixture of experts ("experts"), a LLaMA-like one ("modern", and "mild"
with 6 bits lost instead of 7), and at an attention learning rate far too high ("rate"). Does
restoring the spectrum of some matrices every P steps hold the loss; of which matrices, how seldom
may it be, and what do the rivals do?

    python -m experiments.msign_rescue                          every arm, three seeds
    python -m experiments.msign_rescue --configurations fault   one configuration
    python -m experiments.msign_rescue --arms clean adamw       some arms

20 to 100 seconds a run on one core and half a minute of compiling an arm: about two hours for all
of it. Rows go to `runs/msign_rescue.jsonl`; a run whose row is there, with the same settings, is
not run again. Figure: `runs/msign_rescue.html`.
Results: `experiments/README.md`. Arms: `rescue_arms.py`. Tables: `rescue_tables.py`.

Arms of a configuration and seed share data and initialisation; "clean" is AdamW without the fault,
or at the other matrices' learning rate. The loss of a run is the mean of the held-out losses over
its last 300 steps, for every arm alike, and each 23 steps, which has no factor in common with a
period: neither right after an application nor just before the next is seen more often than it
happens, and 300 steps are whole periods of all P but 1000, which a run of 1,200 steps meets once.
Gradient norm, logits and spectra are sampled each 25 steps, so `grad_max` is a lower bound.
Jacobians are taken at the kept checkpoints before the end. What an application costs:
`bench_msign.py`.
"""

from dataclasses import dataclass, replace
from math import exp, isfinite
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import tyro

from experiments.loop.checkpoints import Checkpoints
from experiments.loop.data import batches, load_corpus
from experiments.loop.session import identity
from experiments.loop.step import MonitorConfig, make_step
from experiments.support.ending import Result, ended
from experiments.support.jacobians import block_jacobians, least
from experiments.support.rescue_arms import ARMS, CONFIGURATIONS
from experiments.support.rescue_tables import figure, headline, tables
from experiments.support.rows import key, measured
from experiments.train import HELD_OUT, train
from experiments.train import Config as TrainConfig
from models.config import GPTConfig
from stabmon.runs.jsonl import plain, read_jsonl
from stabmon.runs.run import Run, load_run

GRAD = "symptoms/global/grad_norm/value"
LOGIT = "attention/global/max_logit/max"
RANKS = [f"weights/global/{role}/stable_rank/mean" for role in "qk"]
EVERY = 25
EVALUATE_EVERY = 23
WINDOW = 300
CHECKPOINT_EVERY = 295


@dataclass(frozen=True)
class Config:
    """What to run.

    Attributes:
        configurations: Of `CONFIGURATIONS`.
        arms: Of `ARMS`; a configuration runs those of them that it has.
        seeds: Of initialisation and data order; None: those of each configuration's verdict.
        steps: Length of a run; None: the configuration's own.
        model: Shape instead of the configuration's own; None: that.
        runs: Where runs, rows and figure lie.
    """

    configurations: tuple[str, ...] = tuple(CONFIGURATIONS)
    arms: tuple[str, ...] = tuple(ARMS)
    seeds: tuple[int, ...] | None = None
    steps: int | None = None
    model: GPTConfig | None = None
    runs: Path = Path("runs")


def main(config: Config) -> Result:
    """Run what is not there yet, print the tables and draw the figure."""
    file = config.runs / "msign_rescue.jsonl"
    for configuration, arm, seed in plan(config):
        settings = settings_of(config, configuration, arm, seed)
        where = {"configuration": configuration, "arm": arm, "seed": seed}
        measured(file, settings_row(settings), lambda w=where, s=settings: w | measure(s))
    return ended(file, rows_there_are(config, file), headline, tables, figure)


def plan(config: Config) -> list[tuple[str, str, int]]:
    """(configuration, arm, seed) in the order of running: one program serves an arm's seeds."""
    return [
        (name, arm, seed)
        for name in config.configurations
        for arm in CONFIGURATIONS[name].arms
        if arm in config.arms
        for seed in config.seeds or CONFIGURATIONS[name].seeds
    ]


def rows_there_are(config: Config, file: Path) -> list[dict[str, Any]]:
    """All rows of the file that this configuration would write, for any arm and seed, in order.

    Runs of development seeds may be of any length.
    """
    rows = []
    for row in read_jsonl(file):
        where = row["configuration"], row["arm"], row["seed"]
        if where[0] in config.configurations and where[1] in ARMS:
            own = where[2] in CONFIGURATIONS[where[0]].seeds
            steps = config.steps if own else row["settings"]["steps"]
            settings = settings_of(replace(config, steps=steps), *where)
            if key(row["settings"]) == key(settings_row(settings)):
                rows.append(row)
    order, names = list(ARMS), list(CONFIGURATIONS)
    place = lambda row: (names.index(row["configuration"]), order.index(row["arm"]), row["seed"])
    return sorted(rows, key=place)


def settings_of(config: Config, configuration: str, arm: str, seed: int) -> TrainConfig:
    """The training run of one arm."""
    base, chosen = CONFIGURATIONS[configuration].run, ARMS[arm]
    optimizer = replace(base.optimizer, **chosen.optimizer)
    healthy = dict(base.optimizer.rates).get("mlp")
    if chosen.healthy and healthy is not None:
        optimizer = replace(optimizer, rates=(("all", healthy),))
    slug = "".join(x if x.isalnum() else "-" for x in arm.lower())
    return replace(
        base,
        name=f"rescue-{configuration}-{slug}-seed{seed}",
        runs=config.runs,
        steps=config.steps or base.steps,
        seed=seed,
        model=replace(config.model or base.model, **chosen.model),
        optimizer=optimizer,
        monitor=MonitorConfig(router=0, delta=0, activations=EVERY, weights=EVERY, symptoms=EVERY),
        armed=not chosen.healthy,
        evaluate_every=EVALUATE_EVERY,
        checkpoint_every=CHECKPOINT_EVERY,
        resume=True,
        quiet=True,
    )


def settings_row(settings: TrainConfig) -> dict[str, Any]:
    """What a row was measured with, wherever the run lies."""
    return plain(identity(settings) | {"steps": settings.steps})


def measure(settings: TrainConfig) -> dict[str, Any]:
    """Train one run; what came of it."""
    result = train(settings)
    if result.step < settings.steps:
        raise SystemExit(f"{settings.name}: stopped at step {result.step}, goes on from there")
    run = load_run(result.folder)
    steps, losses = (np.asarray(x) for x in run.metrics[HELD_OUT])
    loss = float(np.mean(losses[steps >= settings.steps - WINDOW]))
    return {
        "loss": loss,
        "end": result.held_out,
        "perplexity": exp(loss) if isfinite(loss) else loss,
        "grad_max": _largest(run, GRAD),
        "max_logit": _largest(run, LOGIT),
        "stable_rank": mean(_late(run, key, settings.steps - WINDOW) for key in RANKS),
        "jacobian": jacobians(settings, result.folder),
        "curve": [round(float(x), 3) for x in losses],
    }


def jacobians(settings: TrainConfig, folder: Path) -> list[dict[str, Any]]:
    """a, M and a·M at the kept checkpoints before the last step, on one held-out sequence."""
    corpus = load_corpus(settings.data)
    context = settings.model.context
    tokens = np.asarray(batches(corpus, seed=0, batch=1, context=context, split="held_out")[0])
    init, _, _ = make_step(settings.model, settings.optimizer, settings.monitor, settings.fault)
    like, saved, found = init(settings.seed), Checkpoints(folder / "checkpoints"), []
    for step in saved.steps():
        if step < settings.steps:
            params = saved.restore(like, step).params
            stats = block_jacobians(settings.model, params, tokens[:, :-1])
            found.append({"step": step} | least(stats))
    saved.close()
    return found


def _late(run: Run, key: str, first: int) -> float:
    """The mean of a metric from a step on."""
    steps, values = (np.asarray(x) for x in run.metrics[key])
    return float(np.mean(values[steps >= first]))


def _largest(run: Run, key: str) -> float:
    """The largest sample, infinite where one is not finite."""
    values = np.asarray(run.metrics[key][1])
    return float(values.max()) if np.isfinite(values).all() else float("inf")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
