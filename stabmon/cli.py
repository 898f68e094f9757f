"""`stabmon watch | report | compare | replay | rank | import | scan`: the command line.

What lives here: the commands' arguments, exit codes, and how results are printed. What does not:
the work, which is a function in a room of its own for each command.
"""

import io
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MISSING = 'the stabmon command needs more packages: pip install "stabmon[cli]"'
_HEALTHY, _WRONG, _UNREADABLE, _INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True)
class Watch:
    """A live board of a run: rank ratio, grade, attention entropy, loss and gradient norm.

    Attributes:
        run: Folder of the run, such as runs/NAME, or another trainer's log, also unfinished.
        once: Print one frame and exit.
        every: Seconds between frames.
    """

    run: Path
    once: bool = False
    every: float = 1.0

    def __call__(self) -> int:
        """Runs the command; its exit code."""
        from stabmon.output.board import watch

        watch(self.run, _console(), once=self.once, every=self.every)
        return _HEALTHY


@dataclass(frozen=True)
class Report:
    """Write a self-contained HTML report on one or more runs.

    Attributes:
        runs: Folders of runs, or other trainers' logs, a clean one first.
        out: The file, or a folder for report.html; by default beside the last run's samples.
        attempt: 1 is a run as it was before its first rewind, and so on; by default the newest.
    """

    runs: tuple[Path, ...]
    out: Path | None = None
    attempt: int | None = None

    def __call__(self) -> int:
        """Runs the command; its exit code."""
        from stabmon.output.report import write_report
        from stabmon.runs.foreign.load import load

        _some(self.runs, "runs")
        last = self.runs[-1]
        out = self.out or (last.with_suffix(".html") if last.is_file() else last / "report.html")
        print(write_report([load(x, attempt=self.attempt) for x in self.runs], out))
        return _HEALTHY


@dataclass(frozen=True)
class Compare:
    """Replay runs against clean ones: which monitor spoke when, and how long before the loss.

    Attributes:
        runs: Folders of the runs to be judged, or other trainers' logs.
        reference: Two or more clean runs of other seeds, or one reference file (.json).
        window: Healthy steps, for metrics judged by the run's own level; by default from a
            twentieth to three twentieths of the clean runs.
        threshold: Spreads that are too many.
        dwell: Samples running that make an alarm.
        save: Write the reference that was learned to this file.
        json: Print JSON instead of tables.
    """

    runs: tuple[Path, ...]
    reference: tuple[Path, ...] = ()
    window: tuple[int, int] | None = None
    threshold: float = 5.0
    dwell: int = 2
    save: Path | None = None
    json: bool = False

    def __call__(self) -> int:
        """Runs the command; its exit code."""
        from stabmon.alarms.reference import Reference
        from stabmon.output.comparison import compare, learn_reference, show_comparison
        from stabmon.runs.foreign.load import load

        _some(self.runs, "runs")
        _some(self.reference, "--reference: clean runs or a .json file")
        if len(self.reference) == 1 and self.reference[0].suffix == ".json":
            reference = Reference.load(self.reference[0])
        else:
            reference = learn_reference([load(x) for x in self.reference], self.window)
        if self.save:
            reference.save(self.save)
        runs = [load(path) for path in self.runs]
        found = compare(runs, reference, threshold=self.threshold, dwell=self.dwell)
        show_comparison(_console(), found, self.json)
        return _HEALTHY


@dataclass(frozen=True)
class Replay:
    """Which alarms the standard rules would have raised on runs that are over, and what for.

    Attributes:
        runs: Folders of runs, or other trainers' logs.
        warmup: Steps of learning-rate warm-up, which are not judged.
        window: Steps of the healthy window after it.
        attempt: 1 is a run as it was before its first rewind, and so on; by default the newest.
        json: Print JSON instead of tables.
    """

    runs: tuple[Path, ...]
    warmup: int = 100
    window: int = 200
    attempt: int | None = None
    json: bool = False

    def __call__(self) -> int:
        """Runs the command; its exit code."""
        from stabmon.output.replay import replay_runs, show_replay

        _some(self.runs, "runs")
        found = replay_runs(self.runs, self.warmup, self.window, self.attempt)
        show_replay(_console(), found, self.json)
        return _HEALTHY


