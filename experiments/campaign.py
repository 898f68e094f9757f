"""Do the alarms notice what is broken, name it rightly, and keep quiet where nothing is?

Question: some thirty short runs, healthy or with one fault each (attention arithmetic at several
doses, learning rate, batch, balance loss, one dirty batch, repeated data, NaN, two at once), dense
and mixture of experts, are watched by the default alarms, which only write down what they see. How
often is the fault named right, how long after its onset and before the loss does the first alarm
come, how many alarms does a healthy run raise?

    python -m experiments.campaign table            all runs, judged: the tables
    python -m experiments.campaign table --again    recorded runs, judged anew by today's rules
    python -m experiments.campaign rescue           a run that --act is to save, with it and without

`table` takes about 23 minutes on one core, `rescue` 7. A run that is already there, or its row, is
not run again, so both may be interrupted. Rows are written to `runs/campaign.jsonl`, the figure to
`runs/campaign.html`. Results: `experiments/README.md`, from `experiments/results/campaign.jsonl`.

Runs are judged by what they recorded, as the alarms would have spoken while they went on (a test
holds the two equal): rules can be changed without training. The seeds are none of those on which
the thresholds were chosen. The diagnosis of a run is the one at its end, with all evidence in; the
first that was not "unknown" stands beside it. Every alarm of a clean run is a false one.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import plotly.graph_objects as go
import tyro

from experiments.loop.alarms import AlarmConfig
from experiments.support.arms import ARMS, CLEAN, EXPERTS, SMALL, run_of, truth_of
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
from experiments.support.tables import each, grouped, listed, listing, table
from experiments.train import Config as TrainConfig
from stabmon.alarms.calibration import poisson_bound

ALARMS = AlarmConfig(on=True, watch=100, verify=200, dwell=100)
BASE = replace(SMALL, runs=Path("runs/campaign"), alarms=ALARMS)
_DENSE = ("learning rate ×10", "batch ÷8", "dirty batch", "repeated data", "NaN in the gradient")
_DENSE += ("attention 7/7", "attention 7/7, learning rate ×10", "attention 7/0")
_EXPERTS = (CLEAN, "learning rate ×10", "batch ÷8", "balance loss off", "attention 7/7")
# In an order in which runs of one compiled program follow each other.
CASES = {name: ARMS[name] for name in (CLEAN, *_DENSE)}
CASES |= {f"{name}, experts": replace(ARMS[name], model=EXPERTS) for name in _EXPERTS}
CASES |= {"attention 6/6": ARMS["attention 6/6"]}
RESCUED = "learning rate ×40"
MOST_FALSE, LEAST_RIGHT = 1.0, 0.8


@dataclass(frozen=True)
class Config:
    """What to run.

    Attributes:
        command: table or rescue.
        seeds: Of the faulty runs.
        clean_seeds: Of the clean runs.
        steps: Length of the faulty runs.
        clean_steps: Of the clean runs, longer: what is healthy has time to drift.
        onset: First step with a fault.
        rescue_steps: Length of the runs of `rescue`.
        base: What all runs share, their alarms and the pace of the ladder included.
        cases: Names of the cases to run.
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
    base: TrainConfig = BASE
    cases: tuple[str, ...] = tuple(CASES)
    results: Path = Path("runs/campaign.jsonl")
    again: bool = False


def main(config: Config) -> Result:
    """Carry out `config.command`; all rows that there are then."""
    verdicts, rescues = plan(config)
    rescuing = config.command == "rescue"
    for name, run in rescues if rescuing else verdicts:
        measure = partial(rescue if rescuing else verdict, config, name, run)
        measured(config.results, settings_row(run), measure, config.again and not rescuing)
    wanted = [settings_row(run) for _, run in (*verdicts, *rescues)]
    return ended(config.results, rows_there(config.results, wanted), headline, tables, figure)


