"""How early each monitor spoke: first alarms of a recorded run, and their lead over the loss."""

from collections.abc import Mapping
from dataclasses import dataclass

from stabmon.alarms.detectors.base import Alarm, BandDetector
from stabmon.runs.runlog import Run


@dataclass(frozen=True)
class Lead:
    """One line of the lead-time table.

    Attributes:
        monitor: Name for people.
        key: Metric key.
        first: Step of the first alarm; None: it never fired.
        after: Steps from the fault's onset to it; None without either.
        lead: Steps by which it preceded the loss's first alarm, or the end of the run where the
            loss never fired; None if it never fired.
        lead_is_bound: Whether the loss never fired, so that `lead` is only a lower bound.
    """

    monitor: str
    key: str
    first: int | None
    after: int | None
    lead: int | None
    lead_is_bound: bool


def replay(run: Run, detector: BandDetector, before: int | None = None) -> dict[str, Alarm]:
    """Feed a recorded run to a detector, sample by sample; its first alarms by metric key.

    A resumed run does it with the samples `before` its checkpoint: the detector then stands where
    an uninterrupted run's would.
    """
    samples: dict[int, dict[str, float]] = {}
    for key in detector.reference.bands:
        if key in run.metrics:
            for step, value in zip(*run.metrics[key], strict=True):
                samples.setdefault(int(step), {})[key] = float(value)
    for step in sorted(s for s in samples if before is None or s < before):
        detector.update(step, samples[step])
    return detector.alarms


def lead_times(
    alarms: Mapping[str, Alarm],
    monitors: Mapping[str, str],
    loss_key: str,
    last_step: int,
    onset: int | None,
) -> list[Lead]:
    """The lead-time table, earliest first, monitors that never fired last.

    Args:
        alarms: First alarms by metric key.
        monitors: {name for people: metric key}.
        loss_key: Key of the loss.
        last_step: Last step of the run.
        onset: First step of the fault; None: there is none.
    """
    loss = alarms[loss_key].step if loss_key in alarms else None
    table = []
    for name, key in monitors.items():
        first = alarms[key].step if key in alarms else None
        table.append(
            Lead(
                name,
                key,
                first,
                None if first is None or onset is None else first - onset,
                None if first is None else (last_step if loss is None else loss) - first,
                loss is None,
            )
        )
    return sorted(table, key=lambda row: (row.first is None, row.first or 0))
