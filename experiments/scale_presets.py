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
`scale_study.py`. Tables and figure: `scale_tables.py`.
"""

import resource
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments.loop.cluster import join, leads, together
from experiments.loop.optimizer import OptimizerConfig
from experiments.loop.placement import Placement
from experiments.loop.step import MonitorConfig, make_step
from experiments.support.ending import Result, ended
from experiments.support.rows import Row, measured
from experiments.support.scale_tables import figure, headline, tables
from experiments.train import HELD_OUT, train
from experiments.train import Config as TrainConfig
from models.gpt import init_params
from models.presets import PRESETS
from models.sharding import Parallelism
from stabmon.runs.run import load_run


@dataclass(frozen=True)
class Paper:
    """How a preset is trained in its paper.

    Attributes:
        rate: Base learning rate.
        tokens: A step.
        matrices: Factor of the block matrices' learning rate.
        others: Factor of all others' (the paper: the embeddings'; here the norms' too).
        source: Where it is from.
    """

    rate: float
    tokens: int
    matrices: float = 1.0
    others: float = 1.0
    source: str = "arXiv 2602.01734"


SIGMA = Paper(3.5e-4, 65_536, matrices=16.0, others=4.0)
PAPERS = {
    "nanogpt-5m": Paper(6e-4, 122_880, matrices=16.0, others=4.0),
    "sigma-40m-mha": SIGMA,
    "sigma-40m-mla": SIGMA,
    "llama-1b": Paper(1e-3, 65_536),
    "llama-moe-3b": Paper(1e-3, 65_536),
    "qwen3-moe-mini": Paper(1e-3, 65_536, source="rate and batch not published, as LLaMA"),
}
# (layers, tokens of a sequence) of the two steps that are taken, one sequence each.
REDUCED = {
    "nanogpt-5m": (24, 256),
    "sigma-40m-mha": (28, 128),
    "sigma-40m-mla": (28, 128),
    "llama-1b": (2, 64),
    "llama-moe-3b": (1, 64),
    "qwen3-moe-mini": (4, 64),
}


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


def paper_config(preset: str) -> TrainConfig:
    """A preset as its paper trains it; the linear decay goes on for ten times the warm-up."""
    model, paper = PRESETS[preset], PAPERS[preset]
    return TrainConfig(
        name=preset,
        steps=50_000,
        batch=paper.tokens // model.context,
        model=model,
        optimizer=OptimizerConfig(
            learning_rate=paper.rate * paper.others,
            rates=(("all", paper.rate * paper.matrices),),
            warmup=2000,
            schedule="linear",
            clip=1.0,
        ),
        monitor=MonitorConfig(weights=500, activations=100),
        evaluate_every=500,
        checkpoint_every=1000,
    )


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


def two_steps(name: str, layers: int, context: int, seed: int) -> Row:
    """The full step compiled; two steps of the reduced one, on random tokens."""
    full = paper_config(name)
    memory = compiled_memory(full)
    model = replace(full.model, layers=layers, context=context)
    init, step, _ = make_step(model, full.optimizer, MonitorConfig(delta=0), None)
    rng = np.random.default_rng(seed)
    losses, state = [], init(seed)
    before = np.array(jax.tree.leaves(state.params)[0])
    for _ in range(2):
        tokens = rng.integers(0, model.vocabulary, (1, context + 1), np.int32)
        state, _, loss = step(state, tokens, np.float32(0), due=())
        losses.append(float(loss))
    return {
        "preset": name,
        "parameters": count(full),
        "paper": {"rate": PAPERS[name].rate, "tokens": PAPERS[name].tokens},
        "source": PAPERS[name].source,
        "full": {"layers": full.model.layers, "context": full.model.context, "batch": full.batch},
        "full_bytes": memory,
        "reduced": {"layers": layers, "context": context, "batch": 1},
        "reduced_parameters": count(replace(full, model=model)),
        "losses": losses,
        "moved": bool((np.asarray(jax.tree.leaves(state.params)[0]) != before).any()),
        "uniform": float(np.log(model.vocabulary)),
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def count(config: TrainConfig) -> int:
    """Parameters of the model."""
    shapes = jax.eval_shape(lambda: init_params(config.model, 0))
    return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(shapes))


def compiled_memory(config: TrainConfig) -> int:
    """Bytes that the full step needs on one device, one sequence at a time, in bfloat16."""
    model = replace(config.model, dtype="bfloat16")
    init, step, _ = make_step(model, config.optimizer, MonitorConfig(delta=0), None)
    state = jax.eval_shape(lambda: init(0))
    tokens = jax.ShapeDtypeStruct((1, model.context + 1), jnp.int32)
    armed = jax.ShapeDtypeStruct((), jnp.float32)
    train_step: Any = step.train
    memory = train_step.lower(state, tokens, armed, due=()).compile().memory_analysis()
    held = memory.argument_size_in_bytes - memory.alias_size_in_bytes
    return held + memory.output_size_in_bytes + memory.temp_size_in_bytes


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
    result = train(settings)
    if result.step < steps:
        raise SystemExit(f"{settings.name}: interrupted, goes on from there")
    run = load_run(result.folder)
    keys = {
        **{f"stable rank of W_{x}": f"weights/global/{x}/stable_rank/mean" for x in "qk"},
        "stable rank of W_up": "weights/global/mlp_up/stable_rank/mean",
        "stable rank of W_down": "weights/global/mlp_down/stable_rank/mean",
        "largest attention logit": "attention/global/max_logit/max",
        "gradient norm": "symptoms/global/grad_norm/value",
        "rank ratio of the activations": "activations/global/rank_ratio/mean",
        "held-out loss": HELD_OUT,
    }
    short = lambda values: [float(f"{float(x):.4g}") for x in values]
    curves = {
        name: [run.metrics[key][0].tolist(), short(run.metrics[key][1])]
        for name, key in keys.items()
    }
    return {
        "run": "nanogpt-5m",
        "seed": config.seed,
        "tokens": steps * config.batch * model.context,
        "paper_tokens": 30_000 * PAPERS["nanogpt-5m"].tokens,
        "parameters": count(settings),
        "held_out": result.held_out,
        "curves": curves,
    }


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
