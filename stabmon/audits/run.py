"""`audit`: any set of audits on one case, and what they say together.

What lives here: the list of audits, which of them bear on a suspicion, and the table. What does
not: the audits themselves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from stabmon.audits.batch import batch
from stabmon.audits.case import Case, Outcome, Verdict
from stabmon.audits.causality import causality
from stabmon.audits.modules import init, modules
from stabmon.audits.optimizer import optimizer
from stabmon.audits.precision import precision
from stabmon.audits.repeat import repeat, replicas
from stabmon.audits.targets import targets
from stabmon.audits.weights import weights

_ALL = (batch, targets, causality, init, weights, optimizer, modules, repeat, replicas, precision)
AUDITS: dict[str, Callable[[Case], Verdict]] = {run.__name__: run for run in _ALL}
# What makes sense before the first step.
PREFLIGHT = tuple(name for name in AUDITS if name not in ("precision", "repeat"))
# By what a diagnosis is called; others get those of "unknown".
BEARING = {
    "attention numerics": ("precision", "weights", "causality", "optimizer"),
    "learning rate": ("optimizer", "weights"),
    "dirty batch": ("batch", "targets", "weights"),
    "repeated data": ("batch", "targets", "causality", "optimizer"),
    "batch or balance": ("batch", "optimizer", "weights"),
    "non-finite values": ("weights", "repeat"),
    "unknown": ("batch", "targets", "causality", "weights", "optimizer", "precision"),
}


class Standing(StrEnum):
    """How sure a diagnosis is after audits."""

    PROVED = "proved"
    SUSPECTED = "suspected"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Findings:
    """What audits said, in the order in which they ran; printed as a table.

    Attributes:
        verdicts: One of each audit.
    """

    verdicts: tuple[Verdict, ...]

    @property
    def convicted(self) -> tuple[Verdict, ...]:
        """Those that prove a fault."""
        return tuple(x for x in self.verdicts if x.convicted)

    def standing(self, suspected: str = "unknown") -> tuple[Standing, str]:
        """Returns how sure a suspicion is now, and the sentence that says so.

        Args:
            suspected: What the alarms say.
        """
        if self.convicted:
            return Standing.PROVED, "; ".join(f"{x.cause}: {x.sentence}" for x in self.convicted)
        tested = ", ".join(x.audit for x in self.verdicts if x.outcome is Outcome.ACQUITTED)
        ruled = f"ruled out by {tested}" if tested else "no audit could tell"
        if suspected == "unknown":
            return Standing.UNKNOWN, f"no cause was found; {ruled}"
        return Standing.SUSPECTED, f"{suspected} is not proved; other causes {ruled}"

    def __str__(self) -> str:
        wide = max((len(x.audit) for x in self.verdicts), default=0)
        row = lambda x: f"{x.audit:<{wide}}  {x.outcome.value:<10}  {x.sentence}"
        return "\n".join(map(row, self.verdicts))


def audit(loss: Any, params: Any, batch: Any, audits: Sequence[str] = (), **known: Any) -> Findings:
    """Tests causes of trouble in one step of a training run.

    Args:
        loss: (params, batch) -> scalar loss.
        params: Parameters.
        batch: What the step trains on; see `Case`.
        audits: Names of `AUDITS`; none: all. What is not known makes an audit say "can't tell".
        **known: Other fields of `Case`: logits, reference, layout, tx, opt_state, step, schedule …

    Returns:
        The verdicts; `print` shows a table.

    Raises:
        ValueError: An audit is unknown.

    >>> import jax.numpy as jnp
    >>> loss = lambda w, batch: jnp.sum(w["w"] * batch)
    >>> print(audit(loss, {"w": jnp.ones(32)}, jnp.ones(32), ["weights"]))
    weights  acquitted   no entry is out of line with its matrix
    """
    return run(Case(loss, params, batch, **known), audits or tuple(AUDITS))


def run(case: Case, audits: Sequence[str]) -> Findings:
    """Runs audits on a case.

    Args:
        case: The case.
        audits: Names of `AUDITS`.

    Raises:
        ValueError: An audit is unknown.
    """
    if missing := [name for name in audits if name not in AUDITS]:
        raise ValueError(f"unknown audit {missing[0]!r}; some of {', '.join(AUDITS)}")
    return Findings(tuple(AUDITS[name](case) for name in audits))


def bearing(fault: str) -> tuple[str, ...]:
    """Returns the audits that bear on what is suspected.

    Args:
        fault: Name of a diagnosis.

    >>> bearing("learning rate")
    ('optimizer', 'weights')
    """
    return BEARING.get(fault, BEARING["unknown"])
