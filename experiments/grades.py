"""Does the rank of activations grade a run's health, and does the grade choose the checkpoint?

Question: a learning rate fortyfold from one step on, or an initialisation far too large, makes the
grade S0…S7 of the residual stream fall. Does its alarm come, does the recovery ladder bring run and
grade back, is QK-norm a remedy? How does the grade depend on the data (code, prose, prose over and
over) and on the segment of the context? And does a healthy checkpoint with a slightly higher loss
beat a collapsing one with a lower loss, after 500 more steps of each?

    python -m experiments.grades                           everything
    python -m experiments.grades --parts story             runs, ladder and QK-norm
    python -m experiments.grades --parts ranking mixes     the rest
    python -m experiments.grades --rejudge                 judge recorded runs anew

About 12 minutes on one core. Rows go to `runs/grades.jsonl`, a run whose row is there is not
measured again; figure: `runs/grades.html`. Results: `experiments/README.md`.

Two layers, D = 64, dense. Arms of a seed share data and, but for QK-norm and the initialisation's
scale, the first parameters and the compiled program. Without `--act` the alarms are replayed over
the recorded run; with it they are those that it acted on. Checkpoints are ranked as `stabmon rank`
does and continued without the fault (`continuing.py`). Tables: `grades_tables.py`.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from math import gcd
from pathlib import Path
from typing import Any, Literal

import tyro

from experiments.campaign import ALARMS, DENSE, MONITOR, OPTIMIZER, held_out
from experiments.loop.acting import AlarmConfig
from experiments.loop.faults import AttentionFault, Disturbance
from experiments.loop.optimizer import OptimizerConfig
from experiments.loop.session import identity
from experiments.loop.step import MonitorConfig
from experiments.support.continuing import continue_all
from experiments.support.ending import Result, ended
from experiments.support.figures import curve
from experiments.support.grades_of_text import grades_of_texts
from experiments.support.grades_tables import figure, headline, tables
from experiments.support.moe_faults import judged, run_one
from experiments.support.rows import Row, append_row, measured, rows_there
from experiments.support.text_mixes import MIXES, write_mixes
from experiments.support.verdicts import LOSSES
from experiments.train import HELD_OUT
from experiments.train import Config as TrainConfig
from models.config import GPTConfig
from stabmon.runs.run import Run

RATIO = "activations/global/rank_ratio/min"
ENTROPY = "attention/global/entropy/mean"
Part = Literal["story", "ranking", "mixes"]


@dataclass(frozen=True)
class Arm:
    """How a run of the story differs from a clean one.

    Attributes:
        rate: Factor of the learning rate from the onset on.
        attention: Whether O and dO lose 7 mantissa bits from the onset on.
        std: Standard deviation of the block matrices at the start; None: the model's own.
        qk_norm: Whether queries and keys are normalised.
        act: Whether the recovery ladder acts.
    """

    rate: float = 1.0
    attention: bool = False
    std: float | None = None
    qk_norm: bool = False
    act: bool = False


ARMS = {
    "clean": Arm(),
    "learning rate ×40": Arm(rate=40.0),
    "learning rate ×40, ladder": Arm(rate=40.0, act=True),
    "clean, QK-norm": Arm(qk_norm=True),
    "learning rate ×40, QK-norm": Arm(rate=40.0, qk_norm=True),
    "attention": Arm(attention=True),
    "initialisation": Arm(std=1.0),
    "initialisation, QK-norm": Arm(std=1.0, qk_norm=True),
}


@dataclass(frozen=True)
class Config:
    """What to run.

    Attributes:
        parts: Of the question.
        arms: Of `ARMS`, for the story.
        ranked: Of `ARMS`, whose checkpoints are ranked and continued.
        seeds: Of initialisation and data order.
        steps: Length of a run.
        onset: First step with a fault.
        ranked_at: Steps of the checkpoints that are ranked.
        continued: Steps that each of them goes on.
        mix_steps: Length of a run on one of the texts.
        batch: Sequences a step.
        model: Shape.
        optimizer: Optimizer and snapshot ring.
        monitor: What is measured.
        alarms: Watching, and the pace of the ladder.
        rejudge: Whether recorded runs are judged, and their checkpoints ranked, anew.
        runs: Where runs, rows, texts and figure lie.
    """

    parts: tuple[Part, ...] = ("story", "ranking", "mixes")
    arms: tuple[str, ...] = tuple(ARMS)
    ranked: tuple[str, ...] = ("learning rate ×40", "attention")
    seeds: tuple[int, ...] = (720, 721, 722)
    steps: int = 800
    onset: int = 400
    ranked_at: tuple[int, ...] = (300, 400, 500, 600, 800)
    continued: int = 500
    mix_steps: int = 500
    batch: int = 16
    model: GPTConfig = DENSE
    optimizer: OptimizerConfig = field(default_factory=lambda: replace(OPTIMIZER, control=True))
    monitor: MonitorConfig = MONITOR
    alarms: AlarmConfig = ALARMS
    rejudge: bool = False
    runs: Path = Path("runs")


def main(config: Config) -> Result:
    """Run what is not there yet, print the tables and draw the figure."""
    file = config.runs / "grades.jsonl"
    texts = write_mixes(config.runs / "grades-texts")
    all_settings = []
    for part, names in plan(config).items():
        for seed in config.seeds:
            for name in names:
                run = mix_settings(config, name, texts, seed) if part == "mixes" else None
                run = run or settings_of(config, name, seed)
                settings = row_settings(config, part, name, run)
                all_settings.append(settings)
                if part not in config.parts:
                    continue
                measure = partial(row_of, config, part, name, run, texts)
                there = rows_there(file, [settings])
                if config.rejudge and part != "mixes" and there:
                    append_row(file, measure(there[0]) | {"settings": settings})
                measured(file, settings, measure)
    return ended(file, rows_there(file, all_settings), headline, tables, figure)


def plan(config: Config) -> dict[Part, tuple[str, ...]]:
    """What each part runs for every seed: arms, or texts."""
    return {"story": config.arms, "ranking": config.ranked, "mixes": MIXES}


def row_settings(config: Config, part: Part, name: str, run: TrainConfig) -> dict[str, Any]:
    """What a row is measured with, wherever runs and texts lie."""
    settings = identity(run) | {
        "data": None,
        "steps": run.steps,
        "part": part,
        "of": name,
        "window": config.alarms.window,
    }
    if part == "ranking":
        settings |= {"ranked_at": list(config.ranked_at), "continued": config.continued}
    return settings


def row_of(
    config: Config,
    part: Part,
    name: str,
    settings: TrainConfig,
    texts: dict[str, Path],
    before: Row | None = None,
) -> Row:
    """The row of one run and one part of the question.

    Judged anew where it is there `before`: checkpoints are not continued again.
    """
    recorded = run_one(settings)
    run = recorded
    if not settings.act:
        run = judged(recorded, settings.optimizer.warmup, config.alarms.window)
    row = {"kind": part, "arm": name, "seed": settings.seed}
    if part == "ranking":
        known = {x["step"]: x["continued"] for x in before["checkpoints"]} if before else None
        found = continue_all(settings, run, config.ranked_at, config.continued, known)
        return row | {"checkpoints": found, "onset": config.onset}
    graded = grades_of_texts(settings, texts)
    if part == "mixes":
        return row | {"held_out": held_out(recorded), "texts": graded}
    return row | story(config, name, run, held_out(recorded)) | {"texts": {"code": graded["code"]}}


def story(config: Config, name: str, run: Run, loss: float) -> Row:
    """What became of grade, alarms and loss in one run."""
    onset = 0 if ARMS[name].std is not None else config.onset
    alarms = [x for x in run.events if x["kind"] == "alarm" and x["step"] >= onset]
    first = lambda found: min((x["step"] - onset for x in found), default=None)
    steps, ratios = run.metrics[RATIO]
    later = ratios[(steps > onset) & (steps > config.optimizer.warmup)]
    before = ratios[(steps <= onset) & (steps > config.optimizer.warmup)]
    actions = [x for x in run.events if x["kind"] == "action" and ARMS[name].act]
    return {
        "onset": onset,
        "before": float(before[-4:].mean()) if len(before) else None,
        "lowest": float(later.min()),
        "late": float(ratios[-4:].mean()),
        "attention_entropy": float(run.metrics[ENTROPY][1][-4:].mean()),
        "grade_alarm": first([x for x in alarms if x["key"] == RATIO]),
        "first_alarm": first(alarms),
        "first_key": min(alarms, key=lambda x: x["step"])["key"] if alarms else None,
        "loss_alarm": first([x for x in alarms if x["key"] in LOSSES]),
        "held_out": loss,
        "actions": [f"{x['action']} {x['step']}" for x in actions if not x["dry"]],
        "stopped": any(x["kind"] == "stopped" for x in run.events),
        "curves": {
            "rank ratio of the worst layer": curve(run, RATIO, 25),
            "attention entropy": curve(run, ENTROPY, 50),
            "held-out loss": curve(run, HELD_OUT, 50),
        },
    }


def settings_of(config: Config, name: str, seed: int) -> TrainConfig:
    """The training run of one arm of the story."""
    arm = ARMS[name]
    model = replace(config.model, qk_norm=arm.qk_norm)
    if arm.std is not None:
        model = replace(model, std=arm.std)
    wrong = (Disturbance("learning rate", arm.rate, config.onset),) if arm.rate != 1 else ()
    words = name.replace(",", "").replace("×", "x").split()
    return TrainConfig(
        name=f"grades-{'-'.join(words)}-seed{seed}",
        runs=config.runs,
        steps=config.steps,
        seed=seed,
        batch=config.batch,
        model=model,
        optimizer=config.optimizer,
        monitor=config.monitor,
        fault=AttentionFault(7, 7, onset=config.onset),
        armed=arm.attention,
        disturbances=wrong,
        act=arm.act,
        alarms=config.alarms if arm.act else AlarmConfig(),
        evaluate_every=25,
        checkpoint_every=_checkpoints(config, name),
        keep=0,
        resume=True,
        quiet=True,
    )


def mix_settings(config: Config, mix: str, texts: dict[str, Path], seed: int) -> TrainConfig:
    """The training run on one of the texts, without any fault."""
    return replace(
        settings_of(config, "clean", seed),
        name=f"grades-{texts[mix].stem}-seed{seed}",
        data=texts[mix],
        steps=config.mix_steps,
        checkpoint_every=0,
    )


def _checkpoints(config: Config, name: str) -> int:
    """Steps between checkpoints: what the ladder goes back to, or what is ranked, or none."""
    if ARMS[name].act:
        return config.alarms.dwell // 2
    return gcd(*config.ranked_at) if name in config.ranked else 0


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
