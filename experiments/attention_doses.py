"""At which dose does a low-precision attention fault show, in which model, and in what first?

Question: the model of `attention_fault.py`, with 6 or 7 bits of O, or of O and dO, lost in the
attention backward; as controls no bits (rounding to bfloat16 alone) and 7 bits rounded to nearest;
in one layer only; and with 7 bits of O lost in models without positions, with RoPE, QK-norm or
shared key heads. How long before the loss and the gradient norm does each monitor call it, which
lag, α and aggregate of the Δ2 spectrum see it first, and how often are healthy runs accused?

    python -m experiments.attention_doses                   every arm
    python -m experiments.attention_doses --arms 7/0 6/0    some, and the clean ones they need

About 22 minutes on one core; runs that are finished are not run again. Rows:
`runs/attention_doses.jsonl`, figure: `runs/attention_doses.html`. Results: `experiments/README.md`.

Clean runs are those of the same program with the fault never coming on. Each run, faulty or clean,
is judged by the clean runs of the same model and of other seeds. How is in `attention_judge.py`,
tables and headline in `attention_tables.py`.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import tyro

from experiments.attention_fault import MODEL
from experiments.loop.faults import AttentionFault
from experiments.loop.optimizer import OptimizerConfig
from experiments.loop.step import MonitorConfig
from experiments.support.attention_judge import Judge, judge
from experiments.support.attention_tables import figure, headline, tables
from experiments.support.ending import Result, ended
from experiments.support.rows import Row, append_row, rows_there
from experiments.train import Config as TrainConfig
from experiments.train import train
from models.config import GPTConfig
from stabmon.runs.run import Run, load_run

LAGS = (10, 50, 200)
EVERY = 20


@dataclass(frozen=True)
class Arm:
    """One kind of run.

    Attributes:
        bits: Mantissa bits that O and dO lose; None: no fault.
        model: What tells the model from the base, by field of `GPTConfig`.
        rounding: As in `AttentionFault`.
        layers: Layers with the fault; None: all.
        steps: Length: beyond the loss's alarm where that comes, for the least time.
    """

    bits: tuple[int, int] | None = None
    model: tuple[tuple[str, str | int | bool], ...] = ()
    rounding: Literal["truncate", "nearest"] = "truncate"
    layers: tuple[int, ...] | None = None
    steps: int = 2000


MODELS: dict[str, tuple[tuple[str, str | int | bool], ...]] = {
    "no positions": (("positions", "none"),),
    "RoPE": (("positions", "rope"),),
    "QK-norm": (("qk_norm", True),),
    "GQA": (("kv_heads", 2),),
}
BASE = {
    "clean": Arm(),
    "7/0": Arm((7, 0)),
    "6/0": Arm((6, 0)),
    "7/7": Arm((7, 7), steps=900),
    "6/6": Arm((6, 6), steps=1000),
    "0/0": Arm((0, 0), steps=1000),
    "7/0 to nearest": Arm((7, 0), rounding="nearest", steps=1400),
    "7/0 in the last layer": Arm((7, 0), layers=(1,), steps=1400),
}
VARIANTS = {
    arm: Arm(bits, model, steps=1000)
    for name, model in MODELS.items()
    for arm, bits in ((f"clean, {name}", None), (f"7/0, {name}", (7, 0)))
}
ARMS = BASE | VARIANTS


@dataclass(frozen=True)
class Config:
    """What to run.

    Attributes:
        arms: Of `ARMS`; the clean arm of its model comes with each.
        seeds: Of faulty runs; a clean run of each is there too.
        more_seeds: Of further clean runs of the base model.
        more_variant_seeds: The same for the other models.
        onset: First step with the fault.
        learning_rate: After warm-up.
        steps: Length of all runs; None: each arm's own.
        model: The base model.
        window: Healthy steps, for metrics that are judged by the run's own level.
        runs: Where runs, rows and figure lie.
    """

    arms: tuple[str, ...] = tuple(ARMS)
    seeds: tuple[int, ...] = (0, 1, 2)
    more_seeds: tuple[int, ...] = (100, 101, 102, 103)
    more_variant_seeds: tuple[int, ...] = (3,)
    onset: int = 300
    learning_rate: float = 2e-3
    steps: int | None = None
    model: GPTConfig = MODEL
    window: tuple[int, int] = (100, 300)
    runs: Path = Path("runs")


def main(config: Config) -> Result:
    """Train what is not there yet, judge it, print the tables and draw the figure."""
    file = config.runs / "attention_doses.jsonl"
    arms = dict.fromkeys(x for arm in config.arms for x in (clean_arm(arm), arm))
    wanted = [(arm, seed) for arm in arms for seed in seeds_of(config, arm)]
    for arm in arms:
        seeds = seeds_of(config, arm)
        missing = [s for s in seeds if not rows_there(file, [settings_of(config, arm, s)])]
        if missing:
            clean = clean_arm(arm)
            healthy = {s: run_one(config, clean, s) for s in seeds_of(config, clean)}
            for seed in missing:
                run = healthy[seed] if arm == clean else run_one(config, arm, seed)
                append_row(file, row_of(config, arm, seed, run, healthy))
    rows = rows_there(file, [settings_of(config, *it) for it in wanted])
    return ended(file, rows, headline, tables, figure)


def seeds_of(config: Config, arm: str) -> tuple[int, ...]:
    """Seeds of an arm."""
    if ARMS[arm].bits is not None:
        return config.seeds
    return config.seeds + (config.more_variant_seeds if ARMS[arm].model else config.more_seeds)


def clean_arm(arm: str) -> str:
    """The arm with the same model and no fault."""
    return next(
        name for name, it in ARMS.items() if it.bits is None and it.model == ARMS[arm].model
    )


def train_config(config: Config, arm: str, seed: int) -> TrainConfig:
    """The training run of one arm."""
    it = ARMS[arm]
    slug = "".join(x if x.isalnum() else "-" for x in arm.lower())
    return TrainConfig(
        name=f"doses-{slug}-seed{seed}",
        runs=config.runs,
        steps=config.steps or it.steps,
        seed=seed,
        model=replace(config.model, **dict(it.model)),
        optimizer=OptimizerConfig(learning_rate=config.learning_rate, every=10, keep=20),
        monitor=MonitorConfig(
            lags=LAGS, delta=EVERY, activations=EVERY, weights=EVERY, detail="full"
        ),
        fault=AttentionFault(
            *(it.bits or (7, 0)), onset=config.onset, rounding=it.rounding, layers=it.layers
        ),
        armed=it.bits is not None,
        evaluate_every=EVERY,
        checkpoint_every=0,
        resume=True,
        quiet=True,
    )


def settings_of(config: Config, arm: str, seed: int) -> Row:
    """What a row was measured with: what tells the run from a default one, and its judges."""
    it, run = ARMS[arm], train_config(config, arm, seed)
    usual = asdict(GPTConfig())
    return {
        "seed": seed,
        "steps": run.steps,
        "learning_rate": config.learning_rate,
        "onset": config.onset,
        "bits": it.bits,
        "rounding": it.rounding,
        "faulty_layers": it.layers,
        "model": {k: v for k, v in asdict(run.model).items() if v != usual[k]},
        "layers": run.model.layers,
        "lags": LAGS,
        "every": EVERY,
        "judged_by": [s for s in seeds_of(config, clean_arm(arm)) if s != seed],
        "window": config.window,
    }


def run_one(config: Config, arm: str, seed: int) -> Run:
    """Train one run, unless it is finished, and read it back."""
    settings = train_config(config, arm, seed)
    folder = config.runs / settings.name
    events = load_run(folder).events if (folder / "config.json").exists() else ()
    if not any(x["kind"] == "finished" and x["step"] >= settings.steps for x in events):
        print(f"{arm}, seed {seed}", flush=True)
        if train(settings).step < settings.steps:
            raise SystemExit(f"{settings.name}: interrupted, goes on from there")
    return load_run(folder)


def row_of(config: Config, arm: str, seed: int, run: Run, healthy: dict[int, Run]) -> Row:
    """One run, judged by the healthy runs of other seeds."""
    settings = train_config(config, arm, seed)
    faulty = ARMS[arm].bits is not None
    how = Judge(config.window, config.onset, settings.optimizer.warmup, LAGS)
    others = [healthy[s] for s in sorted(healthy) if s != seed]
    found = judge(run, others, healthy[seed] if faulty else None, how)
    about = {"arm": arm, "clean": clean_arm(arm), "seed": seed, "steps": settings.steps}
    return about | found | {"settings": settings_of(config, arm, seed)}


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
