"""The runs behind `attention_fault.py` and `attention_doses.py`, and what is read off each.

Here: the model, the arms, what is looked at, and the numbers of one judged run. Not here: tables
and conclusions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from experiments.faults import AttentionFault
from experiments.loop.alarms import AlarmConfig
from experiments.loop.optimizer import OptimizerConfig
from experiments.loop.step import MonitorConfig
from experiments.support.arms import CLEAN, Arm
from experiments.support.judging import (
    LOSSES,
    alarm_events,
    first_outside,
    first_step,
    replayed,
)
from experiments.train import Config as TrainConfig
from models.config import GPTConfig
from stabmon.alarms.detectors.bands import BandDetector
from stabmon.alarms.reference import Judged, Reference, learn
from stabmon.quantities import HELD_OUT, is_brief
from stabmon.runs.run import Run

MODEL = GPTConfig(layers=2, model=64, heads=4, context=32, backend="flash")
# Its name for people: the key, and whether the run's own level is taken off first.
MONITORS: dict[str, tuple[str, Judged]] = {
    "Δ2 spectrum": ("delta200/global/delta2/modes/p10", "reference"),
    "Δ1 spectrum": ("delta200/global/delta1/modes/p10", "reference"),
    "Δ3 spectrum": ("delta200/global/delta3/modes/p10", "reference"),
    "ΔW_q spectrum": ("delta200/global/query/modes/p10", "reference"),
    "radial alignment of W_q": ("delta200/global/q/radial_alignment/mean", "reference"),
    "stable rank of W_q": ("weights/global/q/stable_rank/mean", "own"),
    "‖W_q‖": ("weights/global/q/norm/mean", "own"),
    "largest attention logit": ("attention/global/max_logit/max", "own"),
    "attention entropy": ("attention/global/entropy/mean", "own"),
    "gradient norm": ("symptoms/global/grad_norm/value", "reference"),
    "training loss": ("symptoms/global/loss/value", "reference"),
    "held-out loss": (HELD_OUT, "reference"),
}
KEYS = {name: key for name, (key, _) in MONITORS.items()}
SPECTRUM = KEYS["Δ2 spectrum"]
WORST = "delta200/global/delta2/modes/worst_layer"
LAGS = (10, 50, 200)
# "lag, α, aggregate" of the Δ2 spectrum, and its key.
SPECTRA = {
    f"{lag}, {alpha}, {aggregate}": f"delta{lag}/global/delta2/{name}/{aggregate}"
    for lag in LAGS
    for alpha, name in ((1, "effective_rank"), (2, "modes"))
    for aggregate in ("mean", "p10", "min")
}
GAP = 0.05

DOSES = TrainConfig(
    steps=2000,
    model=MODEL,
    optimizer=OptimizerConfig(learning_rate=2e-3, every=10, keep=20),
    monitor=MonitorConfig(lags=LAGS, delta=20, activations=20, weights=20, detail="full"),
    fault=AttentionFault(7, 0),
    evaluate_every=20,
    checkpoint_every=0,
)
MODELS: dict[str, dict[str, Any]] = {
    "no positions": {"positions": "none"},
    "RoPE": {"positions": "rope"},
    "QK-norm": {"qk_norm": True},
    "GQA": {"kv_heads": 2},
}
SHORT = {"steps": 1000}
# Lengths are beyond the loss's alarm where that comes, for the least time.
BASE = {
    CLEAN: Arm(),
    "7/0": Arm(AttentionFault(7, 0)),
    "6/0": Arm(AttentionFault(6, 0)),
    "7/7": Arm(AttentionFault(7, 7), run={"steps": 900}),
    "6/6": Arm(AttentionFault(6, 6), run=SHORT),
    "0/0": Arm(AttentionFault(0, 0), run=SHORT),
    "7/0 to nearest": Arm(AttentionFault(7, 0, rounding="nearest"), run={"steps": 1400}),
    "7/0 in the last layer": Arm(AttentionFault(7, 0, layers=(1,)), run={"steps": 1400}),
}
VARIANTS = {
    arm: Arm(fault, model=model, run=SHORT)
    for name, model in MODELS.items()
    for arm, fault in ((f"{CLEAN}, {name}", None), (f"7/0, {name}", AttentionFault(7, 0)))
}
ARMS = BASE | VARIANTS


def clean_arm(arm: str) -> str:
    """The arm with the same model and no fault."""
    return next(
        name for name, it in ARMS.items() if it.attention is None and it.model == ARMS[arm].model
    )


@dataclass(frozen=True)
class Windows:
    """Steps by which a run is judged.

    Attributes:
        window: Healthy steps, for metrics that are judged by the run's own level.
        onset: First step with the fault.
        warmup: Steps of learning-rate warm-up.
    """

    window: tuple[int, int]
    onset: int
    warmup: int


def judged_run(
    run: Run, healthy: Sequence[Run], matched: Run | None, how: Windows
) -> dict[str, Any]:
    """What bands and default alarms made of a run, for a row.

    Args:
        run: The run.
        healthy: Clean runs of the same model and of other seeds: the bands.
        matched: The clean run of the same seed; None: this is one.
        how: Onset and windows.
    """
    kinds: dict[str, Judged] = dict.fromkeys(SPECTRA.values(), "reference")
    reference = learn(healthy, kinds | dict(MONITORS.values()), how.window)
    alarms = {key: alarm.step for key, alarm in first_outside(run, reference).items()}
    steps, loss = run.metrics[HELD_OUT]
    found: dict[str, Any] = {"firsts": {name: alarms.get(key) for name, key in KEYS.items()}}
    # First alarm, median z after the onset, samples beyond |z| = 5, and all samples.
    found["spectra"] = {}
    for name, key in SPECTRA.items():
        at, z = scores(run, reference, key)
        late = z[(at >= how.onset + 200) & (at <= how.onset + 600)]
        middle = _short(np.median(late)) if len(late) else float("nan")
        found["spectra"][name] = [alarms.get(key), middle, int((np.abs(z) > 5).sum()), len(z)]
    z = dict(zip(*(x.tolist() for x in scores(run, reference, SPECTRUM)), strict=True))
    shown = [int(x) for x in steps[::2]]
    found |= {
        "default": default_alarms(run, how),
        "loss": float(loss[-1]),
        # The Δ2 spectrum's z, 0 before there is one.
        "course": [shown, [_short(z.get(step, 0.0)) for step in shown]],
    }
    if matched is not None:
        clean = dict(zip(*matched.metrics[HELD_OUT], strict=True))
        above = [(int(s), x - clean[s]) for s, x in zip(steps, loss, strict=True)]
        apart = [s for s, gap in above if not gap < GAP and s >= how.onset]
        found |= {"gap": _short(above[-1][1]), "apart": min(apart, default=None)}
        # The layers that are named as worst, from the alarm on, one for each sample.
        at, layers = run.metrics[WORST]
        since = alarms.get(SPECTRUM, np.inf)
        found["worst_layers"] = [int(x) for x in layers[at >= since]]
    return found


def scores(run: Run, reference: Reference, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps of a metric, and its distances from the band."""
    steps, values = run.metrics[key]
    detector = BandDetector(reference)
    z = []
    for step, value in zip(steps.tolist(), values.tolist(), strict=True):
        found = detector.score(key, step, value) if np.isfinite(value) else None
        z.append(found.z if found else (0.0 if np.isfinite(value) else np.nan))
    return np.asarray(steps), np.asarray(z)


def default_alarms(run: Run, how: Windows) -> dict[str, Any]:
    """The alarms that a run has by default, which sees one lag and what is kept in brief detail."""
    kept = {}
    for key, series in run.metrics.items():
        monitor, brief = key.split("/")[0], is_brief(key)
        if monitor.startswith("delta"):
            brief = brief and monitor == f"delta{max(LAGS)}"
        if brief or key == HELD_OUT:
            kept[key] = series
    seen = replace(run, metrics=kept)
    seen = replayed(seen, how.warmup, AlarmConfig(window=how.window[1] - how.warmup))
    raised, late = alarm_events(seen), alarm_events(seen, how.onset)
    return {
        "alarms": sorted({f"{x['key']} {x['rule']} {x['step']}" for x in raised}),
        "early": len(raised) - len(late),
        "first": first_step(late),
        "spectrum": first_step(x for x in late if x["key"].startswith("delta")),
        "loss": first_step(x for x in late if x["key"] in LOSSES),
        "judged": max(int(at[-1]) for at, _ in kept.values()) - how.window[1],
    }


def _short(x: Any) -> float:
    return float(f"{float(x):.3g}")
