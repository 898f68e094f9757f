"""What the monitors made of one run with an attention fault, or of a healthy one.

Two judges look at each run: bands learned from clean runs of other seeds (|z| > 5 in two samples
running), and the alarms that a run has by default, which know the run itself only. Which runs there
are is `attention_doses.py`'s, what is shown of it `attention_tables.py`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from experiments.attention_fault import MONITORS
from experiments.train import HELD_OUT
from stabmon.alarms.detector_set import LOSS
from stabmon.alarms.detectors.bands import BandDetector
from stabmon.alarms.lead import alarms_of, first_by_key
from stabmon.alarms.reference import Judged, Reference, learn
from stabmon.alarms.standard import standard_detectors
from stabmon.quantities import is_brief
from stabmon.recovery.replay import has_qk_norm
from stabmon.runs.run import Run

ALPHAS = {1: "effective_rank", 2: "modes"}
AGGREGATES = ("mean", "p10", "min")
SPECTRUM = "delta200/global/delta2/modes/p10"
WORST = "delta200/global/delta2/modes/worst_layer"
GAP = 0.05


@dataclass(frozen=True)
class Judge:
    """How runs are judged.

    Attributes:
        window: Healthy steps, for metrics that are judged by the run's own level.
        onset: First step with the fault.
        warmup: Steps of learning-rate warm-up.
        lags: That were measured.
    """

    window: tuple[int, int]
    onset: int
    warmup: int
    lags: tuple[int, ...]

    @property
    def spectra(self) -> dict[str, str]:
        """{"lag, α, aggregate": key} of the Δ2 spectrum."""
        return {
            f"{lag}, {alpha}, {aggregate}": f"delta{lag}/global/delta2/{name}/{aggregate}"
            for lag in self.lags
            for alpha, name in ALPHAS.items()
            for aggregate in AGGREGATES
        }


def judge(run: Run, healthy: Sequence[Run], matched: Run | None, how: Judge) -> dict[str, Any]:
    """What the alarms made of a run.

    Args:
        run: The run.
        healthy: Clean runs of the same model and of other seeds.
        matched: The clean run of the same seed; None: this is one.
        how: Onset and windows.
    """
    spectra = how.spectra
    kinds: dict[str, Judged] = dict.fromkeys(spectra.values(), "reference")
    kinds |= dict(MONITORS.values())
    reference = learn(healthy, kinds, how.window)
    alarms = {key: alarm.step for key, alarm in first_by_key(run, BandDetector(reference)).items()}
    scores = {name: _scores(run, reference, key) for name, key in spectra.items()}
    steps, loss = run.metrics[HELD_OUT]
    found = {
        "firsts": {name: alarms.get(key) for name, (key, _) in MONITORS.items()},
        # First alarm, median z after the onset, samples beyond |z| = 5, and all samples.
        "spectra": {
            name: [
                alarms.get(key),
                _round(np.median(_between(*scores[name], how.onset + 200, how.onset + 600))),
                int((np.abs(scores[name][1]) > 5).sum()),
                len(scores[name][1]),
            ]
            for name, key in spectra.items()
        },
        "default": _default(run, how),
        "loss": float(loss[-1]),
        "course": [[int(x) for x in steps[::2]], [_round(z) for z in _course(run, reference)]],
    }
    if matched is not None:
        healthy_loss = dict(zip(*matched.metrics[HELD_OUT], strict=True))
        above = [(int(s), x - healthy_loss[s]) for s, x in zip(steps, loss, strict=True)]
        apart = [s for s, gap in above if not gap < GAP and s >= how.onset]
        found |= {"gap": _round(above[-1][1]), "apart": min(apart, default=None)}
        found["worst_layers"] = _worst_layers(run, alarms.get(SPECTRUM))
    return found


def _scores(run: Run, reference: Reference, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps of a metric, and its distances from the band."""
    steps, values = run.metrics[key]
    detector = BandDetector(reference)
    z = []
    for step, value in zip(steps.tolist(), values.tolist(), strict=True):
        found = detector.score(key, step, value) if np.isfinite(value) else None
        z.append(found.z if found else (0.0 if np.isfinite(value) else np.nan))
    return np.asarray(steps), np.asarray(z)


def _between(steps: np.ndarray, values: np.ndarray, first: int, last: int) -> np.ndarray:
    inside = values[(steps >= first) & (steps <= last)]
    return inside if len(inside) else np.asarray([np.nan])


def _course(run: Run, reference: Reference) -> list[float]:
    """The Δ2 spectrum's z at every other evaluation; 0 before there is one."""
    there = dict(zip(*(x.tolist() for x in _scores(run, reference, SPECTRUM)), strict=True))
    return [there.get(int(s), 0.0) for s in run.metrics[HELD_OUT][0][::2]]


def _worst_layers(run: Run, first: int | None) -> list[int]:
    """The layers that are named as worst, from the alarm on, one for each sample."""
    steps, layers = run.metrics[WORST]
    return [] if first is None else [int(x) for x in layers[steps >= first]]


def _default(run: Run, how: Judge) -> dict[str, Any]:
    """The alarms that a run has by default, which sees one lag and what is kept in brief detail."""
    kept = {}
    for key, series in run.metrics.items():
        monitor, brief = key.split("/")[0], is_brief(key)
        if monitor.startswith("delta"):
            brief = brief and monitor == f"delta{max(how.lags)}"
        if brief or key == HELD_OUT:
            kept[key] = series
    seen = replace(run, metrics=kept)
    length = how.window[1] - how.warmup
    board = standard_detectors(how.warmup, length, qk_norm=has_qk_norm(run))
    raised = alarms_of(seen, board)
    late = [alarm for alarm in raised if alarm.step >= how.onset]
    first = lambda keys: min((a.step for a in late if keys(a.key)), default=None)
    return {
        "alarms": sorted({f"{a.key} {a.rule} {a.step}" for a in raised}),
        "early": len(raised) - len(late),
        "first": first(lambda key: True),
        "spectrum": first(lambda key: key.startswith("delta")),
        "loss": first(lambda key: key in (LOSS, HELD_OUT)),
        "judged": int(max(steps[-1] for steps, _ in kept.values())) - how.window[1],
    }


def _round(x: Any) -> float:
    return float(f"{float(x):.3g}")
