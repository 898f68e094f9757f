"""The runs behind `router_fault.py` and `combined_fault.py`: a small mixture of experts, harmed.

Here: the training run of an arm, and the row of what alarms, clean bands and the router say of it.
Not here: which arms a question needs, tables and conclusions.

All arms are one compiled program with the attention fault in it, which comes on in some of them
only, and with factors that the step takes as arguments; so the arms of a seed are alike to the bit
until the onset.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from experiments.faults import AttentionFault
from experiments.loop.alarms import AlarmConfig
from experiments.support.arms import ARMS, CLEAN, EXPERTS, SMALL, faults_of, run_of, truth_of
from experiments.support.figures import curve
from experiments.support.judging import alarm_events, first_outside, judge, replayed
from experiments.support.recorded import Row, held_out, mean_from, measured, recorded, settings_row
from experiments.support.states import router_on_text
from experiments.support.tables import crossed, grouped, listed
from experiments.train import Config as TrainConfig
from stabmon.alarms.reference import Judged, Reference, learn
from stabmon.quantities import HELD_OUT
from stabmon.runs.run import Run

BASE = replace(SMALL, steps=800, model=replace(SMALL.model, **EXPERTS), fault=AttentionFault(7, 7))
# Its name for people: the key, and whether the run's own level is taken off first. The lag of the
# spectra is the longest that is measured.
MONITORS: dict[str, tuple[str, Judged]] = {
    "router entropy": ("router/global/entropy/mean", "own"),
    "router margin": ("router/global/margin/mean", "own"),
    "max violation": ("router/global/max_violation/mean", "own"),
    "effective experts": ("router/global/effective_experts/mean", "own"),
    "router similarity": ("router/global/similarity/mean", "own"),
    "Δ2 spectrum": ("delta*/global/delta2/entropy/p10", "reference"),
    "ΔW_q spectrum": ("delta*/global/query/entropy/p10", "reference"),
    "radial alignment of W_q": ("delta*/global/q/radial_alignment/mean", "reference"),
    "attention entropy": ("attention/global/entropy/mean", "own"),
    "update ratio": ("symptoms/global/update_ratio/value", "reference"),
    "gradient norm": ("symptoms/global/grad_norm/value", "reference"),
    "training loss": ("symptoms/global/loss/value", "reference"),
    "held-out loss": (HELD_OUT, "reference"),
}
# Means of all samples after the onset.
AFTER = {
    "router entropy": "router/global/entropy/mean",
    "margin": "router/global/margin/mean",
    "max violation": "router/global/max_violation/mean",
    "effective experts": "router/global/effective_experts/mean",
    "dead": "router/global/dead/mean",
}
# Means of the last steps.
LATE_STEPS = 100
LATE = {
    "router entropy": "router/global/entropy/mean",
    "similarity": "router/global/similarity/mean",
    "Δ2 p10": "delta*/global/delta2/entropy/p10",
    "Δ2 min": "delta*/global/delta2/entropy/min",
    "ΔW_q p10": "delta*/global/query/entropy/p10",
    "radial alignment": "delta*/global/q/radial_alignment/mean",
    "update ratio": "symptoms/global/update_ratio/value",
    "loss": "symptoms/global/loss/value",
}
CURVES = {
    "router entropy": AFTER["router entropy"],
    "router margin": AFTER["margin"],
    "max violation": AFTER["max violation"],
    "router similarity": LATE["similarity"],
    "Δ2 p10": LATE["Δ2 p10"],
    "radial alignment of W_q": LATE["radial alignment"],
    "update ratio": LATE["update ratio"],
    "held-out loss": HELD_OUT,
}


@dataclass(frozen=True)
class MoEConfig:
    """What all arms share.

    Attributes:
        base: The run.
        onset: First step with a fault.
        window: Steps of the healthy window after the warm-up, by which alarms judge.
        reference_seeds: Clean runs that the bands are learned from.
    """

    base: TrainConfig = BASE
    onset: int = 400
    window: int = 200
    reference_seeds: tuple[int, ...] = (710, 711, 712, 713)

    def key(self, pattern: str) -> str:
        """A key with the longest lag that is measured in place of the star."""
        ring = self.base.optimizer
        lags = self.base.monitor.lags or (ring.every * ring.keep,)
        return pattern.replace("*", str(max(lags)))


def train_config(moe: MoEConfig, arm: str, seed: int) -> TrainConfig:
    """The training run of one arm and seed."""
    return run_of(moe.base, f"moe {arm}", ARMS[arm], seed, moe.onset)


def judged_rows(
    moe: MoEConfig, file: Path, arms: Sequence[str], seeds: Sequence[int], again: bool
) -> list[Row]:
    """The row of each seed and arm, in order; those that are missing, or all, are measured.

    Raises:
        ValueError: A seed is in the reference.
    """
    if shared := sorted(set(seeds) & set(moe.reference_seeds)):
        raise ValueError(f"seeds {shared} are in the reference: they would judge themselves")
    found = []
    for seed in seeds:
        for arm in arms:
            measure = partial(judged_row, moe, arm, seed)
            found.append(measured(file, judged_settings(moe, arm, seed), measure, again))
    return found


def judged_settings(moe: MoEConfig, arm: str, seed: int) -> Row:
    """What a run's row is measured with."""
    judging = {"reference": list(moe.reference_seeds), "window": moe.window}
    return settings_row(train_config(moe, arm, seed), **judging)


