"""What a training run shows on the terminal while it runs; it never waits for the device."""

import math
import time
from collections.abc import Mapping

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from stabmon.quantities import LOSS
from stabmon.recovery.watcher import Seen


class ProgressLine:
    """A progress bar with step time, tokens/s, and loss and grade of the last sample.

    A context; `quiet` shows nothing at all.
    """

    def __init__(self, name: str, steps: int, tokens_per_step: int, quiet: bool = False):
        self._tokens = tokens_per_step
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed}/{task.total}"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[state]}"),
            refresh_per_second=5,
            disable=quiet,
        )
        self._task = self._progress.add_task(name, total=steps, state="compiling")
        self._since: tuple[float, int] | None = None
        self._speed = ""
        self._sample = ""

    def __enter__(self) -> "ProgressLine":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def advance(self, step: int) -> None:
        """Note that `step` updates have been dispatched."""
        now = time.perf_counter()
        if self._since is None or step <= self._since[1]:
            self._since = (now, step)
        elif now - self._since[0] > 0.5:
            seconds = (now - self._since[0]) / (step - self._since[1])
            self._speed = f"{seconds * 1e3:.1f} ms/step  {self._tokens / seconds:,.0f} tok/s"
            self._since = (now, step)
        self._progress.update(self._task, completed=step, state=f"{self._speed}  {self._sample}")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Note a written sample; its loss and grade stay on the line until the next."""
        loss, grade = values.get(LOSS), values.get("activations/global/grade/min")
        words = dict(word.split(" ", 1) for word in self._sample.split("  ") if word)
        if loss is not None:
            words["loss"] = f"{loss:.3f}"
        if grade is not None and not math.isnan(grade):
            words["grade"] = f"S{int(grade)}"
        self._sample = "  ".join(f"{name} {word}" for name, word in words.items())

    def rewind(self, step: int) -> None:
        """The bar follows `advance`."""

    def close(self) -> None:
        """The bar ends with its context."""

    def hear(self, seen: Seen) -> None:
        """Print alarms above the bar, when they happen."""
        for alarm in seen.alarms:
            expected = "" if alarm.reference is None else f", expected {alarm.reference:.4g}"
            z = "" if alarm.z is None else f" (z = {alarm.z:+.1f})"
            self._progress.console.print(
                f"[bold red]alarm[/] step {alarm.step}: {alarm.key} = {alarm.value:.4g}"
                f"{expected}{z}",
                highlight=False,
            )
