"""What `Watch` builds where it is not given: the monitor and the watcher that suit a layout."""

from jaxtyping import PyTree

from stabmon.alarms.reference import Reference
from stabmon.alarms.standard import standard_detectors
from stabmon.layout import Layout
from stabmon.layout.gather import match
from stabmon.layout.paths import leaves_with_paths
from stabmon.monitor import Monitor
from stabmon.recovery.ladder import Policy
from stabmon.recovery.ledger import CheckpointLedger
from stabmon.recovery.recovery import Recovery
from stabmon.recovery.watcher import Watcher


def default_monitor(layout: Layout, roles: frozenset[str]) -> Monitor:
    """Returns a monitor of a model with these roles; without a router its tier is off."""
    return Monitor(layout, router=10 if "router" in roles else 0)


def default_watcher(
    roles: frozenset[str],
    warmup: int,
    window: int,
    reference: Reference | None,
    policy: Policy,
    ledger: CheckpointLedger | None,
) -> Watcher:
    """Returns the standard detectors for a model with these roles, and its ladder."""
    qk_norm = bool(roles & {"q_scale", "k_scale"})
    detectors = standard_detectors(warmup, window, reference, qk_norm=qk_norm)
    return Watcher(detectors, Recovery(policy, CheckpointLedger() if ledger is None else ledger))


def roles_of(layout: Layout, params: PyTree) -> frozenset[str]:
    """Returns the roles of the matrices and scales that a layout finds."""
    found, _ = match(layout.rules, leaves_with_paths(params))
    return frozenset(role for item in found for role in item.rule.roles)
