"""Several sinks at once, none of which can stop or slow down training.

What lives here: `guarded`, which moves a writer to a thread of its own behind a bounded queue, and
`Fanout`, which hands each sample to many. What does not: the sinks (`writers`).
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from stabmon.output.sinks.writers import Writer
from stabmon.runs.runlog import RunLog

CAPACITY = 256
PATIENCE = 5.0
LIMIT = 30.0


class Guarded:
    """A writer that cannot stop training; made by `guarded`.

    Attributes:
        name: What it is called in messages.
    """

    def __init__(
        self,
        writer: Writer,
        capacity: int,
        patience: float,
        limit: float,
        report: Callable[[str], None],
    ) -> None:
        """Starts the threads; use `guarded`."""
        self.name = type(writer).__name__
        self._writer, self._patience, self._limit = writer, patience, limit
        self._report = report
        self._queue: queue.Queue[tuple[int, dict[str, float] | None] | None]
        self._queue = queue.Queue(capacity)
        self._offered = self._written = self._dropped = self._failed = 0
        self._owed: int | None = None
        self._busy: tuple[int, float] | None = None  # at which step, since when
        self._closed = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._drain, name=self.name, daemon=True)
        watcher = threading.Thread(target=self._watch, name=f"{self.name} watched", daemon=True)
        self._thread.start()
        watcher.start()

    @property
    def lost(self) -> int:
        """Samples that were not written so far, but for those that wait for an open sink."""
        return self._offered - self._written if self._closed else self._dropped + self._failed

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Queues one sample; drops it if the queue is full. Never blocks, never raises.

        Args:
            step: Step at which it was measured.
            values: Metric key → value, on the host; copied.
        """
        if self._closed:
            return
        self._offered += 1
        try:
            if self._owed is not None:
                self._queue.put_nowait((self._owed, None))
                self._owed = None
            self._queue.put_nowait((step, dict(values)))
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                self._report(
                    f"{self.name} does not keep up: samples from step {step} on are dropped there, "
                    f"training and metrics.jsonl go on"
                )

    def rewind(self, step: int) -> None:
        """Queues a rewind; if the queue is full, it goes before the next sample.

        Args:
            step: Step of the checkpoint that was restored.
        """
        self._owed = step if self._owed is None else min(step, self._owed)
        if not self._closed and not self._queue.full():
            self._queue.put_nowait((self._owed, None))
            self._owed = None

    def close(self) -> None:
        """Waits a while for what is queued, closes the sink and reports what was lost in all."""
        if self._closed:
            return
        try:
            self._queue.put(None, timeout=self._patience)
            self._thread.join(self._patience)
        except queue.Full:
            pass  # It hangs: the thread is a daemon and ends with the process.
        self._closed = True
        self._done.set()
        if self._thread.is_alive():
            self._report(f"{self.name} hangs and was left behind")
        if self.lost:
            self._report(f"{self.name} lost {self.lost} samples in all")

    def _drain(self) -> None:
        """What the thread does: hand queued samples on until the end, whatever happens."""
        # Also an exit: it would end this thread alone, without a word.
        while (sample := self._queue.get()) is not None:
            step, values = sample
            self._busy = step, time.monotonic()
            try:
                if values is None:
                    self._writer.rewind(step)
                else:
                    self._writer.write(step, values)
                    self._written += 1
            except BaseException as error:
                self._failed += values is not None
                if self._failed + (values is None) == 1:
                    reason = f"{type(error).__name__}: {error}"
                    self._report(
                        f"{self.name} failed at step {step} ({reason}); "
                        f"training and metrics.jsonl go on"
                    )
            self._busy = None
        try:
            self._writer.close()
        except BaseException as error:
            self._report(f"{self.name} failed to close ({type(error).__name__}: {error})")

    def _watch(self) -> None:
        """What the other thread does: say once that a sample takes too long."""
        while not self._done.wait(self._limit / 4):
            busy = self._busy
            if busy is not None and time.monotonic() - busy[1] > self._limit:
                self._report(
                    f"{self.name} hangs since step {busy[0]}, for {self._limit:g} s; "
                    "training and metrics.jsonl go on"
                )
                return


class Fanout:
    """Hands each sample to every writer: to a `RunLog` at once, to all others guarded.

    An error of the run's own log is raised: everything else rests on it.

    Example:
        >>> class Broken:
        ...     def write(self, step, values):
        ...         raise OSError("no route to host")
        ...     def rewind(self, step):
        ...         pass
        ...     def close(self):
        ...         pass
        >>> with Fanout([Broken()], report=print) as out:
        ...     out.write(10, {"symptoms/global/loss/value": 2.5})
        ...     out.write(20, {"symptoms/global/loss/value": 2.4})
        Broken failed at step 10 (OSError: no route to host); training and metrics.jsonl go on
        Broken lost 2 samples in all
    """

    def __init__(
        self, writers: Sequence[Writer], *, report: Callable[[str], None] | None = None
    ) -> None:
        """Guards the writers.

        Args:
            writers: The sinks.
            report: Called with a sentence when a sink fails, falls behind or has lost samples; by
                default a warning of the logger "stabmon".
        """
        self._writers = [
            writer if isinstance(writer, RunLog | Guarded) else guarded(writer, report=report)
            for writer in writers
        ]

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Takes one sample.

        Args:
            step: Step at which it was measured.
            values: Metric key → value, on the host.

        Raises:
            OSError: If a `RunLog` among the writers cannot write.
        """
        for writer in self._writers:
            writer.write(step, values)

    def rewind(self, step: int) -> None:
        """Tells every writer that training goes on from an earlier step.

        Args:
            step: Step of the checkpoint that was restored.

        Raises:
            OSError: If a `RunLog` among the writers cannot write.
        """
        for writer in self._writers:
            writer.rewind(step)

    def close(self) -> None:
        """Closes every writer."""
        for writer in self._writers:
            writer.close()

    def __enter__(self) -> "Fanout":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def guarded(
    writer: Writer,
    *,
    capacity: int = CAPACITY,
    patience: float = PATIENCE,
    limit: float = LIMIT,
    report: Callable[[str], None] | None = None,
) -> Guarded:
    """Returns `writer` in a thread of its own, where it can neither stop nor slow down training.

    Samples wait in a bounded queue. When the sink raises, the sample is lost and the next one is
    tried; when it blocks until the queue is full, samples are dropped. Each kind of trouble is
    reported once, and the number of lost samples once at the end.

    Args:
        writer: The sink. It is used by one thread only.
        capacity: Samples that may wait.
        patience: Seconds that `close` waits for a slow sink, at most twice.
        limit: Seconds for one sample after which the sink is said to hang.
        report: Called with a sentence, perhaps from the sink's thread; by default a warning of the
            logger "stabmon".

    Raises:
        ValueError: If `capacity` is below 1.
    """
    if capacity < 1:
        raise ValueError(f"capacity is a number of samples, at least 1, got {capacity}")
    report = report or logging.getLogger("stabmon").warning
    return Guarded(writer, capacity, patience, limit, report)
