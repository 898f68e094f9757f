"""Which runs `msign_rescue.py` compares: configurations, the arms of each, and when one is rescued.

Not here: how an arm is run, what is measured of it, and tables of that.
"""

import re
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any

from experiments.faults import AttentionFault
from experiments.loop.optimizer import MsignConfig, OptimizerConfig
from experiments.support.recorded import Row
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
MLP = "MLP P=50"
HOLDS, LOST = 5.0, 20.0  # per cent above the clean run of the seed: at most, at least


def over(
    rows: list[Row], configuration: str, arm: str | None = None, name: str = "loss"
) -> list[float]:
    """Per cent by which an arm (None: the judged one) is above clean, seed by seed."""
    arm = CONFIGURATIONS[configuration].judged if arm is None else arm
    chosen = _of(rows, configuration)
    clean = {row["seed"]: row[name] for row in chosen if row["arm"] == CLEAN}
    of = [row for row in chosen if row["arm"] == arm and row["seed"] in clean]
    return [100 * (row[name] / clean[row["seed"]] - 1) for row in of]


def holds(rows: list[Row], configuration: str) -> bool:
    """Whether the judged arm ends near clean and AdamW far above it, in each of all seeds."""
    near = over(rows, configuration)
    return _near(near, configuration) and beyond(rows, configuration, ADAMW, LOST)


def bracket(rows: list[Row], configuration: str) -> str:
    """Between which periods the restoration of the attention stops holding; "" if unknown.

    Behind the longest that holds, even where a shorter one misses.
    """
    whole = len(CONFIGURATIONS[configuration].seeds)
    found = [
        (period, over(rows, configuration, arm)) for period, arm in by_period(rows, configuration)
    ]
    held = {p: _near(ratios, configuration) for p, ratios in found if len(ratios) >= whole}
    last = max((p for p in held if held[p]), default=0)
    beyond = [p for p in held if p > last]
    if not beyond:
        return ""
    return f"at {last}–{beyond[0]}" if last else f"below {beyond[0]}"


def by_period(rows: list[Row], configuration: str) -> list[tuple[int, str]]:
    """(P, arm) of the arms that restore the attention, by P."""
    arms = {row["arm"] for row in _of(rows, configuration)}
    matches = [re.fullmatch(r"attention P=(\d+)", arm) for arm in arms]
    return sorted((int(match[1]), match[0]) for match in matches if match)


def counts(row: Row) -> bool:
    """Whether a row's seed is one of the verdict."""
    return row["seed"] in CONFIGURATIONS[row["configuration"]].seeds


def _near(ratios: list[float], configuration: str) -> bool:
    whole = len(ratios) >= len(CONFIGURATIONS[configuration].seeds)
    return whole and all(x <= HOLDS for x in ratios)


def beyond(rows: list[Row], configuration: str, arm: str, bound: float) -> bool:
    """Whether an arm ends at least that far above clean in each of all seeds, NaN included."""
    ratios = over(rows, configuration, arm)
    whole = len(ratios) >= len(CONFIGURATIONS[configuration].seeds)
    return whole and not any(x < bound for x in ratios)


def _of(rows: list[Row], configuration: str) -> list[Row]:
    return [row for row in rows if row["configuration"] == configuration]


def late_jacobian(rows: list[Row], name: str) -> float:
    """The mean over seeds at the last checkpoint before the end; NaN without one."""
    last = [row["jacobian"][-1][name] for row in rows if row["jacobian"]]
    return mean(map(float, last)) if last else float("nan")


def range_of(values: list[float]) -> str:
    """Least and largest, once where they are alike."""
    ends = dict.fromkeys(f"{x:.1f}" for x in (min(values), max(values))) if values else {}
    return "…".join(ends) if ends else "not run"
