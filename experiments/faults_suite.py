"""Which faults do the alarms notice, and what do they call those that are in no catalogue?

Question: thirty kinds of fault, of data, optimizer, arithmetic and modules, come on in the middle
of a run. Is anything raised, how long before the loss, and is the name one of those accepted for
that kind, "unknown", or another one said with confidence?

    python -m experiments.faults_suite                       all kinds, judged: the tables
    python -m experiments.faults_suite --again               judged anew by today's rules
    python -m experiments.faults_suite --cases leak          some of them

A run takes about half a minute on one core. Rows are written to `runs/faults_suite.jsonl`. The
seeds are development seeds: rules were changed with these runs in sight. A fault that leaves the
held-out loss within 2 % of the clean run's of its seed is not called harmful.
"""

from dataclasses import dataclass, replace
from functools import partial
from math import nan
from pathlib import Path

import plotly.graph_objects as go
import tyro

from experiments.campaign import ALARMS
from experiments.faults import AttentionFault
from experiments.support.arms import CLEAN, EXPERTS, SMALL, Arm, run_of
from experiments.support.ending import Result, ended
from experiments.support.figures import colour, panels
from experiments.support.judging import judge, replayed
from experiments.support.recorded import (
    Row,
    held_out,
    measured,
    recorded,
    rows_there,
    settings_row,
)
from experiments.support.tables import each, grouped, listing, table
from experiments.train import Config as TrainConfig
from stabmon.alarms.signatures import Fault

