"""A run on disk: `config.json`, `metrics.jsonl`, `events.jsonl`, `faults.jsonl`.

What lives here: `RunLog`, which writes them so that a run killed at any moment and resumed has each
sample once. What does not: reading them (`run`, `follow`), lines of JSON (`jsonl`), sinks,
checkpoints. No JAX.

    metrics.jsonl  {"step": 1200, "tokens": 921600, "time": 1.7e9, "values": {KEY: 0.37, ...}}
    events.jsonl   {"kind": "alarm", "step": 1240, "time": 1.7e9, "rule": ..., "value": ..., ...}
    faults.jsonl   {"kind": "attention", "onset": 500, "end": null, ...}

KEY is `{monitor}/layer_{i}/{metric}/{aggregate}` or `{monitor}/global/{metric}/{aggregate}`, as
`delta50/layer_03/delta2/modes/p10`. Non-finite numbers are the strings "NaN", "Infinity" and
"-Infinity" on disk and floats again when read.
"""

import fcntl
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stabmon.runs.columns import Columns, is_sample
from stabmon.runs.config import as_config, differences, read_config
from stabmon.runs.follow import REWINDS
from stabmon.runs.jsonl import append, backwards, mend, plain, read_jsonl

_FILES = ("metrics.jsonl", "events.jsonl", "faults.jsonl")


