"""Does the monitor call a low-precision attention fault before the loss does?

Question: O loses its mantissa in the attention backward from some step on; everything else is
exact. Which monitor notices first, and how long before the loss?

    python -m experiments.attention_fault demo         one faulty run and its matched clean run
    python -m experiments.attention_fault seeds        the same for several seeds: the table
    python -m experiments.attention_fault reference    learn the reference anew from clean seeds

Two layers, 2,000 steps; `demo` takes about a minute, `seeds` three times that, `reference` twice. A
run that is already there is not run again. Rows: `runs/attention_fault.jsonl`, figure:
`runs/attention_fault.html`, and for each seed `runs/attention-fault-seed<n>/report.html`. Results:
`experiments/README.md`. Doses and models: `attention_doses.py`.

Each faulty run is judged against a reference learned from clean runs of other seeds: an alarm is
|z| > 5 in two samples running. Metrics that sit at another level for every seed (norms, stable
rank, logits, attention entropy) are compared with the run's own healthy window. The loss gets its
best chance: the held-out loss, always on the same text, as often as the spectra. The matched clean
run has the same seed, data, initialisation and even compiled program; its fault never comes on.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

import numpy as np
import plotly.graph_objects as go
import tyro
from rich.console import Console

from experiments.faults import AttentionFault
from experiments.loop.optimizer import OptimizerConfig
from experiments.loop.step import MonitorConfig
from experiments.support.arms import Arm, run_of
from experiments.support.attention import KEYS, MODEL, MONITORS
from experiments.support.ending import ended
from experiments.support.figures import colour, curve, line, panels
from experiments.support.judging import first_outside
from experiments.support.recorded import Row, measured, recorded, rows_there
from experiments.support.tables import crossed, each, table
from experiments.train import Config as TrainConfig
from models.config import GPTConfig
from stabmon.alarms.lead import Lead, lead_times
from stabmon.alarms.reference import Reference, learn
from stabmon.output.report import write_report
from stabmon.quantities import HELD_OUT
from stabmon.runs.run import Run

REFERENCE = Path(__file__).parent / "references" / "attention_fault.json"
DRAWN = ("Δ2 spectrum", "radial alignment of W_q", "gradient norm", "held-out loss")


@dataclass(frozen=True)
class Config:
    """What to run.

    Attributes:
        command: demo, seeds or reference.
        seeds: Seeds of the faulty runs and their matched clean runs; `demo` takes the first.
        reference_seeds: Clean seeds of the reference; none of `seeds`.
        steps: Length of every run.
        learning_rate: Of every run, after warm-up.
        onset: First step with the fault.
        bits_o: Low mantissa bits that O loses.
        model: Shape of the model.
        runs: Where runs lie.
        reference: File of the reference.
        window: Healthy steps, for metrics judged by the run's own level.
    """

    command: Annotated[Literal["demo", "seeds", "reference"], tyro.conf.Positional] = "demo"
    seeds: tuple[int, ...] = (0, 1, 2)
    reference_seeds: tuple[int, ...] = (100, 101, 102, 103)
    steps: int = 2000
    learning_rate: float = 2e-3
    onset: int = 300
    bits_o: int = 7
    model: GPTConfig = MODEL
    runs: Path = Path("runs")
    reference: Path = REFERENCE
    window: tuple[int, int] = (100, 300)


@dataclass(frozen=True)
class Result:
    """One seed: the faulty run, its matched clean run, and what the detector made of both."""

    faulty: Run
    clean: Run
    table: list[Lead]
    false_alarms: list[str]


def main(config: Config) -> list[Result]:
    """Carry out `config.command`; the results that it judged."""
    console = Console()
    if config.command == "reference":
        learn_reference(config).save(config.reference)
        console.print(f"reference: {config.reference}")
        return []
    reference, file = Reference.load(config.reference), config.runs / "attention_fault.jsonl"
    seeds = config.seeds[:1] if config.command == "demo" else config.seeds
    results = []
    for seed in seeds:
        result = one_seed(config, seed, reference)
        results.append(result)
        said, leads = verdict(result, config.onset), [asdict(row) for row in result.table]
        console.print(f"seed {seed}. {said}\n{lead_table(leads)}", markup=False, soft_wrap=True)
        report = write_report(
            [result.clean, result.faulty],
            result.faulty.folder / "report.html",
            title="Low-precision attention",
            verdict=said,
            table=leads,
        )
        console.print(f"report: {report}")
        measured(file, settings_of(config, seed, reference), lambda it=result: row_of(it))
    if config.command == "seeds":
        rows = rows_there(file, [settings_of(config, seed, reference) for seed in seeds])
        ended(file, rows, headline, tables, figure)
    return results


def run_one(config: Config, seed: int, armed: bool, reference: Path | None) -> Run:
    """One run, trained unless it is there."""
    fault = AttentionFault(bits_o=config.bits_o)
    base = TrainConfig(
        runs=config.runs,
        steps=config.steps,
        model=config.model,
        optimizer=OptimizerConfig(learning_rate=config.learning_rate, every=25, keep=8),
        monitor=MonitorConfig(lags=(50, 200), delta=25, activations=25, weights=25, detail="full"),
        fault=fault,
        reference=reference,
        evaluate_every=25,
        checkpoint_every=0,
    )
    name = f"attention-{'fault' if armed else 'clean'}"
    return recorded(run_of(base, name, Arm(fault if armed else None), seed, config.onset))


def learn_reference(config: Config) -> Reference:
    """The reference from the clean seeds."""
    runs = [run_one(config, seed, False, None) for seed in config.reference_seeds]
    command = "python -m experiments.attention_fault reference"
    keys = dict(MONITORS.values())
    return learn(runs, keys, config.window, source={"command": command, "steps": config.steps})


def one_seed(config: Config, seed: int, reference: Reference) -> Result:
    """A faulty run and its matched clean run, judged by the same detector."""
    if seed in config.reference_seeds:
        raise ValueError(f"seed {seed} is in the reference: it would judge itself")
    faulty = run_one(config, seed, True, config.reference)
    clean = run_one(config, seed, False, config.reference)
    alarms, false = first_outside(faulty, reference), first_outside(clean, reference)
    leads = lead_times(alarms, KEYS, HELD_OUT, config.steps, config.onset)
    return Result(faulty, clean, leads, [name for name in KEYS if KEYS[name] in false])


def lead_table(leads: list[Row]) -> str:
    """First alarms, and how long before the loss's; ">" over a loss that never alarmed."""
    lead = lambda x: "" if x["key"] == HELD_OUT else "> " * x["lead_is_bound"] + str(x["lead"])
    columns = {"first alarm": "first", "after onset": "after", "lead over loss": lead}
    there = [x for x in leads if x["first"] is not None]
    return table(there, "monitor", {name: each(value) for name, value in columns.items()})


