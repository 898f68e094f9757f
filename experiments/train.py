"""The training loop, written to be copied.

One jitted, donated step does loss, gradients and optimizer. On a sampled step a second program
measures beside it (`measuring.py`); other steps cost nothing. `stabmon.Watch` does the rest: run
folder, alarms, recovery. `--resume` continues a run bit for bit.

    python -m experiments.train --name first --steps 1000
    python -m experiments.train --name first --steps 1000 --resume
    python -m experiments.train --name watched --steps 1000 --alarms.on     alarms, advice only
    python -m experiments.train --name cared-for --steps 1000 --act         acts on them too
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import Mesh

import stabmon
from experiments.data import Corpus, batches, load_corpus, windows
from experiments.faults import AttentionFault, Disturbance, disturbed, scales
from experiments.loop.alarms import AlarmConfig, keep_batches
from experiments.loop.checkpoints import checkpoints
from experiments.loop.cluster import join, together
from experiments.loop.losses import make_evaluation
from experiments.loop.optimizer import OptimizerConfig, make_schedule
from experiments.loop.placement import Placement, make_mesh, mesh_in_force, place_batch
from experiments.loop.progress import ProgressLine
from experiments.loop.session import identity, interruptible
from experiments.loop.sinks import Sink, open_sinks
from experiments.loop.step import MonitorConfig, make_step
from models.config import GPTConfig
from stabmon.hosts import leads
from stabmon.watch.ahead import compiling_ahead


@dataclass(frozen=True)
class Config:
    """One training run.

    Attributes:
        name: Folder under `runs`.
        runs: Where runs lie.
        data: Text file, folder or token file; None: the Python standard library's sources.
        steps: Length of the run.
        seed: Of initialisation and data order.
        batch: Sequences a step, of `model.context` tokens.
        placement: How the run is divided over devices.
        distributed: Whether to have JAX look for other processes; see `cluster.py`.
        model: Shape of the model.
        optimizer: Optimizer and snapshot ring.
        monitor: What is measured how often.
        fault: Injected into the attention backward; None: none.
        disturbances: What else goes wrong between which steps. None: the program without them.
        armed: Whether the fault ever comes on. False runs the very same program without it: the
            matched clean run.
        reference: File of a reference (`stabmon.alarms.reference`); samples are judged by it while
            the run goes on, and alarms printed and journalled. None: no alarms.
        sinks: Where samples go besides `metrics.jsonl`; see `sinks.py`.
        act: Whether the recovery ladder acts on the run: cuts the learning rate, rolls back, stops.
            False: what it would do is journalled, if `alarms.on`.
        alarms: Watching without a reference, and how the ladder is climbed.
        evaluate_every: Steps between evaluations on the held-out split; 0: only at the end.
        checkpoint_every: Steps between checkpoints; 0: only at the end.
        keep: Newest checkpoints that stay, besides those that the ledger asks for; 0: all.
        resume: Go on from the newest checkpoint.
        quiet: No progress on the terminal.
    """

    name: str = "run"
    runs: Path = Path("runs")
    data: Path | None = None
    steps: int = 1000
    seed: int = 0
    batch: int = 16
    placement: Placement = field(default_factory=Placement)
    distributed: bool = False
    model: GPTConfig = field(default_factory=GPTConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    fault: AttentionFault | None = None
    disturbances: tuple[Disturbance, ...] | None = None
    armed: bool = True
    reference: Path | None = None
    sinks: tuple[Sink, ...] = ()
    act: bool = False
    alarms: AlarmConfig = field(default_factory=AlarmConfig)
    evaluate_every: int = 0
    checkpoint_every: int = 500
    keep: int = 3
    resume: bool = False
    quiet: bool = False


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
        folder: The run's folder.
        step: Steps done; fewer than asked for if it was interrupted.
        loss: Training loss of the last step, nats per token.
        held_out: Mean loss on the held-out split, nats per token.
        code: Exit code: 0, or `ladder.EXIT_UNRECOVERED` where the ladder stopped it.
    """

    folder: Path
    step: int
    loss: float
    held_out: float
    code: int = 0


