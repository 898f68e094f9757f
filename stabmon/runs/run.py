"""A run as it was recorded: `Run`, and `load_run`, which reads a run's folder.

What lives here: what a run is to every reader, and where its samples come from (`Source`). What
does not: writing (`runlog`), following (`follow`), other trainers' logs (`foreign`).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stabmon.quantities import LOSS
from stabmon.runs.columns import Series
from stabmon.runs.config import read_config, setting
from stabmon.runs.follow import Follower
from stabmon.runs.jsonl import read_jsonl

EPOCH = "schedule/global/epoch/value"


@dataclass(frozen=True)
class Source:
    """What kind of log a run's samples come from.

    Attributes:
        kind: "stabmon" for a run's own folder, or what another trainer's log is called.
        path: The log; empty for a run's own folder.
        means: Whether a loss is the mean over the steps since the row before; None: it does not
            say.
        columns: Key → name in the log.
        left_out: Names in the log that no key was found for.
    """

    kind: str = "stabmon"
    path: str = ""
    means: bool | None = False
    columns: dict[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def foreign(self) -> bool:
        """Whether it is another trainer's log."""
        return self.kind != "stabmon"


@dataclass(frozen=True)
class Run:
    """A run as read from its folder or from another trainer's log.

    Attributes:
        name: Name of the folder.
        folder: Where it lies.
        config: What it was started with.
        metrics: Key → (steps, values), int64 and float64, both of shape (samples,), steps rising;
            what a rewind abandoned is left out.
        events: Alarms and actions, in the order they were written; alarms that a rewind abandoned
            are left out.
        faults: Injected faults.
        source: What kind of log the samples come from.
        attempts: How often training was begun: rewinds and one.
        skipped: Lines that could not be read.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    metrics: dict[str, Series]
    events: tuple[dict[str, Any], ...]
    faults: tuple[dict[str, Any], ...]
    source: Source = Source()
    attempts: int = 1
    skipped: int = 0

    @property
    def steps(self) -> np.ndarray:
        """Steps of the training loss, or of the longest series where there is none: the rows."""
        if LOSS in self.metrics:
            return self.metrics[LOSS][0]
        return max((x for x, _ in self.metrics.values()), key=len, default=np.zeros(0, np.int64))

    @property
    def spacing(self) -> int:
        """Steps from a row to the next, the median; 0 with fewer than two rows."""
        steps = self.steps
        return int(np.median(np.diff(steps))) if len(steps) > 1 else 0

    @property
    def epochs(self) -> Series | None:
        """Steps and passes over the data, where the log tells."""
        return self.metrics.get(EPOCH)


def load_run(folder: str | Path, *, attempt: int | None = None) -> Run:
    """Returns the run in `folder`, finished or still being written, as one timeline.

    Lines that cannot be read are skipped with a `UserWarning` that names the file and counts them.

    Args:
        folder: `runs/NAME`.
        attempt: 1 is the run as it was before its first rewind, 2 before its second; None the
            newest.

    Raises:
        FileNotFoundError: If it has no `config.json`.
        ValueError: If `config.json` cannot be read as JSON, or there is no such attempt.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder} is not a run, it has no config.json: give a folder such as runs/NAME"
        )
    config = read_config(folder / "config.json")
    found = Follower(folder, attempt=attempt)
    found.update()
    found.warn()
    if attempt is not None and attempt != found.attempts:
        raise ValueError(f"{folder} has {found.attempts} attempts, from 1; got attempt {attempt}")
    return Run(
        folder.resolve().name,
        folder,
        config,
        found.columns.series(),
        tuple(found.events),
        tuple(read_jsonl(folder / "faults.jsonl")),
        _source(config),
        found.attempts,
        found.skipped,
    )


def _source(config: dict[str, Any]) -> Source:
    """What `stabmon import` wrote down about the log that a folder was made from."""
    kind = setting(config, "imported", "kind")
    if not isinstance(kind, str):
        return Source()
    told = config["imported"]
    columns, left_out = told.get("columns"), told.get("left_out")
    return Source(
        kind,
        str(told.get("path", "")),
        told.get("means"),
        columns if isinstance(columns, dict) else {},
        tuple(left_out) if isinstance(left_out, list) else (),
    )
