"""What an audit is given, a `Case`, and what it returns, a `Verdict`.

What lives here: these two, and how tokens are read from a batch. What does not: the audits, each
in a file of its own, and which of them are run (`run.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from stabmon.layout import Layout

Loss = Callable[[PyTree, Any], Any]
Logits = Callable[[PyTree, Any], Any]


class Outcome(StrEnum):
    """What an audit says."""

    CONVICTED = "convicted"
    ACQUITTED = "acquitted"
    UNDECIDED = "can't tell"


@dataclass(frozen=True)
class Verdict:
    """What one audit says of a case.

    Attributes:
        audit: Its name.
        outcome: Convicted, acquitted, or can't tell.
        sentence: For people.
        cause: The fault that is proved, such as "attention numerics"; empty without one.
        numbers: What was measured.
        path: Leaf that is worst, None where there is none.
        layer: Layer that is worst, likewise.
        head: Head or expert that is worst, likewise.
    """

    audit: str
    outcome: Outcome
    sentence: str
    cause: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    path: str | None = None
    layer: int | None = None
    head: int | None = None

    @property
    def convicted(self) -> bool:
        """Whether a fault is proved."""
        return self.outcome is Outcome.CONVICTED

    def event(self) -> dict[str, Any]:
        """The row of `events.jsonl`, less kind and step, and less what is not known."""
        row = asdict(self) | {"outcome": self.outcome.value, "numbers": dict(self.numbers)}
        return {key: value for key, value in row.items() if value not in (None, "", {})}


@dataclass(frozen=True)
class Case:
    """What is audited: a step of a training run. What is not given is not tested.

    Attributes:
        loss: (params, batch) -> scalar loss, as the trainer differentiates it; jit-able. Give the
            same function each time: compiled programs are kept by it.
        params: Parameters.
        batch: What the step trains on: `(inputs, targets)` of token ids (B, T), one array (B, T+1),
            or a mapping with "inputs" and "targets", "tokens", or "input_ids" and "labels".
        logits: (params, batch) -> (B, T, V).
        reference: A second loss function that must agree, such as with plain attention.
        precision: Dtype in which `loss` is meant to compute; None: that of the parameters.
        layout: Where the matrices lie; None: places are leaves only.
        tx: The optimizer.
        opt_state: Its state before the step.
        step: Updates so far.
        schedule: Learning rate, or a function of the step.
        decay: Weight decay, as the optimizer multiplies it with the rate; None: not known.
        decayed: (path, leaf) -> whether it is meant to decay; None: not known.
        frozen: (path, leaf) -> whether it is meant to keep still; None: none is.
        snapshot: Parameters of some steps ago.
        healthy: Batches of the healthy past.
        tied: Pairs of paths of leaves that are one.
        seen: (params, batch) -> intermediates, of which "max_attention_logit" (L, N) is read.
        padding: Token id that pads; None: none does.
    """

    loss: Loss
    params: PyTree
    batch: Any
    logits: Logits | None = None
    reference: Loss | None = None
    precision: str | None = None
    layout: Layout | None = None
    tx: Any = None
    opt_state: PyTree = None
    step: int = 0
    schedule: Any = None
    decay: float | None = None
    decayed: Callable[[str, Any], bool] | None = None
    frozen: Callable[[str, Any], bool] | None = None
    snapshot: PyTree = None
    healthy: Sequence[Any] = ()
    tied: Sequence[tuple[str, str]] = ()
    seen: Callable[[PyTree, Any], Mapping[str, Any]] | None = None
    padding: int | None = None


class Tokens(NamedTuple):
    """Token ids of a batch (B, T), and how to put other inputs in their place."""

    inputs: Array
    targets: Array
    replaced: Callable[[Array], Any]
    segments: Array | None = None


_NAMES = (("inputs", "targets"), ("input_ids", "labels"), ("x", "y"))


def tokens_of(batch: Any) -> Tokens | None:
    """Returns the token ids of a batch; None where its form is not known.

    Args:
        batch: As in `Case`.

    >>> print(tokens_of(jnp.arange(6).reshape(2, 3)).targets)
    [[1 2]
     [4 5]]
    """
    if isinstance(batch, Mapping):
        segments = next(
            (batch[k] for k in ("inputs_segmentation", "segment_ids") if k in batch), None
        )
        for first, second in _NAMES:
            if first in batch and second in batch:
                put = lambda x, first=first: {**batch, first: x}
                return _checked(batch[first], batch[second], put, segments)
        if "tokens" not in batch:
            return None
        inner = tokens_of(batch["tokens"])
        return inner and inner._replace(replaced=lambda x: {**batch, "tokens": inner.replaced(x)})
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        make = getattr(type(batch), "_make", type(batch))
        return _checked(batch[0], batch[1], lambda x: make([x, *batch[1:]]), None)
    return _of_one(batch)


def _of_one(tokens: Any) -> Tokens | None:
    """Of one array (B, T+1): its inputs, and its targets one position on."""
    if not _is_ids(tokens) or tokens.shape[1] < 2:
        return None
    whole = jnp.asarray(tokens)
    put = lambda x: jnp.concatenate([x, whole[:, -1:]], axis=1)
    return Tokens(whole[:, :-1], whole[:, 1:], put)


def _checked(inputs: Any, targets: Any, put: Callable, segments: Any) -> Tokens | None:
    if not (_is_ids(inputs) and _is_ids(targets)) or inputs.shape != targets.shape:
        return None
    return Tokens(jnp.asarray(inputs), jnp.asarray(targets), put, segments)


def _is_ids(x: Any) -> bool:
    """Whether an array is a table of token ids."""
    return getattr(x, "ndim", 0) == 2 and jnp.issubdtype(x.dtype, jnp.integer)


def value_of(loss: Any) -> Array:
    """Returns the scalar of what a loss function returns: a scalar, or (scalar, auxiliary)."""
    return loss[0] if isinstance(loss, tuple) else loss


def undecided(audit: str, why: str, **numbers: float) -> Verdict:
    """Returns the verdict of an audit that can't tell, and why."""
    return Verdict(audit, Outcome.UNDECIDED, why, numbers=numbers)


def acquitted(audit: str, sentence: str, **numbers: float) -> Verdict:
    """Returns the verdict of an audit that has found nothing."""
    return Verdict(audit, Outcome.ACQUITTED, sentence, numbers=numbers)


def vocabulary(logits: Logits, params: PyTree, batch: Any) -> int:
    """Returns V, the width of the logits; nothing is computed."""
    (scores,) = jax.tree.leaves(jax.eval_shape(logits, params, batch))
    return int(np.shape(scores)[-1])
