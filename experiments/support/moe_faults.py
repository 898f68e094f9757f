"""The runs behind `router_fault.py` and `combined_fault.py`: a small mixture of experts, harmed.

Here: the arms, how one of them is trained, and what the default alarms make of a recorded run. Not
here: which arms a question needs, and what is concluded.

All arms are one compiled program with the attention fault in it, which comes on in some of them
only, and with factors that the step takes as arguments; so the arms of a seed are alike to the bit
until the onset. The alarms are replayed over the recorded samples, as they would have been raised
while the run went on: a rule that changes is judged anew without training anew.
"""

import fcntl
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.campaign import ALARMS, EXPERTS, MONITOR, OPTIMIZER
from experiments.loop.faults import AttentionFault, Disturbance, Kind
from experiments.loop.optimizer import OptimizerConfig
from experiments.loop.step import MonitorConfig
from experiments.train import Config as TrainConfig
from experiments.train import train
from models.config import GPTConfig
from stabmon.recovery.replay import replay_events, standard_watcher
from stabmon.runs.run import Run, load_run


@dataclass(frozen=True)
class Arm:
    """What is wrong with a run from the onset on.

    Attributes:
        attention: Whether O and dO lose 7 mantissa bits in the attention backward.
        disturbances: (kind, amount) of `faults.Disturbance`.
    """

    attention: bool = False
    disturbances: tuple[tuple[Kind, float], ...] = ()


_Harm = tuple[tuple[Kind, float], ...]
_RATE10: _Harm = (("learning rate", 10.0),)
_RATE40: _Harm = (("learning rate", 40.0),)
_BATCH: _Harm = (("batch", 8.0),)
_NO_BALANCE: _Harm = (("auxiliary", 0.0),)
ARMS: dict[str, Arm] = {
    "clean": Arm(),
    "learning rate ×10": Arm(disturbances=_RATE10),
    "learning rate ×40": Arm(disturbances=_RATE40),
    "batch ÷8": Arm(disturbances=_BATCH),
    "balance loss off": Arm(disturbances=_NO_BALANCE),
    "learning rate ×10, balance loss off": Arm(disturbances=_RATE10 + _NO_BALANCE),
    "learning rate ×10, batch ÷8": Arm(disturbances=_RATE10 + _BATCH),
    "batch ÷8, balance loss off": Arm(disturbances=_BATCH + _NO_BALANCE),
    "attention": Arm(True),
    "attention, learning rate ×10": Arm(True, _RATE10),
    "attention, learning rate ×40": Arm(True, _RATE40),
}


@dataclass(frozen=True)
class MoEConfig:
    """What all arms share.

    Attributes:
        steps: Length of a run.
        onset: First step with a fault.
        batch: Sequences a step.
        model: Shape.
        optimizer: Optimizer and snapshot ring.
        monitor: What is measured.
        window: Steps of the healthy window after the warm-up, by which alarms judge.
    """

    steps: int = 800
    onset: int = 400
    batch: int = 16
    model: GPTConfig = EXPERTS
    optimizer: OptimizerConfig = OPTIMIZER
    monitor: MonitorConfig = MONITOR
    window: int = ALARMS.window


def settings_of(config: MoEConfig, arm: str, seed: int, runs: Path) -> TrainConfig:
    """The training run of one arm and seed, under `runs`."""
    harm = ARMS[arm]
    words = arm.replace(",", "").replace("×", "x").replace("÷", "over").split()
    return TrainConfig(
        name=f"moe-{'-'.join(words)}-seed{seed}",
        runs=runs,
        steps=config.steps,
        seed=seed,
        batch=config.batch,
        model=config.model,
        optimizer=config.optimizer,
        monitor=config.monitor,
        fault=AttentionFault(7, 7, onset=config.onset),
        armed=harm.attention,
        disturbances=tuple(Disturbance(kind, x, config.onset) for kind, x in harm.disturbances),
        evaluate_every=25,
        checkpoint_every=0,
        resume=True,
        quiet=True,
    )


def run_one(settings: TrainConfig) -> Run:
    """The recorded run; trained first, unless it is there already.

    Two experiments that need the same run at the same time train it once.

    Raises:
        SystemExit: It was interrupted; it goes on from there the next time.
    """
    folder = settings.runs / settings.name
    settings.runs.mkdir(parents=True, exist_ok=True)
    with (settings.runs / f"{settings.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _finished(folder, settings.steps):
            train(settings)
    if not _finished(folder, settings.steps):
        raise SystemExit(f"{settings.name}: interrupted, goes on from there")
    return load_run(folder)


def judged(run: Run, warmup: int, window: int) -> Run:
    """The run with the events that the default alarms raise over its samples, and no others."""
    return replace(run, events=tuple(replay_events(run, standard_watcher(run, warmup, window))))


def first_alarms(run: Run, onset: int) -> list[tuple[int, str, str]]:
    """(step after the onset, key, rule) of the first alarm of each key after it, in order."""
    first: dict[str, tuple[int, str, str]] = {}
    for event in run.events:
        if event["kind"] == "alarm" and event["step"] >= onset:
            row = (event["step"] - onset, event["key"], event["rule"])
            first.setdefault(event["key"], row)
    return sorted(first.values())


def mean_from(run: Run, key: str, first: int) -> float:
    """Mean of a metric's samples from a step on, NaN if one of them is not finite."""
    at, values = run.metrics[key]
    return float(values[at >= first].mean())


def _finished(folder: Path, steps: int) -> bool:
    if not (folder / "config.json").exists():
        return False
    ends = [x["step"] for x in load_run(folder).events if x["kind"] == "finished"]
    return steps in ends
