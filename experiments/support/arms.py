"""What is wrong with a run: `Arm`, those that several questions share, and an arm's training run.

Not here: which arms a question compares, and what is made of them.
"""

from dataclasses import dataclass, field, replace
from math import nan
from typing import Any

from experiments.faults import AttentionFault, Disturbance, Kind
from experiments.loop.optimizer import OptimizerConfig
from experiments.loop.step import MonitorConfig
from experiments.train import Config as TrainConfig
from models.config import GPTConfig
from stabmon.alarms.signatures import Fault

# The run of the campaign and the grades; with experts that of the router.
SMALL = TrainConfig(
    batch=16,
    model=GPTConfig(layers=2, model=64, heads=4, context=32, backend="flash"),
    optimizer=OptimizerConfig(learning_rate=2e-3, every=25, keep=8),
    monitor=MonitorConfig(lags=(50, 200), delta=25, activations=25),
    disturbances=(),
    evaluate_every=25,
    checkpoint_every=0,
)
EXPERTS = {"experts": 8, "feedforward": 128}
CLEAN = "clean"
_FAULTS: dict[Kind, Fault] = {
    "learning rate": Fault.LEARNING_RATE,
    "batch": Fault.BALANCE,
    "auxiliary": Fault.BALANCE,
    "dirty batch": Fault.DIRTY_BATCH,
    "repeated data": Fault.REPEATED_DATA,
    "gradient": Fault.NONFINITE,
}


@dataclass(frozen=True)
class Arm:
    """One kind of run: what goes wrong at the onset, and what else tells it from the base.

    Attributes:
        attention: The attention fault; its onset is the experiment's. None: none.
        disturbances: (kind, amount) of `faults.Disturbance`.
        brief: Whether they last for one step only.
        before: (kind, amount) of disturbances that end at the onset: the change is their end.
        model: Fields of `GPTConfig`.
        optimizer: Fields of `OptimizerConfig`.
        run: Fields of the training run.
    """

    attention: AttentionFault | None = None
    disturbances: tuple[tuple[Kind, float], ...] = ()
    brief: bool = False
    before: tuple[tuple[Kind, float], ...] = ()
    model: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)


_ATTENTION = AttentionFault(7, 7)
_Harm = tuple[tuple[Kind, float], ...]
_RATE10: _Harm = (("learning rate", 10.0),)
_RATE40: _Harm = (("learning rate", 40.0),)
_BATCH: _Harm = (("batch", 8.0),)
_NO_BALANCE: _Harm = (("auxiliary", 0.0),)
# "attention" alone is 7/7: as many mantissa bits of O and of dO are lost.
ARMS = {
    CLEAN: Arm(),
    "learning rate ×10": Arm(disturbances=_RATE10),
    "learning rate ×40": Arm(disturbances=_RATE40),
    "batch ÷8": Arm(disturbances=_BATCH),
    "balance loss off": Arm(disturbances=_NO_BALANCE),
    "dirty batch": Arm(disturbances=(("dirty batch", 1.0),), brief=True),
    "repeated data": Arm(disturbances=(("repeated data", 8.0),)),
    "NaN in the gradient": Arm(disturbances=(("gradient", nan),), brief=True),
    "attention": Arm(_ATTENTION),
    "attention 7/7": Arm(_ATTENTION),
    "attention 7/0": Arm(AttentionFault(7, 0)),
    "attention 6/6": Arm(AttentionFault(6, 6)),
    "learning rate ×10, balance loss off": Arm(disturbances=_RATE10 + _NO_BALANCE),
    "learning rate ×10, batch ÷8": Arm(disturbances=_RATE10 + _BATCH),
    "batch ÷8, balance loss off": Arm(disturbances=_BATCH + _NO_BALANCE),
    "attention, learning rate ×10": Arm(_ATTENTION, _RATE10),
    "attention, learning rate ×40": Arm(_ATTENTION, _RATE40),
    "attention 7/7, learning rate ×10": Arm(_ATTENTION, _RATE10),
}


def run_of(base: TrainConfig, name: str, arm: Arm, seed: int, onset: int) -> TrainConfig:
    """The training run of an arm.

    An attention fault that `base` has is compiled into arms without one too, where it never comes
    on: all arms of a seed are then the same program, alike to the bit until the onset.

    Args:
        base: What all arms share.
        name: Of the experiment and the arm; the run's folder is named by it.
        arm: What is wrong.
        seed: Of initialisation and data order.
        onset: First step with a fault.
    """
    fault = arm.attention or base.fault
    disturbances = base.disturbances
    if disturbances is not None:
        end = onset + 1 if arm.brief else None
        disturbances = tuple(Disturbance(kind, x, onset, end) for kind, x in arm.disturbances)
        disturbances += tuple(Disturbance(kind, x, 0, onset) for kind, x in arm.before)
    run = replace(
        base,
        name=f"{slug(name)}-seed{seed}",
        seed=seed,
        model=replace(base.model, **arm.model),
        optimizer=replace(base.optimizer, **arm.optimizer),
        fault=None if fault is None else replace(fault, onset=onset),
        armed=arm.attention is not None,
        disturbances=disturbances,
        resume=True,
        quiet=True,
    )
    return replace(run, **arm.run)


def faults_of(arm: Arm) -> list[Fault]:
    """What is wrong in an arm, as the diagnosis calls it; each fault once.

    >>> [x.value for x in faults_of(Arm(disturbances=(("batch", 8), ("auxiliary", 0))))]
    ['batch or balance']
    """
    found = [Fault.ATTENTION] if arm.attention is not None else []
    return list(dict.fromkeys(found + [_FAULTS[kind] for kind, _ in arm.disturbances]))


def truth_of(arm: Arm) -> str:
    """The right diagnosis of an arm; `CLEAN` where nothing is wrong."""
    faults = faults_of(arm)
    if not faults:
        return CLEAN
    return str(faults[0] if len(faults) == 1 else Fault.SEVERAL)


def slug(name: str) -> str:
    """A name as part of a folder's.

    >>> slug("learning rate ×10, balance loss off")
    'learning-rate-x10-balance-loss-off'
    """
    words = name.replace("×", "x").replace("÷", "over").replace(",", "").lower()
    return "".join(x if x.isalnum() else "-" for x in words)
