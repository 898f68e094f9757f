"""What the commands print with: text made safe for a terminal, tables, JSON, progress.

What lives here: `printable`, `short`, `table`, `show_json`, `progress`. What does not: what is
printed (`board`, `ranking`, `comparison`, `stabmon.scan`).

Names of runs, layers and files come from outside. They are shown as text, never as markup, and
characters that would steer the terminal are spelled out.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from stabmon.runs.jsonl import plain

_NARROW = 60


def printable(text: str) -> str:
    r"""Returns text with everything that is not printable spelled out, such as `\x1b`.

    Args:
        text: From anywhere.

    Example:
        >>> print(printable("layer\x1b[2J <b>0</b>"))
        layer\x1b[2J <b>0</b>
    """
    spell = lambda c: c.encode("unicode_escape", "surrogatepass").decode("ascii")
    return "".join(c if c.isprintable() else spell(c) for c in text)


def short(value: Any) -> str:
    """Returns a value for a cell: numbers to four digits, nothing for None.

    Args:
        value: A number, text or None.

    Example:
        >>> short(1234567), short(0.123456), short(float("nan")), short(None)
        ('1,234,567', '0.1235', 'NaN', '')
    """
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else plain(value)
    return f"{value:,}" if isinstance(value, int) else printable(str(value))


class _Fitting:
    """A table where it fits, else its rows as lines of words."""

    def __init__(self, wide: Table, lines: Sequence[Text]) -> None:
        """Keeps both."""
        self._wide, self._lines = wide, lines

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """The one that fits."""
        if options.max_width >= _NARROW:
            yield self._wide
            return
        yield from self._lines


def table(
    title: str, rows: Sequence[Sequence[Any]], columns: Sequence[str], *, words: int = 1
) -> RenderableType:
    """Returns a table; the first columns hold words, the others numbers.

    On a narrow terminal each row is a few lines of its own, broken between words.

    Args:
        title: Above it.
        rows: A value for each column, as `short` takes them, or rich text.
        columns: Headings.
        words: How many columns hold words.
    """
    made = Table(title=Text(printable(title)), title_justify="left", box=SIMPLE_HEAD)
    made.padding, made.pad_edge = (0, 1, 0, 0), False
    for i, column in enumerate(columns):
        side = "left" if i < words else "right"
        made.add_column(column, justify=side, overflow="fold", no_wrap=i >= words)
    for row in rows:
        made.add_row(*(x if isinstance(x, Text) else Text(short(x)) for x in row))
    lines = [Text(printable(title), "italic")]
    for row in rows:
        cells = [(x.plain if isinstance(x, Text) else short(x)) for x in row]
        named = [
            f"{name} {cell}" for name, cell in zip(columns[words:], cells[words:], strict=True)
        ]
        lines.append(Text("  ".join(x for x in [*cells[:words], *named] if x)))
    return _Fitting(made, lines)


def show_json(console: Console, value: Any) -> None:
    """Prints a value as JSON in ASCII, non-finite numbers as strings.

    Args:
        console: Where to.
        value: Numbers, strings, paths, arrays, lists and mappings of these.
    """
    console.file.write(json.dumps(plain(value), indent=2, allow_nan=False) + "\n")


@contextmanager
def progress(total: int) -> Iterator[Callable[[str, int], None]]:
    """Shows progress over bytes on standard error: a bar, or in a log a line for every tenth.

    Args:
        total: Bytes in all.

    Returns:
        A context with a function of what was done and how many bytes that were.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=16),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading", total=total)
        done = tenths = 0

        def advance(what: str, count: int) -> None:
            nonlocal done, tenths
            done += count
            bar.update(task, advance=count, description=printable(what)[-32:])
            if not console.is_terminal and 10 * done // max(total, 1) > tenths:
                tenths = 10 * done // max(total, 1)
                print(f"{10 * tenths:3d} % {printable(what)}", file=sys.stderr, flush=True)

        yield advance
