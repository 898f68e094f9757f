"""What makes a run the run it is, and how it is interrupted; the loop itself is `train.py`."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

# A run may go on elsewhere, be shown otherwise, or be judged by something else.
_SKIPPED = {"name", "runs", "resume", "quiet", "steps", "checkpoint_every", "keep", "reference"}
_SKIPPED |= {"placement", "distributed", "sinks"}
# Options that came in later count only where they are used: older runs stay what they are.
_LATER = {
    "": ("act", "alarms", "disturbances"),
    "optimizer": ("control", "msign", "rates", "base", "qk_clip", "decay", "floor"),
    "monitor": ("router",),
}


def identity(config: Any) -> dict[str, Any]:
    """What makes the run of an `experiments.train.Config` what it is, as JSON can hold it."""
    whole = {k: v for k, v in asdict(config).items() if k not in _SKIPPED}
    default = asdict(type(config)())
    for group, options in _LATER.items():
        held, usual = (whole[group], default[group]) if group else (whole, default)
        for name in options:
            if held[name] == usual[name]:
                del held[name]
    return whole


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """A list that is no longer empty once Ctrl-C or a termination signal came.

    The second Ctrl-C interrupts at once, as usual.
    """
    caught: list[int] = []

    def note(signum, frame):
        caught.append(signum)
        signal.signal(signum, previous[signum])

    previous = {}
    for signum in (signal.SIGINT, signal.SIGTERM):
        previous[signum] = signal.signal(signum, note)
    try:
        yield caught
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
