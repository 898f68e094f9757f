"""Does MSign save a run that AdamW loses?

Question: AdamW ends far above the healthy run under an attention fault, in a GPT-2-like model
("fault"), the same with a mixture of experts ("experts"), a LLaMA-like one ("modern", and "mild"
with 6 bits lost instead of 7), and at an attention learning rate far too high ("rate"). Does
restoring the spectrum of some matrices every P steps hold the loss; of which matrices, how seldom
may it be, and what do the rivals do?

    python -m experiments.msign_rescue                          every arm, three seeds
    python -m experiments.msign_rescue --configurations fault   one configuration
    python -m experiments.msign_rescue --arms clean adamw       some arms

20 to 100 seconds a run on one core and half a minute of compiling an arm: about two hours for all
of it. Rows go to `runs/msign_rescue.jsonl`; a run whose row is there, with the same settings, is
not run again. Figure: `runs/msign_rescue.html`. Results: `experiments/README.md`. Arms, and when a
configuration counts as rescued: `support/rescue.py`.

Arms of a configuration and seed share data and initialisation; "clean" is AdamW without the fault,
or at the other matrices' learning rate. The loss of a run is the mean of the held-out losses over
its last 300 steps, for every arm alike, and each 23 steps, which has no factor in common with a
period: neither right after an application nor just before the next is seen more often than it
happens, and 300 steps are whole periods of all P but 1000, which a run of 1,200 steps meets once.
Gradient norm, logits and spectra are sampled each 25 steps, so `grad_max` is a lower bound.
Jacobians are taken at the kept checkpoints before the end. What an application costs:
`bench_msign.py`.
"""

from dataclasses import dataclass, replace
from math import exp, isfinite
from pathlib import Path
from statistics import mean

import numpy as np
import plotly.graph_objects as go
import tyro

from experiments.loop.step import MonitorConfig
from experiments.support import rescue
from experiments.support.ending import Result, ended
from experiments.support.figures import arms_of, colour, line, panels
from experiments.support.jacobians import jacobians
from experiments.support.recorded import (
    Row,
    held_out,
    largest,
    mean_from,
    measured,
    recorded,
    settings_row,
)
from experiments.support.rescue import ADAMW, ARMS, CLEAN, CONFIGURATIONS, HOLDS, LOST, MLP
from experiments.support.tables import crossed, each, grouped, listed, listing, table
from experiments.train import Config as TrainConfig
from models.config import GPTConfig
from stabmon.quantities import HELD_OUT

GRAD = "symptoms/global/grad_norm/value"
LOGIT = "attention/global/max_logit/max"
RANKS = [f"weights/global/{role}/stable_rank/mean" for role in "qk"]
# Arms with a colour of their own in the figure, and that of all others.
DRAWN = {
    CLEAN: colour(0),
    ADAMW: colour(2),
    MLP: colour(5),
    "attention P=50": colour(1),
    "attention P=10": colour(6),
    "QK-norm": colour(3),
    "muon": colour(4),
}
OTHERS = "#dddddd"
EVERY = 25
EVALUATE_EVERY = 23
WINDOW = 300
CHECKPOINT_EVERY = 295


@dataclass(frozen=True)
class Config:
    """What to run.

    Attributes:
        configurations: Of `CONFIGURATIONS`.
        arms: Of `ARMS`; a configuration runs those of them that it has.
        seeds: Of initialisation and data order; None: those of each configuration's verdict.
        steps: Length of a run; None: the configuration's own.
        model: Shape instead of the configuration's own; None: that.
        runs: Where runs, rows and figure lie.
    """

    configurations: tuple[str, ...] = tuple(CONFIGURATIONS)
    arms: tuple[str, ...] = tuple(ARMS)
    seeds: tuple[int, ...] | None = None
    steps: int | None = None
    model: GPTConfig | None = None
    runs: Path = Path("runs")


def main(config: Config) -> Result:
    """Run what is not there yet, print the tables and draw the figure."""
    file, rows = config.runs / "msign_rescue.jsonl", []
    for configuration, arm, seed in plan(config):
        settings = settings_of(config, configuration, arm, seed)
        where = {"configuration": configuration, "arm": arm, "seed": seed}
        found = measured(file, settings_row(settings), lambda w=where, s=settings: w | measure(s))
        rows.append(found)
    return ended(file, rows, headline, tables, figure)