@dataclass(frozen=True)
class Rank:
    """Rank a run's checkpoints by loss, held-out if there is one, else of training.

    Only those that are finite and free of alarms are ranked; the others follow, with the reason.

    Attributes:
        run: Folder of the run.
        json: Print JSON instead of a table.
    """

    run: Path
    json: bool = False

    def __call__(self) -> int:
        """Runs the command; its exit code."""
        from stabmon.checkpoints.folders import checkpoint_steps
        from stabmon.output.ranking import rank_checkpoints, show_ranking
        from stabmon.runs.run import load_run

        run = load_run(self.run)
        steps = checkpoint_steps(self.run / "checkpoints")
        if not steps:
            raise ValueError(f"{self.run / 'checkpoints'} holds no checkpoints to rank")
        ranked = rank_checkpoints(run, steps)
        show_ranking(_console(), run, ranked, steps, self.json)
        return _HEALTHY


@dataclass(frozen=True)
class Import:
    """Make a run's folder from another trainer's log, for all the other commands.

    Attributes:
        source: The log, file or folder: a trainer_state.json, TensorBoard or Weights & Biases
            files, a printed log, a CSV, JSON or JSONL table.
        run: The folder to be made, such as runs/NAME.
        map: Which column is what, where the names do not tell: --map loss=train/nll step=updates.
    """

    source: Path
    run: Path
    map: tuple[str, ...] = ()

    def __call__(self) -> int:
        """Runs the command; its exit code."""
        from stabmon.output.provenance import provenance
        from stabmon.runs.foreign.load import import_log
        from stabmon.runs.foreign.names import as_map

        print(*provenance(import_log(self.source, self.run, as_map(self.map))), sep="\n")
        return _HEALTHY


@dataclass(frozen=True)
class Scan:
    """Offline health of checkpoints: Orbax, safetensors (single or sharded), runs, folders of them.

    One layer at a time is in memory. Exit code 0: nothing wrong; 1: entries that are not finite, a
    matrix that is zero, missing or below a limit, a layer that is missing; 2: unreadable.

    Attributes:
        checkpoints: Files or folders, in the order of training; changes are measured between
            successive ones.
        heads: Query heads, where neither shapes nor a config.json tell.
        kv_heads: Key-value heads, likewise.
        layout: TOML file with [[rules]] of role, path and pattern, where no known naming fits.
        min_stable_rank: Stable rank below which a matrix counts as collapsed.
        min_relative: The same as a fraction of a Gaussian's stable rank; 0 is off.
        exact: Largest smaller side of a matrix for which the effective rank is measured, by a full
            SVD.
        every: A line for each matrix instead of one for each role.
        json: Print JSON instead of tables.
    """

    checkpoints: tuple[Path, ...]
    heads: int | None = None
    kv_heads: int | None = None
    layout: Path | None = None
    min_stable_rank: float = 1.5
    min_relative: float = 0.0
    exact: int = 1024
    every: bool = False
    json: bool = False

    def __call__(self) -> int:
        """Runs the command; its exit code."""
        from stabmon.scan.command import run_scan
        from stabmon.scan.health import Limits

        limits = Limits(self.min_stable_rank, self.min_relative, self.exact)
        heads = {"heads": self.heads, "kv_heads": self.kv_heads}
        shown = {"every": self.every, "json": self.json}
        report = run_scan(_console(), self.checkpoints, limits, self.layout, heads, **shown)
        return _WRONG if report.problems else _HEALTHY


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
        arguments: Instead of the process's own.
    """
    # Read when LAPACK is loaded; its threads and XLA's get in each other's way.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        import tyro

        from stabmon.output.terminal import printable
    except ImportError as error:
        print(f"stabmon: {MISSING} ({error})", file=sys.stderr)
        return _UNREADABLE
    command = tyro.cli(
        Watch | Report | Compare | Replay | Rank | Import | Scan,
        prog="stabmon",
        description="Sees a language-model training run going wrong before the loss does.",
        args=arguments,
        config=(tyro.conf.PositionalRequiredArgs, tyro.conf.FlagCreatePairsOff),
    )
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Unicode
    say = lambda text: print(f"stabmon: {printable(str(text))}", file=sys.stderr)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default", UserWarning)
            warnings.showwarning = lambda message, *_: say(message)
            code = command()
            sys.stdout.flush()
            return code
    except BrokenPipeError:
        # Who read it has gone; what is left in the buffer must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _HEALTHY
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (OSError, ValueError, ImportError) as error:
        say(error)
        return _UNREADABLE


def _console():
    """Standard output; a pipe gets wide lines."""
    from rich.console import Console

    sized = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console() if sized else Console(width=120)


def _some(paths: Sequence[Path], what: str) -> None:
    """There is at least one path."""
    if not paths:
        raise ValueError(f"no {what} given; see stabmon --help")


if __name__ == "__main__":
    sys.exit(main())
