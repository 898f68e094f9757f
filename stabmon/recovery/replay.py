"""Recorded runs as streams: which alarms these rules would have raised on a run that is over.

So rules can be tried without training. What the rules are is `standard.py`'s.
"""

from typing import Any

from stabmon.alarms.standard import standard_detectors
from stabmon.recovery.recovery import Recovery
from stabmon.recovery.watcher import Watcher
from stabmon.runs.config import setting
from stabmon.runs.run import Run
from stabmon.runs.samples import samples


def has_qk_norm(run: Run) -> bool:
    """Whether the run's configuration says "model" "qk_norm"; not, where it says nothing."""
    return bool(setting(run.config, "model", "qk_norm"))


def standard_watcher(run: Run, warmup: int = 100, window: int = 200) -> Watcher:
    """The standard alarms and a ladder that only advises, fresh, for a run of this configuration.

    Args:
        run: The run; whether its queries and keys are normalised is read from its configuration.
        warmup: Steps of learning-rate warm-up, which are not judged.
        window: Steps of the healthy window after it.

    Raises:
        ValueError: A negative warm-up, or no window.
    """
    return Watcher(standard_detectors(warmup, window, qk_norm=has_qk_norm(run)), Recovery())


def replay_events(run: Run, watcher: Watcher | None = None) -> list[dict[str, Any]]:
    """What a watcher says about a recorded run: rows as of `events.jsonl`, in order.

    Equal to what it would have written while the run went on, as long as it only advises.

    Args:
        run: The run.
        watcher: A fresh one; by default `standard_watcher`.

    Raises:
        ValueError: The watcher would act: what is over cannot be acted on.
    """
    watcher = watcher or standard_watcher(run)
    if watcher.recovery.policy.act:
        raise ValueError("a recorded run cannot be acted on: take a Policy with act=False")
    return [row for step, values in samples(run) for row in watcher.observe(step, values).events()]
