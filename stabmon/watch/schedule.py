"""What a learning-rate schedule tells of a run: its rate at a step, and how long it warms up."""

from collections.abc import Callable
from typing import Any

import numpy as np

LONGEST = 20_000
DEFAULT = 100
Schedule = Callable[[int], Any] | float | None


def rate_at(schedule: Schedule, step: int) -> float | None:
    """Returns the learning rate at a step, None without a schedule.

    Args:
        schedule: A function of the step, a constant, or None.
        step: The step.
    """
    if schedule is None:
        return None
    return float(schedule(step) if callable(schedule) else schedule)


def warmup_of(schedule: Schedule) -> int:
    """Returns the steps of warm-up: up to the first at which the rate is as high as it gets.

    Looked for within the first 20,000 steps, finely at first. A rate that rises all along is no
    warm-up; then, and without a schedule, it is 100.

    Args:
        schedule: A function of the step, a constant, or None.

    Example:
        >>> warmup_of(lambda step: min(step / 250, 1.0))
        250
        >>> warmup_of(3e-4), warmup_of(None)
        (0, 100)
    """
    if not callable(schedule):
        return DEFAULT if schedule is None else 0
    steps = np.unique(np.round(np.geomspace(1, LONGEST, 400))).astype(int)
    steps = np.concatenate([[0], steps])
    rates = np.array([float(schedule(int(step))) for step in steps])
    if not np.isfinite(rates).all():
        return DEFAULT
    peak = int(np.argmax(rates >= 0.999 * rates.max()))
    if peak == len(steps) - 1:
        return DEFAULT
    low, high = (steps[peak - 1] if peak else 0), steps[peak]
    enough = 0.999 * rates.max()
    while low < high:
        middle = int(low + high) // 2
        low, high = (low, middle) if float(schedule(middle)) >= enough else (middle + 1, high)
    return int(high)
