"""What `Watch` builds where it is not given: the monitor and the watcher that suit a layout."""

import re

from jaxtyping import PyTree

from stabmon.alarms.detector_set import DetectorSet
from stabmon.alarms.standard import standard_detectors
from stabmon.contracts import Contracts
from stabmon.layout import Layout
from stabmon.layout.paths import parameters
from stabmon.monitor import Monitor
from stabmon.recovery.ladder import Policy
from stabmon.recovery.ledger import CheckpointLedger
from stabmon.recovery.recovery import Recovery
from stabmon.recovery.watcher import Watcher


def default_monitor(layout: Layout) -> Monitor:
    """Returns a monitor of a model with this layout; without a router its tier is off."""
    return Monitor(layout, router=10 if layout.has("router") else 0)


def default_watcher(
    layout: Layout,
    warmup: int,
    window: int,
    detectors: DetectorSet | None,
    policy: Policy,
    ledger: CheckpointLedger | None,
) -> Watcher:
    """Returns detectors, by default the standard ones for this layout, and a ladder."""
    if detectors is None:
        detectors = standard_detectors(warmup, window, qk_norm=layout.qk_norm)
    return Watcher(detectors, Recovery(policy, CheckpointLedger() if ledger is None else ledger))


def declared(params: PyTree, frozen: str | None) -> Contracts:
    """Returns the contracts of a run, with the leaves that must not move.

    Args:
        params: Parameters, real or abstract.
        frozen: Regular expression of their paths, None without any.

    Raises:
        ValueError: It matches no leaf.
    """
    if frozen is None:
        return Contracts()
    paths = [path for path, _ in parameters(params)]
    found = {path for path in paths if re.search(frozen, path)}
    if not found:
        some = ", ".join(paths[:12])
        raise ValueError(f"frozen: {frozen!r} matches none of {len(paths)} leaves: {some}")
    return Contracts.declared(found.__contains__)