def verdict(result: Result, onset: int) -> str:
    """The sentence above the evidence."""
    steps = {row.monitor: row for row in result.table}
    spectrum, loss = steps["Δ2 spectrum"], steps["held-out loss"]
    if spectrum.first is None:
        return "The Δ2 spectrum did not react to the fault."
    seen = f"Fault at step {onset}. The Δ2 spectrum calls it at step {spectrum.first}"
    if loss.first is None:
        return f"{seen}; the loss does not before the run ends."
    return f"{seen}, {spectrum.lead} steps before the held-out loss ({loss.first})."


def settings_of(config: Config, seed: int, reference: Reference) -> Row:
    """What tells the row of one seed from others."""
    held = asdict(config)
    for name in ("command", "seeds", "reference_seeds", "reference", "runs"):
        del held[name]
    return held | {"seed": seed, "judged_by": reference.source["runs"]}


def row_of(result: Result) -> Row:
    """First alarms of a faulty run, the monitors that alarmed in its matched clean run; curves."""
    firsts = {row.monitor: row.first for row in result.table}
    return {
        "firsts": {name: firsts[name] for name in KEYS},
        "clean": result.false_alarms,
        "curves": {
            arm: {name: curve(run, KEYS[name], 50) for name in DRAWN}
            for arm, run in (("clean", result.clean), ("faulty", result.faulty))
        },
    }


def tables(rows: list[Row]) -> str:
    """First alarms by seed, and the monitors that alarmed in the matched clean runs."""
    last = "alarms in the matched clean run"
    quiet = lambda row: ", ".join(row["clean"]) or "none"
    said = lambda row, name: quiet(row) if name == last else row["firsts"][name] or "never"
    seeds = {f"seed {row['settings']['seed']}": row for row in rows}
    return crossed("monitor", [*KEYS, last], seeds, said)


def headline(rows: list[Row]) -> str:
    """By how many steps Δ2 is ahead of the gradient norm and of the losses, where it is."""
    leads, ahead = [], True
    for name in ("gradient norm", "held-out loss", "training loss"):
        # What never alarms does so at the end at the earliest.
        firsts = [
            [row["firsts"][x] or row["settings"]["steps"] for x in ("Δ2 spectrum", name)]
            for row in rows
        ]
        lead = [later - first for first, later in firsts]
        ahead &= min(lead) > 0
        leads.append(f"{median(lead):g} ({min(lead)} to {max(lead)}) before the {name}")
    quiet = sum(not row["clean"] for row in rows)
    return (
        f"{'reproduces' if ahead else 'partly'}: Δ2 alarms {', '.join(leads)}, in steps, median of "
        f"{len(rows)} seeds; {quiet} of {len(rows)} matched clean runs without any alarm"
    )


def figure(rows: list[Row]) -> go.Figure:
    """Monitors over steps, faulty beside clean runs; dots are first alarms."""
    drawn = panels(DRAWN, columns=2)
    shown: set[str] = set()
    for column, name in enumerate(DRAWN):
        place = column // 2 + 1, column % 2 + 1
        for i, row in enumerate(rows):
            seed, first = f"seed {row['settings']['seed']}", row["firsts"][name]
            for arm, painted in (("clean", colour(0)), ("faulty", colour(i + 1))):
                x, y = row["curves"][arm][name]
                label = "without the fault" if arm == "clean" else f"with it, {seed}"
                style = {"color": painted, "width": 1.5}
                drawn.add_trace(line((x, y), label, seed, shown, **style), *place)
                if arm == "faulty" and first is not None:
                    mark = {"color": painted, "size": 9}
                    at = {"x": [first], "y": [float(np.interp(first, x, y))]}
                    point = go.Scatter(at, mode="markers", marker=mark, showlegend=False)
                    drawn.add_trace(point, *place)
    onset = rows[0]["settings"]["onset"]
    drawn.add_vline(x=onset, line_dash="dot", annotation_text="fault begins")
    losses = [curves["held-out loss"] for row in rows for curves in row["curves"].values()]
    late = [y for curve in losses for x, y in zip(*curve, strict=True) if x >= onset / 2]
    drawn.update_yaxes(range=[0.95 * min(late), 1.05 * max(late)], row=2, col=2)
    drawn.update_yaxes(type="log", row=2, col=1)
    drawn.update_xaxes(title="step")
    return drawn


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