def judged_row(moe: MoEConfig, arm: str, seed: int) -> Row:
    """What came of one run."""
    settings = train_config(moe, arm, seed)
    whole = recorded(settings)
    run = replayed(whole, moe.base.optimizer.warmup, AlarmConfig(window=moe.window))
    start = moe.base.optimizer.warmup + moe.window
    onset, since = (moe.base.steps, start) if arm == CLEAN else (moe.onset, moe.onset)
    verdict = judge(run, arm, seed, truth_of(ARMS[arm]), onset, moe.base.steps, start)
    late = moe.base.steps - LATE_STEPS
    outside = first_outside(run, reference(moe))
    left = {name: outside.get(moe.key(key)) for name, (key, _) in MONITORS.items()}
    of = lambda x, value: None if x is None else value(x)
    return {
        "kind": "run",
        "arm": arm,
        "seed": seed,
        "onset": moe.onset,
        "steps": moe.base.steps,
        "held_out": held_out(whole),
        "faults": [str(x) for x in faults_of(ARMS[arm])],
        "verdict": verdict,
        "parts": [x.get("parts", []) for x in run.events if x["kind"] == "diagnosis"][-1:],
        "first": first_alarms(run, since)[:6],
        "bands": {name: of(x, lambda x: x.step - moe.onset) for name, x in left.items()},
        "directions": {name: of(x, lambda x: x.direction) for name, x in left.items()},
        "after": {name: mean_from(run, key, moe.onset + 1) for name, key in AFTER.items()},
        "late": {name: mean_from(run, moe.key(key), late) for name, key in LATE.items()},
        "text": router_on_text(settings),
        "curves": {name: curve(run, moe.key(key), 50) for name, key in CURVES.items()},
    }


@lru_cache(maxsize=2)
def reference(moe: MoEConfig) -> Reference:
    """The bands, learned from the clean runs of other seeds."""
    runs = [recorded(train_config(moe, CLEAN, seed)) for seed in moe.reference_seeds]
    keys: dict[str, Judged] = {moe.key(key): how for key, how in MONITORS.values()}
    return learn(runs, keys, (moe.base.optimizer.warmup, moe.onset - 1))


def first_alarms(run: Run, since: int) -> list[tuple[int, str, str]]:
    """(steps after `since`, key, rule) of the first alarm of each key from then on, in order."""
    first: dict[str, tuple[int, str, str]] = {}
    for x in alarm_events(run, since):
        first.setdefault(x["key"], (x["step"] - since, x["key"], x["rule"]))
    return sorted(first.values())


def bands_table(rows: list[Row]) -> str:
    """When each metric left its band: a line for each, a column for each arm, seed by seed."""
    left = lambda of, name: listed(row["bands"][name] for row in of)
    return crossed("metric", rows[0]["bands"], grouped(rows, "arm"), left)


def parts_of(row: Row) -> list[str]:
    """The faults of a diagnosis of several, as it stood at the end."""
    return row["parts"][0] if row["parts"] else []
