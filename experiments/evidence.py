"""Runs every experiment, and writes its tables and headline where people read them.

    make evidence                                            everything, on all cores
    python -m experiments.evidence run --only scale_study    some of it
    python -m experiments.evidence tables                    the text alone
    python -m experiments.evidence figures                   text and images

One experiment a core, side by side. How long each takes is in `listed.py` and, with the sum, in
`experiments/README.md`: on two cores about half the sum. Experiments resume: what is measured is
not measured again, so this may be interrupted. What they print goes to `runs/<name>.log`.

`run` copies each experiment's rows, `runs/<name>.jsonl`, to `experiments/results/`. Then every
command writes, from the rows in `experiments/results/` alone,

- into `experiments/README.md` the tables, between the lines `<!-- name -->` and `<!-- /name -->`,
  and the list of experiments, between `<!-- experiments -->` and `<!-- /experiments -->`,
- into `README.md` a line for each experiment, between `<!-- results -->` and `<!-- /results -->`,

and `run` and `figures` also `experiments/figures/<name>.svg`, which wants Kaleido and a browser
(`figures.py`); without them `run` says so and leaves the images as they are.

An experiment's module has `tables(rows) -> str`, Markdown, `figure(rows)`, a Plotly figure, and
`headline(rows) -> str`, one line that gives a verdict and a colon first (`verdict_of`). What is
measured is each experiment's.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any, Literal

import plotly.graph_objects as go
import tyro

from experiments.support.figures import write_images
from experiments.support.listed import EXPERIMENTS, Experiment
from experiments.support.recorded import Row, latest
from stabmon.runs.jsonl import append, read_jsonl

ROOT = Path(__file__).parent.parent
VERDICTS = ("reproduces", "partly", "not at this size", "not met", "met")
NOT_RUN = "not run"


@dataclass(frozen=True)
class Config:
    """What to do.

    Attributes:
        command: run everything, or write tables alone, or tables and images.
        only: Names of experiments; empty: all.
        cores: Experiments side by side; 0: as many as there are cores.
        runs: Where experiments write, relative to the working directory.
        root: The project's folder.
    """

    command: Annotated[Literal["run", "tables", "figures"], tyro.conf.Positional] = "run"
    only: tuple[str, ...] = ()
    cores: int = 0
    runs: Path = Path("runs")
    root: Path = ROOT


@dataclass(frozen=True)
class Result:
    """Experiments that failed, and minutes by experiment that was run."""

    failed: list[str]
    minutes: dict[str, float]


def main(config: Config, experiments: Sequence[Experiment] = EXPERIMENTS) -> Result:
    """Carry out `config.command`.

    Raises:
        ValueError: A name that is not listed, or a README without the marks of an experiment.
        RuntimeError: `figures` without Kaleido or a browser.
    """
    names = [x.name for x in experiments]
    if unknown := sorted(set(config.only) - set(names)):
        raise ValueError(f"no experiment {unknown}; there are {names}")
    chosen = [x for x in experiments if not config.only or x.name in config.only]
    minutes: dict[str, float] = {}
    failed: list[str] = []
    if config.command == "run":
        minutes, failed = run_all(config, chosen)
        for experiment in chosen:
            if experiment.name not in failed:
                collect(config, experiment)
    if config.command != "tables":
        try:
            write_images(images(config.root, chosen))
        except RuntimeError as error:
            if config.command == "figures":
                raise
            print(f"images are left as they were: {error}", file=sys.stderr)
    for path, text in texts(config.root, experiments).items():
        path.write_text(text, encoding="utf-8")
    for name in failed:
        print(f"{name} failed: see {config.runs / name}.log", file=sys.stderr)
    return Result(failed, minutes)


def run_all(
    config: Config, experiments: Sequence[Experiment]
) -> tuple[dict[str, float], list[str]]:
    """Minutes of each experiment, and the names of those that failed; the longest start first."""
    held = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    count = config.cores or len(held) or os.cpu_count() or 1
    free: SimpleQueue[int | None] = SimpleQueue()
    for i in range(count):
        free.put(sorted(held)[i] if i < len(held) else None)
    config.runs.mkdir(parents=True, exist_ok=True)

    def run(experiment: Experiment) -> tuple[int, float]:
        core, start = free.get(), time.monotonic()
        print(f"{experiment.name}: about {experiment.minutes:g} minutes on a core", flush=True)
        try:
            code = _run_one(config, experiment, core)
        finally:
            free.put(core)
        took = (time.monotonic() - start) / 60
        print(f"{experiment.name}: {'failed' if code else 'done'}, {took:.1f} min", flush=True)
        return code, took

    order = sorted(experiments, key=lambda x: -x.minutes)
    with ThreadPoolExecutor(count) as pool:
        try:
            ended = dict(zip([x.name for x in order], pool.map(run, order), strict=True))
        except BaseException:
            # What has not begun does not; what runs was interrupted as well, and saves.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    failed = [name for name, (code, _) in ended.items() if code]
    return {name: took for name, (_, took) in ended.items()}, failed


def _run_one(config: Config, experiment: Experiment, core: int | None) -> int:
    """Exit code of an experiment that runs on one core alone: of the first command that fails."""
    with (config.runs / f"{experiment.name}.log").open("ab") as log:
        for arguments in experiment.runs:
            command = [sys.executable, "-m", experiment.program, *arguments]
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            if core is not None:
                # Before the interpreter is up: its threads, and XLA's, then know one core only.
                os.sched_setaffinity(process.pid, {core})
            try:
                code = process.wait()
            except BaseException:
                process.terminate()
                process.wait()
                raise
            if code:
                return code
    return 0


def collect(config: Config, experiment: Experiment) -> None:
    """Copy an experiment's rows to `experiments/results/`."""
    rows = latest(read_jsonl(config.runs / f"{experiment.name}.jsonl"))
    target = config.root / "experiments" / "results" / f"{experiment.name}.jsonl"
    target.parent.mkdir(parents=True, exist_ok=True)
    whole = target.with_suffix(".part")
    descriptor = os.open(whole, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        for row in rows:
            append(descriptor, row)
    finally:
        os.close(descriptor)
    whole.replace(target)


def images(root: Path, experiments: Sequence[Experiment]) -> dict[Path, go.Figure]:
    """The figure of each experiment with rows, by the image's path."""
    found = {}
    for experiment in experiments:
        if rows := read_jsonl(root / "experiments" / "results" / f"{experiment.name}.jsonl"):
            module: Any = import_module(experiment.program)
            found[_image(root, experiment)] = module.figure(rows)
    return found


def texts(root: Path, experiments: Sequence[Experiment]) -> dict[Path, str]:
    """Both READMEs as the committed rows have them.

    Raises:
        ValueError: The marks of an experiment with rows are missing, or its headline is not of the
            form.
    """
    results = root / "experiments" / "results"
    book, front = root / "experiments" / "README.md", root / "README.md"
    inside = book.read_text(encoding="utf-8")
    lines = ["| question | outcome |", "|---|---|"]
    index = ["| question | command | minutes | outcome |", "|---|---|---|---|"]
    for experiment in experiments:
        rows = read_jsonl(results / f"{experiment.name}.jsonl")
        question, minutes = experiment.question, f"{experiment.minutes:g}"
        verdict = headline = NOT_RUN
        if rows:
            tables, headline = written(experiment, rows)
            if (image := _image(root, experiment)).exists():
                tables = f"![{question}](figures/{image.name})\n\n{tables}"
            inside = between(inside, experiment.name, tables, book)
            anchor = anchor_of(inside, experiment.name)
            verdict = f"[{verdict_of(headline)}](#{anchor})"
            question = f"[{question}](experiments/README.md#{anchor})"
        index.append(f"| {experiment.question} | {experiment.command} | {minutes} | {verdict} |")
        lines.append(f"| {question} | {headline} |")
    total = sum(x.minutes for x in experiments)
    index.append(f"| all of it | `make evidence` | {total:g}, on two cores half of it | |")
    return {
        book: between(inside, "experiments", "\n".join(index), book),
        front: between(front.read_text(encoding="utf-8"), "results", "\n".join(lines), front),
    }


def written(experiment: Experiment, rows: list[Row]) -> tuple[str, str]:
    """An experiment's tables and headline.

    Raises:
        ValueError: The headline has several lines, or no verdict.
    """
    module: Any = import_module(experiment.program)
    headline = module.headline(rows)
    if "\n" in headline or verdict_of(headline) is None:
        raise ValueError(
            f"{experiment.name}: a headline is one line that begins with one of {VERDICTS} and a "
            f"colon, got {headline!r}"
        )
    return module.tables(rows).strip(), headline


def _image(root: Path, experiment: Experiment) -> Path:
    return root / "experiments" / "figures" / f"{experiment.name}.svg"


def verdict_of(headline: str) -> str | None:
    """The word of `VERDICTS` that stands before the first colon; None without.

    >>> verdict_of("partly: 3 of 4"), verdict_of("memory not met: 7 %"), verdict_of("it works: 3")
    ('partly', 'not met', None)
    """
    before, colon, _ = headline.partition(":")
    return next((x for x in VERDICTS if colon and before.endswith(x)), None)


def between(text: str, name: str, block: str, path: Path) -> str:
    r"""`text` with `block` between the marks of `name`.

    >>> print(between("<!-- x -->\nold\n<!-- /x -->", "x", "new", Path("README.md")))
    <!-- x -->
    new
    <!-- /x -->
    """
    first, last = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    if text.count(first) != 1 or text.count(last) != 1:
        raise ValueError(f"{path}: expected the lines {first.strip()!r} and {last!r} once each")
    head, rest = text.split(first)
    return f"{head}{first}{block}\n{last}{rest.split(last)[1]}"


def anchor_of(text: str, name: str) -> str:
    r"""The fragment of the Markdown heading that the marks of `name` stand under.

    >>> anchor_of("## Rounding in flash-attention, β\n<!-- x -->\n", "x")
    'rounding-in-flash-attention-β'
    """
    headings = re.findall(r"^#+ (.*)$", text.split(f"<!-- {name} -->\n")[0], re.MULTILINE)
    return re.sub(r"[^\w\- ]", "", headings[-1].lower()).replace(" ", "-")


if __name__ == "__main__":
    sys.exit(1 if main(tyro.cli(Config, description=__doc__)).failed else 0)
