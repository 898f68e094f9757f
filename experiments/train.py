"""The training loop, written to be copied.

One jitted, donated step does loss, gradients and optimizer. On a sampled step a second program
measures beside it (`measuring.py`); other steps cost nothing. What is measured leaves as data and
is written while the next step already runs, so the device never waits for the host. A run is a
folder (`stabmon.runs.runlog`); `--resume` continues it bit for bit.

    python -m experiments.train --name first --steps 1000
    python -m experiments.train --name first --steps 1000 --resume
    python -m experiments.train --name watched --steps 1000 --alarms.on     alarms, advice only
    python -m experiments.train --name cared-for --steps 1000 --act         acts on them too

What `--act` does is in `acting.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import Mesh

import stabmon
from experiments.loop.acting import Acting, AlarmConfig
from experiments.loop.ahead import compiling_ahead
from experiments.loop.checkpoints import Checkpoints, TrainState
from experiments.loop.cluster import agree, join, leads, shared_log, together
from experiments.loop.data import Corpus, batches, load_corpus, windows
from experiments.loop.faults import AttentionFault, Disturbance, disturbed, scales
from experiments.loop.losses import make_evaluation
from experiments.loop.optimizer import OptimizerConfig
from experiments.loop.placement import Placement, make_mesh, mesh_in_force, place_batch
from experiments.loop.progress import Board
from experiments.loop.session import identity, interruptible
from experiments.loop.sinks import Sink, open_sinks
from experiments.loop.step import MonitorConfig, make_step
from models.config import GPTConfig
from stabmon.alarms.detectors.bands import BandDetector
from stabmon.alarms.lead import first_by_key
from stabmon.alarms.reference import Reference
from stabmon.recovery.ladder import EXIT_UNRECOVERED
from stabmon.runs.run import load_run

HELD_OUT = "evaluation/global/loss/value"


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
        keep: Newest checkpoints that stay; 0: all. A watched run keeps what its ledger asks for.
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
    context = config.model.context
    held_out_loss = make_evaluation(config.model, corpus, config.batch)
    optimizer = replace(config.optimizer, control=config.optimizer.control or config.act)
    disturbances = config.disturbances
    init, step_fn, monitor = make_step(
        config.model,
        optimizer,
        config.monitor,
        config.fault,
        config.placement,
        disturbances is not None,
    )
    watched = config.act or config.alarms.on
    folder = config.runs / config.name
    with shared_log(folder, identity(config), config.resume) as log:
        saved = Checkpoints(folder / "checkpoints", keep=None if watched else config.keep or None)
        fresh: Callable[[], TrainState] = lambda: init(config.seed)
        state = fresh()
        acting = None
        if watched:
            order = windows(corpus, seed=config.seed, batch=config.batch, context=context)
            learned = None if config.reference is None else Reference.load(config.reference)
            acting = Acting.of(
                config.alarms,
                config.act,
                config.optimizer.warmup,
                folder,
                log,
                saved,
                order,
                learned,
                config.model.qk_norm,
            )
        if config.resume and saved.latest() is not None:
            state = saved.restore(state)
            if acting is not None:
                state = acting.resume(state, fresh)
        if config.fault is not None and config.armed:
            log.fault(**config.fault.journal())
        for disturbance in disturbances or ():
            log.fault(**disturbance.journal())
        step, loss = int(state.step), jnp.nan
        detector = None
        if config.reference is not None and acting is None:
            detector = BandDetector(Reference.load(config.reference))
            first_by_key(load_run(folder), detector, before=step)
        armed = np.float32(config.armed)
        pending, begun = None, step
        # The step that begins a run is not sampled: it would wait for the monitors' compilation.
        sampled = lambda step: monitor.due(step) if step else ()
        coming = dict.fromkeys(map(sampled, range(step, min(config.steps, step + 10_000))))

        def write(step: int, readings: stabmon.Readings | None, held_out: jax.Array | None) -> None:
            values = readings.flatten() if readings is not None else {}
            if held_out is not None:
                values[HELD_OUT] = float(held_out)
            log.sample(step, values, tokens=step * config.batch * context)
            sinks.write(step, values)
            board.show(step, values)
            if acting is not None:
                alarms = acting.observe(step, values)
            else:
                alarms = detector.update(step, values) if detector else []
                for alarm in alarms:
                    log.event("alarm", step, **alarm.event())
            for alarm in alarms:
                board.alarm(alarm)
            ladder = None if acting is None else acting.recovery.state()
            agree(f"what step {step} led to", [values, [x.event() for x in alarms], ladder])
            if readings is not None and (path := readings.offender()) is not None:
                log.event("nonfinite", step, path=path)

        def save() -> None:
            if acting is None:
                saved.save(state)
            elif not acting.wants_rollback:
                acting.save(state, float(loss))

        quiet = config.quiet or not leads()
        names = config.sinks if leads() else ()
        with (
            open_sinks(names, folder, identity(config), step) as sinks,
            Board(config.name, config.steps, config.batch * context, quiet) as board,
            compiling_ahead(mesh) as ahead,
        ):
            with interruptible() as stop:
                while not stop:
                    if acting is not None:
                        if acting.recovery.stop:
                            break
                        if acting.wants_rollback:
                            state, pending = acting.roll_back(fresh), None
                            step = int(state.step)
                            sinks.rewind(step)
                        state = acting.before(step, state)
                    if step >= config.steps:
                        break
                    held_out = None
                    if config.evaluate_every and step % config.evaluate_every == 0:
                        held_out = held_out_loss(state.params)
                    due = sampled(step)
                    shift = 0 if acting is None else acting.data_shift
                    tokens = disturbed(disturbances, data, step, shift, corpus.vocabulary)
                    batch = place_batch(tokens, config.placement, mesh)
                    factors = scales(disturbances, step)
                    ahead.wait(due)
                    state, readings, loss = step_fn(state, batch, armed, due=due, scales=factors)
                    if step == begun:
                        ahead.start(step_fn, (state, batch, armed, factors), coming)
                    # Step t is under way; only now look at what step t−1 measured.
                    if pending is not None:
                        write(*pending)
                    pending = (step, readings, held_out) if due or held_out is not None else None
                    step += 1
                    board.advance(step)
                    saves = config.checkpoint_every and step % config.checkpoint_every == 0
                    if pending is not None and (saves or step >= config.steps):
                        write(*pending)
                        pending = None
                    if saves:
                        save()
            if pending is not None:
                write(*pending)
        save()
        saved.close()
        final = float(held_out_loss(state.params))
        stopped = acting is not None and acting.recovery.stop
        if stopped:
            log.event("stopped", step, code=EXIT_UNRECOVERED)
        elif step >= config.steps:
            log.event("finished", step, loss=float(loss), held_out=final)
    return Result(folder, step, float(loss), final, EXIT_UNRECOVERED if stopped else 0)


if __name__ == "__main__":
    config = tyro.cli(Config)
    join(config.distributed)
    with together():
        result = train(config)
    if leads():
        print(f"{result.folder}: step {result.step}, loss {result.loss:.3f}")
    raise SystemExit(result.code)
