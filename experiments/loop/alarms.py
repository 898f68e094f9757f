"""How a training run is watched, from its configuration: detectors, ladder, and which batches."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from grain import MapDataset

from stabmon.alarms.detector_set import DetectorSet
from stabmon.alarms.detectors.bands import BandDetector
from stabmon.alarms.reference import Reference
from stabmon.alarms.standard import standard_detectors
from stabmon.hosts import leads
from stabmon.recovery.ladder import Kind, Policy
from stabmon.recovery.ledger import CheckpointLedger
from stabmon.recovery.watcher import Seen


@dataclass(frozen=True)
class AlarmConfig:
    """Watching by the standard detectors, and how the recovery ladder is climbed.

    Attributes:
        on: Whether the standard detectors judge the run; `--act` implies it.
        window: Steps of the healthy window after the warm-up.
        watch: Steps to watch after the learning rate was halved.
        verify: Steps of verification after a rollback.
        dwell: Healthy steps before and after a checkpoint that make it trusted.
        min_grade: Lowest grade of a trusted checkpoint.
        max_rollbacks: Rollbacks before the run is stopped.
        joint: Different quantities that must have alarmed before the learning rate is touched.
        skip_data: Whether the data between checkpoint and alarm are passed over after a rollback.
        msign: Whether a fault in the attention is first met by one MSign restoration of its
            matrices.
    """

    on: bool = False
    window: int = 200
    watch: int = 500
    verify: int = 1000
    dwell: int = 500
    min_grade: int = 4
    max_rollbacks: int = 3
    joint: int = 2
    skip_data: bool = False
    msign: bool = False

    def policy(self) -> Policy:
        """The ladder."""
        names = ("watch", "verify", "max_rollbacks", "joint", "skip_data", "msign")
        return Policy(**{name: getattr(self, name) for name in names})

    def ledger(self, keep: int) -> CheckpointLedger:
        """Which checkpoints are trusted; the newest `keep` stay whatever their health."""
        return CheckpointLedger(self.dwell, self.min_grade, max(keep, 1))

    def detectors(
        self, judged: bool, warmup: int, reference: Path | None, qk_norm: bool
    ) -> DetectorSet:
        """The standard detectors where the run is `judged`, and the bands of a reference."""
        learned = None if reference is None else Reference.load(reference)
        if judged:
            return standard_detectors(warmup, self.window, learned, qk_norm=qk_norm)
        return DetectorSet({} if learned is None else {"bands": BandDetector(learned)})


def keep_batches(folder: Path, order: MapDataset, shift: Callable[[], int]) -> Any:
    """Writes which windows of the data the steps around an S0 were fed, when the ladder asks.

    Args:
        folder: The run's folder.
        order: Indices of the data of each step.
        shift: How many steps the data are ahead of the counter.
    """

    def hear(seen: Seen) -> None:
        for action in seen.actions:
            if action.kind is not Kind.KEEP_BATCHES or not leads():
                continue
            steps = range(action.fields["first"], action.fields["last"] + 1)
            fed = {step: np.asarray(order[step + shift()]).tolist() for step in steps}
            path = folder / f"batches-{action.step:08d}.json"
            path.write_text(json.dumps(fed) + "\n", encoding="utf-8")

    return hear
