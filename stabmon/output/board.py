"""`stabmon watch`: a board of four in the terminal, on a run that may still be written.

What lives here: `Board`, one frame of it, and `watch`, the loop. What does not: following the files
(`tail`), curves (`curves`), the report in a browser (`report`).

Rank ratio, grade, attention entropy, and loss with gradient norm; alarms and actions beneath. Keys
are those of the monitor's brief detail.
"""

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from stabmon.alarms.detectors.grades import Health, grade_of, health_of
from stabmon.output.curves import Curve, Scale, draw
from stabmon.output.panels import thin
from stabmon.output.terminal import printable, short
from stabmon.output.verdict import named
from stabmon.runs.foreign.load import LogFollower, follow

RATIO, GRADE = "activations/global/rank_ratio", "activations/global/grade"
ENTROPY = "attention/global/entropy"
LOSS, GRAD = "symptoms/global/loss/value", "symptoms/global/grad_norm/value"
KEYS = (
    *(f"{RATIO}/{x}" for x in ("mean", "min", "worst_layer")),
    *(f"{GRADE}/{x}" for x in ("mean", "min")),
    *(f"{ENTROPY}/{x}" for x in ("mean", "min", "worst_layer", "worst_head")),
    *(LOSS, GRAD),
)
_MEAN, _LOW = "cyan", "yellow"
_STATES = {
    Health.HEALTHY: "bold green",
    Health.FALLING: "bold yellow",
    Health.CAUTION: "bold yellow",
    Health.DANGER: "bold red",
}
_END = 200
_BARE = ("key", "fault", "action")
_EVENTS = {"alarm": "bold red", "finished": "green"}


