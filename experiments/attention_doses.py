"""At which dose does a low-precision attention fault show, in which model, and in what first?

Question: the model of `attention_fault.py`, with 6 or 7 bits of O, or of O and dO, lost in the
attention backward; as controls no bits (rounding to bfloat16 alone) and 7 bits rounded to nearest;
in one layer only; and with 7 bits of O lost in models without positions, with RoPE, QK-norm or
shared key heads. How long before the loss and the gradient norm does each monitor call it, which
lag, α and aggregate of the Δ2 spectrum see it first, and how often are healthy runs accused?

    python -m experiments.attention_doses                   every arm
    python -m experiments.attention_doses --arms 7/0 6/0    some, and the clean ones they need

About 22 minutes on one core; runs that are finished are not run again. Rows:
`runs/attention_doses.jsonl`, figure: `runs/attention_doses.html`. Results: `experiments/README.md`.

In clean runs of the same program the fault never comes on. Each run is judged by the clean runs of
its model and of other seeds, and by its own default alarms (`attention.judged_run`).
"""

from dataclasses import asdict, dataclass, replace
from statistics import median

import plotly.graph_objects as go
import tyro

from experiments.support.arms import CLEAN, run_of
from experiments.support.attention import ARMS, DOSES, Windows, clean_arm, judged_run
from experiments.support.ending import Result, ended
from experiments.support.figures import COLOURS, arms_of, colour, line, panels
from experiments.support.recorded import Row, measured, recorded
from experiments.support.tables import (
    crossed,
    each,
    first,
    grouped,
    listing,
    median_range,
    table,
    value_of,
)
from experiments.train import Config as TrainConfig
from models.config import GPTConfig

MAIN, MILD = "7/0", "6/0"
LOSSES = ("held-out loss", "training loss")
SPECTRUM = "Δ2 spectrum"
MILD_LEAD, RATE = 0.2, 1.0


@dataclass(frozen=True)
class Config:
    """What to run.

    Attributes:
        arms: Of `ARMS`; the clean arm of its model comes with each.
        seeds: Of faulty runs; a clean run of each is there too.
        more_seeds: Of further clean runs of the base model.
        more_variant_seeds: The same for the other models.
        onset: First step with the fault.
        steps: Length of all runs; None: each arm's own.
        base: What all runs share.
        window: Healthy steps, for metrics that are judged by the run's own level.
    """

    arms: tuple[str, ...] = tuple(ARMS)
    seeds: tuple[int, ...] = (0, 1, 2)
    more_seeds: tuple[int, ...] = (100, 101, 102, 103)
    more_variant_seeds: tuple[int, ...] = (3,)
    onset: int = 300
    steps: int | None = None
    base: TrainConfig = DOSES
    window: tuple[int, int] = (100, 300)


def main(config: Config) -> Result:
    """Train what is not there yet, judge it, print the tables and draw the figure."""
    file, rows = config.base.runs / "attention_doses.jsonl", []
    for arm in dict.fromkeys(x for name in config.arms for x in (clean_arm(name), name)):
        for seed in seeds_of(config, arm):
            settings = settings_of(config, arm, seed)
            rows.append(measured(file, settings, lambda a=arm, s=seed: row_of(config, a, s)))
    return ended(file, rows, headline, tables, figure)


def seeds_of(config: Config, arm: str) -> tuple[int, ...]:
    """Seeds of an arm."""
    if ARMS[arm].attention is not None:
        return config.seeds
    return config.seeds + (config.more_variant_seeds if ARMS[arm].model else config.more_seeds)


def train_config(config: Config, arm: str, seed: int) -> TrainConfig:
    """The training run of one arm."""
    run = run_of(config.base, f"doses-{arm}", ARMS[arm], seed, config.onset)
    return run if config.steps is None else replace(run, steps=config.steps)


def settings_of(config: Config, arm: str, seed: int) -> Row:
    """What a row was measured with: what tells the run from a default one, and its judges."""
    run, usual, fault = train_config(config, arm, seed), asdict(GPTConfig()), ARMS[arm].attention
    return {
        "seed": seed,
        "steps": run.steps,
        "learning_rate": run.optimizer.learning_rate,
        "onset": config.onset,
        "bits": None if fault is None else (fault.bits_o, fault.bits_do),
        "rounding": "truncate" if fault is None else fault.rounding,
        "faulty_layers": None if fault is None else fault.layers,
        "model": {k: v for k, v in asdict(run.model).items() if v != usual[k]},
        "layers": run.model.layers,
        "lags": run.monitor.lags,
        "every": run.monitor.delta,
        "judged_by": [s for s in seeds_of(config, clean_arm(arm)) if s != seed],
        "window": config.window,
    }


