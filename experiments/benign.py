"""Do the alarms keep quiet where a healthy run merely changes?

Question: schedules, optimizers, batch, context, text and architecture differ from run to run, and
change within one. How many alarms, and how much advice, does that draw from the default alarms?

    python -m experiments.benign                 all kinds, judged: the table
    python -m experiments.benign --again         recorded runs, judged anew by today's rules
    python -m experiments.benign --cases lion    some of them

A run takes about a minute on one core, a run that is there is not trained again. Rows are written
to `runs/benign.jsonl`. Every alarm is a false one. The seeds are development seeds: rules were
changed with these runs in sight.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import plotly.graph_objects as go
import tyro

from experiments.campaign import ALARMS
from experiments.support.arms import CLEAN, EXPERTS, SMALL, Arm, run_of
from experiments.support.ending import Result, ended
from experiments.support.figures import colour, panels
from experiments.support.judging import judge, replayed
from experiments.support.recorded import Row, measured, recorded, rows_there, settings_row
from experiments.support.tables import each, listing, table
from experiments.train import Config as TrainConfig
from stabmon.alarms.calibration import poisson_bound

BASE = replace(SMALL, runs=Path("runs/benign"), alarms=ALARMS)
_STEPS, _ONSET = 3000, 1200
_MODERN = {"kv_heads": 2, "positions": "rope", "activation": "swiglu"}
_TO_ZERO = {"schedule": "cosine", "floor": 0.0}
CASES = {
    "cosine to 0": Arm(optimizer=_TO_ZERO),
    "cosine to 0, 4 layers, GQA, RoPE, SwiGLU": Arm(
        model={"layers": 4, **_MODERN}, optimizer=_TO_ZERO
    ),
    "warm restart": Arm(optimizer={"schedule": "restart"}),
    "context ×2": Arm(before=(("context", 2.0),)),
    "lion": Arm(optimizer={"base": "lion", "learning_rate": 3e-4}),
    "muon": Arm(optimizer={"base": "muon"}),
    "adafactor": Arm(optimizer={"base": "adafactor", "learning_rate": 2e-2}),
    "SGD with momentum": Arm(optimizer={"base": "sgd", "learning_rate": 0.3}),
    "AdamW with clip 1": Arm(optimizer={"clip": 1.0}),
    "WSD": Arm(optimizer={"schedule": "wsd", "floor": 0.0}),
    "WSD, experts": Arm(model=EXPERTS, optimizer={"schedule": "wsd", "floor": 0.0}),
    "context ×2, RoPE": Arm(before=(("context", 2.0),), model=_MODERN),
    "constant": Arm(),
    "linear to 0": Arm(optimizer={"schedule": "linear", "floor": 0.0}),
    "rate ÷3 at a step": Arm(optimizer={"schedule": "step"}),
    "batch ×4": Arm(before=(("batch", 4.0),)),
    "30 % other text": Arm(disturbances=(("other text", 0.3),)),
    "other text alone": Arm(disturbances=(("other text", 1.0),)),
    "30 % other text, experts": Arm(disturbances=(("other text", 0.3),), model=EXPERTS),
    "schedule-free": Arm(optimizer={"base": "schedule-free"}),
    "peak ×3": Arm(optimizer={"learning_rate": 6e-3}),
    "peak ÷6": Arm(optimizer={"learning_rate": 3.3e-4}),
    "QK-norm, GQA, RoPE, SwiGLU": Arm(model={"qk_norm": True, **_MODERN}),
    "cosine to 0, experts": Arm(model=EXPERTS, optimizer=_TO_ZERO),
    "bfloat16": Arm(model={"dtype": "bfloat16"}),
}


@dataclass(frozen=True)
class Config:
    """What to run.

    Attributes:
        seeds: Of each kind.
        steps: Length of a run; a schedule ends with it.
        onset: Step of a change within a run.
        base: What all runs share.
        cases: Names of the kinds.
        results: Where the rows go.
        again: Whether recorded runs are judged anew.
    """

    seeds: tuple[int, ...] = (500, 501, 502)
    steps: int = _STEPS
    onset: int = _ONSET
    base: TrainConfig = BASE
    cases: tuple[str, ...] = tuple(CASES)
    results: Path = Path("runs/benign.jsonl")
    again: bool = False


def main(config: Config) -> Result:
    """Runs and judges; all rows that were asked for."""
    runs = plan(config)
    for name, run in runs:
        measured(config.results, settings_row(run), partial(verdict, name, run), config.again)
    rows = rows_there(config.results, [settings_row(run) for _, run in runs])
    return ended(config.results, rows, headline, tables, figure)


def plan(config: Config) -> list[tuple[str, TrainConfig]]:
    """(kind, run), seed by seed, so that an interrupted suite has every kind."""
    return [
        (name, training(config.base, name, seed, config.steps, config.onset))
        for seed in config.seeds
        for name in config.cases
    ]


def training(base: TrainConfig, name: str, seed: int, steps: int, onset: int) -> TrainConfig:
    """The training run of a kind."""
    run = run_of(replace(base, steps=steps), name, CASES[name], seed, onset)
    decay = steps - run.optimizer.warmup
    return replace(run, optimizer=replace(run.optimizer, decay=decay))


def verdict(name: str, settings: TrainConfig) -> Row:
    """The row of one run, recorded before or now."""
    warmup, alarms, steps = settings.optimizer.warmup, settings.alarms, settings.steps
    run = replayed(recorded(settings), warmup, alarms)
    judged_from = warmup + alarms.window
    return judge(run, name, settings.seed, CLEAN, steps, steps, judged_from)


def tables(rows: list[Row]) -> str:
    """A line for each kind, and the rates."""
    columns = {
        "seeds": each("seed"),
        "alarms": each(lambda row: len(row["false_alarms"])),
        "first": each(lambda row: (row["false_alarms"] or ["–"])[0]),
        "named": each("named"),
        "actions advised": each(lambda row: len(row["false_actions"])),
    }
    return "\n\n".join([table(rows, "case", columns), listing([_rates(rows)])])


def headline(rows: list[Row]) -> str:
    """One line: whether the targets are met, and the rate."""
    alarms, steps, quiet, actions = _counts(rows)
    met = 10_000 * alarms <= steps and quiet >= 0.9 * len(rows) and not actions
    found = _rates(rows)
    return (
        f"{'met' if met else 'not met'}: {quiet} of {len(rows)} healthy runs of "
        f"{len({x['case'] for x in rows})} kinds without any alarm, {alarms} alarms in {steps:,} "
        f"steps ({found['per 10,000 steps']} per 10,000, 95 % upper bound "
        f"{found['95 % upper bound']}), {actions} actions advised (development seeds)"
    )


def figure(rows: list[Row]) -> go.Figure:
    """Alarms of each run."""
    drawn = panels(("",), columns=1)
    drawn.add_bar(
        x=[len(x["false_alarms"]) for x in rows],
        y=[f"{x['case']}, seed {x['seed']}" for x in rows],
        orientation="h",
        marker_color=colour(1),
    )
    drawn.update_layout(height=150 + 18 * len(rows), xaxis_title="false alarms")
    return drawn


def _counts(rows: list[Row]) -> tuple[int, int, int, int]:
    """Alarms, steps in which one was possible, runs without any, actions advised."""
    return (
        sum(len(x["false_alarms"]) for x in rows),
        sum(x["clean_steps"] for x in rows),
        sum(not x["false_alarms"] for x in rows),
        sum(len(x["false_actions"]) for x in rows),
    )


def _rates(rows: list[Row]) -> dict[str, str]:
    alarms, steps, quiet, actions = _counts(rows)
    per = 10_000 / max(steps, 1)
    return {
        "alarms": f"{alarms} in {steps:,} steps",
        "per 10,000 steps": f"{alarms * per:.2f}",
        "95 % upper bound": f"{poisson_bound(alarms) * per:.2f}",
        "runs without any": f"{quiet} of {len(rows)}",
        "actions advised": str(actions),
    }


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