BASE = replace(SMALL, runs=Path("runs/faults_suite"), alarms=ALARMS)
HARM = 0.02
_MODERN = {"kv_heads": 2, "positions": "rope", "activation": "swiglu"}
_COSINE = {"schedule": "cosine", "floor": 0.0}


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        arm: What goes wrong.
        names: Names that are right; empty: the catalogue has none, "unknown" is.
    """

    arm: Arm
    names: tuple[Fault, ...] = ()


_ATTENTION, _RATE = (Fault.ATTENTION,), (Fault.LEARNING_RATE,)
_DATA = (Fault.REPEATED_DATA,)
CASES = {
    CLEAN: Kind(Arm()),
    "10 % random tokens": Kind(Arm(disturbances=(("dirty batch", 0.1),)), (Fault.DATA,)),
    "50 % random tokens": Kind(Arm(disturbances=(("dirty batch", 0.5),)), (Fault.DATA,)),
    "shifted targets": Kind(Arm(disturbances=(("shifted targets", 1.0),)), (Fault.DATA,)),
    "leak": Kind(Arm(disturbances=(("leak", 0.5),)), _DATA),
    "repeated data": Kind(Arm(disturbances=(("repeated data", 8.0),)), _DATA),
    "one dirty batch": Kind(
        Arm(disturbances=(("dirty batch", 1.0),), brief=True), (Fault.DIRTY_BATCH,)
    ),
    "batch ÷8": Kind(Arm(disturbances=(("batch", 8.0),)), (Fault.BALANCE,)),
    "rate ×0": Kind(Arm(disturbances=(("learning rate", 0.0),)), (Fault.STILL,)),
    "rate ×3": Kind(Arm(disturbances=(("learning rate", 3.0),)), _RATE),
    "rate ×10": Kind(Arm(disturbances=(("learning rate", 10.0),)), _RATE),
    "rate creeping to ×20": Kind(Arm(disturbances=(("creeping rate", 20.0),)), _RATE),
    "rate with the wrong sign": Kind(Arm(disturbances=(("learning rate", -1.0),))),
    "gradient ×1e-9": Kind(Arm(disturbances=(("gradient", 1e-9),)), (Fault.STILL,)),
    "gradient ×-1": Kind(Arm(disturbances=(("gradient", -1.0),))),
    "one NaN in the gradient": Kind(
        Arm(disturbances=(("gradient", nan),), brief=True), (Fault.NONFINITE,)
    ),
    "attention 7/7": Kind(Arm(AttentionFault(7, 7)), _ATTENTION),
    "attention 7/0": Kind(Arm(AttentionFault(7, 0)), _ATTENTION),
    "attention 8/8, one layer of four": Kind(
        Arm(AttentionFault(8, 8, layers=(1,)), model={"layers": 4}), _ATTENTION
    ),
    "attention 7/7, GQA, RoPE, SwiGLU": Kind(Arm(AttentionFault(7, 7), model=_MODERN), _ATTENTION),
    "attention 7/7 under a cosine": Kind(Arm(AttentionFault(7, 7), optimizer=_COSINE), _ATTENTION),
    "attention 7/7 under Lion": Kind(
        Arm(AttentionFault(7, 7), optimizer={"base": "lion", "learning_rate": 3e-4}), _ATTENTION
    ),
    "attention 7/7, experts": Kind(Arm(AttentionFault(7, 7), model=EXPERTS), _ATTENTION),
    "rate ×10, experts": Kind(Arm(disturbances=(("learning rate", 10.0),), model=EXPERTS), _RATE),
    "balance loss off": Kind(
        Arm(disturbances=(("auxiliary", 0.0),), model=EXPERTS), (Fault.BALANCE,)
    ),
    "balance loss with the wrong sign": Kind(
        Arm(disturbances=(("auxiliary", -1.0),), model=EXPERTS), (Fault.BALANCE,)
    ),
    "10 % random tokens, experts": Kind(
        Arm(disturbances=(("dirty batch", 0.1),), model=EXPERTS), (Fault.DATA,)
    ),
}


@dataclass(frozen=True)
class Config:
    """What to run.

    Attributes:
        seeds: Of each kind.
        steps: Length of a run.
        onset: First step with the fault.
        base: What all runs share.
        cases: Names of the kinds.
        results: Where the rows go.
        again: Whether recorded runs are judged anew.
    """

    seeds: tuple[int, ...] = (510, 511, 512)
    steps: int = 1200
    onset: int = 500
    base: TrainConfig = BASE
    cases: tuple[str, ...] = tuple(CASES)
    results: Path = Path("runs/faults_suite.jsonl")
    again: bool = False


def main(config: Config) -> Result:
    """Runs and judges; all rows that were asked for."""
    runs = plan(config)
    for name, run in runs:
        measure = partial(verdict, config, name, run)
        measured(config.results, settings_row(run), measure, config.again)
    rows = rows_there(config.results, [settings_row(run) for _, run in runs])
    return ended(config.results, rows, headline, tables, figure)


def plan(config: Config) -> list[tuple[str, TrainConfig]]:
    """(kind, run), seed by seed, so that an interrupted suite has every kind."""
    return [(name, training(config, name, seed)) for seed in config.seeds for name in config.cases]


def training(config: Config, name: str, seed: int) -> TrainConfig:
    """The training run of a kind; a schedule ends with it."""
    base = replace(config.base, steps=config.steps)
    run = run_of(base, name, CASES[name].arm, seed, config.onset)
    if run.optimizer.schedule == "constant":
        return run
    decay = config.steps - run.optimizer.warmup
    return replace(run, optimizer=replace(run.optimizer, decay=decay))


def verdict(config: Config, name: str, settings: TrainConfig) -> Row:
    """The row of one run, recorded before or now."""
    warmup, alarms, names = settings.optimizer.warmup, settings.alarms, CASES[name].names
    run = replayed(recorded(settings), warmup, alarms)
    truth = CLEAN if name == CLEAN else str(names[0] if names else Fault.UNKNOWN)
    onset = config.steps if name == CLEAN else config.onset
    first = warmup + alarms.window
    row = judge(run, name, settings.seed, truth, onset, config.steps, first)
    outcome = outcome_of(row["named"], row["first_alarm"] is not None, names)
    return row | {"outcome": outcome, "held_out": held_out(run)}


def outcome_of(named: str, noticed: bool, names: tuple[Fault, ...]) -> str:
    """What a diagnosis at the end is worth.

    >>> outcome_of("unknown", True, ())
    'right'
    """
    if not noticed:
        return "not noticed"
    if named == Fault.UNKNOWN:
        return "unknown" if names else "right"
    return "right" if named in names else "wrong"


def tables(rows: list[Row]) -> str:
    """A line for each kind, the confusion matrix, the counts."""
    columns = {
        "seeds": each("seed"),
        "said at the end": each("named"),
        "outcome": each(lambda row: "–" if row["case"] == CLEAN else row["outcome"]),
        "first alarm after onset": each("first_alarm"),
        "held-out loss": each("held_out", ".2f"),
        "harmful": each(lambda row: {True: "yes", False: "no", None: "?"}[_harmful(row, rows)]),
    }
    faulty = _faulty(rows)
    truths = grouped(faulty, "truth")
    names = [*truths, *sorted({x["named"] for x in faulty} - set(truths))]
    said = lambda name: lambda of: sum(row["named"] == name for row in of) or ""
    confusion = table(faulty, "truth", {name: said(name) for name in names})
    return "\n\n".join([table(rows, "case", columns), confusion, listing([_counts(rows)])])


def headline(rows: list[Row]) -> str:
    """One line: whether the targets are met, and the counts."""
    found = _counts(rows)
    harmful = [x for x in _faulty(rows) if _harmful(x, rows)]
    wrong = sum(x["outcome"] == "wrong" for x in harmful)
    seen = sum(x["outcome"] != "not noticed" for x in harmful)
    met = seen >= 0.9 * len(harmful) and wrong <= 0.05 * len(harmful)
    kinds = len({x["case"] for x in _faulty(rows)})
    return (
        f"{'met' if met else 'not met'}: of {len(harmful)} harmful faults ({kinds} kinds tried) "
        f"{seen} noticed, {wrong} called by a wrong name; of all {found['runs']}: "
        f"{found['right']} right, {found['unknown']} unknown, {found['wrong']} wrong, "
        f"{found['not noticed']} not noticed (development seeds)"
    )


def figure(rows: list[Row]) -> go.Figure:
    """Steps from the onset to the first alarm."""
    drawn = panels(("",), columns=1)
    for i, outcome in enumerate(("right", "unknown", "wrong")):
        some = [x for x in _faulty(rows) if x["outcome"] == outcome]
        drawn.add_scatter(
            x=[x["first_alarm"] for x in some],
            y=[f"{x['case']}, seed {x['seed']}" for x in some],
            text=[x["named"] for x in some],
            mode="markers",
            marker={"color": colour(i), "size": 10},
            name=outcome,
        )
    drawn.update_layout(height=200 + 20 * len(rows), xaxis_title="steps after the onset")
    return drawn


def _faulty(rows: list[Row]) -> list[Row]:
    return [x for x in rows if x["case"] != CLEAN]


def _harmful(row: Row, rows: list[Row]) -> bool | None:
    """Whether a run ended above the clean one of its seed; None where there is no such run.

    The clean run is of the default model: for other models this cannot be told.
    """
    arm = CASES[row["case"]].arm
    clean = [x for x in rows if x["case"] == CLEAN and x["seed"] == row["seed"]]
    if not clean or arm.model or arm.optimizer:
        return None
    # Of a run that broke there is no finite loss.
    return not row["held_out"] <= (1 + HARM) * clean[0]["held_out"]


def _counts(rows: list[Row]) -> Row:
    outcomes = ("right", "unknown", "wrong", "not noticed")
    faulty = _faulty(rows)
    return {"runs": len(faulty)} | {x: sum(y["outcome"] == x for y in faulty) for x in outcomes}


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