def row_of(config: Config, arm: str, seed: int) -> Row:
    """One run, judged by the healthy runs of other seeds."""
    clean, settings = clean_arm(arm), train_config(config, arm, seed)
    healthy = {s: recorded(train_config(config, clean, s)) for s in seeds_of(config, clean)}
    how = Windows(config.window, config.onset, settings.optimizer.warmup)
    others = [healthy[s] for s in sorted(healthy) if s != seed]
    matched = None if arm == clean else healthy[seed]
    found = judged_run(recorded(settings), others, matched, how)
    return {"arm": arm, "clean": clean, "seed": seed, "steps": settings.steps} | found


def tables(rows: list[Row]) -> str:
    """Doses and models, first alarms by monitor, the sensitivity of Δ2, false alarms."""
    faulty, clean = _split(rows)
    onset = rows[0]["settings"]["onset"]
    parts = [
        f"{len(faulty)} faulty and {len(clean)} clean runs. Steps after the onset, by seed; "
        '"never" is never before the run\'s end, ">" a lead over what never alarmed:',
        _arms_table(faulty),
        f"First alarm, median (range) over seeds, in steps of the run; onset {onset}:",
        _monitors_table(faulty),
        "The Δ2 spectrum by lag, α and aggregate over heads: first alarm, median (range), and "
        "median z 200 to 600 steps after the onset; right, samples of the clean runs beyond "
        "|z| = 5, and runs with an alarm:",
        _sensitivity_table(faulty, clean),
        "False alarms in the clean runs, each judged by those of the other seeds, or by itself "
        "(default alarms):",
        _false_alarms_table(clean),
    ]
    return "\n\n".join(parts)


def headline(rows: list[Row]) -> str:
    """Leads in the main and the mild configuration, false alarms of the default settings."""
    faulty, clean = _split(rows)
    ahead: list[bool] = []
    shares: list[float] = []
    for arm in (MAIN, MILD):
        of = [row for row in faulty if row["arm"] == arm]
        if not of:
            return f"partly: {arm} was not run"
        ahead += [
            _lead(row, row["firsts"][SPECTRUM], row["firsts"][x]) > 0
            for row in of
            for x in ("gradient norm", *LOSSES)
        ]
        leads = [(_lead(r, r["default"]["first"], r["default"]["loss"]), r["steps"]) for r in of]
        shares = [100 * lead / steps for lead, steps in leads]
    count, steps = _default_alarms(clean)
    good = all(ahead) and min(shares) >= 100 * MILD_LEAD and 10_000 * count / steps <= RATE
    return (
        f"{'reproduces' if good else 'partly'}: default alarms lead the loss's by "
        f"{median(shares):.0f} % ({min(shares):.0f} to {max(shares):.0f}) of the run at a mild "
        f"dose, {count} false ones in {steps:,} clean steps; judged by clean runs Δ2 is ahead of "
        f"gradient norm and losses in {sum(ahead)} of {len(ahead)} comparisons"
    )


def figure(rows: list[Row]) -> go.Figure:
    """The Δ2 spectrum's distance from healthy over steps: doses beside models, a line a run."""
    drawn = panels(("doses", "models"), columns=2, shared_yaxes=True)
    faulty, clean = _split(rows)
    painted = {arm: colour(1 + i % (len(COLOURS) - 1)) for i, arm in enumerate(arms_of(faulty))}
    shown: set[str] = set()
    for row in [*clean, *faulty]:
        label, other = row["arm"] if row in faulty else CLEAN, row["clean"] != CLEAN
        dash = "dash" if other and label != CLEAN else "solid"
        style = {"color": painted.get(label, colour(0)), "dash": dash}
        curve = line(row["course"], label, f"{row['arm']}, seed {row['seed']}", shown, **style)
        drawn.add_trace(curve, row=1, col=2 if other else 1)
    drawn.add_vline(x=rows[0]["settings"]["onset"], line_dash="dot")
    drawn.update_xaxes(title="step")
    drawn.update_yaxes(range=[-30, 10])
    drawn.update_yaxes(title="z of Δ2, p10 over heads, lag 200", col=1)
    return drawn


