"""A run on disk: `config.json`, `metrics.jsonl`, `events.jsonl`, `faults.jsonl`.

What lives here: `RunLog`, which writes them so that a run killed at any moment and resumed has each
sample once, and `load_run`, which reads them back, also while they are being written. What does
not: lines of JSON (`jsonl`), other sinks (`writers`), pictures (`report`), checkpoints. No JAX.

    metrics.jsonl  {"step": 1200, "tokens": 921600, "time": 1.7e9, "values": {KEY: 0.37, ...}}
    events.jsonl   {"kind": "alarm", "step": 1240, "time": 1.7e9, "rule": ..., "value": ..., ...}
    faults.jsonl   {"kind": "attention", "onset": 500, "end": null, ...}

KEY is `{monitor}/layer_{i}/{metric}/{aggregate}` or `{monitor}/global/{metric}/{aggregate}`, as
`delta50/layer_03/delta2/modes/p10`. Non-finite numbers are the strings "NaN", "Infinity" and
"-Infinity" on disk and floats again when read.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stabmon.runs.jsonl import (
    append,
    floats,
    last_row,
    mend,
    plain,
    read_jsonl,
    rows,
    warn_skipped,
)

_FILES = ("metrics.jsonl", "events.jsonl", "faults.jsonl")


class RunLog:
    """Writes one run's folder; made by `RunLog.open`, closed by `close` or as a context.

    Attributes:
        folder: Where the files lie.
        last_step: Step of the newest sample in the log, −1 without one. `sample` skips steps up to
            it, so a resumed run may go over ground that is already written.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp()) / "first"
        >>> with RunLog.open(folder, {"seed": 0}) as log:
        ...     log.sample(10, {"train/global/loss/mean": 2.5}, tokens=7680)
        >>> with RunLog.open(folder, {"seed": 0}, resume=True) as log:
        ...     log.sample(10, {"train/global/loss/mean": 2.5}, tokens=7680)  # already there
        ...     log.sample(20, {"train/global/loss/mean": float("inf")}, tokens=15360)
        >>> load_run(folder).metrics["train/global/loss/mean"]
        (array([10, 20]), array([2.5, inf]))
    """

    def __init__(self, folder: Path) -> None:
        """Opens the three files of `folder` for appending; use `RunLog.open`."""
        self.folder = folder
        last = last_row(folder / "metrics.jsonl")
        self.last_step = int(last["step"]) if last else -1
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._files = {name: os.open(folder / name, flags, 0o644) for name in _FILES}
        self._faults = {_identity(row) for row in read_jsonl(folder / "faults.jsonl")}
        self._events: set[str] = set()
        for row in read_jsonl(folder / "events.jsonl"):
            if row.get("kind") == "rewind":
                self._events.clear()
                if row["metrics_bytes"] == self._size("metrics.jsonl"):
                    self.last_step = min(self.last_step, int(row["step"]))
            self._events.add(_identity(row))

    @classmethod
    def open(
        cls, folder: str | Path, config: Mapping[str, Any], *, resume: bool = False
    ) -> "RunLog":
        """Returns the log of a new run, or of one to go on with.

        A torn last line, left by a process killed while it wrote, is cut off. With `resume` a
        missing or empty folder begins a new run, so that one command serves for both.

        Args:
            folder: `runs/NAME`; created with its parents.
            config: What makes the run what it is, as JSON can hold it.
            resume: Go on with the run that is there.

        Raises:
            FileExistsError: If the folder holds another configuration, or this one and samples
                without `resume`. Nothing is overwritten.
            ValueError: If its `config.json` cannot be read.
        """
        folder = Path(folder)
        path, metrics = folder / "config.json", folder / "metrics.jsonl"
        wanted = plain(config)
        if path.exists():
            if found := _differences(_read_config(path), wanted):
                raise FileExistsError(
                    f"{folder} holds a run of another configuration, nothing was written: "
                    f"{'; '.join(found)}. Choose another name, or give the old values"
                )
        elif metrics.exists():
            raise FileExistsError(f"{folder} holds samples but no config.json: choose another name")
        if metrics.exists() and not resume:
            raise FileExistsError(
                f"{folder} holds this run already: pass resume=True (--resume) to go on with it, "
                f"or choose another name"
            )
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            half = folder / "config.json.part"
            half.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
            half.replace(path)
        for name in _FILES:
            mend(folder / name)
        return cls(folder)

    def sample(self, step: int, values: Mapping[str, Any], *, tokens: int | None = None) -> None:
        """Appends one sample, unless `step` is in the log already.

        Args:
            step: Step at which it was measured.
            values: Key → scalar of any kind that `float` takes.
            tokens: Tokens trained on so far.

        Raises:
            OSError: If the disk is full; the file then ends with its last whole line.
        """
        if step <= self.last_step:
            return
        numbers = {key: float(value) for key, value in values.items()}
        row = {"step": int(step), "tokens": tokens, "time": time.time(), "values": numbers}
        self._append("metrics.jsonl", row)
        self.last_step = int(step)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends one sample: `sample`, under the name that every writer has for it.

        Args:
            step: Step at which it was measured.
            values: Key → scalar.
        """
        self.sample(step, values)

    def event(self, kind: str, step: int, **fields: Any) -> None:
        """Appends what happened, such as an alarm or an action; the same event once.

        Args:
            kind: `alarm`, `action`, ...
            step: When.
            **fields: For an alarm `rule`, `key`, `value`, `reference` and perhaps `layer`.

        Raises:
            OSError: If the disk is full.
        """
        row = {"kind": kind, "step": int(step), "time": time.time(), **fields}
        if _identity(row) not in self._events:
            self._append("events.jsonl", row)
            self._events.add(_identity(row))

    def fault(self, **fields: Any) -> None:
        """Appends the truth about an injected fault; the same fault once.

        Args:
            **fields: `kind`, `onset`, `end` (None: it stays) and whatever tells its severity.

        Raises:
            OSError: If the disk is full.
        """
        if _identity(fields) not in self._faults:
            self._append("faults.jsonl", fields)
            self._faults.add(_identity(fields))

    def rewind(self, step: int) -> None:
        """Says that training goes on from `step`, so that later steps are written again.

        What was written stays; readers take the last sample of each step.

        Args:
            step: Step of the checkpoint that was restored.

        Raises:
            OSError: If the disk is full.
        """
        self._events.clear()
        size = self._size("metrics.jsonl")
        self.event("rewind", step, newest=self.last_step, metrics_bytes=size)
        self.last_step = min(self.last_step, int(step))

    def close(self) -> None:
        """Closes the files; doing it twice is fine."""
        while self._files:
            os.close(self._files.popitem()[1])

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _size(self, name: str) -> int:
        """Bytes in a file of the log."""
        return os.fstat(self._descriptor(name)).st_size

    def _descriptor(self, name: str) -> int:
        """The open file."""
        if name not in self._files:
            raise ValueError(f"the log of {self.folder} is closed: open it with resume=True")
        return self._files[name]

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        """Appends `row` to a file of the log."""
        try:
            append(self._descriptor(name), row)
        except OSError as error:
            reason = f"{error.strerror}: the line was not written, the lines before it are whole"
            raise OSError(error.errno, reason, str(self.folder / name)) from error


