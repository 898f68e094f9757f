"""SIGTERM as an exception, so that a run that is told to end still writes what it knows."""

import signal
import threading
from collections.abc import Callable
from types import FrameType


def catch() -> Callable[[], None]:
    """Lets SIGTERM raise `SystemExit(143)` and returns what undoes that.

    Nothing is changed where the program has a handler of its own, or outside of the main thread.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return lambda: None
    signal.signal(signal.SIGTERM, _end)
    return _undo


def _undo() -> None:
    if signal.getsignal(signal.SIGTERM) is _end:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
