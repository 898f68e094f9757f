"""Does MSign save a run that AdamW loses?

Question: AdamW ends far above the healthy run under an attention fault, in a GPT-2-like model
("fault") and a LLaMA-like one ("modern", and "mild" with 6 bits lost instead of 7), and at an
attention learning rate far too high ("rate"). Does restoring the spectrum of some matrices every P
steps hold the loss; of which, and how seldom may it be?

    python -m experiments.msign_rescue                          every arm
    python -m experiments.msign_rescue --arms clean adamw       some of them
    python -m experiments.msign_rescue --configurations fault   one configuration

About 50 minutes on one core for all of it (estimated). Rows go to `runs/msign_rescue.jsonl`; a run
whose row is there, with the same settings, is not run again. Curves: `runs/msign_rescue.html`.
Results: `experiments/README.md`.

Arms of a configuration and seed share data and initialisation; "clean" is AdamW without the fault,
or at the other matrices' learning rate. The arms of `MAIN` are run for `seeds`, the others for
`other_seeds`; tables show all rows there are. Gradient norm and spectra are sampled each 25 steps,
so `grad_max` is a lower bound. "fault" and "modern" end right after an application, "mild" 25 steps
later. What an application costs: `bench_msign.py`.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from math import exp, isfinite
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go
import tyro
from plotly.subplots import make_subplots
from rich.console import Console

from experiments.faults import AttentionFault
from experiments.step import MonitorConfig, MsignConfig, OptimizerConfig
from experiments.train import HELD_OUT, train
from experiments.train import Config as TrainConfig
from models.config import GPTConfig
from stabmon.output.jsonl import append, plain, read_jsonl
from stabmon.output.runlog import Run, load_run

GRAD = "symptoms/global/grad_norm/value"
LOGIT = "attention/global/max_logit/max"
RANKS = [f"weights/global/{role}/stable_rank/mean" for role in "qk"]
EVERY = 25


@dataclass(frozen=True)
class Arm:
    """How an arm differs from AdamW in its configuration.

    Attributes:
        msign: None: without.
        healthy: Whether fault or learning rate are taken away.
        decays: Whether block matrices decay.
        base: As in `OptimizerConfig`.
    """

    msign: MsignConfig | None = None
    healthy: bool = False
    decays: bool = True
    base: Literal["adamw", "muon"] = "adamw"


P50 = MsignConfig(period=50)
MAIN = {
    "clean": Arm(healthy=True),
    "adamw": Arm(),
    "attention P=50": Arm(P50),
    "MLP P=50": Arm(replace(P50, select=("mlp",))),
    "all P=50": Arm(replace(P50, select=("all",))),
}
OTHERS = {
    "clean, attention P=50": Arm(P50, healthy=True),
    "attention P=10": Arm(replace(P50, period=10)),
    "attention P=100": Arm(replace(P50, period=100)),
    "attention P=300": Arm(replace(P50, period=300)),
    "attention P=1000": Arm(replace(P50, period=1000)),
    "q, k P=50": Arm(replace(P50, select=("q", "k"))),
    "v, o P=50": Arm(replace(P50, select=("v", "o"))),
    "trigger 0.5, P=50": Arm(replace(P50, trigger=0.5)),
    "stagger, P=50": Arm(replace(P50, stagger=True)),
    "blend 0.5, P=50": Arm(replace(P50, blend=0.5)),
    "no decay": Arm(decays=False),
    "no decay, attention P=50": Arm(P50, decays=False),
    "muon": Arm(base="muon"),
    "muon, attention P=50": Arm(P50, base="muon"),
}
ARMS = MAIN | OTHERS

FAULT = TrainConfig(
    steps=1000,
    batch=8,
    model=GPTConfig(layers=4, model=64, heads=4, context=64, backend="flash"),
    optimizer=OptimizerConfig(learning_rate=1e-3, warmup=50, clip=1.0, rates=(("all", 2e-3),)),
    fault=AttentionFault(bits_o=7, bits_do=7, onset=200),
)
MODERN = replace(
    FAULT, model=replace(FAULT.model, positions="rope", kv_heads=2, activation="swiglu")
)
MILD = replace(MODERN, steps=1025, fault=AttentionFault(bits_o=6, bits_do=6, onset=200))
RATE = TrainConfig(
    steps=600,
    batch=8,
    model=GPTConfig(
        layers=8, model=64, heads=4, context=64, norm="layernorm", zero_query=True, std=0.08
    ),
    optimizer=OptimizerConfig(
        learning_rate=1e-3, warmup=50, rates=(("attention", 3e-2), ("mlp", 3e-3))
    ),
)
CONFIGURATIONS = {"fault": FAULT, "modern": MODERN, "mild": MILD, "rate": RATE}


@dataclass(frozen=True)
class Config:
    """What to run.

    Attributes:
        configurations: Of `CONFIGURATIONS`.
        arms: Of `ARMS`.
        seeds: Of initialisation and data order, for the arms in `MAIN`.
        other_seeds: For the arms in `OTHERS`.
        steps: Length of a run; None: the configuration's own.
        model: Shape instead of the configuration's own; None: that.
        runs: Where runs, rows and figure lie.
    """

    configurations: tuple[str, ...] = tuple(CONFIGURATIONS)
    arms: tuple[str, ...] = tuple(ARMS)
    seeds: tuple[int, ...] = (0, 1, 2)
    other_seeds: tuple[int, ...] = (0,)
    steps: int | None = None
    model: GPTConfig | None = None
    runs: Path = Path("runs")


@dataclass(frozen=True)
class Result:
    """All rows asked for, the file they lie in, and the figure."""

    rows: list[dict[str, Any]]
    file: Path
    figure: Path


def main(config: Config) -> Result:
    """Run what is not there yet, print the tables and draw the figure."""
    file = config.runs / "msign_rescue.jsonl"
    done = {_key(row["settings"]) for row in read_jsonl(file)}
    for configuration, arm, seed in plan(config):
        settings = settings_of(config, configuration, arm, seed)
        if _key(asdict(settings)) not in done:
            row = {"configuration": configuration, "arm": arm, "seed": seed}
            _write(file, row | measure(settings) | {"settings": asdict(settings)})
    rows = rows_there_are(config, file)
    console = Console(soft_wrap=True)
    for configuration in config.configurations:
        chosen = [row for row in rows if row["configuration"] == configuration]
        console.print(f"\n{configuration}\n{markdown(chosen)}", markup=False)
    return Result(rows, file, draw(rows, config.runs))


def plan(config: Config) -> list[tuple[str, str, int]]:
    """(configuration, arm, seed) in the order of running: what every seed has comes first."""
    first = [arm for arm in config.arms if arm in MAIN]
    then = [arm for arm in config.arms if arm not in MAIN]
    main = [(c, a, s) for c in config.configurations for a in first for s in config.seeds]
    return main + [
        (c, a, s) for c in config.configurations for a in then for s in config.other_seeds
    ]


def rows_there_are(config: Config, file: Path) -> list[dict[str, Any]]:
    """All rows of the file that this configuration would write, for any arm and seed, in order."""
    rows = []
    for row in read_jsonl(file):
        where = row["configuration"], row["arm"], row["seed"]
        if where[0] in config.configurations and where[1] in ARMS:
            if _key(row["settings"]) == _key(asdict(settings_of(config, *where))):
                rows.append(row)
    order = list(ARMS)
    return sorted(rows, key=lambda row: (order.index(row["arm"]), row["seed"]))


def settings_of(config: Config, configuration: str, arm: str, seed: int) -> TrainConfig:
    """The training run of one arm."""
    base, chosen = CONFIGURATIONS[configuration], ARMS[arm]
    optimizer = replace(base.optimizer, msign=chosen.msign, base=chosen.base)
    if not chosen.decays:
        optimizer = replace(optimizer, weight_decay=0.0)
    if chosen.healthy:
        healthy = dict(base.optimizer.rates).get("mlp")
        if healthy is not None:
            optimizer = replace(optimizer, rates=(("all", healthy),))
    slug = "".join(x if x.isalnum() else "-" for x in arm.lower())
    return replace(
        base,
        name=f"rescue-{configuration}-{slug}-seed{seed}",
        runs=config.runs,
        steps=config.steps or base.steps,
        seed=seed,
        model=config.model or base.model,
        optimizer=optimizer,
        monitor=MonitorConfig(delta=0, activations=EVERY, weights=EVERY, symptoms=EVERY),
        armed=not chosen.healthy,
        evaluate_every=100,
        checkpoint_every=0,
        resume=True,
        quiet=True,
    )


def measure(settings: TrainConfig) -> dict[str, Any]:
    """Train one run; what came of it."""
    result = train(settings)
    if result.step < settings.steps:
        raise SystemExit(f"{settings.name}: stopped at step {result.step}, goes on from there")
    run = load_run(result.folder)
    loss = result.held_out
    return {
        "loss": loss,
        "perplexity": exp(loss) if isfinite(loss) else loss,
        "grad_max": _largest(run, GRAD),
        "max_logit": _largest(run, LOGIT),
        "stable_rank": mean(float(run.metrics[key][1][-1]) for key in RANKS),
        "curve": [x.tolist() for x in run.metrics[HELD_OUT]],
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    """One configuration's table; the loss against the clean run of the same seed."""
    clean = {row["seed"]: row["loss"] for row in rows if row["arm"] == "clean"}
    lines = ["| arm | held-out loss, by seed | over clean | perplexity | grad max | max logit "]
    lines[0] += "| stable rank of W_q, W_k |"
    lines.append("|---" * 7 + "|")
    for arm in dict.fromkeys(row["arm"] for row in rows):
        of = [row for row in rows if row["arm"] == arm]
        over = [100 * (r["loss"] / clean[r["seed"]] - 1) for r in of if r["seed"] in clean]
        cells = [
            arm,
            ", ".join(f"{x:.2f}" for x in _all(of, "loss")),
            ", ".join(f"{x:+.1f} %" for x in over),
            f"{mean(_all(of, 'perplexity')):.1f}",
            f"{max(_all(of, 'grad_max')):.2g}",
            f"{max(_all(of, 'max_logit')):.2g}",
            f"{mean(_all(of, 'stable_rank')):.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], folder: Path) -> Path:
    """Held-out loss over steps, a panel for each configuration; first seeds only."""
    names = list(dict.fromkeys(row["configuration"] for row in rows))
    figure = make_subplots(1, len(names), subplot_titles=names, shared_yaxes=True)
    for row in rows:
        if row["seed"] == min(row["seed"] for row in rows):
            x, y = row["curve"]
            line = go.Scatter(x=x, y=y, name=row["arm"], legendgroup=row["arm"])
            figure.add_trace(line, row=1, col=names.index(row["configuration"]) + 1)
    figure.update_xaxes(title="step")
    figure.update_yaxes(title="held-out loss, nats per token", range=[1.5, 4.5], col=1)
    path = folder / "msign_rescue.html"
    figure.write_html(path)
    return path


def _largest(run: Run, key: str) -> float:
    """The largest sample, infinite where one is not finite."""
    values = np.asarray(run.metrics[key][1])
    return float(values.max()) if np.isfinite(values).all() else float("inf")


def _all(rows: Iterable[dict[str, Any]], name: str) -> list[float]:
    return [float(row[name]) for row in rows]


def _key(settings: dict[str, Any]) -> str:
    """What a row was measured with, wherever the runs lie."""
    return json.dumps(plain(settings | {"runs": ""}), sort_keys=True)


def _write(file: Path, row: dict[str, Any]) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        append(descriptor, row)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
