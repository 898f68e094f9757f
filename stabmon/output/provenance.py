"""What a run's log is, and what it cannot tell, in sentences.

What lives here: `provenance`, for the report and for `stabmon import`. What does not: reading logs
(`stabmon.runs.foreign`).
"""

from stabmon.quantities import GRAD_NORM, HELD_OUT, LEARNING_RATE, LOSS, split_key
from stabmon.runs.run import Run

_FEW = 50
_SCALARS = ("symptoms", "evaluation", "schedule")
_LACKS = (
    (LOSS, "There is no training loss in it."),
    (GRAD_NORM, "Without a gradient norm, trouble that the loss does not show yet is not seen."),
    (HELD_OUT, "Without a held-out loss, overfitting is not seen."),
    (LEARNING_RATE, "Without the learning rate, its schedule is not told from a change of course."),
)


def provenance(run: Run) -> list[str]:
    """Returns what is to be known about a run's log; nothing for one that is whole and its own.

    Args:
        run: The run as it was read.

    Example:
        >>> from pathlib import Path
        >>> import numpy as np
        >>> from stabmon.runs.run import Source
        >>> series = np.array([10, 20]), np.array([2.5, 2.0])
        >>> source = Source("CSV table", "log.csv", None, {LOSS: "train/nll"})
        >>> run = Run("log", Path("log.csv"), {}, {LOSS: series}, (), (), source)
        >>> provenance(run)[0]
        'CSV table, 2 rows, one each 10 steps: loss is train/nll.'
    """
    said = []
    source, rows = run.source, len(run.steps)
    if source.foreign:
        names = ", ".join(f"{_short(key)} is {name}" for key, name in source.columns.items())
        each = f", one each {run.spacing:,} steps" if rows > 1 else ""
        said.append(f"{source.kind}, {rows:,} rows{each}: {names}.")
    if source.foreign and rows < _FEW:
        said.append(f"Only {rows:,} rows: little can be judged.")
    if source.foreign and run.spacing > 1:
        blurred = "A loss is the mean over the steps of a row: what is shorter is blurred."
        unseen = "What comes and goes between two rows is not seen."
        said.append(blurred if source.means else unseen)
    if source.foreign:
        said += [text for key, text in _LACKS if key not in run.metrics]
        if all((parts := split_key(key)) and parts.monitor in _SCALARS for key in run.metrics):
            said.append("It has numbers of the whole model only: no module can be named.")
    if source.left_out:
        some = ", ".join(source.left_out[:12]) + ", …" * (len(source.left_out) > 12)
        said.append(f"Left out, for want of a known quantity: {some}.")
    if run.attempts > 1:
        said.append(f"Attempt {run.attempts}: what earlier ones wrote of later steps is left out.")
    if run.skipped:
        said.append(f"{run.skipped:,} lines could not be read and are left out.")
    return said


def _short(key: str) -> str:
    """A key in a word."""
    parts = split_key(key)
    return key if parts is None else "held-out loss" if key == HELD_OUT else parts.metric
