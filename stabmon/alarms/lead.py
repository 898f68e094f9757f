"""Recorded runs fed to a detector: its alarms, the first of each metric, and their lead times.

What a whole watcher says about a recorded run is `stabmon.recovery.replay`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from stabmon.alarms.detector_set import DetectorSet
from stabmon.alarms.detectors.base import Alarm, Detector
from stabmon.runs.run import Run
from stabmon.runs.samples import samples


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


def alarms_of(run: Run, detector: Detector | DetectorSet, before: int | None = None) -> list[Alarm]:
    """The alarms that a recorded run raises in a fresh detector, fed sample by sample.

    A resumed run is fed the samples `before` its checkpoint: the detector then stands where an
    uninterrupted run's would.
    """
    early = (x for x in samples(run) if before is None or x[0] < before)
    return [alarm for step, values in early for alarm in detector.update(step, values)]


def first_by_key(
    run: Run, detector: Detector | DetectorSet, before: int | None = None
) -> dict[str, Alarm]:
    """The first alarm of each metric, as of `alarms_of`."""
    first: dict[str, Alarm] = {}
    for alarm in alarms_of(run, detector, before):
        first.setdefault(alarm.key, alarm)
    return first


def lead_times(
    first: Mapping[str, Alarm],
    monitors: Mapping[str, str],
    loss_key: str,
    last_step: int,
    onset: int | None,
) -> list[Lead]:
    """The lead-time table, earliest first, monitors that never fired last.

    Args:
        first: First alarms by metric key.
        monitors: {name for people: metric key}.
        loss_key: Key of the loss.
        last_step: Last step of the run.
        onset: First step of the fault; None: there is none.
    """
    loss = first[loss_key].step if loss_key in first else None
    table = []
    for name, key in monitors.items():
        at = first[key].step if key in first else None
        table.append(
            Lead(
                name,
                key,
                at,
                None if at is None or onset is None else at - onset,
                None if at is None else (last_step if loss is None else loss) - at,
                loss is None,
            )
        )
    return sorted(table, key=lambda row: (row.first is None, row.first or 0))