def plan(config: Config) -> tuple[list[tuple[str, TrainConfig]], list[tuple[str, TrainConfig]]]:
    """(case, run) of the verdicts; the same of the rescues, with the ladder at work."""
    verdicts, rescues = [], []
    for name in config.cases:
        clean = truth_of(CASES[name]) == CLEAN
        run = replace(config.base, steps=config.clean_steps if clean else config.steps)
        for seed in config.clean_seeds if clean else config.seeds:
            verdicts.append((name, run_of(run, name, CASES[name], seed, config.onset)))
    run = replace(config.base, steps=config.rescue_steps)
    for seed in config.seeds:
        faulty = run_of(run, f"rescue {RESCUED}", ARMS[RESCUED], seed, config.onset)
        rescues.append((RESCUED, acting(faulty, True)))
    return verdicts, rescues


def acting(run: TrainConfig, act: bool) -> TrainConfig:
    """A run that the ladder may act on, or the same program without."""
    return replace(
        run,
        name=f"{run.name}-act" if act else run.name,
        optimizer=replace(run.optimizer, control=True),
        act=act,
        checkpoint_every=run.alarms.dwell // 2,
    )


def verdict(config: Config, name: str, settings: TrainConfig) -> Row:
    """The row of one run, recorded before or now."""
    truth, warmup, alarms = truth_of(CASES[name]), settings.optimizer.warmup, settings.alarms
    run, steps = replayed(recorded(settings), warmup, alarms), settings.steps
    onset = steps if truth == CLEAN else config.onset
    row = judge(run, name, settings.seed, truth, onset, steps, warmup + alarms.window)
    return {"kind": "verdict"} | row | {"right": row["named"] == truth}


def rescue(config: Config, name: str, settings: TrainConfig) -> Row:
    """Held-out loss of a clean run, of a faulty one, and of the same with the ladder at work."""
    faulty = acting(replace(settings, name=settings.name.removesuffix("-act")), False)
    clean = replace(faulty, name=f"rescue-clean-seed{settings.seed}", disturbances=())
    arms = {"clean": clean, "faulty": faulty, "act": settings}
    runs = {arm: recorded(run) for arm, run in arms.items()}
    losses = {key: held_out(run) for key, run in runs.items()}
    story = [f"{x['action']} {x['step']}" for x in runs["act"].events if x["kind"] == "action"]
    excess = losses["act"] / losses["clean"] - 1
    row = {"kind": "rescue", "case": name, "seed": settings.seed, "steps": settings.steps, **losses}
    return row | {"excess": excess, "actions": story}


def tables(rows: list[Row]) -> str:
    """Cases, confusion, targets, false alarms, and rescued runs."""
    verdicts, saved = ([x for x in rows if x["kind"] == kind] for kind in ("verdict", "rescue"))
    joined = lambda name: each(lambda row: ", ".join(row[name]) or "–")
    parts = []
    if verdicts:
        named = lambda of, name: sum(row["named"] == name for row in of) or ""
        truths = grouped(verdicts, "truth")
        names = [*truths, *sorted({x["named"] for x in verdicts} - set(truths))]
        counts = {name: lambda of, name=name: named(of, name) for name in names}
        parts += [_cases(verdicts), table(verdicts, "truth", counts), listing(_targets(verdicts))]
    if false := [x for x in verdicts if x["false_alarms"] or x["false_actions"]]:
        told = {"false alarms": joined("false_alarms"), "actions advised": joined("false_actions")}
        parts.append(table(false, {"case": "case", "seed": "seed"}, told))
    if saved:
        losses = {"clean": "clean", "without the ladder": "faulty", "with it": "act"}
        columns = {head: each(name, ".3f") for head, name in losses.items()}
        columns |= {"above clean": each("excess", "+.1%"), "actions": joined("actions")}
        parts.append(table(saved, {"fault": "case", "seed": "seed"}, columns))
    return "\n\n".join(parts)


