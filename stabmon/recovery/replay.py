"""Recorded runs as streams: which alarms these rules would have raised on a run that is over.

So rules can be tried without training. What the rules are is `standard.py`'s.
"""

from typing import Any

from stabmon.alarms.standard import standard_detectors
from stabmon.recovery.ladder import Policy
from stabmon.recovery.ledger import CheckpointLedger
from stabmon.recovery.recovery import Recovery
from stabmon.recovery.watcher import Watcher
from stabmon.runs.config import setting
from stabmon.runs.run import Run
from stabmon.runs.samples import samples


def has_qk_norm(run: Run) -> bool:
    """Whether the run's configuration says "model" "qk_norm"; not, where it says nothing."""
    return bool(setting(run.config, "model", "qk_norm"))


def replay_events(run: Run, watcher: Watcher | None = None) -> list[dict[str, Any]]:
    """What a watcher says about a recorded run: rows as of `events.jsonl`, in order.

    Equal to what it would have written while the run went on, as long as it only advises.

    Args:
        run: The run.
        watcher: A fresh one; by default the standard alarms after a warm-up of 100 steps, judged by
            the 200 steps that follow it.

    Raises:
        ValueError: The watcher would act: what is over cannot be acted on.
    """
    watcher = watcher or Watcher(standard_detectors(), Recovery(Policy(), CheckpointLedger()))
    if watcher.recovery.policy.act:
        raise ValueError("a recorded run cannot be acted on: take a Policy with act=False")
    return [row for step, values in samples(run) for row in watcher.observe(step, values).events()]
