"""What each fault looks like: which signs it needs, which speak for it, which against.

A sign is a quantity and where it went, such as "Δ2 down". Data only; how signs are read off alarms
and weighed is `attribution.py`.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from stabmon.alarms.detectors.base import IMPOSSIBLE, UNREADABLE, Alarm
from stabmon.quantities import quantity_of

# Rules that are no evidence of what their quantity stands for.
_OWN_SIGN = {UNREADABLE: "unreadable", IMPOSSIBLE: "impossible", "falling": "falling rank"}
CONTRAST = "q, k against v, o"
SPECTRA = ("Δ2", "ΔW", "radial alignment", CONTRAST)
# What tells a fault of the attention from one of the learning rate: one of these must be measured.
_SIZES = ("/update_norm/", "/update_ratio/", "/qk_over_vo/")
# Where one of these came first, the spectra follow from what it tells.
_BEFORE_SPECTRA = (
    "router entropy down",
    "update size",
    "loss up",
    "loss level up",
    "held-out loss up",
    "rank",
    "gradient level up",
    "loss down",
    "expert load",
)


class Fault(StrEnum):
    """The classes that can be told apart."""

    ATTENTION = "attention numerics"
    LEARNING_RATE = "learning rate"
    BALANCE = "batch or balance"
    DIRTY_BATCH = "dirty batch"
    NO_QK_NORM = "missing QK-norm"
    LOW_RANK = "low-rank pathology"
    REPEATED_DATA = "repeated data"
    NONFINITE = "non-finite values"
    DATA = "changed data"
    STILL = "no learning"
    IMPOSSIBLE = "impossible values"
    SEVERAL = "several at once"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Signature:
    """One way in which a fault shows.

    A sign names a quantity, with or without a direction: "Δ2", "router entropy down". Besides
    those of alarms there are "loss falling" and "loss risen" (its last mean is near its best, or
    5 % above it), "router quiet" (it is measured and none of its entropies alarmed) and
    "over: QUANTITY" (its alarm has ended).

    Attributes:
        fault: What it is a sign of.
        needs: Groups of signs; at least one of each group must be there.
        base: Confidence with these alone, in [0, 1].
        supports: {sign: confidence that it adds}.
        against: {sign: confidence that it takes away}.
        leads: Of the two groups of signs the first must not begin later than the second, but for
            the caller's slack; None: no order.
        decides: Parts of metric keys, one of which must be measured: without it the fault is a
            candidate and no more.
    """

    fault: Fault
    needs: tuple[tuple[str, ...], ...]
    base: float
    supports: dict[str, float] = field(default_factory=dict)
    against: dict[str, float] = field(default_factory=dict)
    leads: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    decides: tuple[str, ...] = ()


SIGNATURES = (
    Signature(Fault.NONFINITE, (("non-finite",),), 0.95),
    Signature(Fault.IMPOSSIBLE, (("impossible",),), 0.95),
    Signature(Fault.STILL, (("update size down",),), 0.9),
    Signature(
        # What is learned from is other than it was: the loss stands above its best at once.
        Fault.DATA,
        (("loss level up", "held-out loss up"), ("loss up", "loss level up", "loss risen")),
        0.55,
        {"loss level up": 0.1, "held-out loss up": 0.1},
        {"update size": 0.5, "gradient level up": 0.1, "expert load": 0.2}
        | {"loss down": 0.3, "loss falling": 0.3},
        leads=(("loss up", "loss level up", "held-out loss up"), ("rank", *SPECTRA)),
    ),
    Signature(
        # Whatever the rate and the data do, they do to v and o too.
        Fault.ATTENTION,
        ((CONTRAST,),),
        0.5,
        {"Δ2": 0.1, "ΔW": 0.1, "router quiet": 0.1, "attention logit": 0.1},
        {"update size down": 0.5, "router entropy down": 0.2},
        leads=((CONTRAST,), ("loss up", "loss level up", "loss down", "held-out loss up", "rank")),
    ),
    Signature(
        Fault.ATTENTION,
        (SPECTRA,),
        0.25,
        {
            "Δ2": 0.2,
            "ΔW": 0.2,
            "radial alignment": 0.2,
            "router quiet": 0.1,
            "attention logit": 0.1,
        },
        leads=(SPECTRA, _BEFORE_SPECTRA),
        decides=_SIZES,
    ),
    Signature(
        # Beside a learning rate that is too high, which moves Δ2 but not the alignment.
        Fault.ATTENTION,
        (("radial alignment up",), ("Δ2 down", "ΔW down")),
        0.5,
        {"attention logit": 0.1},
    ),
    Signature(
        Fault.LEARNING_RATE,
        (("update size up",),),
        0.6,
        {"Δ2": 0.1, "gradient norm up": 0.05, "loss up": 0.15, "router entropy down": 0.15},
        leads=(("update size up",), SPECTRA),
    ),
    Signature(
        Fault.LEARNING_RATE,
        (("router entropy down",), ("Δ2 down",)),
        0.65,
        {"loss up": 0.1, "gradient norm up": 0.1, "update size up": 0.15},
        leads=(("router entropy down",), ("Δ2 down",)),
    ),
    Signature(
        Fault.BALANCE,
        (("expert load", "router margin"),),
        0.5,
        {
            "expert load": 0.1,
            "router margin": 0.1,
            "gradient norm up": 0.05,
            "router entropy up": 0.1,
        },
        {"rank": 0.1},
        # Where the spectra went first, the load follows from what damaged the attention.
        leads=(("expert load", "router margin"), SPECTRA),
    ),
    Signature(
        # Without its balance loss a router sharpens faster, and nothing else moves.
        Fault.BALANCE,
        (("router entropy down",),),
        0.55,
        {"expert load": 0.1, "router margin": 0.1},
        dict.fromkeys((*SPECTRA, "update size up"), 0.3) | {"rank": 0.1, "gradient norm up": 0.1},
    ),
    Signature(
        # A smaller batch: the noise of the gradient is there at once, and stays.
        Fault.BALANCE,
        (("gradient level up",),),
        0.55,
        {"router entropy up": 0.1},
        {"router entropy down": 0.2, "rank": 0.2, "all heads": 0.2, "update size up": 0.2},
        leads=(("gradient level up",), SPECTRA),
    ),
    Signature(
        Fault.DIRTY_BATCH,
        (("gradient norm up",),),
        0.35,
        {"over: gradient norm": 0.25, "loss up": 0.1},
        {"router entropy": 0.3, "rank": 0.3, "all heads": 0.3, "update size up": 0.1}
        | {"gradient level up": 0.3}
        | dict.fromkeys(SPECTRA, 0.3),
    ),
    Signature(
        Fault.NO_QK_NORM,
        (("all heads",),),
        0.6,
        {"attention logit": 0.2, "gradient norm up": 0.05},
        dict.fromkeys(SPECTRA, 0.25),
        decides=_SIZES,
    ),
    Signature(
        Fault.LOW_RANK,
        (("rank",), ("gradient norm up",)),
        0.75,
        {"loss up": 0.1},
        dict.fromkeys(SPECTRA, 0.1),
    ),
    Signature(
        # What was seen before is predicted much better than new text.
        Fault.REPEATED_DATA,
        (("loss down",),),
        0.6,
        {"attention entropy down": 0.1, "held-out loss up": 0.3},
        {"gradient norm up": 0.1},
    ),
    Signature(
        # The loss of other text rises while that of the training data falls.
        Fault.REPEATED_DATA,
        (("held-out loss up",), ("loss falling", "loss down")),
        0.7,
        {"attention entropy down": 0.1, "loss down": 0.1},
        {
            "loss level up": 0.5,
            "update size down": 0.5,
            "gradient level up": 0.3,
            "gradient norm up": 0.2,
            "update size up": 0.3,
            "loss up": 0.3,
        },
    ),
    Signature(
        Fault.REPEATED_DATA,
        (("attention entropy down", "all heads"), ("loss falling", "loss down")),
        0.5,
        {"loss down": 0.3, "held-out loss up": 0.3},
        {"gradient norm up": 0.1, "attention logit": 0.1} | dict.fromkeys(SPECTRA, 0.2),
    ),
)

# What the first fault brings about by itself; the second is then no fault of its own.
EXPLAINS = frozenset(
    {
        (Fault.LEARNING_RATE, Fault.BALANCE),
        (Fault.LEARNING_RATE, Fault.NO_QK_NORM),
        (Fault.LEARNING_RATE, Fault.REPEATED_DATA),
        (Fault.LEARNING_RATE, Fault.DIRTY_BATCH),
        (Fault.LEARNING_RATE, Fault.LOW_RANK),
        (Fault.ATTENTION, Fault.LOW_RANK),
        (Fault.ATTENTION, Fault.NO_QK_NORM),
        (Fault.ATTENTION, Fault.REPEATED_DATA),
        (Fault.ATTENTION, Fault.DIRTY_BATCH),
        (Fault.NO_QK_NORM, Fault.REPEATED_DATA),
        (Fault.REPEATED_DATA, Fault.NO_QK_NORM),
        (Fault.REPEATED_DATA, Fault.BALANCE),
        (Fault.LOW_RANK, Fault.NO_QK_NORM),
        (Fault.LOW_RANK, Fault.DIRTY_BATCH),
        (Fault.BALANCE, Fault.DIRTY_BATCH),
        *((Fault.STILL, other) for other in Fault if other is not Fault.NONFINITE),
        *((Fault.IMPOSSIBLE, other) for other in Fault if other is not Fault.NONFINITE),
        (Fault.LEARNING_RATE, Fault.DATA),
        (Fault.ATTENTION, Fault.DATA),
        (Fault.BALANCE, Fault.DATA),
        (Fault.DATA, Fault.DIRTY_BATCH),
        (Fault.DATA, Fault.LOW_RANK),
        (Fault.DATA, Fault.NO_QK_NORM),
        (Fault.LOW_RANK, Fault.DATA),
        (Fault.NO_QK_NORM, Fault.DATA),
        (Fault.REPEATED_DATA, Fault.DATA),
    }
)


def sign_of(alarm: Alarm) -> str | None:
    """What an alarm is evidence of, None if no signature speaks of it.

    >>> sign_of(Alarm(10, "z", "delta200/global/delta2/modes/p10", 3.0, 8.0, -9.0))
    'Δ2'
    """
    if alarm.rule in _OWN_SIGN:
        return _OWN_SIGN[alarm.rule]
    if alarm.direction == "non-finite":
        return "non-finite"
    quantity = quantity_of(alarm.key)
    if quantity is None:
        return None
    own = (x.evidence for x in quantity.judged if x.rule == alarm.rule and x.evidence)
    return next(own, quantity.evidence) or None
