"""The detectors that a run has by default, built from the judgements of its quantities.

What is judged, and how, stands in `stabmon.quantities`; here judgements become detectors, for a run
without clean sisters. How often they raise an alarm by mistake is measured by `calibration.py`.
"""

import math

from stabmon.alarms.detector_set import DetectorSet
from stabmon.alarms.detectors.bands import BandDetector
from stabmon.alarms.detectors.base import Detector
from stabmon.alarms.detectors.counts import Rise
from stabmon.alarms.detectors.deviations import AllHeads, Collapse, Cusum, RobustZ
from stabmon.alarms.detectors.grades import GradeWatch
from stabmon.alarms.detectors.impossible import Impossible
from stabmon.alarms.detectors.latch import Patience
from stabmon.alarms.detectors.levels import Level
from stabmon.alarms.detectors.limits import Threshold
from stabmon.alarms.detectors.shifts import Shift
from stabmon.alarms.detectors.surges import Surge
from stabmon.alarms.detectors.window import HealthyWindow
from stabmon.alarms.reference import Reference
from stabmon.quantities import QUANTITIES, Judged, Quantity

# A healthy run drifts: its router sharpens and its logits grow for thousands of steps.
_WIDEN = 5.0


def standard_detectors(
    warmup: int = 100,
    length: int = 200,
    reference: Reference | None = None,
    cooldown: int = 500,
    span: int = 1000,
    qk_norm: bool = False,
) -> DetectorSet:
    """The detectors of a run that is watched by `stabmon.Monitor`.

    Nothing is judged before step `warmup + length`, but for values that are not finite and for
    fixed limits. Metrics that are not sampled cost nothing.

    Args:
        warmup: Steps of learning-rate warm-up.
        length: Steps of the healthy window after it.
        reference: Bands of clean runs, judged besides.
        cooldown: Steps after an alarm in which the same metric raises no other.
        span: Steps for which an alarm counts as evidence.
        qk_norm: Whether queries and keys are normalised. Logits then do not depend on the lengths
            of W_q and W_k, which grow in a healthy run too: their radial alignment is not judged.

    Raises:
        ValueError: A negative warm-up, or no window.
    """
    if warmup < 0 or length < 1:
        raise ValueError(
            f"expected warmup >= 0 and a healthy window of length >= 1, got {warmup} and {length}"
        )
    once = Patience(1, 0.5, cooldown)
    detectors: dict[str, Detector] = {
        "finite": Threshold("non-finite", ".*", math.inf, patience=once)
    }
    for quantity in QUANTITIES:
        if qk_norm and quantity.evidence == "radial alignment":
            continue
        for judged in quantity.judged:
            name = f"{quantity.name}/{','.join(judged.at)} {judged.rule} {judged.side}"
            detector = _detector(quantity, judged, warmup, warmup + length, cooldown)
            detector.unless = judged.unless
            detectors[name] = detector
    if reference is not None:
        detectors["bands"] = BandDetector(reference)
    return DetectorSet(detectors, span)


def _detector(
    quantity: Quantity, judged: Judged, warmup: int, first: int, cooldown: int
) -> Detector:
    """One judgement as a detector; `first` is the first step after the healthy window."""
    rule, pattern, side = judged.rule, quantity.pattern(judged.at), judged.side
    patience = Patience(judged.dwell, 0.5, cooldown)
    follow = {"up": -1, "down": 1}[side] if judged.ratchet else 0
    window = HealthyWindow(warmup, first, floor=judged.floor, ratchet=follow, widen=_WIDEN)
    match rule:
        case "z":
            return RobustZ(rule, pattern, window, side, judged.threshold, patience=patience)
        case "drift":
            return Cusum(rule, pattern, window, side, judged.threshold, patience=patience)
        case "surge" | "spike":
            return Surge(rule, pattern, warmup, side, judged.threshold, patience=patience)
        case "shift":
            shape = (judged.threshold, judged.before, judged.recent)
            return Shift(rule, pattern, warmup, side, *shape, patience=patience)
        case "limit":
            begin = 0 if judged.from_start else first
            return Threshold(rule, pattern, judged.threshold, begin, patience=patience)
        case "count":
            return Rise(rule, pattern, judged.threshold, patience=patience)
        case "low":
            return Collapse(rule, pattern, window, judged.threshold, patience=patience)
        case "level":
            return Level(rule, pattern, warmup, patience=patience)
        case "impossible":
            return Impossible(pattern, patience=patience)
        case "all heads":
            return AllHeads(window, patience=Patience(judged.dwell, 0.75, cooldown))
        case "grade":
            return GradeWatch(first, patience=Patience(1, 0.5, cooldown))
