r"""Do the papers' own configurations compile and train?

    python -m experiments.scale_presets                  two reduced steps each; NanoGPT-5M for long
    python -m experiments.scale_presets steps            the former only
    python -m experiments.scale_presets pod --preset llama-1b --data tokens.bin --distributed \
        --parallelism mixed --model-axis 8 --runs /shared/runs --resume     one in full, on a pod

Question: each preset of `models.presets` at the paper's learning rates. Here, on one core: the full
training step is compiled from shapes, which gives its memory, and two steps are taken with fewer
layers, sequences and tokens (`REDUCED`). NanoGPT-5M is trained with all its layers, on bytes and
with a small batch, for `Config.steps`: do stable rank and loss do what the paper saw after 20,000?

About 70 minutes on one core, 60 of them for NanoGPT-5M. Rows: `runs/scale_presets.jsonl`, figure:
`runs/scale_presets.html`. Results: `experiments/README.md`. What devices send each other:
`scale_study.py`.
"""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from math import isfinite
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Literal

import plotly.graph_objects as go
import tyro

from experiments.loop.cluster import join, together
from experiments.loop.placement import Placement
from experiments.loop.step import MonitorConfig
from experiments.support.ending import Result, ended
from experiments.support.figures import curve, curves
from experiments.support.recorded import Row, held_out, measured, recorded
from experiments.support.scale import PAPERS, REDUCED, count, paper_config, two_steps
from experiments.support.tables import table
from experiments.train import Config as TrainConfig
from experiments.train import train
from models.sharding import Parallelism
from stabmon.hosts import leads
from stabmon.quantities import HELD_OUT


@dataclass(frozen=True)
class Config:
    """What to run.

    Attributes:
        command: table: two steps of each preset and NanoGPT-5M. steps: the former. pod: `preset`
            in full.
        presets: Names, for two steps.
        preset: The one for `pod`.
        data: Of `pod`, as in `train.Config`; None: bytes.
        parallelism: Of `pod`.
        model_axis: Devices along "model", of `pod`.
        distributed: Whether to have JAX look for other processes.
        resume: Whether `pod` goes on from the newest checkpoint.
        steps: Of NanoGPT-5M, or of `pod`; None: 4,000, or 50,000.
        batch: Sequences a step of NanoGPT-5M.
        warmup: Steps of its warm-up, where the paper has 2,000.
        layers: Of NanoGPT-5M.
        seed: Of it all.
        runs: Where runs, rows and figure lie.
    """

    command: Annotated[Literal["table", "steps", "pod"], tyro.conf.Positional] = "table"
    presets: tuple[str, ...] = tuple(PAPERS)
    preset: str = "nanogpt-5m"
    data: Path | None = None
    parallelism: Parallelism | None = None
    model_axis: int = 1
    distributed: bool = False
    resume: bool = False
    steps: int | None = None
    batch: int = 4
    warmup: int = 100
    layers: int = 24
    seed: int = 0
    runs: Path = Path("runs")


def main(config: Config) -> Result | None:
    """Carry out `config.command`; `pod` leaves a run, and no rows."""
    if config.command == "pod":
        join(config.distributed)
        with together():
            result = train(pod_config(config))
        if leads():
            print(f"{result.folder}: step {result.step}, loss {result.loss:.3f}")
        return None
    file, rows = config.runs / "scale_presets.jsonl", []
    for name in config.presets:
        settings = {"preset": name, "reduced": REDUCED[name], "seed": config.seed}
        rows.append(measured(file, settings, lambda name=name: _apart(name, config.seed)))
    if config.command == "table":
        settings = {
            "run": "nanogpt-5m",
            "steps": config.steps or 4000,
            **{name: getattr(config, name) for name in ("batch", "warmup", "layers", "seed")},
        }
        rows.append(measured(file, settings, lambda: nanogpt(config)))
    return ended(file, rows, headline, tables, figure)


def pod_config(config: Config) -> TrainConfig:
    """A preset in full, its forward pass in bfloat16."""
    full = paper_config(config.preset)
    return replace(
        full,
        runs=config.runs,
        steps=config.steps or full.steps,
        data=config.data,
        seed=config.seed,
        model=replace(full.model, dtype="bfloat16"),
        placement=Placement(config.parallelism, config.model_axis),
        distributed=config.distributed,
        resume=config.resume,
    )


