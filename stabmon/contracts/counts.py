"""Contracts of counters and of the learning rate."""

import math

import numpy as np

from stabmon.contracts.contract import Finding, Known, Sample, contract

# Updates of Adam in units of its learning rate: at most about 1, at least 0.01 for years.
_LEAST, _MOST = 0.003, 4.0
_CLOSE = 2e-3


@contract()
def counts(now: Sample, before: Sample | None, known: Known) -> Finding:
    """No counter goes back, stands still while others advance, or runs ahead of the caller's step.

    With accumulation a counter advances once in k steps. Under `apply_if_finite` it may lag.

    References:
        A counter that is wrong at start or after a resume (entrenar#257); bias corrections jump.
    """
    if before is None:
        return None
    old, new = before.all("count"), now.all("count")
    steps = now.step - before.step
    gone = {path: int(new[path][0] - old[path][0]) for path in new.keys() & old.keys()}
    if not gone or steps <= 0:
        return None
    broken = {}
    for path, advance in gone.items():
        if advance < 0:
            broken[path] = f"it went back from {int(old[path][0]):,} to {int(new[path][0]):,}"
        elif advance > steps:
            broken[path] = f"it advanced by {advance:,} in {steps:,} steps"
        elif advance == 0 and steps > 1 and any(2 * other >= steps for other in gone.values()):
            broken[path] = "it stands still while others advance"
        elif known.moved.get(path, 0) >= 2 and advance == 0 and before.any("update"):
            broken[path] = "it stands still, though there are updates"
    return broken


@contract(patience=2)
def rate(now: Sample, before: Sample | None, known: Known) -> Finding:
    """The rate in the optimizer's state is the schedule's, and updates have the size it gives them.

    Of optimizers with first and second moments the root mean square of an update is between 0.003
    and 4 times the rate. While the declared rate changes twofold or more, sizes of updates change
    with it: a slope near 0 of their logarithm against the rate's is another schedule.

    References:
        A wrong rate for a long stretch (github.com/jzhang38/TinyLlama/issues/72); a ramp that runs
        backwards (github.com/karpathy/nanochat/issues/68).
    """
    if now.rate is None:
        return None
    broken = {}
    for path, x in now.all("rate").items():
        declared = [x for x in (now.rate, now.rate_before) if x is not None]
        if not any(math.isclose(float(x[0]), y, rel_tol=_CLOSE, abs_tol=1e-12) for y in declared):
            broken[path] = f"it is {float(x[0]):.3g}, the schedule says {now.rate:.3g}"
    kinds = {kind.rpartition("/")[2] for kind in now.kinds}
    adam = bool(kinds & {"mu", "m", "exp_avg"}) and bool(kinds & {"nu", "v", "exp_avg_sq"})
    rows = [row for row in known.past[-5:] if row[2] and any(row[3].values())]
    if not adam or not rows or rows[-1][0] != now.step:
        return broken if now.all("rate") else None
    ratio = _median_log(rows[-1][3], math.log(now.rate)) if now.rate > 0 else 0.0
    if not math.log(_LEAST) <= ratio <= math.log(_MOST):
        broken["all updates"] = f"they are {math.exp(ratio):.3g} times the declared rate"
    slope = _slope([(math.log(r or 1.0), _median_log(sizes, 0.0)) for _, _, r, sizes in rows])
    if slope is not None and not 0.3 <= slope <= 3.0:
        broken["all updates"] = "they do not follow the declared rate"
    return broken


def _median_log(sizes: dict[str, float], base: float) -> float:
    """Median over leaves of the logarithm of their updates' sizes, less a base."""
    return float(np.median([math.log(x) for x in sizes.values() if x > 0])) - base


def _slope(points: list[tuple[float, float]]) -> float | None:
    """Slope of y against x, None where x spans too little or there are too few points."""
    x, y = np.array(points).T
    if len(points) < 4 or np.ptp(x) < math.log(2):
        return None
    return float(np.polyfit(x, y, 1)[0])