def plan(config: Config) -> list[tuple[str, str, int]]:
    """(configuration, arm, seed) in the order of running: one program serves an arm's seeds."""
    return [
        (name, arm, seed)
        for name in config.configurations
        for arm in CONFIGURATIONS[name].arms
        if arm in config.arms
        for seed in config.seeds or CONFIGURATIONS[name].seeds
    ]


def settings_of(config: Config, configuration: str, arm: str, seed: int) -> TrainConfig:
    """The training run of one arm."""
    base, chosen = CONFIGURATIONS[configuration].run, ARMS[arm]
    optimizer = replace(base.optimizer, **chosen.optimizer)
    healthy = dict(base.optimizer.rates).get("mlp")
    if chosen.healthy and healthy is not None:
        optimizer = replace(optimizer, rates=(("all", healthy),))
    slug = "".join(x if x.isalnum() else "-" for x in arm.lower())
    return replace(
        base,
        name=f"rescue-{configuration}-{slug}-seed{seed}",
        runs=config.runs,
        steps=config.steps or base.steps,
        seed=seed,
        model=replace(config.model or base.model, **chosen.model),
        optimizer=optimizer,
        monitor=MonitorConfig(router=0, delta=0, activations=EVERY, weights=EVERY, symptoms=EVERY),
        armed=not chosen.healthy,
        evaluate_every=EVALUATE_EVERY,
        checkpoint_every=CHECKPOINT_EVERY,
        resume=True,
        quiet=True,
    )


def measure(settings: TrainConfig) -> Row:
    """What came of one run, trained unless it is there."""
    run = recorded(settings)
    steps, losses = (np.asarray(x) for x in run.metrics[HELD_OUT])
    loss = float(np.mean(losses[steps >= settings.steps - WINDOW]))
    return {
        "loss": loss,
        "end": held_out(run),
        "perplexity": exp(loss) if isfinite(loss) else loss,
        "grad_max": largest(run, GRAD),
        "max_logit": largest(run, LOGIT),
        "stable_rank": mean(mean_from(run, name, settings.steps - WINDOW) for name in RANKS),
        "jacobian": jacobians(settings),
        "curve": [round(float(x), 3) for x in losses],
    }


def tables(rows: list[Row]) -> str:
    """Every configuration's arms, then what decides, then the seeds of development."""
    judged = [row for row in rows if rescue.counts(row)]
    parts = []
    for name in _names(judged):
        of = [row for row in judged if row["configuration"] == name]
        steps = of[0]["settings"]["steps"]
        parts.append(f"**{name}**: {CONFIGURATIONS[name].says}; {steps:,} steps.")
        parts.append(_arms(of, name))
    if judged:
        parts += ["What decides:", _claim(judged), "By period:", _periods(judged)]
    if early := [row for row in rows if not rescue.counts(row)]:
        parts += ["Development seeds, not in the verdict:", _development(early)]
    return "\n\n".join(parts)


def headline(rows: list[Row]) -> str:
    """The verdict in one line: a word, then the numbers that decide.

    "reproduces" wants two configurations or more that were tried, and all of them rescued.
    """
    names, judged = _names(rows), [row for row in rows if rescue.counts(row)]
    met = [name for name in names if rescue.holds(judged, name)]
    said = lambda of, name, arm=None: rescue.range_of(rescue.over(of, name, arm))
    near = [f"{name} {said(judged, name)} (AdamW {said(judged, name, ADAMW)})" for name in met]
    far = []
    for name in (name for name in names if name not in met):
        tried = "" if rescue.over(judged, name) else " on a development seed"
        far.append(f"{name} {said(rows if tried else judged, name)}{tried}")
    parts = [f"within {HOLDS:g} % of clean in {len(met)} of {len(names)} configurations"]
    missed = [f"not {', '.join(far)}"] if far else []
    parts.append(f"% above it: {', '.join([*near, *missed])}")
    useless = all(rescue.beyond(judged, name, MLP, HOLDS) for name in met)
    if met and useless:
        parts.append("MLP only fails")
    bounds = [f"{said} on {name}" for name in met if (said := rescue.bracket(judged, name))]
    parts.append(f"P breaks {', '.join(bounds) or 'not bracketed'}")
    whole = 2 <= len(met) == len(names) and bool(bounds) and useless
    word = "reproduces" if whole else "partly" if met else "not at this size"
    return f"{word}: {'; '.join(parts)}"