def _apart(name: str, seed: int) -> Row:
    """`two_steps` in a process of its own, which gives its memory back and knows its peak."""
    print(f"{name}: compiling, two steps", flush=True)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(two_steps, name, *REDUCED[name], seed).result()


def nanogpt(config: Config) -> Row:
    """NanoGPT-5M on bytes for as long as asked; its loss, stable ranks and gradient."""
    full = paper_config("nanogpt-5m")
    model = replace(full.model, vocabulary=256, layers=config.layers)
    steps = config.steps or 4000
    settings = replace(
        full,
        name=f"nanogpt-5m-seed{config.seed}",
        runs=config.runs,
        steps=steps,
        seed=config.seed,
        batch=config.batch,
        model=model,
        optimizer=replace(full.optimizer, warmup=config.warmup, schedule="constant"),
        monitor=MonitorConfig(delta=0, activations=25, weights=25),
        evaluate_every=50,
        checkpoint_every=50,
        resume=True,
        quiet=True,
    )
    run = recorded(settings)
    keys = {
        **{f"stable rank of W_{x}": f"weights/global/{x}/stable_rank/mean" for x in "qk"},
        "stable rank of W_up": "weights/global/mlp_up/stable_rank/mean",
        "stable rank of W_down": "weights/global/mlp_down/stable_rank/mean",
        "largest attention logit": "attention/global/max_logit/max",
        "gradient norm": "symptoms/global/grad_norm/value",
        "rank ratio of the activations": "activations/global/rank_ratio/mean",
        "held-out loss": HELD_OUT,
    }
    return {
        "run": "nanogpt-5m",
        "seed": config.seed,
        "tokens": steps * config.batch * model.context,
        "paper_tokens": 30_000 * PAPERS["nanogpt-5m"].tokens,
        "parameters": count(settings),
        "held_out": held_out(run),
        "curves": {name: curve(run, key, 1) for name, key in keys.items()},
    }


def tables(rows: list[Row]) -> str:
    """What compiled and stepped, and NanoGPT-5M's course."""
    presets, runs = _split(rows)
    losses = lambda row: ", ".join(f"{x:.2f}" for x in row["losses"])
    columns = {
        "preset": "preset",
        "parameters": lambda row: f"{row['parameters'] / 1e6:,.1f}M",
        "paper: layers, context, tokens a step, rate": lambda row: (
            "{layers}, {context}, {tokens:,}, {rate:g}".format(**row["full"], **row["paper"])
        ),
        "memory of the compiled full step, one sequence": lambda row: _gib(row["full_bytes"]),
        "two steps taken with": lambda row: (
            "{layers} layers, {batch} × {context} tokens, ".format(**row["reduced"])
            + f"{row['reduced_parameters'] / 1e6:,.0f}M"
        ),
        "loss; uniform is": lambda row: f"{losses(row)}; {row['uniform']:.2f}",
        "peak memory": lambda row: _gib(row["peak_bytes"]),
    }
    parts = [table(presets, columns, {})]
    for row in runs:
        settings = row["settings"]
        share = 100 * row["tokens"] / row["paper_tokens"]
        parts += [
            f"NanoGPT-5M on bytes, {settings['layers']} layers, {row['parameters'] / 1e6:.2f}M "
            f"parameters, seed {row['seed']}: {settings['steps']:,} steps, {row['tokens']:,} "
            f"tokens, {share:.1g} % of what the paper had seen when AdamW failed:",
            _course(row["curves"]),
        ]
    return "\n\n".join(parts)


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


def _course(curves: dict[str, list[list[float]]]) -> str:
    """Each curve at the first two and eight more of the steps of the held-out loss, about."""
    steps = curves["held-out loss"][0]
    shown = sorted({*steps[:2], *steps[:: max(1, -(-len(steps) // 8))]})

    def at(name: str, step: float) -> str:
        there = dict(zip(*curves[name], strict=True))
        return f"{there[step]:.3g}" if step in there else ""

    columns = {f"{step:g}": lambda of, step=step: at(of[0], step) for step in shown}
    return table(curves, {"step": str}, columns)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
