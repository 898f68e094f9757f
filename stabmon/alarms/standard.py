"""The detectors that a run has by default, for the keys that the monitor emits in brief detail.

Thresholds are for a run without clean sisters, judged by its own window after the warm-up; how
often they go off by mistake is measured by `calibration.py`.
"""

import math

from stabmon.alarms.detector_set import DetectorSet
from stabmon.alarms.detectors.base import BandDetector, Detector
from stabmon.alarms.detectors.deviations import Cusum, RobustZ
from stabmon.alarms.detectors.grades import GradeWatch
from stabmon.alarms.detectors.latch import Patience
from stabmon.alarms.detectors.limits import AllHeads, Threshold
from stabmon.alarms.detectors.shifts import Shift
from stabmon.alarms.detectors.surges import Surge
from stabmon.alarms.detectors.window import HealthyWindow
from stabmon.alarms.reference import Reference

_SPECTRA = r"delta\d+/global/(delta[12]|query)/(modes|entropy|effective_rank)/(p10|mean)"
_RADIAL = r"delta\d+/global/[qk]/radial_alignment/mean"
# A healthy run drifts: its router sharpens and its logits grow for thousands of steps.
_WIDEN = 5.0
_SYMPTOM = "symptoms/global/{}/value"


def standard_detectors(
    warmup: int = 100,
    length: int = 200,
    reference: Reference | None = None,
    cooldown: int = 500,
    span: int = 1000,
    qk_norm: bool = False,
) -> DetectorSet:
    """A board for a run that is watched by `stabmon.Monitor`.

    Nothing is judged before step `warmup + length`, but for values that are not finite and for
    fixed limits. Spectra and the router's entropy are judged by the best that the run has been,
    downwards only: a healthy run's rise while it learns. Metrics that are not sampled cost nothing.

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
    twice, once = Patience(2, 0.5, cooldown), Patience(1, 0.5, cooldown)
    thrice = Patience(3, 0.5, cooldown)
    first = warmup + length

    def window(floor: float, ratchet: int = 0) -> HealthyWindow:
        return HealthyWindow(warmup, first, floor=floor, ratchet=ratchet, widen=_WIDEN)

    entropy = "router/global/entropy/(mean|min)"
    load = "router/global/max_violation/mean"
    detectors: dict[str, Detector] = {
        "finite": Threshold("non-finite", ".*", math.inf, once),
        "nonfinite": Threshold("non-finite", _SYMPTOM.format("nonfinite"), 0.0, once),
        "logit limit": Threshold("limit", "attention/global/max_logit/max", 1e4, once),
        "dead": Threshold("limit", "router/global/dead/mean", 0.5, thrice, first),
        "radial": Threshold("limit", _RADIAL, 0.05, twice, first),
        "spectra": RobustZ("z", _SPECTRA, window(0.03, 1), "down", 5.0, twice),
        "spectra drift": Cusum("drift", _SPECTRA, window(0.03, 1), "down", 20.0, patience=once),
        # A router's entropy falls by a third in a healthy run: no drift detector for it, but one of
        # a change of pace.
        "router": RobustZ("z", entropy, window(0.04, 1), "down", patience=twice),
        "router course": Shift(
            "shift", "router/global/entropy/mean", warmup, "down", 3.2, 40, 20, patience=once
        ),
        "load": RobustZ("z", load, window(0.1), "up", patience=twice),
        "experts": RobustZ(
            "z", "router/global/effective_experts/mean", window(0.02), "down", patience=twice
        ),
        "experts course": Shift(
            "shift", "router/global/effective_experts/mean", warmup, "down", patience=once
        ),
        "margin": RobustZ("z", "router/global/margin/mean", window(0.05), "up", patience=twice),
        "heads": AllHeads(window(0.02), patience=Patience(2, 0.75, cooldown)),
        "entropy": RobustZ(
            "z", "attention/global/entropy/mean", window(0.07), "down", patience=twice
        ),
        "logit": RobustZ("z", "attention/global/max_logit/max", window(0.2), "up", patience=twice),
        "grade": GradeWatch(first, patience=Patience(1, 0.5, cooldown)),
        # One batch of a healthy run can be six deviations off: more, or for longer.
        "gradient spike": Surge(
            "spike", _SYMPTOM.format("grad_norm"), warmup, threshold=10.0, patience=once
        ),
        "gradient": Surge("surge", _SYMPTOM.format("grad_norm"), warmup, patience=twice),
        "gradient level": Shift("shift", _SYMPTOM.format("grad_norm"), warmup, patience=once),
        "update": Surge("surge", _SYMPTOM.format("update_(norm|ratio)"), warmup, patience=thrice),
        "loss spike": Surge(
            "spike", _SYMPTOM.format("loss"), warmup, threshold=10.0, patience=once
        ),
        "loss": Surge("surge", _SYMPTOM.format("loss"), warmup, threshold=5.0, patience=twice),
        "plunge": Shift("plunge", _SYMPTOM.format("loss"), warmup, "down", 5.0, patience=once),
        "held out": RobustZ(
            "z", "evaluation/global/loss/value", window(0.02, -1), "up", patience=twice
        ),
    }
    if qk_norm:
        del detectors["radial"]
    if reference is not None:
        detectors["bands"] = BandDetector(reference)
    return DetectorSet(detectors, span)