def headline(rows: list[Row]) -> str:
    """One line: whether all targets are met, and the numbers that decide it."""
    verdicts, saved = ([x for x in rows if x["kind"] == kind] for kind in ("verdict", "rescue"))
    right, faulty, alarms, steps, actions = _counts(verdicts)
    missed = any(x["met"] == "no" for x in _targets(verdicts))
    rate, bound = _rate(alarms, steps), _rate(poisson_bound(alarms), steps)
    line = (
        f"{'not met' if missed else 'met'}: {right} of {faulty} faults named right, {alarms} false "
        f"alarms and {actions} actions advised in {steps:,} clean steps ({rate} per 10,000, 95 % "
        f"upper bound {bound})"
    )
    if saved:
        worst = max(x["excess"] for x in saved)
        line += f"; `--act` ends {worst:+.1%} from the clean loss at worst in {len(saved)} runs"
    return line


def figure(rows: list[Row]) -> go.Figure:
    """First alarm of each faulty run after its onset, and the loss's."""
    drawn = panels(("",), columns=1)
    faulty = [x for x in rows if x["kind"] == "verdict" and x["truth"] != CLEAN]
    label = lambda x: f"{x['case']}, seed {x['seed']}"
    kinds = (
        ("first alarm, named right", "first_alarm", True, "circle", colour(1)),
        ("first alarm, not named right", "first_alarm", False, "x", colour(2)),
        ("alarm of the loss", "loss_alarm", None, "line-ns-open", colour(0)),
    )
    for name, key, right, symbol, painted in kinds:
        some = [x for x in faulty if x[key] is not None and right in (None, x["right"])]
        drawn.add_scatter(
            x=[x[key] for x in some],
            y=[label(x) for x in some],
            text=[x["named"] for x in some],
            mode="markers",
            marker={"symbol": symbol, "color": painted, "size": 10},
            name=name,
        )
    drawn.update_layout(
        height=150 + 22 * len(faulty),
        xaxis_title="steps after the onset of the fault",
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        yaxis={"autorange": "reversed", "categoryarray": [label(x) for x in faulty]},
    )
    return drawn


def _cases(verdicts: list[Row]) -> str:
    """A line for each case: seeds, diagnoses, lags and leads, in the order of the seeds."""
    bound = lambda x: "> " if x["loss_alarm"] is None else ""
    lead = lambda x: None if x["lead"] is None else f"{bound(x)}{x['lead']}"
    columns = {
        "steps": lambda of: listed(dict.fromkeys(x["steps"] for x in of), ","),
        "seeds": each("seed"),
        "named at the end": each(lambda x: f"{x['named']} {'✓' if x['right'] else '✗'}"),
        "first named": each("first_named"),
        "first alarm after onset": each("first_alarm"),
        "lead over loss": each(lead),
    }
    return table(verdicts, "case", columns)


def _targets(verdicts: list[Row]) -> list[dict[str, str]]:
    """What was wanted, what was measured."""
    right, faulty, alarms, steps, actions = _counts(verdicts)
    share = f"{right} of {faulty}, {right / max(faulty, 1):.0%}"
    false = f"{alarms} in {steps:,}; 95 % upper bound {_rate(poisson_bound(alarms), steps)}"
    few = 10_000 * alarms <= MOST_FALSE * steps
    clean = sum(x["truth"] == CLEAN for x in verdicts)
    found = {
        "at most 1 false alarm per 10,000 clean steps": (f"{_rate(alarms, steps)} ({false})", few),
        "at least 80 % of the faults named right": (share, right >= LEAST_RIGHT * faulty),
        "no action in a clean run": (f"{actions} advised, in {clean} clean runs", actions == 0),
    }
    said = {True: "yes", False: "no"}
    return [{"target": x, "measured": y, "met": said[met]} for x, (y, met) in found.items()]


def _counts(verdicts: list[Row]) -> tuple[int, int, int, int, int]:
    """Faults named right, faults, false alarms, clean steps, false actions; of clean runs alone."""
    clean = [x for x in verdicts if x["truth"] == CLEAN]
    faulty = [x for x in verdicts if x["truth"] != CLEAN]
    return (
        sum(x["right"] for x in faulty),
        len(faulty),
        sum(len(x["false_alarms"]) for x in clean),
        sum(x["clean_steps"] for x in clean),
        sum(len(x["false_actions"]) for x in clean),
    )


def _rate(alarms: float, steps: int) -> str:
    return f"{10_000 * alarms / max(steps, 1):.1f}"


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
