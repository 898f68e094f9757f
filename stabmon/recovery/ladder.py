"""The recovery ladder as pure data: policy, phases, actions, and the transition between phases.

`transition` is a function of policy, standing and observation; it does nothing and knows no
training loop. The object that holds a standing is `recovery.py`'s; carrying out is the caller's.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from stabmon.alarms.detectors.grades import Health
from stabmon.alarms.diagnosis import Diagnosis
from stabmon.alarms.signatures import Fault

EXIT_UNRECOVERED = 70


class Phase(StrEnum):
    """Where on the ladder a run stands."""

    RUNNING = "running"
    WATCHING = "watching"
    ROLLING_BACK = "rolling back"
    VERIFYING = "verifying"
    STOPPED = "stopped"


class Kind(StrEnum):
    """What can be done."""

    SCALE_LEARNING_RATE = "scale learning rate"
    MSIGN = "msign"
    KEEP_BATCHES = "keep batches"
    ROLL_BACK = "roll back"
    RESET_OPTIMIZER = "reset optimizer"
    SKIP_DATA = "skip data"
    RESUME = "resume"
    STOP = "stop"


@dataclass(frozen=True)
class Action:
    """One thing to do, or with `dry` only to write down.

    Attributes:
        kind: What.
        step: When it was decided.
        reason: Why, in words.
        dry: Whether it is advice only.
        fields: What it takes: `scale`, the learning-rate factor that shall hold, with respect to
            the run's own schedule, so that doing it twice does no harm; `target`, the checkpoint's
            step; `first` and `last`, a range of steps.
    """

    kind: Kind
    step: int
    reason: str
    dry: bool = True
    fields: dict[str, Any] = field(default_factory=dict)

    def event(self) -> dict[str, Any]:
        """The row of `events.jsonl`, less kind and step."""
        return {"action": self.kind.value, "reason": self.reason, "dry": self.dry} | self.fields


@dataclass(frozen=True)
class Policy:
    """How the ladder is climbed.

    Attributes:
        act: Whether actions are to be carried out; False: written down as advice.
        watch: Steps to watch after the learning rate was halved.
        verify: Steps of verification after a rollback.
        halve: Learning-rate factor of the first rung.
        cut: Learning-rate factor at a rollback, 0.3 to 0.5.
        max_rollbacks: Rollbacks in a run before it is stopped.
        alarm_grade: During verification, this grade or a lower one is an alarm.
        batches: Steps to each side of an S0 whose batches are kept.
        msign: Whether attention numerics are first met by MSign on demand.
        joint: Different quantities that must have alarmed for a diagnosis before the learning rate
            is touched for it; one alone goes wrong in a healthy run too. A learning rate that is
            named, values that are not finite, and the grade table need no second.
        skip_data: Whether the steps between the checkpoint and the alarm are not trained on again.

    Raises:
        ValueError: A length below 1, a factor outside (0, 1), or a negative number of rollbacks.
    """

    act: bool = False
    watch: int = 500
    verify: int = 1000
    halve: float = 0.5
    cut: float = 0.4
    max_rollbacks: int = 3
    alarm_grade: int = 3
    batches: int = 200
    msign: bool = False
    skip_data: bool = False
    joint: int = 2

    def __post_init__(self):
        if self.joint < 1:
            raise ValueError(f"joint: expected at least 1 quantity, got {self.joint}")
        if min(self.watch, self.verify) < 1 or self.max_rollbacks < 0:
            raise ValueError(
                f"expected watch and verify >= 1 steps and max_rollbacks >= 0, got {self.watch}, "
                f"{self.verify} and {self.max_rollbacks}"
            )
        for name in ("halve", "cut"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(
                    f"{name}: expected a factor between 0 and 1, got {getattr(self, name)}"
                )


@dataclass(frozen=True)
class Standing:
    """Where the machine is.

    Attributes:
        phase: Its rung.
        until: Step at which watching or verifying ends.
        scale: Learning-rate factor in force.
        rollbacks: Rollbacks so far.
        target: Checkpoint of the rollback under way.
        since: Step of the alarm that brought it about.
        kept: Whether the batches around an S0 were asked for since the last rollback.
        undone: Steps of non-finite values for which the run was rolled back.
    """

    phase: Phase = Phase.RUNNING
    until: int = 0
    scale: float = 1.0
    rollbacks: int = 0
    target: int | None = None
    since: int | None = None
    kept: bool = False
    undone: tuple[int, ...] = ()


@dataclass(frozen=True)
class Observation:
    """What the machine is told of a sample.

    Attributes:
        step: The step.
        healthy: Whether no metric is in alarm.
        health: State of the grade table.
        grade: Stability grade, None where none is measured.
        diagnosis: What the alarms of this step say, None without new alarms.
        checkpoint: Checkpoint to go back to, None without one that is finite.
    """

    step: int
    healthy: bool
    health: Health = Health.HEALTHY
    grade: int | None = None
    diagnosis: Diagnosis | None = None
    checkpoint: int | None = None


# Nothing is done about what passes by itself, what is the data's, and what is not understood.
_DANGEROUS = frozenset({Fault.NONFINITE, Fault.LOW_RANK})
_HARMLESS = frozenset({Fault.DIRTY_BATCH, Fault.REPEATED_DATA, Fault.DATA, Fault.UNKNOWN})
# Nor where a smaller rate cannot help.
_HARMLESS |= {Fault.STILL, Fault.IMPOSSIBLE}
# Non-finite values so near to where they were undone are the same fault: samples lie between.
_SAME = 20


def transition(
    policy: Policy, now: Standing, seen: Observation
) -> tuple[Standing, tuple[Action, ...]]:
    """The next standing and what to do on the way there."""
    actions: list[Action] = []
    if now.phase in (Phase.STOPPED, Phase.ROLLING_BACK):
        return now, ()
    # The rank is low in a warm-up too: only where the grade table finds fault with it.
    if seen.grade == 0 and seen.health is not Health.HEALTHY and not now.kept:
        first, last = max(seen.step - policy.batches, 0), seen.step + policy.batches
        reason = "the grade is S0: keep what the model was fed"
        actions.append(
            Action(Kind.KEEP_BATCHES, seen.step, reason, False, {"first": first, "last": last})
        )
        now = replace(now, kept=True)
    why = danger(policy, now, seen)
    if why is not None:
        now, more = _roll_back(policy, now, seen, why)
        return now, (*actions, *more)
    if now.phase in (Phase.WATCHING, Phase.VERIFYING):
        if seen.step < now.until:
            return now, tuple(actions)
        if not seen.healthy:
            now, more = _roll_back(policy, now, seen, f"not healthy after {now.phase}")
            return now, (*actions, *more)
        reason = f"healthy after {now.phase}: go on"
        actions.append(Action(Kind.RESUME, seen.step, reason, not policy.act))
        return replace(now, phase=Phase.RUNNING, since=None, kept=False), tuple(actions)
    if (why := caution(policy, seen)) is not None:
        numerics = seen.diagnosis is not None and seen.diagnosis.fault is Fault.ATTENTION
        if policy.msign and numerics:
            actions.append(Action(Kind.MSIGN, seen.step, why, not policy.act))
        scale = now.scale * policy.halve
        fields = {"scale": scale}
        actions.append(Action(Kind.SCALE_LEARNING_RATE, seen.step, why, not policy.act, fields))
        if policy.act:
            now = replace(now, scale=scale)
        until = seen.step + policy.watch
        now = replace(now, phase=Phase.WATCHING, until=until, since=seen.step)
    return now, tuple(actions)


def danger(policy: Policy, now: Standing, seen: Observation) -> str | None:
    """Why a rollback is due at once, None if it is not."""
    if seen.health is Health.DANGER:
        return f"the rank ratio is in danger (grade S{seen.grade})"
    if seen.diagnosis is not None and seen.diagnosis.fault in _DANGEROUS:
        return _named(seen.diagnosis)
    if now.phase is Phase.VERIFYING:
        low = seen.grade is not None and seen.grade <= policy.alarm_grade
        if low and seen.health is not Health.HEALTHY:
            return f"grade S{seen.grade} while verifying"
        if caution(policy, seen) is not None and seen.diagnosis is not None:
            return f"{_named(seen.diagnosis)} while verifying"
    return None


def caution(policy: Policy, seen: Observation) -> str | None:
    """Why the learning rate is to be halved, None if it is not."""
    if seen.health is Health.CAUTION:
        return f"the rank ratio is low and falling (grade S{seen.grade})"
    found = seen.diagnosis
    if found is None or found.fault in _HARMLESS:
        return None
    # An adaptive optimizer's updates are as large as its rate: their size needs no second word.
    sure = found.fault is Fault.LEARNING_RATE or found.quantities >= policy.joint
    return _named(found) if sure else None


def _named(diagnosis: Diagnosis) -> str:
    return f"{diagnosis.fault.value} (confidence {diagnosis.confidence:.2f})"


def _roll_back(
    policy: Policy, now: Standing, seen: Observation, why: str
) -> tuple[Standing, list[Action]]:
    """Back to a checkpoint with a smaller learning rate; or the end.

    Non-finite values that come back at the same step are not the learning rate's: the run stops,
    rather than cut the rate again.
    """
    dry, step = not policy.act, seen.step
    if now.rollbacks >= policy.max_rollbacks:
        reason = f"{why}; {now.rollbacks} rollbacks were made, which is as many as allowed"
        return replace(now, phase=Phase.STOPPED), [Action(Kind.STOP, step, reason, dry)]
    if seen.checkpoint is None:
        reason = f"{why}; there is no finite checkpoint to go back to"
        return replace(now, phase=Phase.STOPPED), [Action(Kind.STOP, step, reason, dry)]
    broken = seen.diagnosis is not None and seen.diagnosis.fault is Fault.NONFINITE
    if broken and any(abs(step - at) <= _SAME for at in now.undone):
        cause = "its data were skipped" if policy.skip_data else "skip its data (skip_data)"
        reason = (
            f"{why}; they came back at the same step after a rollback with a smaller learning "
            f"rate: the fault is bound to this step; {cause}"
        )
        return replace(now, phase=Phase.STOPPED), [Action(Kind.STOP, step, reason, dry)]
    scale, target = now.scale * policy.cut, seen.checkpoint
    actions = [
        Action(Kind.ROLL_BACK, step, why, dry, {"target": target, "number": now.rollbacks + 1}),
        Action(Kind.SCALE_LEARNING_RATE, step, why, dry, {"scale": scale}),
        Action(Kind.RESET_OPTIMIZER, step, why, dry),
    ]
    if policy.skip_data:
        fields = {"first": target, "last": step}
        actions.append(Action(Kind.SKIP_DATA, step, why, dry, fields))
    since = step if now.since is None else now.since
    if dry:  # Nothing is undone: as if it had been, from here.
        until = step + policy.verify
        rollbacks = now.rollbacks + 1
        return replace(now, phase=Phase.VERIFYING, until=until, rollbacks=rollbacks), actions
    undone = (*now.undone, step) if broken else now.undone
    now = replace(now, phase=Phase.ROLLING_BACK, target=target, since=since, scale=scale)
    return replace(now, rollbacks=now.rollbacks + 1, undone=undone), actions
