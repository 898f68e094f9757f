"""`Recovery`: the ladder's state machine as an object, for a training loop to hold.

It says what to do and remembers where it stands; the rules are `ladder.py`'s, which checkpoints are
healthy is `ledger.py`'s, and carrying the actions out is the training loop's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from stabmon.alarms.detectors.base import Alarm
from stabmon.alarms.detectors.grades import Health
from stabmon.alarms.diagnosis import Diagnosis
from stabmon.recovery.ladder import (
    Action,
    Kind,
    Observation,
    Phase,
    Policy,
    Standing,
    transition,
)
from stabmon.recovery.ledger import CheckpointLedger

FORMAT = 1


@dataclass
class Recovery:
    """Climbs the recovery ladder: halve the learning rate and watch, roll back, verify, stop.

    In the phase "rolling back" it waits for `rolled_back`, and `pending` holds what is to be done.
    All of it is in the state, so that a run killed in the midst finds the same actions again; each
    may be carried out twice.

    Attributes:
        policy: How.
        ledger: The checkpoints.
        standing: Where it is.
        pending: Actions of a rollback that has not been reported done.

    >>> recovery = Recovery(Policy(act=True, watch=100), CheckpointLedger(dwell=50))
    >>> [a.kind.value for a in recovery.update(10, health=Health.CAUTION, healthy=False)]
    ['scale learning rate']
    >>> recovery.phase.value
    'watching'
    """

    policy: Policy = field(default_factory=Policy)
    ledger: CheckpointLedger = field(default_factory=CheckpointLedger)
    standing: Standing = field(default_factory=Standing)
    pending: tuple[Action, ...] = ()

    @property
    def phase(self) -> Phase:
        """Where on the ladder the run stands."""
        return self.standing.phase

    @property
    def stop(self) -> bool:
        """Whether the run is to end, with the exit code `ladder.EXIT_UNRECOVERED`."""
        return self.policy.act and self.phase is Phase.STOPPED

    def update(
        self,
        step: int,
        alarms: Sequence[Alarm] = (),
        grade: int | None = None,
        *,
        healthy: bool,
        health: Health = Health.HEALTHY,
        diagnosis: Diagnosis | None = None,
    ) -> list[Action]:
        """Take one sample; what to do now, in order.

        Args:
            step: The step.
            alarms: Those that were raised at this step.
            grade: Stability grade, None where none is measured.
            healthy: Whether no metric is in alarm.
            health: State of the grade table.
            diagnosis: What the alarms say; looked at only where `alarms` has any.
        """
        self.ledger.note(step, healthy and not alarms)
        seen = Observation(
            step,
            healthy and not alarms,
            health,
            grade,
            diagnosis if alarms else None,
            self.ledger.target(before=step),
        )
        self.standing, actions = transition(self.policy, self.standing, seen)
        if self.phase is Phase.ROLLING_BACK and actions:
            self.pending = actions
        return list(actions)

    def rolled_back(self) -> None:
        """Hear that the pending actions are carried out: verification begins at the target.

        Raises:
            ValueError: No rollback is under way.
        """
        target = self.standing.target
        if self.phase is not Phase.ROLLING_BACK or target is None:
            raise ValueError(f"no rollback is under way, the phase is {self.phase.value!r}")
        until = target + self.policy.verify
        self.standing = replace(
            self.standing, phase=Phase.VERIFYING, until=until, target=None, since=None, kept=False
        )
        self.ledger.rewind(target)
        self.pending = ()

    def state(self) -> dict[str, Any]:
        """Standing, pending actions and ledger, as JSON can hold them."""
        return {
            "format": FORMAT,
            "standing": asdict(self.standing) | {"phase": self.phase.value},
            "pending": [asdict(action) | {"kind": action.kind.value} for action in self.pending],
            "ledger": self.ledger.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`.

        Raises:
            ValueError: It is of a newer format.
        """
        if state["format"] > FORMAT:
            raise ValueError(
                f"recovery state has format {state['format']}, this code reads up to {FORMAT}"
            )
        standing: dict[str, Any] = {**state["standing"]}
        standing["phase"] = Phase(standing["phase"])
        standing["undone"] = tuple(standing["undone"])
        self.standing = Standing(**standing)
        self.pending = tuple(
            Action(**row | {"kind": Kind(row["kind"])}) for row in state["pending"]
        )
        self.ledger.restore(state["ledger"])