def _split(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Faulty and clean rows."""
    return [r for r in rows if r["arm"] != r["clean"]], [r for r in rows if r["arm"] == r["clean"]]


def _lead(row: Row, first: int | None, later: int | None) -> int:
    """Steps between two alarms; one that never came is put at the end."""
    return (later or row["steps"]) - (first or row["steps"])


def _arms_table(faulty: list[Row]) -> str:
    def after(value: str):
        step = lambda row: value_of(row, value)
        since = lambda row: step(row) - row["settings"]["onset"]
        return each(lambda row: "never" if step(row) is None else since(row))

    def ahead(first: str, later: str):
        return each(lambda row: _ahead(row, value_of(row, first), value_of(row, later)))

    def last_layer(of: list[Row]) -> str:
        named = [x for row in of for x in row["worst_layers"]]
        last = sum(x == of[0]["settings"]["layers"] - 1 for x in named)
        return f"{100 * last / len(named):.0f} %" if named else ""

    spectrum, default, loss = f"firsts/{SPECTRUM}", "default/first", "firsts/held-out loss"
    return table(
        faulty,
        "arm",
        {
            "seeds": each("seed"),
            "steps": first("steps"),
            "loss above clean at the end": each("gap", "+.2f"),
            ".05 above after": after("apart"),
            "Δ2 alarms after": after(spectrum),
            "ahead of gradient norm": ahead(spectrum, "firsts/gradient norm"),
            "of held-out loss": ahead(spectrum, loss),
            "of training loss": ahead(spectrum, "firsts/training loss"),
            "default alarms after": after(default),
            "ahead of the loss's": ahead(default, "default/loss"),
            "of the held-out loss": ahead(default, loss),
            "samples that name the last layer": last_layer,
        },
    )


def _ahead(row: Row, first: int | None, later: int | None) -> str:
    if first is None and later is None:
        return "never"
    return f"{'> ' if later is None else ''}{_lead(row, first, later)}"


def _monitors_table(faulty: list[Row]) -> str:
    paths = {name: f"firsts/{name}" for name in faulty[0]["firsts"]}
    paths |= {"default alarms: any": "default/first", "default alarms: loss": "default/loss"}
    firsts = lambda of, name: median_range([value_of(row, paths[name]) for row in of])
    return crossed("monitor", paths, grouped(faulty, "arm"), firsts)


def _sensitivity_table(faulty: list[Row], clean: list[Row]) -> str:
    lines = []
    for name in clean[0]["spectra"]:
        line: Row = dict(zip(("lag", "α", "aggregate"), name.split(", "), strict=True))
        for arm in (MAIN, MILD):
            found = [row["spectra"][name] for row in faulty if row["arm"] == arm]
            line[f"{arm}: first alarm"] = median_range([x[0] for x in found])
            line[f"{arm}: z"] = f"{median(x[1] for x in found):.1f}" if found else "–"
        found = [row["spectra"][name] for row in clean]
        share = sum(x[2] for x in found) / sum(x[3] for x in found)
        line["clean samples beyond"] = f"{100 * share:.2f} %"
        line["clean runs"] = f"{sum(x[0] is not None for x in found)} of {len(found)}"
        lines.append(line)
    return listing(lines)


def _default_alarms(clean: list[Row]) -> tuple[int, int]:
    """Default alarms in clean runs, and the steps in which they were possible."""
    alarms = sum(len(row["default"]["alarms"]) for row in clean)
    return alarms, sum(row["default"]["judged"] for row in clean)


def _false_alarms_table(clean: list[Row]) -> str:
    names = list(clean[0]["firsts"])
    by = {name: sum(row["firsts"][name] is not None for row in clean) for name in names}
    count, steps = _default_alarms(clean)
    who = lambda row: f"({row['arm']}, seed {row['seed']})"
    told = [f"`{x}` {who(row)}" for row in clean for x in row["default"]["alarms"]]
    which = ", ".join(f"{name} {n}" for name, n in by.items() if n)
    found = {
        f"bands, all {len(names)} monitors": (sum(by.values()), which or "none"),
        "bands, Δ2 spectrum": (by[SPECTRUM], ""),
        "default alarms": (count, ", ".join(told) or "none"),
    }
    heads = ("judge", "clean runs", "clean steps", "false alarms", "per 10,000", "which")
    lines = [
        (judge, len(clean), f"{steps:,}", n, f"{10_000 * n / steps:.2f}", what)
        for judge, (n, what) in found.items()
    ]
    return listing([dict(zip(heads, line, strict=True)) for line in lines])


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
