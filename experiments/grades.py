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
does and continued without the fault (`continuing.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import plotly.graph_objects as go
import tyro

from experiments.campaign import ALARMS
from experiments.faults import AttentionFault
from experiments.loop.alarms import AlarmConfig
from experiments.support.arms import SMALL, run_of
from experiments.support.continuing import continue_all
from experiments.support.ending import Result, ended
from experiments.support.figures import curves
from experiments.support.grading import (
    ARMS,
    EARLY,
    FALLS,
    HEALED,
    WINS,
    actions_of,
    acts,
    claims,
    correlations,
    firsts,
    story,
    wins_of,
)
from experiments.support.judging import claims_table, overall, replayed
from experiments.support.recorded import (
    Row,
    held_out,
    measured,
    recorded,
    rows_there,
    settings_row,
)
from experiments.support.states import grades_of_texts
from experiments.support.tables import each, grouped, listed, table, value_of
from experiments.support.text_mixes import MIXES, write_mixes
from experiments.train import Config as TrainConfig
from stabmon.alarms.detectors.grades import grade_of

Part = Literal["story", "ranking", "mixes"]
# A factor that can be changed, where none will be too: one program for all.
BASE = replace(
    SMALL,
    steps=800,
    fault=AttentionFault(7, 7),
    optimizer=replace(SMALL.optimizer, control=True),
)
CURVES = ("rank ratio of the worst layer", "attention entropy", "held-out loss")
# Claims of the headline, and how they are put there.
_SHORT = {FALLS: "the grade falls in", EARLY: "its alarm before the loss's in"}
_SHORT |= {HEALED: "the ladder ends within 5 % of clean in", WINS: "the healthier checkpoint wins"}


@dataclass(frozen=True)
class Config:
    """What to run.

    Attributes:
        parts: Of the question.
        arms: Of `grading.ARMS`, for the story.
        ranked: Those whose checkpoints are ranked and continued.
        seeds: Of initialisation and data order.
        onset: First step with a fault.
        ranked_at: Steps of the checkpoints that are ranked.
        continued: Steps that each of them goes on.
        mix_steps: Length of a run on one of the texts.
        base: What all runs share.
        alarms: Watching, and the pace of the ladder.
        rejudge: Whether recorded runs are judged, and their checkpoints ranked, anew.
    """

    parts: tuple[Part, ...] = ("story", "ranking", "mixes")
    arms: tuple[str, ...] = tuple(ARMS)
    ranked: tuple[str, ...] = ("learning rate ×40", "attention")
    seeds: tuple[int, ...] = (720, 721, 722)
    onset: int = 400
    ranked_at: tuple[int, ...] = (300, 400, 500, 600, 800)
    continued: int = 500
    mix_steps: int = 500
    base: TrainConfig = BASE
    alarms: AlarmConfig = ALARMS
    rejudge: bool = False


def main(config: Config) -> Result:
    """Run what is not there yet, print the tables and draw the figure."""
    file = config.base.runs / "grades.jsonl"
    texts = write_mixes(config.base.runs / "grades-texts")
    wanted = []
    plan: dict[Part, tuple[str, ...]]
    plan = {"story": config.arms, "ranking": config.ranked, "mixes": MIXES}
    for part, names in plan.items():
        for seed in config.seeds:
            for name in names:
                run = train_config(config, part, name, seed, texts)
                settings = row_settings(config, part, name, run)
                wanted.append(settings)
                if part not in config.parts:
                    continue
                there = rows_there(file, [settings])
                before = there[0] if there else None
                measure = partial(row_of, config, part, name, run, texts, before)
                measured(file, settings, measure, config.rejudge and part != "mixes")
    return ended(file, rows_there(file, wanted), headline, tables, figure)


def row_settings(config: Config, part: Part, name: str, run: TrainConfig) -> Row:
    """What a row is measured with, wherever runs and texts lie."""
    about = {"data": None, "part": part, "of": name, "window": config.alarms.window}
    if part == "ranking":
        about |= {"ranked_at": list(config.ranked_at), "continued": config.continued}
    return settings_row(run) | about


def row_of(
    config: Config,
    part: Part,
    name: str,
    settings: TrainConfig,
    texts: Mapping[str, Path],
    before: Row | None,
) -> Row:
    """The row of one run and one part of the question.

    Judged anew where it is there `before`: checkpoints are not continued again.
    """
    whole, warmup = recorded(settings), settings.optimizer.warmup
    row = {"kind": part, "arm": name, "seed": settings.seed}
    if part == "mixes":
        return row | {"held_out": held_out(whole), "texts": grades_of_texts(settings, texts)}
    window = AlarmConfig(window=config.alarms.window)
    run = whole if settings.act else replayed(whole, warmup, window)
    if part == "ranking":
        known = {x["step"]: x["continued"] for x in before["checkpoints"]} if before else None
        found = continue_all(settings, run, config.ranked_at, config.continued, known)
        return row | {"checkpoints": found, "onset": config.onset}
    row |= story(run, name, config.onset, warmup) | {"held_out": held_out(whole)}
    return row | {"texts": grades_of_texts(settings, {"code": texts["code"]})}


def train_config(
    config: Config, part: Part, name: str, seed: int, texts: Mapping[str, Path]
) -> TrainConfig:
    """The training run of one arm, or on one of the texts without any fault."""
    mix, arm = part == "mixes", "clean" if part == "mixes" else name
    every = 0 if mix or arm not in config.ranked else gcd(*config.ranked_at)
    run = replace(
        config.base,
        data=texts[name] if mix else None,
        steps=config.mix_steps if mix else config.base.steps,
        alarms=config.alarms if acts(arm) else AlarmConfig(),
        checkpoint_every=config.alarms.dwell // 2 if acts(arm) else every,
        keep=0,
    )
    label = f"grades text {name}" if mix else f"grades {name}"
    return run_of(run, label, ARMS[arm], seed, config.onset)


def tables(rows: list[Row]) -> str:
    """The story, the segments, the data mixes, the ranking, and what they say to each claim."""
    kinds, parts = grouped(rows, "kind"), []
    rho = lambda name: lambda row: correlations(row)[name]
    if of := kinds.get("story"):
        parts += ["*The story: rank ratio of the worst layer, and grade.*", story_table(of)]
        parts += ["*By segment of the context, front to back, at the end, on code.*"]
        parts += [segments_table(of)]
    if of := kinds.get("mixes"):
        columns = {"seeds": each("seed")}
        columns |= {text: each(_graded(f"texts/{text}/ratio")) for text in of[0]["texts"]}
        columns |= {"own held-out loss": each("held_out", ".2f")}
        parts += ["*Grade by data: trained on a row, measured on a column.*"]
        parts += [table(of, {"trained on": "arm"}, columns)]
    if of := kinds.get("ranking"):
        best = {"checkpoints, best first by health": each(_checkpoints)}
        columns = {
            "ρ of the health ranking": each(rho("health"), "+.2f"),
            "ρ of the loss ranking": each(rho("loss"), "+.2f"),
            "disputed pairs won by health": each(
                lambda row: f"{sum(wins_of(row))} of {len(wins_of(row))}"
            ),
            "first by health, first by loss: continued": each(firsts, join="; "),
        }
        parts += ["*Checkpoints, best first by health, and their loss 500 steps later.*"]
        parts += [table(of, {"arm": "arm", "seed": "seed"}, best)]
        parts += ["*Rankings against the loss after continuing.*", table(of, "arm", columns)]
    return "\n\n".join([*parts, "*Claims.*", claims_table(claims(rows))])


def headline(rows: list[Row]) -> str:
    """The verdict and the numbers that it rests on."""
    found = claims(rows)
    short = [f"{_SHORT[x.words]} {x.count}" for x in found if x.words in _SHORT]
    if rho := [correlations(row) for row in rows if row["kind"] == "ranking"]:
        health, loss = (mean(x[name] for x in rho) for name in ("health", "loss"))
        short.append(f"ρ with the loss 500 steps later {health:.2f} by health, {loss:.2f} by loss")
    return f"{overall(found)}: {'; '.join(short)}"


def figure(rows: list[Row]) -> go.Figure:
    """The curves of the story's runs."""
    return curves([row for row in rows if row["kind"] == "story"], CURVES)


def story_table(rows: list[Row]) -> str:
    """Before and after the onset, alarms, loss and actions, seed by seed."""
    what = lambda row: None if row["first_key"] is None else row["first_key"].replace("/global", "")

    def actions(of: list[Row]) -> str:
        return "; ".join(map(actions_of, of)) if any(map(actions_of, of)) else ""

    columns = {
        "seeds": each("seed"),
        "rank ratio before": each(_graded("before")),
        "lowest after": each(_graded("lowest")),
        "at the end": each(_graded("late")),
        "grade alarm": each("grade_alarm"),
        "first alarm": each("first_alarm"),
        "what it was": each(what),
        "loss alarm": each("loss_alarm"),
        "attention entropy": each("attention_entropy", ".2f"),
        "held-out loss": each("held_out", ".2f"),
        "actions": actions,
    }
    return table(rows, "arm", columns)


def segments_table(rows: list[Row]) -> str:
    """Rank ratios of the worst layer's segments, means over seeds."""
    segments = lambda of: [row["texts"]["code"]["segments"] for row in of]
    count = len(segments(rows)[0])
    columns: dict[str, Any] = {
        f"{i + 1} of {count}": lambda of, i=i: f"{mean(x[i] for x in segments(of)):.2f}"
        for i in range(count)
    }
    columns["last less first, by seed"] = lambda of: listed(
        (x[-1] - x[0] for x in segments(of)), "+.2f"
    )
    return table(rows, "arm", columns)


def _checkpoints(row: Row) -> str:
    said = "{step} {state} {loss:.2f} → {continued:.2f}"
    return "; ".join(said.format(**x) for x in row["checkpoints"])


def _graded(value: str):
    """A rank ratio, and its grade."""
    said = lambda ratio: None if ratio is None else f"{ratio:.2f} S{grade_of(ratio)}"
    return lambda row: said(value_of(row, value))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