class Board:
    """A run as a board of four."""

    def __init__(self, folder: str | Path) -> None:
        """Begins to follow a run.

        Args:
            folder: `runs/NAME`, whose files need not be there yet, or another trainer's log.

        Raises:
            FileNotFoundError: If there is no such folder.
            ValueError: It is no log that is known.
        """
        self._folder = Path(folder)
        self._run = follow(folder, KEYS.__contains__)

    def frame(self, width: int, height: int, *, ascii_only: bool = False) -> RenderableType:
        """Returns the board as it stands now, read anew, `width` × `height` characters at most.

        Args:
            width: Columns of the terminal.
            height: Its lines.
            ascii_only: Without Unicode.
        """
        self._run.update()
        self._series = {key: _few(*of) for key, of in self._run.columns.series().items()}
        events = max(2, min(8, height // 4))
        wide, narrow = width >= 160 and height < 32, width < 60 and height - events >= 18
        side = width if narrow else width // (4 if wide else 2)
        lines = max(1, (height - events - 2) // (1 if wide else 4 if narrow else 2) - 3)
        boxes = [
            Panel(
                Group(*content),
                title=title,
                title_align="left",
                width=side,
                height=lines + 3,
                padding=0,
            )
            for title, content in self._panels(side - 2, lines, ascii_only).items()
        ]
        rows = [boxes] if wide else [[x] for x in boxes] if narrow else [boxes[:2], boxes[2:]]
        board = [Columns(row, padding=0) for row in rows]
        return Group(self._heading(width), *board, *self._events(width, events))

    def _heading(self, width: int) -> Text:
        """The run, how far it is, and the state of its grade."""
        run = self._run
        parts = [f"step {run.step:,}" if run.step >= 0 else "no samples yet"]
        parts += [f"{run.tokens:,} tokens"] if run.tokens else []
        parts += [f"attempt {run.attempts}"] if run.attempts > 1 else []
        parts += [f"{run.skipped:,} lines unreadable"] if run.skipped else []
        parts += ["finished"] if any(e.get("kind") == "finished" for e in run.events[-1:]) else []
        name = Text(printable(self._folder.resolve().name), "bold")
        line = name + Text(f"  {'  '.join(parts)}", "dim")
        line.truncate(width, overflow="ellipsis")
        return line

    def _panels(self, width: int, lines: int, ascii_only: bool) -> dict[str, list[Text]]:
        """Title → lines of each of the four."""
        series = lambda key: self._series.get(key, {})
        chart = lambda curves, height, scale: draw(
            curves, width, height, scale, ascii_only=ascii_only
        )

        def pair(stem: str, scale: Scale, where: tuple[str, ...]) -> list[Text]:
            mean, low = series(f"{stem}/mean"), series(f"{stem}/min")
            if not mean and not low:
                return _nothing(stem, lines + 1)
            at = " ".join(f"{x} {_last(series(f'{stem}/worst_{x}'), '.0f')}" for x in where)
            words = Text.assemble(
                *((f" mean {_last(mean)}", _MEAN), (f"  min {_last(low)}", _LOW)), f"  {at}"
            )
            words.truncate(width)
            return [words, *chart([Curve(mean, _MEAN), Curve(low, _LOW)], lines, scale)]

        ratio = pair(RATIO, Scale(0, 1), ("layer",))
        entropy = pair(ENTROPY, Scale(0), ("layer", "head"))
        ratios = series(f"{RATIO}/min") or series(f"{RATIO}/mean")
        grades = {step: grade_of(x) for step, x in ratios.items()}
        steps = [Curve(grades, "bold")]
        graded = [self._state(ratios, width), *chart(steps, lines, Scale(0, 7))]
        loss, grad = series(LOSS), series(GRAD)
        half = max(1, (lines - 1) // 2)
        both = [Text(f" loss {_last(loss)}", _MEAN), *chart([Curve(loss, _MEAN)], half, Scale())]
        norm = [Curve(grad, _LOW)]
        both += [Text(f" grad norm {_last(grad)}", _LOW)]
        both += chart(norm, max(1, lines - 1 - half), Scale(log=True))
        return {
            "rank ratio": ratio,
            "grade": graded if grades else _nothing(GRADE, lines + 1),
            "attention entropy, nats": entropy,
            "loss, gradient norm": both if loss or grad else _nothing("symptoms", lines + 1),
        }

    def _state(self, ratios: Mapping[int, float | int], width: int) -> Text:
        """The last grade in words; alarm below S3."""
        if not ratios:
            return Text("")
        last = max(ratios)
        state = health_of(ratios, last)
        words = Text(f" S{grade_of(ratios[last])} {state}", _STATES[state])
        line = words + Text("  alarm below S3", "dim")
        line.truncate(width, overflow="ellipsis")
        return line

    def _events(self, width: int, count: int) -> list[Text]:
        """What was found and what was done last, then the other events, newest first."""
        events = self._run.events
        done = next((x for x in reversed(events) if x.get("kind") == "action"), None)
        pinned = [x for x in (named(events), done) if x is not None][: count - 1]
        others = [x for x in reversed(events) if not any(x is y for y in pinned)]
        lines = []
        for event in (*pinned, *others[: count - len(pinned)]):
            kind = str(event.get("kind", "event"))
            known = ("kind", "step", "time", "metrics_bytes", "rule", "quantities")
            rest = [
                str(value) if name in _BARE else f"{name} {short(value)}"
                for name, value in event.items()
                if name not in known
            ]
            words = f" {short(event.get('step'))}: {'  '.join(rest)}"
            line = Text(printable(kind), _EVENTS.get(kind, "bold blue")) + Text(printable(words))
            line.truncate(width, overflow="ellipsis")
            lines.append(line)
        judged = not isinstance(self._run, LogFollower)
        nothing = "no alarms, no actions" if judged else "not judged here: see stabmon replay"
        lines = lines or [Text(nothing, "dim")]
        return lines + [Text("")] * (count - len(lines))


def watch(
    folder: str | Path, console: Console, *, once: bool = False, every: float | int = 1.0
) -> None:
    """Shows the board of a run until Ctrl-C; or one frame of it.

    Args:
        folder: `runs/NAME`.
        console: The terminal; one that is none gets a single frame.
        once: One frame, then return.
        every: Seconds between frames.

    Raises:
        FileNotFoundError: If there is no such folder.
    """
    board = Board(folder)
    ascii_only = console.options.ascii_only
    frame = lambda: board.frame(console.width, console.height, ascii_only=ascii_only)
    if once or not console.is_terminal:
        console.print(frame())
        return
    with _ended_by_a_signal(console):
        if console.is_dumb_terminal:  # it cannot be drawn over: frames below each other
            while True:
                console.print(frame())
                time.sleep(every)
        with Live(frame(), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every)
                live.update(frame(), refresh=True)


@contextmanager
def _ended_by_a_signal(console: Console) -> Iterator[None]:
    """Ctrl-C and SIGTERM end what is within, the screen restored; SIGTERM ends the process too."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
        if console.is_alt_screen:  # it came while the display was being set up
            console.set_alt_screen(False)
            console.show_cursor(True)


def _few(steps: np.ndarray, values: np.ndarray) -> dict[int, float]:
    """Step → value of a series: enough to draw it, and all of its end."""
    early, end = thin(steps[:-_END], values[:-_END]), (steps[-_END:], values[-_END:])
    both = (np.concatenate(x).tolist() for x in zip(early, end, strict=True))
    return dict(zip(*both, strict=True))


def _last(samples: Mapping[int, float | int], form: str = ".3g") -> str:
    """The newest value."""
    return format(samples[max(samples)], form) if samples else "–"


def _nothing(what: str, lines: int) -> list[Text]:
    """Lines that say that something is not measured, or not yet."""
    return [Text(f" no {what} yet", "dim"), *[Text("")] * (lines - 1)]
