"""What is broken, by what the alarms of the last steps say together.

`diagnose` weighs the signatures of `signatures.py` and says "unknown" where the evidence is thin.
What is done about it is `recovery.py`'s.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stabmon.alarms.detectors.base import Alarm
from stabmon.alarms.signatures import EXPLAINS, SIGNATURES, Fault, Signature, sign_of
from stabmon.quantities import unmeasured

THIN = 0.5
SLACK = 50


@dataclass(frozen=True)
class Diagnosis:
    """A fault, how sure, and why.

    Attributes:
        step: Step at which it was made.
        fault: The class; `Fault.UNKNOWN` where the evidence is thin.
        confidence: In [0, 1]: a weight of evidence, no probability.
        evidence: In words, the strongest first.
        layer: Layer that is worst, None where the alarms do not agree on one.
        head: Head that is worst there, likewise.
        parts: For `Fault.SEVERAL`, the faults.
        quantities: How many different quantities have alarmed for it, for several the fewest.
        candidates: The faults that come into question with their weights, the likeliest first;
            where the fault is unknown they are what to look for.
    """

    step: int
    fault: Fault
    confidence: float
    evidence: tuple[str, ...]
    layer: int | None = None
    head: int | None = None
    parts: tuple[Fault, ...] = ()
    quantities: int = 1
    candidates: tuple[tuple[str, float], ...] = ()

    def event(self) -> dict[str, Any]:
        """The row of `events.jsonl`, less kind and step, and less a place that is not known."""
        row = asdict(self) | {"fault": self.fault.value, "evidence": list(self.evidence)}
        row["candidates"] = [list(candidate) for candidate in self.candidates]
        row["parts"] = [part.value for part in self.parts]
        row.pop("step")
        return {
            k: v
            for k, v in row.items()
            if v is not None and (v or k not in ("parts", "candidates"))
        }


def diagnose(
    step: int,
    alarms: Sequence[Alarm],
    measured: Collection[str] = (),
    active: Collection[str] | None = None,
    loss_falling: bool = False,
    loss_risen: bool = False,
) -> Diagnosis:
    """The fault that explains the alarms best.

    Args:
        step: The step it is.
        alarms: Those of the last steps, of all detectors.
        measured: Keys that the run samples at all, to tell a quiet router from none.
        active: Keys whose alarm has not ended; None: all.
        loss_falling: Whether the loss has been falling all the while.
        loss_risen: Whether it stands 5 % above the best it was.

    Returns:
        The diagnosis. Where two faults that do not explain each other are both well supported,
        `Fault.SEVERAL`; where none reaches a confidence of 0.5, `Fault.UNKNOWN`.

    >>> late = Alarm(620, "z", "delta200/global/delta2/modes/p10", 3.0, 8.0, -9.0, layer=3, head=1)
    >>> early = Alarm(600, "z", "delta200/global/q/radial_alignment/mean", 0.05, -0.1, 9.0)
    >>> found = diagnose(620, [early, late])
    >>> found.fault.value, found.layer, found.head
    ('attention numerics', 3, 1)
    """
    # Values that are finite again are no evidence any more: what follows has its own name.
    over = lambda a: active is not None and a.key not in active and step - a.step > SLACK
    alarms = [a for a in alarms if math.isfinite(a.value) or not over(a)]
    first = _first_of_each_sign(alarms)
    signs: dict[str, int] = {sign: alarm.step for sign, alarm in first.items()}
    if loss_falling:
        signs["loss falling"] = step
    if loss_risen:
        signs["loss risen"] = step
    router = any(key.startswith("router/") and "/entropy/" in key for key in measured)
    if router and not _begins(signs, ("router entropy",)):
        signs["router quiet"] = step
    running = {sign_of(a) for a in alarms if active is None or a.key in active}
    for quantity in {sign_of(alarm) for alarm in alarms} - running:
        signs[f"over: {quantity}"] = step
    weighed: dict[Fault, tuple[float, Signature]] = {}
    for signature in SIGNATURES:
        confidence = _confidence(signature, signs)
        decides = signature.decides
        if measured and decides and not any(x in key for x in decides for key in measured):
            confidence = min(confidence, THIN - 0.05)
        if confidence > weighed.get(signature.fault, (0.0, signature))[0]:
            weighed[signature.fault] = (confidence, signature)
    candidates = tuple(
        (signature.fault.value, weight)
        for weight, signature in sorted(weighed.values(), key=lambda pair: -pair[0])[:3]
    )
    ranked = _unexplained(sorted(weighed.values(), key=lambda pair: -pair[0]))
    if not ranked or ranked[0][0] < THIN:
        words = [_words(alarm) for alarm in first.values()]
        best = ranked[0][0] if ranked else 0.0
        if ranked:
            words.append(f"nearest to {ranked[0][1].fault.value}, but the evidence is thin")
        words += _missed(measured)
        place = _place(list(alarms))
        return Diagnosis(step, Fault.UNKNOWN, best, tuple(words), *place, candidates=candidates)
    final = ranked[0][1].fault is Fault.NONFINITE
    chosen = ranked[:1] if final else [pair for pair in ranked if pair[0] >= THIN]
    relevant = [sign for _, signature in chosen for sign in _relevant(signature, signs)]
    own = [alarm for sign, alarm in first.items() if sign in relevant]
    words = [_words(alarm) for alarm in sorted(own, key=lambda alarm: -alarm.strength)]
    words += _context(relevant, router) + _missed(measured)
    places = [a for a in alarms if any(a.key == b.key for b in own)]
    faults = tuple(signature.fault for _, signature in chosen)
    confidence = min(pair[0] for pair in chosen)
    speaks = lambda signature: {
        sign_of(alarm) for sign, alarm in first.items() if sign in _relevant(signature, signs)
    }
    joint = min(len(speaks(signature)) for _, signature in chosen)
    fault, parts = faults[0], ()
    if len(faults) > 1:
        words.insert(0, "together: " + ", ".join(fault.value for fault in faults))
        fault, parts = Fault.SEVERAL, faults
    return Diagnosis(
        step, fault, confidence, tuple(words), *_place(places), parts, joint, candidates
    )


def _first_of_each_sign(alarms: Sequence[Alarm]) -> dict[str, Alarm]:
    """The first alarm of each sign, in order of time."""
    first: dict[str, Alarm] = {}
    for alarm in sorted(alarms, key=lambda alarm: alarm.step):
        if (quantity := sign_of(alarm)) is not None:
            first.setdefault(f"{quantity} {alarm.direction}", alarm)
    return first


def _begins(signs: Mapping[str, int], wanted: Collection[str]) -> int | None:
    """First step of any of the wanted signs; "Δ2" is there if "Δ2 down" or "Δ2 up" is."""
    steps = [at for sign, at in signs.items() if any(_is(sign, name) for name in wanted)]
    return min(steps, default=None)


def _is(sign: str, name: str) -> bool:
    return sign == name or sign.startswith(f"{name} ")


def _confidence(signature: Signature, signs: Mapping[str, int]) -> float:
    """Weight of evidence for one signature, 0 without what it needs."""
    if any(_begins(signs, group) is None for group in signature.needs):
        return 0.0
    if signature.leads is not None:
        first, second = (_begins(signs, group) for group in signature.leads)
        if first is not None and second is not None and first > second + SLACK:
            return 0.0
    there = lambda name: _begins(signs, (name,)) is not None
    weight = signature.base
    weight += sum(w for name, w in signature.supports.items() if there(name))
    weight -= sum(w for name, w in signature.against.items() if there(name))
    return round(min(max(weight, 0.0), 0.95), 6)


def _unexplained(ranked: list[tuple[float, Signature]]) -> list[tuple[float, Signature]]:
    """Less the faults that another well supported one brings about; of two mutual ones the later.

    Unless both are thin: then the strongest is still worth naming as the nearest.
    """
    kept = []
    for i, (weight, signature) in enumerate(ranked):
        supported = [(j, other.fault) for j, (w, other) in enumerate(ranked) if w >= THIN]
        if not any(
            (fault, signature.fault) in EXPLAINS
            and (j < i or (signature.fault, fault) not in EXPLAINS)
            for j, fault in supported
        ):
            kept.append((weight, signature))
    return kept


def _relevant(signature: Signature, signs: Mapping[str, int]) -> list[str]:
    names = [name for group in signature.needs for name in group] + list(signature.supports)
    return [sign for sign in signs if any(_is(sign, name) for name in names)]


def _words(alarm: Alarm) -> str:
    """One alarm as a clause."""
    quantity = sign_of(alarm) or alarm.key
    if alarm.direction == "non-finite":
        return f"{alarm.key} is {alarm.value} at step {alarm.step}"
    text = (
        f"{quantity} went {alarm.direction} at step {alarm.step}: {alarm.key} = {alarm.value:.4g}"
    )
    return f"{text}, expected {alarm.reference:.4g} (rule {alarm.rule})"


def _context(signs: Collection[str], router: bool) -> list[str]:
    """What speaks for the fault without being an alarm."""
    words = []
    if "router quiet" in signs:
        words.append("the router's entropy is quiet")
    elif not router and any(_is(sign, name) for sign in signs for name in ("Δ2", "ΔW")):
        words.append("no router is measured")
    if "loss falling" in signs:
        words.append("the loss is falling all the while")
    over = [sign.removeprefix("over: ") for sign in signs if sign.startswith("over: ")]
    return words + [f"the {quantity} is back already" for quantity in over]


def _missed(measured: Collection[str]) -> list[str]:
    """What could not speak, since it is never measured."""
    missed = [f"{sign} (needs {needs})" for sign, needs in unmeasured(measured).items()]
    return ["never measured, so not ruled out: " + ", ".join(missed)] if measured and missed else []


def _place(alarms: list[Alarm]) -> tuple[int | None, int | None]:
    """Layer and head that most of the alarms with a place agree on; the head only within it."""
    layers = [alarm.layer for alarm in alarms if alarm.layer is not None]
    layer = _majority(layers)
    heads = [alarm.head for alarm in alarms if alarm.layer == layer and alarm.head is not None]
    return layer, _majority(heads) if layer is not None else None


def _majority(votes: list[int]) -> int | None:
    best = max(set(votes), key=votes.count, default=None)
    return best if best is not None and votes.count(best) * 2 > len(votes) else None
