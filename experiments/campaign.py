"""Do the alarms notice what is broken, name it rightly, and keep quiet where nothing is?

Question: some thirty short runs, healthy or with one fault each (attention arithmetic at several
doses, learning rate, batch, balance loss, one dirty batch, repeated data, NaN, two at once), dense
and mixture of experts, are watched by the default alarms, which only write down what they see. How
often is the fault named right, how long after its onset and before the loss does the first alarm
come, how many alarms does a healthy run raise?

    python -m experiments.campaign table      all runs, judged: the tables
    python -m experiments.campaign rescue     a run that --act is to save, with and without it

    python -m experiments.campaign table --again     recorded runs, judged anew by today's rules

`table` takes about 23 minutes on one core, `rescue` 7. A run that is already there, or its row, is
not run again, so both may be interrupted. Rows are written to `runs/campaign.jsonl`, the figure to
`runs/campaign.html`. Results: `experiments/README.md`, from `experiments/results/campaign.jsonl`.

Runs are judged by a replay of what they recorded, which says what the alarms say while a run goes
on (a test holds them equal): so rules can be changed without training, and rows are always those
of one set of rules.

The seeds are none of those on which the thresholds were chosen. What counts as the diagnosis of a
run is the one that stands at its end, with all evidence in; the first that was not "unknown" is
listed beside it. Every alarm of a clean run is a false one. Clean runs are longer than faulty ones,
so that what is healthy has time to drift.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from experiments.loop.acting import AlarmConfig
from experiments.loop.faults import AttentionFault, Disturbance, Kind
from experiments.loop.optimizer import OptimizerConfig
from experiments.loop.step import MonitorConfig
from experiments.support.campaign_tables import figure, headline, tables
from experiments.support.ending import Result, ended
from experiments.support.verdicts import CLEAN, judge
from experiments.train import Config as TrainConfig
from experiments.train import train
from models.config import GPTConfig
from stabmon.alarms.signatures import Fault
from stabmon.alarms.standard import standard_detectors
from stabmon.recovery.ladder import Policy
from stabmon.recovery.ledger import CheckpointLedger
from stabmon.recovery.recovery import Recovery
from stabmon.recovery.replay import replay_events
from stabmon.recovery.watcher import Watcher
from stabmon.runs.jsonl import plain, read_jsonl
from stabmon.runs.run import Run, load_run

DENSE = GPTConfig(layers=2, model=64, heads=4, context=32, backend="flash")
EXPERTS = replace(DENSE, experts=8, feedforward=128)
OPTIMIZER = OptimizerConfig(learning_rate=2e-3, every=25, keep=8)
MONITOR = MonitorConfig(lags=(50, 200), delta=25, activations=25)
ALARMS = AlarmConfig(on=True, watch=100, verify=200, dwell=100)


@dataclass(frozen=True)
class Case:
    """One kind of run: what is injected, and what the alarms should call it.

    Attributes:
        truth: The diagnosis that is right; `CLEAN` if there should be none.
        attention: Mantissa bits that O and dO lose in the attention backward.
        disturbances: {kind: amount} of `faults.Disturbance`.
        brief: Whether they last for one step only.
        moe: Whether the model has experts.
    """

    truth: str
    attention: tuple[int, int] | None = None
    disturbances: tuple[tuple[Kind, float], ...] = ()
    brief: bool = False
    moe: bool = False


# In an order in which runs of one compiled program follow each other.
CASES = {
    "clean": Case(CLEAN),
    "learning rate ×10": Case(Fault.LEARNING_RATE, None, (("learning rate", 10),)),
    "batch ÷8": Case(Fault.BALANCE, None, (("batch", 8),)),
    "dirty batch": Case(Fault.DIRTY_BATCH, None, (("dirty batch", 1),), brief=True),
    "repeated data": Case(Fault.REPEATED_DATA, None, (("repeated data", 8),)),
    "NaN in the gradient": Case(Fault.NONFINITE, None, (("gradient", math.nan),), brief=True),
    "attention 7/7": Case(Fault.ATTENTION, (7, 7)),
    "attention 7/7, learning rate ×10": Case(Fault.SEVERAL, (7, 7), (("learning rate", 10),)),
    "attention 7/0": Case(Fault.ATTENTION, (7, 0)),
    "clean, experts": Case(CLEAN, moe=True),
    "learning rate ×10, experts": Case(
        Fault.LEARNING_RATE, None, (("learning rate", 10),), moe=True
    ),
    "batch ÷8, experts": Case(Fault.BALANCE, None, (("batch", 8),), moe=True),
    "balance loss off, experts": Case(Fault.BALANCE, None, (("auxiliary", 0),), moe=True),
    "attention 7/7, experts": Case(Fault.ATTENTION, (7, 7), moe=True),
    "attention 6/6": Case(Fault.ATTENTION, (6, 6)),
}
RESCUED = {"learning rate ×40": Case(Fault.LEARNING_RATE, None, (("learning rate", 40),))}


@dataclass(frozen=True)
class Config:
    """What to run.

    Attributes:
        command: table or rescue.
        seeds: Seeds of the faulty runs.
        clean_seeds: Seeds of the clean runs.
        steps: Length of the faulty runs.
        clean_steps: Length of the clean runs.
        onset: First step with a fault.
        rescue_steps: Length of the runs of `rescue`.
        batch: Sequences a step.
        dense: Shape of the dense model.
        experts: Shape of the model with experts.
        optimizer: Optimizer and snapshot ring of every run.
        monitor: What is measured.
        alarms: Watching, and the pace of the ladder.
        cases: Names of the cases to run; empty: all.
        runs: Where the runs lie.
        results: Where the rows go.
        again: Whether recorded runs are judged anew.
    """

    command: Annotated[Literal["table", "rescue"], tyro.conf.Positional] = "table"
    seeds: tuple[int, ...] = (400, 401, 402)
    clean_seeds: tuple[int, ...] = (400, 401, 402, 403)
    steps: int = 1200
    clean_steps: int = 4100
    onset: int = 500
    rescue_steps: int = 2000
    batch: int = 16
    dense: GPTConfig = DENSE
    experts: GPTConfig = EXPERTS
    optimizer: OptimizerConfig = OPTIMIZER
    monitor: MonitorConfig = MONITOR
    alarms: AlarmConfig = ALARMS
    cases: tuple[str, ...] = ()
    runs: Path = Path("runs/campaign")
    results: Path = Path("runs/campaign.jsonl")
    again: bool = False


def main(config: Config) -> Result:
    """Carry out `config.command`; all rows that there are then."""
    rows = {_identity(x): x for x in read_jsonl(config.results)}
    if config.command == "rescue":
        wanted = [("rescue", x, s, config.rescue_steps) for x in RESCUED for s in config.seeds]
    else:
        wanted = [
            ("verdict", name, seed, config.clean_steps if clean else config.steps)
            for name, case in CASES.items()
            if not config.cases or name in config.cases
            for clean in [case.truth == CLEAN]
            for seed in (config.clean_seeds if clean else config.seeds)
        ]
    for kind, name, seed, steps in wanted:
        if (kind, name, seed, steps) in rows and not config.again:
            continue
        if kind == "rescue":
            row = rescue(config, name, seed)
        else:
            row = verdict(config, name, seed, steps)
        rows[kind, name, seed, steps] = row
        write(config.results, list(rows.values()))
        said = row["named"] if kind == "verdict" else f"{row['excess']:+.1%} of the clean loss"
        print(f"{name}, seed {seed}: {said}", flush=True)
    return ended(config.results, list(rows.values()), headline, tables, figure)


def verdict(config: Config, name: str, seed: int, steps: int) -> dict[str, Any]:
    """The row of one run, recorded before or now."""
    case, alarms = CASES[name], config.alarms
    run = run_one(config, name, case, seed, steps)
    policy = Policy(watch=alarms.watch, verify=alarms.verify)
    board = standard_detectors(config.optimizer.warmup, alarms.window)
    ledger = CheckpointLedger(alarms.dwell, alarms.min_grade)
    events = replay_events(run, Watcher(board, Recovery(policy, ledger)))
    onset = steps if case.truth == CLEAN else config.onset
    judged_from = config.optimizer.warmup + alarms.window
    return judge(events, name, seed, case.truth, onset, steps, judged_from).row()


def _identity(row: dict[str, Any]) -> tuple[str, str, int, int]:
    return row["kind"], row["case"], row["seed"], row["steps"]


def run_one(
    config: Config, name: str, case: Case, seed: int, steps: int, act: bool | None = None
) -> Run:
    """One run, unless it is there already; `act` given, one of the rescue.

    Raises:
        KeyboardInterrupt: It was interrupted; it is saved, and the next call goes on with it.
    """
    end = config.onset + 1 if case.brief else None
    extra = [Disturbance(kind, x, config.onset, end) for kind, x in case.disturbances]
    fault = None
    if case.attention is not None:
        fault = AttentionFault(*case.attention, onset=config.onset)
    label = "-".join(name.replace(",", "").replace("/", "_").split())
    if act is not None:
        label = f"rescue-{label}" + ("-act" if act else "")
    settings = TrainConfig(
        name=f"{label}-{seed}",
        runs=config.runs,
        steps=steps,
        seed=seed,
        batch=config.batch,
        model=config.experts if case.moe else config.dense,
        # A factor that can be changed, where none will be too: the same program for both.
        optimizer=replace(config.optimizer, control=act is not None),
        monitor=config.monitor,
        fault=fault,
        disturbances=tuple(extra),
        act=bool(act),
        alarms=config.alarms,
        evaluate_every=25,
        checkpoint_every=0 if act is None else config.alarms.dwell // 2,
        resume=True,
        quiet=True,
    )
    folder = config.runs / settings.name
    ended = {"finished", "stopped"}
    if not (folder / "config.json").exists() or not ended & {
        x["kind"] for x in load_run(folder).events
    }:
        result = train(settings)
        if result.step < steps and result.code == 0:
            raise KeyboardInterrupt(f"{folder} was interrupted at step {result.step}")
    return load_run(folder)


def rescue(config: Config, name: str, seed: int) -> dict[str, Any]:
    """Held-out loss of a clean run, of a faulty one, and of the same with the ladder at work."""
    steps, case, clean = config.rescue_steps, RESCUED[name], Case(CLEAN)
    runs = {
        "clean": run_one(config, "clean", clean, seed, steps, False),
        "faulty": run_one(config, name, case, seed, steps, False),
        "act": run_one(config, name, case, seed, steps, True),
    }
    losses = {key: held_out(run) for key, run in runs.items()}
    story = [f"{x['action']} {x['step']}" for x in runs["act"].events if x["kind"] == "action"]
    excess = losses["act"] / losses["clean"] - 1
    row = {"kind": "rescue", "case": name, "seed": seed, "steps": steps, **losses}
    return row | {"excess": excess, "actions": story}


def held_out(run: Run) -> float:
    """Held-out loss at the end, NaN for a run that the ladder stopped."""
    ends = [x["held_out"] for x in run.events if x["kind"] == "finished"]
    return float(ends[-1]) if ends else math.nan


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Rows as JSON lines, in place of what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(plain(row)) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
