"""Following files that are being written: whole new lines, each once.

What lives here: `Tail`, `Follower`. What does not: reading a finished run (`runlog`), drawing
(`board`). No line of a file is read twice, however long the run.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stabmon.runs.jsonl import floats


class Tail:
    r"""The new objects of a JSON-lines file at each call of `rows`.

    A torn last line waits until it is whole. A file that became shorter, because a resumed run cut
    a torn line off it, is read on from its end; one that was replaced, from its beginning.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
        >>> tail = Tail(path)
        >>> _ = path.write_text('{"step": 1}\n{"st')
        >>> list(tail.rows()), list(tail.rows())
        ([{'step': 1}], [])
        >>> _ = path.write_text('{"step": 1}\n{"step": 2}\n')
        >>> list(tail.rows())
        [{'step': 2}]
    """

    def __init__(self, path: Path) -> None:
        """Begins at the beginning of a file, which need not be there yet."""
        self._path = path
        self._inode, self._offset = 0, 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields what came since the last call; lines that are no objects are passed over."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode:
                self._inode, self._offset = status.st_ino, 0
            self._offset = file.seek(min(self._offset, status.st_size))
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                try:
                    row = floats(json.loads(line))
                except ValueError:
                    continue
                if isinstance(row, dict):
                    yield row


class Follower:
    """The newest state of a run: chosen series and events.

    Attributes:
        series: Key → {step: value}; of a step written twice the later sample.
        events: Alarms and actions, in the order they were written.
        step: Newest step, −1 without a sample.
        tokens: Tokens at that step, None if it does not say.
    """

    def __init__(self, folder: Path, wanted: Callable[[str], bool]) -> None:
        """Begins to follow a run.

        Args:
            folder: `runs/NAME`.
            wanted: Which keys to keep.
        """
        self.series: dict[str, dict[int, float]] = {}
        self.events: list[dict[str, Any]] = []
        self.step = -1
        self.tokens: int | None = None
        self._wanted = wanted
        self._metrics, self._journal = (
            Tail(folder / f"{name}.jsonl") for name in ("metrics", "events")
        )

    def update(self) -> None:
        """Takes in what came since the last call."""
        for row in self._metrics.rows():
            step, values = row.get("step"), row.get("values")
            if not isinstance(step, int) or not isinstance(values, dict):
                continue
            tokens = row.get("tokens")
            self.step, self.tokens = step, tokens if isinstance(tokens, int) else None
            for key, value in values.items():
                if isinstance(value, int | float) and self._wanted(key):
                    self.series.setdefault(key, {})[step] = float(value)
        for row in self._journal.rows():
            self.events.append(row)
