"""A run's folder as one timeline, whole or while it is being written.

What lives here: `Follower`, by which every reader reads: which lines count, and which samples and
events a rewind has undone. What does not: lines of JSON (`jsonl`), what is done with the run.

A rewind to step s (a rollback, or a resume that goes over its ground again with other numbers)
abandons what was written before it about later steps. Of the events, what was done (`action`,
`rewind`, `resume`) stays: it is in force still.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stabmon.runs.columns import Columns
from stabmon.runs.jsonl import Tail, floats, warn_skipped

REWINDS = ("rewind", "resume")
_STAYS = ("action", *REWINDS)


class Follower:
    """The newest state of a run: its series and events.

    Attributes:
        columns: The samples of the keys that are wanted.
        events: What happened, in the order it was written.
        attempts: Rewinds so far and one.
        tokens: Tokens at the newest sample, None if it does not say.
        skipped: Lines that could not be read.
    """

    def __init__(
        self,
        folder: str | Path,
        wanted: Callable[[str], bool] = lambda key: True,
        attempt: int | None = None,
    ) -> None:
        """Begins to follow a run.

        Args:
            folder: `runs/NAME`; its files need not be there yet.
            wanted: Which keys to keep.
            attempt: 1 is the run as it was before its first rewind, and so on; None the newest.
        """
        self._folder, self._wanted, self._attempt = Path(folder), wanted, attempt
        self._begin()

    def _begin(self) -> None:
        """Forgets everything."""
        self.columns = Columns(self._wanted)
        self.events: list[dict[str, Any]] = []
        self.attempts = 1
        self.tokens: int | None = None
        self._mistyped: list[int] = []
        self._rewinds: list[tuple[int, int]] = []
        self._end: int | None = None
        self._inode = 0
        self._metrics, self._journal = (
            Tail(self._folder / f"{name}.jsonl") for name in ("metrics", "events")
        )

    @property
    def step(self) -> int:
        """Newest step, −1 without a sample."""
        return self.columns.step

    @property
    def skipped(self) -> int:
        """Lines that could not be read, but for a last one that is still being written."""
        return len(self._mistyped) + len(self._metrics.skipped) + len(self._journal.skipped)

    def update(self) -> None:
        """Takes in what came since the last call.

        Raises:
            FileNotFoundError: The folder was there and is gone.
        """
        # A rewind is journalled before the samples that follow it: of these only such count as were
        # there before the journal was read.
        size = self._size()
        for _, _, row in self._journal.rows():
            self._take_event(floats(row))
        end = size if self._end is None else min(size, self._end)
        for line, offset, row in self._metrics.rows(end):
            self._rewind_to(offset)
            try:
                self.columns.add(row.get("step"), row.get("values"))
            except (TypeError, OverflowError):
                self._mistyped.append(line)
                continue
            if row["step"] == self.columns.step:
                tokens = row.get("tokens")
                self.tokens = tokens if isinstance(tokens, int) else None
        self._rewind_to(end)

    def warn(self) -> None:
        """Warns of the lines that could not be read, once for each file and kind."""
        for tail, name in ((self._metrics, "metrics.jsonl"), (self._journal, "events.jsonl")):
            torn = [] if tail.torn is None else [tail.torn]
            warn_skipped(self._folder / name, [*tail.skipped, *torn])
        warn_skipped(self._folder / "metrics.jsonl", self._mistyped, "samples")

    def _size(self) -> int:
        """Bytes of samples; after a look at whether it is still the same run."""
        path = self._folder / "metrics.jsonl"
        try:
            status = path.stat()
        except FileNotFoundError:
            if self._inode:
                raise FileNotFoundError(
                    f"{path} is gone: the run's folder was removed or renamed while it was read"
                ) from None
            return 0
        if self._inode not in (0, status.st_ino):
            self._begin()
        self._inode = status.st_ino
        return status.st_size

    def _take_event(self, row: dict[str, Any]) -> None:
        """One row of the journal; a rewind undoes those before it."""
        if self._end is not None:
            return
        step, at = row.get("step"), row.get("metrics_bytes")
        if row.get("kind") in REWINDS and type(step) is int and type(at) is int:
            if self.attempts == self._attempt:
                self._end = at
                return
            self.attempts += 1
            self._rewinds.append((at, step))
            self.events = [x for x in self.events if not _undone(x, step)]
        self.events.append(row)

    def _rewind_to(self, offset: int) -> None:
        """Carries out the rewinds that were written before this place in the samples."""
        while self._rewinds and self._rewinds[0][0] <= offset:
            self.columns.cut(self._rewinds.pop(0)[1])


def _undone(event: dict[str, Any], step: int) -> bool:
    """Whether a rewind to `step` undoes an event."""
    at = event.get("step")
    return event.get("kind") not in _STAYS and isinstance(at, int | float) and at > step
