"""`causality`: what a position sees, by changing what it must not see.

Token ids have no derivative, so the test changes tokens and looks at the logits.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from stabmon.audits.case import Case, Outcome, Verdict, acquitted, tokens_of, undecided

NAME = "causality"
# Of the spread of the logits. Another order of summation gives 1e-6; a leak far more.
_BOUND = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2, "float64": 1e-9}


def causality(case: Case) -> Verdict:
    """Whether the logits at t depend on inputs after t, on other sequences or other documents.

    Inputs after three cuts are replaced; then all other sequences; then, where the batch has
    segment ids, all other documents of a sequence. Logits of what was left alone must stay.
    The other way round, a change of an input must reach some later position.

    Args:
        case: Its logits, params and batch.
    """
    tokens = tokens_of(case.batch)
    if case.logits is None or tokens is None or tokens.inputs.shape[1] < 4:
        return undecided(NAME, "needs logits=(params, batch) -> (B, T, V) and a batch of token ids")
    count, length = tokens.inputs.shape
    cuts = sorted({1, length // 2, length - 1})
    row, place = np.arange(count)[:, None], np.arange(length)[None]
    kept = [("later inputs", f"before position {cut}", place < cut) for cut in cuts]
    if count > 1:
        kept.append(("other sequences of the batch", "in sequence 0", row < 1))
    if tokens.segments is not None:
        ids = np.asarray(tokens.segments)
        last = ids == ids.max(axis=1, keepdims=True)
        if not last.all():
            kept.append(("other documents packed with them", "in the last document", last))
            # Only there does the mask of packed documents stop what comes before.
    masks = jnp.asarray(np.stack([np.broadcast_to(mask, (count, length)) for *_, mask in kept]))
    moved, reach, spread = jax.device_get(_changes(case.logits, case.params, case.batch, masks))
    bound = _BOUND.get(case.precision or str(jnp.result_type(*jax.tree.leaves(case.params))), 1e-4)
    share = moved / max(float(spread), 1e-30)
    numbers = {"moved": float(share.max()), "reach": float(reach / max(spread, 1e-30))}
    numbers["bound"] = bound
    if not np.isfinite(share).all():
        return undecided(NAME, "logits are not finite", **numbers)
    if (share > bound).any():
        what, where, _ = kept[int(np.argmax(share > bound))]
        sentence = f"logits {where} change with {what}, by {share.max():.2g} of their spread"
        return Verdict(NAME, Outcome.CONVICTED, sentence, "leak", numbers)
    if numbers["reach"] == 0 and spread > 0:
        sentence = "logits do not depend on any earlier input: each position sees itself alone"
        return Verdict(NAME, Outcome.CONVICTED, sentence, "blind mask", numbers)
    return acquitted(NAME, "no position sees what comes after it", **numbers)


@partial(jax.jit, static_argnames="logits")
def _changes(
    logits: Any, params: Any, batch: Any, masks: Bool[Array, "cuts B T"]
) -> tuple[Float[Array, " cuts"], Array, Array]:
    """Largest change of the logits where the inputs are kept; of the last position; spread."""
    tokens = tokens_of(batch)
    assert tokens is not None
    forward = lambda inputs: logits(params, tokens.replaced(inputs)).astype(jnp.float32)
    base = forward(tokens.inputs)
    # Ids of the batch itself, so that every one is known to the model.
    other = jnp.roll(tokens.inputs[::-1, ::-1], 1, axis=1)
    step = jnp.asarray(1, tokens.inputs.dtype)
    changed = jnp.where(other == tokens.inputs, jnp.maximum(other - step, 0 * other), other)
    changed = jnp.where(changed == tokens.inputs, changed + step, changed)

    def moved(mask):
        now = forward(jnp.where(mask, tokens.inputs, changed))
        difference = jnp.max(jnp.abs(now - base), axis=-1)
        return jnp.max(jnp.where(mask, difference, 0.0))

    first = forward(tokens.inputs.at[:, :-1].set(changed[:, :-1]))
    reach = jnp.max(jnp.abs(first[:, -1] - base[:, -1]))
    return jax.lax.map(moved, masks), reach, jnp.std(base)