def train(config: Config) -> Result:
    """Run `config` to its end, or until Ctrl-C, which saves first.

    Raises:
        FileExistsError: The run's folder holds another configuration, or this one without
            `resume`.
        FileNotFoundError, ValueError: The data is missing or too short.
    """
    corpus = load_corpus(config.data)
    context = config.model.context
    if corpus.vocabulary > config.model.vocabulary:
        raise ValueError(
            f"{corpus.name} has {corpus.vocabulary} token ids, the model {config.model.vocabulary}:"
            f" pass --model.vocabulary {corpus.vocabulary}"
        )
    data = batches(corpus, seed=config.seed, batch=config.batch, context=context)
    with mesh_in_force(make_mesh(config.placement)) as mesh:
        return _train(config, corpus, data, mesh)


def _train(config: Config, corpus: Corpus, data: Any, mesh: Mesh | None) -> Result:
    """`train`, its arguments checked and its mesh in force."""
    context, folder = config.model.context, config.runs / config.name
    held_out_loss = make_evaluation(config.model, corpus, config.batch)
    optimizer = replace(config.optimizer, control=config.optimizer.control or config.act)
    scaled = config.disturbances is not None
    init, step_fn, monitor = make_step(
        config.model, optimizer, config.monitor, config.fault, config.placement, scaled
    )
    state = init(config.seed)
    saved = checkpoints(folder, state)
    quiet = config.quiet or not leads()
    line = ProgressLine(config.name, config.steps, config.batch * context, quiet)
    order = windows(corpus, seed=config.seed, batch=config.batch, context=context)
    warmup, judged = config.optimizer.warmup, config.act or config.alarms.on
    watch = stabmon.Watch(
        folder,
        state.params,
        config=identity(config),
        schedule=make_schedule(optimizer),
        monitor=monitor,
        detectors=config.alarms.detectors(judged, warmup, config.reference, config.model.qk_norm),
        resume=config.resume,
        sinks=(*open_sinks(config.sinks, folder, identity(config)), line),
        on_events=[line.hear, keep_batches(folder, order, lambda: watch.recovery.data_shift)],
        act=config.act,
        policy=config.alarms.policy(),
        ledger=config.alarms.ledger(config.keep),
        save=saved.save,
        restore=saved.restore,
        delete=saved.delete if config.keep else None,
    )
    loss = jnp.nan
    with (
        watch,
        line,
        compiling_ahead(lambda: mesh_in_force(mesh)) as ahead,
        interruptible() as stop,
    ):
        state = watch.resume(state)
        if config.fault is not None and config.armed:
            watch.journal.fault(**config.fault.journal())
        for disturbance in config.disturbances or ():
            watch.journal.fault(**disturbance.journal())
        armed, begun = np.float32(config.armed), watch.step
        # The step that begins a run is not sampled: it would wait for the monitors' compilation.
        sampled = lambda step: watch.due(step) if step else ()
        coming = dict.fromkeys(map(sampled, range(begun, min(config.steps, begun + 10_000))))
        while not stop and not watch.stopped:
            state = watch.apply(state)
            step = watch.step
            if step >= config.steps:
                break
            held_out = None
            if config.evaluate_every and step % config.evaluate_every == 0:
                held_out = held_out_loss(state.params)
            if any(x.kind == "other text" and x.onset == step for x in config.disturbances or ()):
                watch.change("data")
            due = sampled(step)
            shift = watch.data_step - step
            tokens = disturbed(config.disturbances, data, step, shift, corpus.vocabulary)
            batch = place_batch(tokens, config.placement, mesh)
            factors = scales(config.disturbances, step)
            step_fn.wait(ahead, due)
            state, readings, loss = step_fn(state, batch, armed, due=due, scales=factors)
            if step == begun:
                step_fn.compile_ahead(ahead, (state, batch, armed, factors), coming)
            done = step * config.batch * context
            watch.observe(step, readings, held_out=held_out, tokens=done)
            line.advance(watch.step)
            if config.checkpoint_every and watch.step % config.checkpoint_every == 0:
                watch.checkpoint(state)
        watch.checkpoint(state)
        saved.close()
        final = float(held_out_loss(state.params))
        if not watch.stopped and watch.step >= config.steps:
            watch.journal.event("finished", watch.step, loss=float(loss), held_out=final)
    return Result(folder, watch.step, float(loss), final, watch.exit_code)


if __name__ == "__main__":
    config = tyro.cli(Config)
    join(config.distributed)
    with together():
        result = train(config)
    if leads():
        print(f"{result.folder}: step {result.step}, loss {result.loss:.3f}")
    raise SystemExit(result.code)