def figure(rows: list[Row]) -> go.Figure:
    """Held-out loss over steps, a panel for each configuration, a line for each run."""
    judged = [row for row in rows if rescue.counts(row)]
    names, arms = _names(judged), sorted(arms_of(judged), key=lambda arm: arm in DRAWN)
    drawn = panels(names, columns=2, shared_yaxes=True)
    place = lambda row: names.index(row["configuration"])
    shown: set[str] = set()
    for arm in arms:
        label = arm if arm in DRAWN else "others"
        for row in (row for row in judged if row["arm"] == arm):
            steps = [row["settings"]["evaluate_every"] * n for n in range(len(row["curve"]))]
            text, style = f"{arm}, seed {row['seed']}", {"color": DRAWN.get(arm, OTHERS)}
            curve, i = line((steps, row["curve"]), label, text, shown, **style), place(row)
            drawn.add_trace(curve, row=i // 2 + 1, col=i % 2 + 1)
    drawn.update_xaxes(title="step")
    drawn.update_yaxes(title="held-out loss", range=[1.6, 3.4], col=1)
    return drawn


def _arms(rows: list[Row], name: str) -> str:
    """One configuration's arms."""
    above = lambda what: (
        lambda of: listed(rescue.over(rows, name, of[0]["arm"], what), "+.1f", " %")
    )
    late = lambda what: lambda of: f"{rescue.late_jacobian(of, what):.2g}"
    columns = {
        "seeds": each("seed"),
        "held-out loss": each("loss", ".2f"),
        "over clean": above("loss"),
        "at the last step": above("end"),
        "perplexity": lambda of: f"{mean(row['perplexity'] for row in of):.1f}",
        "grad max": lambda of: f"{max(row['grad_max'] for row in of):.2g}",
        "max logit": lambda of: f"{max(row['max_logit'] for row in of):.2g}",
        "stable rank of W_q, W_k": lambda of: f"{mean(row['stable_rank'] for row in of):.1f}",
        "a": late("a"),
        "M": late("M"),
        "a·M": late("aM"),
    }
    order = list(ARMS)
    return table(sorted(rows, key=lambda row: order.index(row["arm"])), "arm", columns)


def _claim(rows: list[Row]) -> str:
    """Each configuration against the claim."""
    above = lambda name, arm=None: listed(rescue.over(rows, name, arm), "+.1f", " %")
    lines = [
        {
            "configuration": name,
            f"judged arm over clean [≤ {HOLDS:.0f} %]": (
                f"{CONFIGURATIONS[name].judged}: {above(name)}"
            ),
            f"AdamW [≥ {LOST:.0f} %]": above(name, ADAMW),
            f"MLP only [> {HOLDS:.0f} %]": above(name, MLP),
            "rescued": "yes" if rescue.holds(rows, name) else "no",
        }
        for name in _names(rows)
    ]
    return listing(lines)


def _periods(rows: list[Row]) -> str:
    """Loss over clean against P, attention restored."""
    found = {name: (name, dict(rescue.by_period(rows, name))) for name in _names(rows)}
    periods = sorted({period for _, arms in found.values() for period in arms})

    def above(of: tuple[str, dict[int, str]], period: str) -> str:
        (name, arms), p = of, int(period)
        return listed(rescue.over(rows, name, arms[p]) if p in arms else [], "+.1f", " %")

    return crossed("P", map(str, periods), found, above)


def _development(rows: list[Row]) -> str:
    """Runs that served to choose a configuration."""

    def above(of: list[Row]) -> str:
        same = [row for row in rows if row["seed"] == of[0]["seed"]]
        return listed(rescue.over(same, of[0]["configuration"], of[0]["arm"]), "+.1f", " %")

    columns = {
        "steps": each("settings/steps", ","),
        "held-out loss": each("loss", ".2f"),
        "over clean": above,
    }
    return table(rows, {name: name for name in ("configuration", "arm", "seed")}, columns)


def _names(rows: list[Row]) -> list[str]:
    """Configurations that have rows, in order."""
    return [name for name in CONFIGURATIONS if name in grouped(rows, "configuration")]


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
