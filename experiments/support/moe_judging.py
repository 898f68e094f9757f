"""Rows of `moe_faults.py`'s runs: what alarms and clean bands say, and how the router ends.

Here: `Judging`, which `router_fault.py` and `combined_fault.py` fill their rows with. Not here:
tables and conclusions.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import stabmon
from experiments.campaign import held_out
from experiments.loop.checkpoints import Checkpoints, TrainState
from experiments.loop.data import batches, load_corpus
from experiments.loop.placement import ALONE
from experiments.loop.session import identity
from experiments.loop.step import make_step
from experiments.support.figures import curve
from experiments.support.moe_faults import (
    ARMS,
    MoEConfig,
    first_alarms,
    judged,
    mean_from,
    run_one,
    settings_of,
)
from experiments.support.rows import Row, append_row, measured, rows_there
from experiments.support.verdicts import CLEAN, judge
from experiments.train import HELD_OUT
from experiments.train import Config as TrainConfig
from models.gpt import apply
from stabmon.alarms.detectors.bands import BandDetector
from stabmon.alarms.lead import first_by_key
from stabmon.alarms.reference import Judged, Reference, learn
from stabmon.alarms.signatures import Fault
from stabmon.monitor.tiers import router_metrics
from stabmon.runs.run import Run

# Its name for people: the key, and whether the run's own level is taken off first. The spectra's
# lag is the longest that is measured.
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
_OF_KIND = {
    "learning rate": Fault.LEARNING_RATE,
    "batch": Fault.BALANCE,
    "auxiliary": Fault.BALANCE,
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


@dataclass
class Judging:
    """Rows of recorded runs, judged by alarms and by bands of clean runs.

    Attributes:
        moe: What all arms share.
        reference_seeds: Of the clean runs of the bands.
        runs: Where runs lie.
    """

    moe: MoEConfig
    reference_seeds: tuple[int, ...]
    runs: Path
    _reference: Reference | None = None

    def rows(self, file: Path, plan: list[tuple[str, int]], again: bool = False) -> list[Row]:
        """The rows of (arm, seed), in order; those that are missing, or all, are measured.

        Raises:
            ValueError: A seed is in the reference.
        """
        if shared := sorted({seed for _, seed in plan} & set(self.reference_seeds)):
            raise ValueError(f"seeds {shared} are in the reference: they would judge themselves")
        found = []
        for arm, seed in plan:
            run = settings_of(self.moe, arm, seed, self.runs)
            judging = {"reference": list(self.reference_seeds), "window": self.moe.window}
            settings = identity(run) | {"steps": run.steps} | judging
            if again and rows_there(file, [settings]):
                append_row(file, self.row(arm, seed, run) | {"settings": settings})
            found.append(measured(file, settings, lambda a=arm, s=seed, r=run: self.row(a, s, r)))
        return found

    def row(self, arm: str, seed: int, settings: TrainConfig) -> Row:
        """What came of one run."""
        moe = self.moe
        recorded = run_one(settings)
        run = judged(recorded, moe.optimizer.warmup, moe.window)
        clean = arm == CLEAN
        onset = moe.steps if clean else moe.onset
        start = moe.optimizer.warmup + moe.window
        faults = faults_of(arm)
        truth = CLEAN if clean else str(faults[0] if len(faults) == 1 else Fault.SEVERAL)
        verdict = judge(run.events, arm, seed, truth, onset, moe.steps, start)
        bands = first_by_key(run, BandDetector(self.reference()))
        after, directions = {}, {}
        for name, (key, _) in MONITORS.items():
            alarm = bands.get(self.key(key))
            after[name] = None if alarm is None else alarm.step - moe.onset
            directions[name] = None if alarm is None else alarm.direction
        first = first_alarms(run, start if clean else moe.onset)
        return {
            "kind": "run",
            "arm": arm,
            "seed": seed,
            "onset": moe.onset,
            "steps": moe.steps,
            "held_out": held_out(recorded),
            "faults": [str(x) for x in faults],
            "verdict": asdict(verdict),
            "parts": [x.get("parts", []) for x in run.events if x["kind"] == "diagnosis"][-1:],
            "first": [list(x) for x in first[:6]],
            "bands": after,
            "directions": directions,
            "after": {name: mean_from(run, key, moe.onset + 1) for name, key in AFTER.items()},
            "late": {
                name: mean_from(run, self.key(key), moe.steps - LATE_STEPS)
                for name, key in LATE.items()
            },
            "text": on_text(settings),
            "curves": {name: curve(run, self.key(key), 50) for name, key in CURVES.items()},
        }

    def key(self, pattern: str) -> str:
        """A key with the longest lag that is measured in place of the star."""
        optimizer = self.moe.optimizer
        lags = self.moe.monitor.lags or (optimizer.every * optimizer.keep,)
        return pattern.replace("*", str(max(lags)))

    def reference(self) -> Reference:
        """The bands, learned once from the clean runs of other seeds."""
        if self._reference is None:
            clean = [settings_of(self.moe, CLEAN, x, self.runs) for x in self.reference_seeds]
            last = self.moe.onset - 1
            window = (self.moe.optimizer.warmup, last)
            recorded: list[Run] = [run_one(settings) for settings in clean]
            self._reference = learn(
                recorded, {self.key(key): how for key, how in MONITORS.values()}, window
            )
        return self._reference


def faults_of(arm: str) -> list[Fault]:
    """What is wrong in an arm, as the attribution calls it.

    >>> [x.value for x in faults_of("batch ÷8, balance loss off")]
    ['batch or balance']
    """
    found = [Fault.ATTENTION] if ARMS[arm].attention else []
    found += [_OF_KIND[kind] for kind, _ in ARMS[arm].disturbances]
    return list(dict.fromkeys(found))


def final_state(settings: TrainConfig) -> TrainState:
    """The last checkpoint of a run."""
    scaled = settings.disturbances is not None
    init, _, _ = make_step(
        settings.model, settings.optimizer, settings.monitor, settings.fault, ALONE, scaled
    )
    saved = Checkpoints(settings.runs / settings.name / "checkpoints")
    state = saved.restore(init(settings.seed))
    saved.close()
    return state


def on_text(settings: TrainConfig) -> dict[str, float]:
    """The router at the end of a run, on held-out text that is always the same; means of layers."""
    params, model = final_state(settings).params, settings.model
    data = batches(
        load_corpus(settings.data), seed=0, batch=32, context=model.context, split="held_out"
    )
    inputs = jnp.asarray(np.asarray(data[0])[:, :-1])
    seen = apply(model, params, inputs, capture=True)[1]
    layout = stabmon.find_layout(params)
    few = {"router_logits": seen["router_logits"]}
    found = router_metrics(layout, params, few, model.top_k, model.auxiliary_weight)
    return {name: float(np.mean(np.asarray(x))) for name, x in found.items()}
