"""A recorded run as the stream of samples that it was."""

from collections.abc import Iterator

import numpy as np

from stabmon.runs.run import Run

_CHUNK = 4096


def samples(run: Run) -> Iterator[tuple[int, dict[str, float]]]:
    """The samples of a run, (step, values), in the order of steps; a few of them in memory."""
    if not run.metrics:
        return
    steps = np.unique(np.concatenate([steps for steps, _ in run.metrics.values()]))
    for part in np.split(steps, range(_CHUNK, len(steps), _CHUNK)):
        found: dict[int, dict[str, float]] = {step: {} for step in part.tolist()}
        for key, (at, values) in run.metrics.items():
            rows = slice(*np.searchsorted(at, (part[0], part[-1] + 1)))
            for step, value in zip(at[rows].tolist(), values[rows].tolist(), strict=True):
                found[step][key] = value
        yield from found.items()
