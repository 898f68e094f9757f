"""Thresholds for a chosen false-alarm rate, from clean runs, each judged by the others' threshold.

What is calibrated is any detector that a function builds for a threshold. The rate it then has on
runs it was not chosen on is reported, not assumed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stabmon.alarms.detector_set import DetectorSet
from stabmon.alarms.detectors.base import Detector
from stabmon.alarms.lead import alarms_of
from stabmon.runs.run import Run


@dataclass(frozen=True)
class Calibration:
    """A threshold, and what it was found to be worth.

    Attributes:
        threshold: The smallest of the candidates that keeps the rate on all clean runs together;
            infinite if none does.
        target: False alarms per 10,000 steps that were asked for.
        fitted_rate: Rate of `threshold` on the runs it was chosen on.
        achieved_rate: Rate by leave-one-out: each run judged by the threshold chosen on the others.
        left_out: That threshold for each run.
        alarms: False alarms of each run by it.
        steps: Clean steps judged in all. With n of them and no alarm at all, a true rate up to
            30,000/n per 10,000 steps is not excluded (95 %).
        unseen_bound: That 95 % upper bound of the achieved rate, 0 alarms or not.
    """

    threshold: float
    target: float
    fitted_rate: float
    achieved_rate: float
    left_out: tuple[float, ...]
    alarms: tuple[int, ...]
    steps: int
    unseen_bound: float


def calibrate(
    runs: Sequence[Run],
    build: Callable[[float], Detector | DetectorSet],
    candidates: Sequence[float],
    rate: float = 1.0,
) -> Calibration:
    """The smallest threshold with at most `rate` false alarms per 10,000 clean steps.

    Args:
        runs: Clean runs of several seeds, at least two.
        build: From a threshold to a fresh detector, or a whole `DetectorSet`.
        candidates: Thresholds to try.
        rate: False alarms per 10,000 steps to allow.

    Raises:
        ValueError: Fewer than two runs, no candidate, a negative rate, or runs without a step.
    """
    if len(runs) < 2:
        raise ValueError(f"leaving one seed out takes at least two clean runs, got {len(runs)}")
    if not candidates or not rate >= 0:
        raise ValueError(
            f"expected thresholds to try and a rate >= 0 per 10,000 steps, got {candidates!r} "
            f"and {rate}"
        )
    lengths = [_steps(run) for run in runs]
    thresholds = sorted(candidates)
    counts = {t: [len(alarms_of(run, build(t))) for run in runs] for t in thresholds}

    def smallest(chosen: Sequence[int]) -> float:
        steps = sum(lengths[i] for i in chosen)
        allowed = rate * steps / 10_000
        fits = (t for t in thresholds if sum(counts[t][i] for i in chosen) <= allowed)
        return next(fits, math.inf)

    every = range(len(runs))
    threshold = smallest(every)
    left_out = tuple(smallest([j for j in every if j != i]) for i in every)
    alarms = tuple(counts[t][i] if t in counts else 0 for i, t in enumerate(left_out))
    steps = sum(lengths)
    fitted = sum(counts[threshold]) if threshold in counts else 0
    per = 10_000 / steps
    return Calibration(
        threshold,
        rate,
        fitted * per,
        sum(alarms) * per,
        left_out,
        alarms,
        steps,
        poisson_bound(sum(alarms)) * per,
    )


def _steps(run: Run) -> int:
    """Steps that the samples of a run span."""
    span = max((int(steps[-1]) for steps, _ in run.metrics.values() if len(steps)), default=0)
    if span < 1:
        raise ValueError(f"run {run.name} spans no step: it has no samples to calibrate on")
    return span


def poisson_bound(count: int) -> float:
    """95 % upper bound of a Poisson mean of which `count` events were seen, by bisection.

    >>> [round(poisson_bound(n), 2) for n in (0, 1, 3)]
    [3.0, 4.74, 7.75]
    """
    low, high = 0.0, 4.0 * count + 20.0
    for _ in range(60):
        middle = (low + high) / 2
        terms = [1.0]
        for k in range(1, count + 1):
            terms.append(terms[-1] * middle / k)
        low, high = (middle, high) if math.exp(-middle) * sum(terms) > 0.05 else (low, middle)
    return high
