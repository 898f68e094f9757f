"""Contracts of the loss and of types."""

import math

from stabmon.contracts.contract import Finding, Known, Sample, contract
from stabmon.contracts.digest import dtype_name

# How far above ln V the first loss of a model may be: twice, and two nats.
_TIMES, _ABOVE, _BELOW = 2.0, 2.0, 0.8


@contract()
def first_loss(now: Sample, before: Sample | None, known: Known) -> Finding:
    """At step 0 of an untrained model the loss is near ln V in nats per token.

    Between 0.8 ln V and 2 ln V + 2. Outside of it the loss is a sum, has another unit, or counts
    classes twice. A model is untrained where its counters are 0 and each norm scale is constant.

    References:
        Gathered logits that count twice (NVIDIA/Megatron-LM#7452).
    """
    loss, spread = now.get("loss", "loss"), now.all("spread")
    fresh = now.step == 0 and bool(spread) and not any(x.any() for x in spread.values())
    if loss is None or now.form.vocabulary is None or not fresh or now.any("count"):
        return None
    value, known_nothing = float(loss[0]), math.log(now.form.vocabulary)
    if not math.isfinite(value):
        return None
    if _BELOW * known_nothing <= value <= _TIMES * known_nothing + _ABOVE:
        return {}
    sentence = f"it is {value:.3g} at step 0, ln {now.form.vocabulary:,} is {known_nothing:.3g}"
    return {"loss": sentence}


@contract()
def types(now: Sample, before: Sample | None, known: Known) -> Finding:
    """Parameters, gradients, updates and intermediates keep the dtypes of the first sample.

    References:
        Norm gains and positions in low precision
        (github.com/huggingface/transformers/pull/29285).
    """
    if not known.types:
        return None
    new = types_of(now)
    return {
        what: f"it is {dtype_name(new[what])}, at the start it was {dtype_name(code)}"
        for what, code in known.types.items()
        if new.get(what, code) != code
    }


@contract()
def evaluation(now: Sample, before: Sample | None, known: Known) -> Finding:
    """A held-out loss that is given twice for one step is the same: dropout is off.

    References:
        Dropout alive at evaluation (github.com/huggingface/transformers/issues/33844).
    """
    twice = [(step, x) for step, x in known.held_out.items() if len(x) > 1]
    if not twice:
        return None
    step, losses = next(((step, x) for step, x in twice if len(set(x)) > 1), (0, []))
    sentence = f"it is {', '.join(f'{x:.6g}' for x in losses)} at step {step:,}"
    return {"held-out loss": sentence} if losses else {}


def types_of(sample: Sample) -> dict[str, float]:
    """Returns the number of the dtype of everything that a sample saw.

    Args:
        sample: The sample.
    """
    found = {f"intermediate {path}": float(x[0]) for path, x in sample.all("type").items()}
    for what, codes in sample.all("types").items():
        pairs = zip(sample.form.leaves, codes, strict=True)
        found |= {f"{what} {leaf.path}": float(code) for leaf, code in pairs if code}
    return found
