"""A recorded run as the stream of samples that it was."""

from collections.abc import Iterator

from stabmon.runs.runlog import Run


def samples(run: Run) -> Iterator[tuple[int, dict[str, float]]]:
    """The samples of a run, (step, values), in the order of steps."""
    found: dict[int, dict[str, float]] = {}
    for key, (steps, values) in run.metrics.items():
        for step, value in zip(steps.tolist(), values.tolist(), strict=True):
            found.setdefault(step, {})[key] = value
    yield from sorted(found.items())
