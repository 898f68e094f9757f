"""`targets`: whether the loss asks for the next token, and no other.

Once of the batch, whose targets are compared with its inputs, and once of the loss function, whose
value is compared with the cross-entropy at each shift.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from stabmon.audits.case import Case, Outcome, Verdict, acquitted, tokens_of, undecided, value_of

NAME = "targets"
_SHIFTS = (-2, -1, 0, 1, 2, 3)
_SAME = 0.9


def targets(case: Case) -> Verdict:
    """Whether targets are the inputs one position on, and the loss is the one for them.

    Args:
        case: Its batch; loss, params and logits for the loss function.
    """
    tokens = tokens_of(case.batch)
    if tokens is None or tokens.inputs.shape[1] < 6:
        return undecided(NAME, "needs a batch of token ids")
    inputs, goals = np.asarray(tokens.inputs), np.asarray(tokens.targets)
    counts = (goals >= 0) & (goals != (case.padding if case.padding is not None else -1))
    agreement = {shift: _agreement(inputs, goals, counts, shift) for shift in _SHIFTS}
    numbers = {f"agreement {shift:+d}": x for shift, x in agreement.items()}
    best = max(agreement, key=lambda shift: agreement[shift])
    if best != 1 and agreement[best] > _SAME and agreement[1] < agreement[best] - 0.1:
        return _shifted(best, "the batch's targets are", numbers)
    if case.logits is None:
        if agreement[1] > _SAME:
            return acquitted(NAME, "targets are the inputs one position on", **numbers)
        return undecided(NAME, "targets are no shift of the inputs; needs logits", **numbers)
    loss, entropies = jax.device_get(_losses(case.loss, case.logits, case.params, case.batch))
    by_shift = dict(zip(_SHIFTS, map(float, entropies), strict=True))
    numbers |= {"loss": float(loss)} | {f"loss {s:+d}": x for s, x in by_shift.items()}
    off = {shift: abs(float(loss) - x) for shift, x in by_shift.items()}
    near = min(off, key=lambda shift: off[shift])
    # The loss may hold more than the cross-entropy: it is told apart by equality alone.
    exact = 1e-5 * abs(float(loss))
    if near != 1 and off[near] <= exact < off[1] / 8:
        return _shifted(near, "the loss takes as targets", numbers)
    if off[1] <= exact or agreement[1] > _SAME:
        return acquitted(NAME, "the loss is that of the next token", **numbers)
    return undecided(NAME, "the loss is no cross-entropy of shifted inputs", **numbers)


def _shifted(shift: int, subject: str, numbers: dict[str, float]) -> Verdict:
    what = "the inputs themselves" if shift == 0 else f"the inputs {shift:+d} positions on"
    cause = "leak" if shift <= 0 else "shifted targets"
    return Verdict(NAME, Outcome.CONVICTED, f"{subject} {what}, not +1", cause, numbers)


def _agreement(inputs: np.ndarray, goals: np.ndarray, counts: np.ndarray, shift: int) -> float:
    """Fraction of targets that are the input `shift` positions on."""
    length = inputs.shape[1]
    here = slice(max(0, -shift), length - max(0, shift))
    there = slice(max(0, shift), length - max(0, -shift))
    same, counted = inputs[:, there] == goals[:, here], counts[:, here]
    return float((same & counted).sum() / max(counted.sum(), 1))


@partial(jax.jit, static_argnames=("loss", "logits"))
def _losses(loss: Any, logits: Any, params: Any, batch: Any) -> tuple[Array, Array]:
    """The loss, and the cross-entropy against the sequence at each shift, where it reaches."""
    tokens = tokens_of(batch)
    assert tokens is not None
    scores = logits(params, batch).astype(jnp.float32)
    whole = jnp.concatenate([tokens.inputs, tokens.targets[:, -1:]], axis=1)
    entropies = []
    for shift in _SHIFTS:
        length = tokens.inputs.shape[1]
        first, last = max(0, -shift), min(length, whole.shape[1] - shift)
        goals = whole[:, first + shift : last + shift]
        entropy = optax.softmax_cross_entropy_with_integer_labels
        entropies.append(jnp.mean(entropy(scores[:, first:last], goals)))
    return value_of(loss(params, batch)), jnp.stack(entropies)
