"""Which runs `msign_rescue.py` compares: the configurations, and the arms of each.

Here: data only. Not here: how an arm is run and what is measured of it (`msign_rescue.py`), nor
what the rows say (`rescue_tables.py`).
"""

from dataclasses import dataclass, field, replace
from typing import Any

from experiments.loop.faults import AttentionFault
from experiments.loop.optimizer import MsignConfig, OptimizerConfig
from experiments.train import Config as TrainConfig
from models.config import GPTConfig


@dataclass(frozen=True)
class Arm:
    """How an arm differs from AdamW in its configuration.

    Attributes:
        healthy: Whether fault or learning rate are taken away.
        optimizer: Fields of `OptimizerConfig`.
        model: Fields of `GPTConfig`.
    """

    healthy: bool = False
    optimizer: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)


def restored(period: int = 50, *select: str, healthy: bool = False, **optimizer: Any) -> Arm:
    """An arm with MSign on the `select`ed matrices, of the attention where none are."""
    msign = MsignConfig(period, select or ("attention",))
    return Arm(healthy, {"msign": msign} | optimizer)


def _changed(**options: Any) -> Arm:
    """Attention P=50 with other options of MSign."""
    return Arm(optimizer={"msign": MsignConfig(50, **options)})


CLEAN, ADAMW = "clean", "adamw"
MAIN = {
    CLEAN: Arm(healthy=True),
    ADAMW: Arm(),
    "attention P=50": restored(50),
    "MLP P=50": restored(50, "mlp"),
}
PERIODS = {f"attention P={period}": restored(period) for period in (10, 100, 300, 1000)}
TARGETS = {
    "all P=50": restored(50, "all"),
    "q, k P=50": restored(50, "q", "k"),
    "v, o P=50": restored(50, "v", "o"),
}
RIVALS = {
    "QK-norm": Arm(model={"qk_norm": True}),
    "QK-clip 50": Arm(optimizer={"qk_clip": 50.0}),
    "grad clip 0.1": Arm(optimizer={"clip": 0.1}),
    "muon": Arm(optimizer={"base": "muon"}),
    "muon, attention P=50": restored(50, base="muon"),
}
VARIANTS = {
    "clean, attention P=50": restored(50, healthy=True),
    "trigger 0.5, P=50": _changed(trigger=0.5),
    "stagger, P=50": _changed(stagger=True),
    "blend 0.5, P=50": _changed(blend=0.5),
    "no decay": Arm(optimizer={"weight_decay": 0.0}),
    "no decay, attention P=50": restored(50, weight_decay=0.0),
}
ARMS = MAIN | PERIODS | TARGETS | RIVALS | VARIANTS

FAULT = TrainConfig(
    steps=1200,
    batch=8,
    model=GPTConfig(layers=4, model=64, heads=4, context=64, backend="flash"),
    optimizer=OptimizerConfig(learning_rate=1e-3, warmup=50, clip=1.0, rates=(("all", 2e-3),)),
    fault=AttentionFault(bits_o=7, bits_do=7, onset=200),
)
EXPERTS = replace(FAULT, model=replace(FAULT.model, experts=8, feedforward=64))
MODERN = replace(
    FAULT, model=replace(FAULT.model, positions="rope", kv_heads=2, activation="swiglu")
)
MILD = replace(MODERN, steps=800, fault=AttentionFault(bits_o=6, bits_do=6, onset=200))
RATE = TrainConfig(
    steps=1200,
    batch=8,
    model=GPTConfig(
        layers=8, model=64, heads=4, context=64, norm="layernorm", zero_query=True, std=0.08
    ),
    optimizer=OptimizerConfig(
        learning_rate=1e-3, warmup=50, rates=(("attention", 3e-2), ("mlp", 3e-3))
    ),
)


@dataclass(frozen=True)
class Configuration:
    """A model with what goes wrong in it.

    Attributes:
        run: The training run of its AdamW arm.
        arms: Of `ARMS`, in the order of running.
        judged: The arm that the claim is judged by; chosen before the runs.
        says: What it is, for a reader.
        seeds: Of the verdict; runs of other seeds served to choose the configuration.
    """

    run: TrainConfig
    arms: tuple[str, ...]
    judged: str
    says: str
    seeds: tuple[int, ...] = (0, 1, 2)


_SHORT = (*MAIN, "attention P=10")
CONFIGURATIONS = {
    "fault": Configuration(
        FAULT,
        tuple(ARMS),
        "attention P=50",
        "4 layers, GELU, learned positions, AdamW at 2e-3 (block matrices) and 1e-3 (rest), clip 1;"
        " O and dO lose 7 bits in δ from step 200 on",
    ),
    "experts": Configuration(
        EXPERTS,
        (*MAIN, *PERIODS, *TARGETS),
        "attention P=50",
        "the same with 8 experts of F = 64 in each block, two a token",
    ),
    "modern": Configuration(
        MODERN, _SHORT, "attention P=50", "as fault, with RoPE, SwiGLU and two kv heads"
    ),
    "mild": Configuration(
        MILD,
        (*_SHORT, "attention P=100", "attention P=300"),
        "attention P=10",
        "as modern, 6 bits of O and dO",
        seeds=(3, 4, 5),
    ),
    "rate": Configuration(
        RATE,
        _SHORT,
        "attention P=10",
        "no fault; 8 layers, LayerNorm, W_q = 0, other matrices' std .08, attention at 3e-2 where"
        " 3e-3 is the clean rate, no clip",
    ),
}