class RunLog:
    """Writes one run's folder; made by `RunLog.open`, closed by `close` or as a context.

    One process writes a folder at a time: it is locked until `close`, or the process's end.

    Attributes:
        folder: Where the files lie.
        last_step: Step of the newest sample in the log, −1 without one.

    Example:
        >>> import tempfile
        >>> from stabmon.runs.run import load_run
        >>> folder = Path(tempfile.mkdtemp()) / "first"
        >>> with RunLog.open(folder, {"seed": 0}) as log:
        ...     log.sample(10, {"train/global/loss/mean": 2.5}, tokens=7680)
        >>> with RunLog.open(folder, {"seed": 0}, resume=True) as log:
        ...     log.sample(10, {"train/global/loss/mean": 2.5}, tokens=7680)  # already there
        ...     log.sample(20, {"train/global/loss/mean": float("inf")}, tokens=15360)
        >>> load_run(folder).metrics["train/global/loss/mean"][1].tolist()
        [2.5, inf]
    """

    def __init__(self, folder: Path) -> None:
        """Opens the three files of `folder` for appending; use `RunLog.open`."""
        self.folder = folder
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._files = {name: os.open(folder / name, flags, 0o644) for name in _FILES}
        self._lock()
        for name in _FILES:
            mend(folder / name)
        self._faults = {_identity(row) for row in read_jsonl(folder / "faults.jsonl")}
        self._events: set[str] = set()
        self._rewinds: list[tuple[int, int]] = []
        self._ahead: tuple[int, Columns] | None = None
        self._vouched = -1  # the last rewind says that what is written up to here is right
        for row in read_jsonl(folder / "events.jsonl"):
            if row.get("kind") in REWINDS:
                self._events.clear()
                self._rewinds.append((row["metrics_bytes"], row["step"]))
                if row["metrics_bytes"] == self._size("metrics.jsonl"):
                    self._vouched = row["step"]
            self._events.add(_identity(row))
        self.last_step = next((row["step"] for row in self._newest()), -1)

    @classmethod
    def open(cls, folder: str | Path, config: Any, *, resume: bool = False) -> "RunLog":
        """Returns the log of a new run, or of one to go on with.

        A torn last line, left by a process killed while it wrote, is cut off. With `resume` a
        missing or empty folder begins a new run, so that one command serves for both. A run that
        ended before its first sample may be begun again without it.

        Args:
            folder: `runs/NAME`; created with its parents.
            config: What makes the run what it is: a mapping, a dataclass, a namespace or anything
                else; what JSON does not know is kept as text (`plain`).
            resume: Go on with the run that is there.

        Raises:
            FileExistsError: If the folder holds another configuration, or this one and samples
                without `resume`. Nothing is overwritten.
            BlockingIOError: If another process, or another log of this one, writes to the folder.
            ValueError: If its `config.json` cannot be read.
        """
        folder = Path(folder)
        path, metrics = folder / "config.json", folder / "metrics.jsonl"
        wanted = as_config(config)
        if path.exists():
            if found := differences(plain(read_config(path)), wanted):
                raise FileExistsError(
                    f"{folder} holds a run of another configuration, nothing was written: "
                    f"{'; '.join(found)}. Choose another name, or give the old values"
                )
        elif _holds(metrics):
            raise FileExistsError(f"{folder} holds samples but no config.json: choose another name")
        if _holds(metrics) and not resume:
            raise FileExistsError(
                f"{folder} holds this run already: pass resume=True (--resume) to go on with it, "
                f"or choose another name"
            )
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            half = folder / "config.json.part"
            half.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
            half.replace(path)
        return cls(folder)

    def sample(self, step: int, values: Mapping[str, Any], *, tokens: int | None = None) -> None:
        """Appends one sample; one that goes back in steps is compared with what is there.

        A resumed run goes over ground that is already written. Samples that are there with these
        values are not written again. At the first that differs the run is another one: what was
        written of this step and later ones is abandoned, as by `rewind`.

        Args:
            step: Step at which it was measured.
            values: Key → scalar of any kind that `float` takes.
            tokens: Tokens trained on so far.

        Raises:
            OSError: If the disk is full; the file then ends with its last whole line.
            FileNotFoundError: If the folder was removed under the run.
        """
        step, numbers = int(step), {key: float(value) for key, value in values.items()}
        if step > self.last_step or self._is_new(step, numbers):
            row = {"step": step, "tokens": tokens, "time": time.time(), "values": numbers}
            self._append("metrics.jsonl", row)
            self.last_step, self._ahead = step, None

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

        What was written stays in the files; readers leave out what is abandoned.

        Args:
            step: Step of the checkpoint that was restored.

        Raises:
            OSError: If the disk is full.
        """
        self._go_back("rewind", int(step))
        self._vouched = int(step)

    def _go_back(self, kind: str, step: int) -> None:
        """Abandons what was written of later steps."""
        self._events.clear()
        size = self._size("metrics.jsonl")
        self.event(kind, step, newest=self.last_step, metrics_bytes=size)
        self._rewinds.append((size, step))
        self.last_step, self._ahead = min(self.last_step, step), None

    def _is_new(self, step: int, numbers: Mapping[str, float]) -> bool:
        """Whether a sample at or before the newest step is to be written; goes back if it must."""
        if step <= self._vouched:
            return False
        if self._ahead is None or step < self._ahead[0]:
            ahead = Columns()
            for row in reversed([*self._newest(step)]):
                ahead.add(row["step"], row["values"])
            self._ahead = step, ahead
        known = self._ahead[1].at(step)
        if step == self.last_step and not known.keys() & numbers.keys():
            return True
        if all(key in known and _same(known[key], x) for key, x in numbers.items()):
            return False
        self._go_back("resume", step - 1)
        return True

    def _newest(self, first: int | None = None) -> Iterator[dict[str, Any]]:
        """The samples of the current timeline from the newest back to step `first`."""
        for offset, row in backwards(self.folder / "metrics.jsonl"):
            if row is None or not is_sample(row):
                continue
            step = row["step"]
            if any(offset < at and step > back for at, back in self._rewinds):
                continue
            if first is not None and step < first:
                return
            yield row

    def close(self) -> None:
        """Closes the files; doing it twice is fine."""
        while self._files:
            os.close(self._files.popitem()[1])

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_files"):  # it was opened
            self.close()

    def _lock(self) -> None:
        """Takes the folder for this process; the lock ends with it."""
        try:
            fcntl.flock(self._files["metrics.jsonl"], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            reason = (
                "another run writes to this folder (or a worker process that it left behind): "
                "end it first, or choose another name"
            )
            raise BlockingIOError(error.errno, reason, str(self.folder)) from None
        except OSError:
            return  # a file system without locks

    def _size(self, name: str) -> int:
        """Bytes in a file of the log."""
        return os.fstat(self._descriptor(name)).st_size

    def _descriptor(self, name: str) -> int:
        """The open file, which must still be where it was."""
        if name not in self._files:
            raise ValueError(f"the log of {self.folder} is closed: open it with resume=True")
        path, descriptor = self.folder / name, self._files[name]
        try:
            there = os.path.samestat(path.stat(), os.fstat(descriptor))
        except FileNotFoundError:
            there = False
        if not there:
            reason = "removed, renamed or replaced under the run: nothing more is kept of it"
            raise FileNotFoundError(2, reason, str(path))
        return descriptor

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        """Appends `row` to a file of the log."""
        descriptor = self._descriptor(name)
        try:
            append(descriptor, row)
        except OSError as error:
            reason = f"{error.strerror}: the line was not written, the lines before it are whole"
            raise OSError(error.errno, reason, str(self.folder / name)) from error


def _holds(path: Path) -> bool:
    """Whether a file is there with something in it."""
    return path.exists() and path.stat().st_size > 0


def _same(old: float, new: float) -> bool:
    """Whether two values are equal, or both no number."""
    return old == new or (math.isnan(old) and math.isnan(new))


def _identity(row: Mapping[str, Any]) -> str:
    """What makes two events the same: all but the time at which they were written."""
    return json.dumps({k: v for k, v in plain(row).items() if k != "time"}, sort_keys=True)