@dataclass(frozen=True)
class Run:
    """A run as read from its folder.

    Attributes:
        name: Name of the folder.
        folder: Where it lies.
        config: What it was started with.
        metrics: Key → (steps, values), int64 and float64, both of shape (samples,), steps rising;
            of a step that was written again after a rewind, the later sample.
        events: Alarms and actions, in the order they were written.
        faults: Injected faults.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    metrics: dict[str, tuple[np.ndarray, np.ndarray]]
    events: tuple[dict[str, Any], ...]
    faults: tuple[dict[str, Any], ...]


def load_run(folder: str | Path) -> Run:
    """Returns the run in `folder`, finished or still being written.

    Lines that cannot be read are skipped with a `UserWarning` that names file and line.

    Args:
        folder: `runs/NAME`.

    Raises:
        FileNotFoundError: If it has no `config.json`.
        ValueError: If `config.json` cannot be read as JSON.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder} is not a run, it has no config.json: give a folder such as runs/NAME"
        )
    config = floats(_read_config(folder / "config.json"))
    series: dict[str, dict[int, float]] = {}
    for number, row in rows(folder / "metrics.jsonl"):
        try:
            step, values = int(row["step"]), {k: float(v) for k, v in row["values"].items()}
        except (AttributeError, KeyError, TypeError, ValueError):
            warn_skipped(folder / "metrics.jsonl", number, "is not a sample")
            continue
        for key, value in values.items():
            series.setdefault(key, {})[step] = value
    metrics = {}
    for key, samples in series.items():
        steps = np.array(sorted(samples), np.int64)
        metrics[key] = (steps, np.array([samples[step] for step in steps.tolist()], np.float64))
    events, faults = (tuple(read_jsonl(folder / name)) for name in _FILES[1:])
    return Run(folder.resolve().name, folder, config, metrics, events, faults)


def _read_config(path: Path) -> dict[str, Any]:
    """What `config.json` holds."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Where two configurations differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in sorted(old.keys() | new.keys()):
            inner = f"{path}.{key}" if path else key
            found += _differences(old.get(key, "absent"), new.get(key, "absent"), inner)
        return found
    return [] if old == new else [f"{path} was {old!r}, now {new!r}"]


def _identity(row: Mapping[str, Any]) -> str:
    """What makes two events the same: all but the time at which they were written."""
    return json.dumps({k: v for k, v in plain(row).items() if k != "time"}, sort_keys=True)
