"""Any known log as a run: `load`, `import_log`, `follow`.

What lives here: telling a log by its name and its first bytes. What does not: reading each kind.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from stabmon.runs.follow import Follower
from stabmon.runs.foreign import tables, tensorboard, wandb
from stabmon.runs.foreign.log import Log, as_run
from stabmon.runs.foreign.names import STEP
from stabmon.runs.foreign.text import read_text
from stabmon.runs.jsonl import parse, plain
from stabmon.runs.run import Run, load_run
from stabmon.runs.runlog import RunLog
from stabmon.runs.samples import samples

_STATE = "trainer_state.json"
_TABLES = (".csv", ".tsv", ".jsonl", ".log", ".txt")
_KNOWN = (
    "a run's folder, a trainer_state.json, TensorBoard event files, a Weights & Biases offline "
    "run or CSV export, a printed log (Megatron, DeepSpeed, MaxText and the like), a CSV, JSON or "
    "JSONL table with a step column"
)


def load(
    path: str | Path, columns: Mapping[str, str] | None = None, *, attempt: int | None = None
) -> Run:
    r"""Returns a run from its folder, or from another trainer's log.

    Args:
        path: A run's folder, or a log: file or folder.
        columns: For a log whose names do not tell, short name or key → column, such as
            {"loss": "train/nll", "step": "updates"}.
        attempt: Of a run's folder: 1 is the run as it was before its first rewind.

    Raises:
        FileNotFoundError: There is nothing at `path`.
        ValueError: It is no log that is known, or lacks what it needs; the message says what it
            holds and what to do.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "log.csv"
        >>> _ = path.write_text("step,train_loss\n10,2.5\n20,2.25\n")
        >>> run = load(path)
        >>> run.source.kind
        'CSV table'
        >>> run.metrics["symptoms/global/loss/value"][1].tolist()
        [2.5, 2.25]
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there: give {_KNOWN}")
    if _is_run(path):
        if columns:
            raise ValueError(f"{path} is a run's folder: its keys need no --map")
        return load_run(path, attempt=attempt)
    if attempt is not None:
        raise ValueError(f"{path} is another trainer's log: only run folders keep attempts")
    told = dict(columns or {})
    log = _find(path)
    return as_run(_read(log, told), path, told)


def import_log(
    source: str | Path, folder: str | Path, columns: Mapping[str, str] | None = None
) -> Run:
    """Writes another trainer's log as a run's folder, and returns the run.

    Args:
        source: The log.
        folder: `runs/NAME`, which must hold no samples.
        columns: As of `load`.

    Raises:
        FileNotFoundError: There is nothing at `source`.
        FileExistsError: The folder holds a run.
        ValueError: As of `load`; or `source` is a run's folder already.
    """
    run = load(source, columns)
    if not run.source.foreign:
        raise ValueError(f"{source} is a run's folder already: use it as it is")
    config = run.config | {"imported": plain(run.source)}
    with RunLog.open(folder, config) as log:
        for step, values in samples(run):
            log.sample(step, values)
    return load_run(folder)


class LogFollower(Follower):
    """The newest state of another trainer's log, which is read anew when it has changed."""

    def __init__(self, path: Path, wanted: Callable[[str], bool]) -> None:
        """Begins to follow a log.

        Args:
            path: The log: file or folder.
            wanted: Which keys to keep.
        """
        super().__init__(path, wanted)
        self._changed = -1.0

    def update(self) -> None:
        """Reads the log, if it has changed.

        Raises:
            FileNotFoundError: It is gone.
            ValueError: As of `load`.
        """
        files = [self._folder] if self._folder.is_file() else [*self._folder.rglob("*")]
        changed = max((x.stat().st_mtime for x in files), default=0.0)
        if changed != self._changed:
            self._begin()
            run = load(self._folder)
            for step, values in samples(run):
                self.columns.add(step, {k: x for k, x in values.items() if self._wanted(k)})
            self.attempts, self._changed = run.attempts, changed


def follow(path: str | Path, wanted: Callable[[str], bool]) -> Follower:
    """Returns what follows a run's folder, which may be empty still, or another trainer's log.

    Args:
        path: Where it lies.
        wanted: Which keys to keep.

    Raises:
        FileNotFoundError: There is nothing at `path`.
        ValueError: It is no log that is known.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there: give {_KNOWN}")
    if _is_run(path) or (path.is_dir() and not any(path.iterdir())):
        return Follower(path, wanted)
    _find(path)
    return LogFollower(path, wanted)


def _is_run(path: Path) -> bool:
    """Whether it is a run's folder."""
    return path.is_dir() and (
        (path / "metrics.jsonl").is_file()
        or ((path / "config.json").is_file() and not (path / _STATE).exists())
    )


def _find(path: Path) -> Path:
    """The log that a path leads to: a file, or a folder of TensorBoard's."""
    if path.is_file():
        return path
    checkpoints = [x for x in path.glob(f"checkpoint-*/{_STATE}") if _number(x.parent) >= 0]
    if (path / _STATE).is_file():
        return path / _STATE
    if checkpoints:
        return max(checkpoints, key=lambda x: _number(x.parent))
    if found := wandb.run_files(path):
        if len(found) > 1:
            names = ", ".join(x.name for x in found[:8])
            raise ValueError(f"{path} holds {len(found)} runs: give one of the files {names}")
        return found[0]
    if tensorboard.event_files(path):
        return path
    found = sorted(x for x in path.iterdir() if x.suffix in _TABLES and x.is_file())
    if len(found) == 1:
        return found[0]
    holds = ", ".join(sorted(x.name for x in path.iterdir())[:8]) or "nothing"
    which = "give one of these files" if found else f"expected {_KNOWN}"
    raise ValueError(f"{path} is a folder with {holds}: {which}")


def _number(folder: Path) -> int:
    """The step of a checkpoint's folder, −1 without one."""
    match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
    return int(match[1]) if match else -1


def _read(path: Path, told: Mapping[str, str]) -> Log:
    """The rows of a log, read as what it is."""
    if path.is_dir() or tensorboard.MARK in path.name:
        return tensorboard.read_tensorboard(path)
    if path.suffix == wandb.SUFFIX:
        return wandb.read_wandb(path, told.get(STEP))
    if path.suffix in (".csv", ".tsv"):
        return tables.read_csv(path, told)
    with path.open("rb") as file:
        head = file.read(4096)
        file.seek(0)
        first = next((line for line in file if line.strip()), b"")
    if not head.strip():
        raise ValueError(f"{path} is empty: give {_KNOWN}")
    if b"\0" in head:
        raise ValueError(f"{path} is binary, and no log that is known: give {_KNOWN}")
    if path.suffix == ".jsonl" or (path.suffix != ".json" and parse(first) is not None):
        return tables.read_jsonl_table(path, told)
    if path.suffix == ".json":
        # Some call a file of JSON lines JSON.
        lines = parse(first) is not None and first.strip() != path.read_bytes().strip()
        return tables.read_jsonl_table(path, told) if lines else tables.read_json(path, told)
    return read_text(path)
