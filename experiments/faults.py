"""Faults that can be injected into a training run, and when they are on.

A fault is data: what is damaged, how much, and between which steps. The attention fault goes in
through the `backward` hook of `models.attention`, in the backward pass only. A `Disturbance` is any
other: of the learning rate, the balance loss or the gradient, as factors that the compiled step
takes as an argument, or of the tokens it is fed. One compiled step serves for all of them.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from grain import MapDataset
from jaxtyping import Array, Float, Int


@dataclass(frozen=True)
class AttentionFault:
    """Low-precision arithmetic in the attention backward, δ = rowsum(dO∘O).

    Copies of O and dO are rounded to bfloat16 and lose their low mantissa bits; the forward pass
    and every other use of O and dO are untouched. Truncation is biased towards zero, so the error
    of δ has one sign, and dW_q and dW_k drift along a common low-rank direction.

    Controls on the same code path: bits 0 (bfloat16 rounding alone) and rounding="nearest".

    Attributes:
        bits_o: Low mantissa bits of O that are cleared; 7 is the whole bfloat16 mantissa, 8 also
            the lowest exponent bit.
        bits_do: Low mantissa bits of dO that are cleared.
        onset: First step with the fault.
        end: First step without it again; None: never.
        rounding: "truncate" clears bits, "nearest" rounds them away without that bias.
        layers: Which layers; None: all.

    Raises:
        ValueError: Bits outside 0…8, or an end before the onset.

    References:
        arXiv 2606.28116 (fault injection), arXiv 2510.04212 (why it happens).
    """

    bits_o: int = 7
    bits_do: int = 0
    onset: int = 300
    end: int | None = None
    rounding: Literal["truncate", "nearest"] = "truncate"
    layers: tuple[int, ...] | None = None

    def __post_init__(self):
        for name in ("bits_o", "bits_do"):
            if not 0 <= getattr(self, name) <= 8:
                raise ValueError(f"{name}: expected 0 … 8 bits, got {getattr(self, name)}")
        if self.end is not None and self.end <= self.onset:
            raise ValueError(f"fault ends at {self.end}, before its onset {self.onset}")

    def gate(self, step: Array, layers: int) -> Float[Array, " L"]:
        """1 for each layer where the fault is on at `step`, else 0; traced, one compiled step."""
        on = step >= self.onset
        if self.end is not None:
            on &= step < self.end
        hit = jnp.asarray([self.layers is None or i in self.layers for i in range(layers)])
        return (on & hit).astype(jnp.float32)

    def __call__(self, o: Array, do: Array, gate: Array) -> tuple[Array, Array]:
        """The `backward` hook: O and dO as δ sees them."""
        damaged = low_precision(o, self.bits_o, self.rounding)
        damaged_do = low_precision(do, self.bits_do, self.rounding)
        return jnp.where(gate > 0, damaged, o), jnp.where(gate > 0, damaged_do, do)

    def journal(self) -> dict[str, Any]:
        """The row of `faults.jsonl`."""
        return {"kind": "attention"} | asdict(self)


Kind = Literal[
    "learning rate",
    "auxiliary",
    "gradient",
    "creeping rate",
    "shifted targets",
    "leak",
    "batch",
    "dirty batch",
    "repeated data",
    "other text",
    "context",
]


class Scales(NamedTuple):
    """Factors of one step, 1 where nothing is disturbed; traced.

    Attributes:
        learning_rate: Of the updates.
        auxiliary: Of the balance loss.
        gradient: Of the gradient.
        targets: How many tokens ahead the targets lie.
        leak: Share of the inputs that are the token to be predicted; less 1.
    """

    learning_rate: Any = 1.0
    auxiliary: Any = 1.0
    gradient: Any = 1.0
    targets: Any = 1.0
    leak: Any = 1.0


@dataclass(frozen=True)
class Disturbance:
    """What else goes wrong between two steps of a run.

    Attributes:
        kind: What, with the meaning of `amount`: the "learning rate", the "auxiliary" loss or the
            "gradient" times `amount`, which may be NaN; a "batch" of 1/`amount` of its sequences,
            each fed `amount` times, so that shapes stay and the gradient is the small batch's; a
            "dirty batch", `amount` of whose tokens are random; "repeated data", the first `amount`
            batches from `onset` on over and over; a "creeping rate", which has grown by `amount`
            after 1,000 steps, evenly in its logarithm; "shifted targets", `amount` tokens further
            on; a "leak", the token to be predicted in `amount` of the inputs; "other text", letters
            of the other case, in `amount` of the sequences; a "context" of 1/`amount`.
        amount: How much.
        onset: First step.
        end: First step without it again; None: never.

    Raises:
        ValueError: An end before the onset, a batch or a repetition below 1, or a share outside
            [0, 1].
    """

    kind: Kind = "learning rate"
    amount: float = 10.0
    onset: int = 500
    end: int | None = None

    def __post_init__(self):
        if self.end is not None and self.end <= self.onset:
            raise ValueError(f"{self.kind}: ends at {self.end}, before its onset {self.onset}")
        if self.kind in ("batch", "repeated data", "context") and self.amount < 1:
            raise ValueError(f"{self.kind}: expected an amount of at least 1, got {self.amount}")
        if self.kind in ("dirty batch", "leak", "other text") and not 0 <= self.amount <= 1:
            raise ValueError(f"{self.kind}: expected a share in [0, 1], got {self.amount}")

    def on(self, step: int) -> bool:
        """Whether it is in force at `step`."""
        return step >= self.onset and (self.end is None or step < self.end)

    def journal(self) -> dict[str, Any]:
        """The row of `faults.jsonl`."""
        return asdict(self)


def scales(disturbances: Sequence[Disturbance] | None, step: int) -> Scales | None:
    """The factors in force at `step`; None for None, the program without them.

    >>> found = scales([Disturbance("learning rate", 10.0, onset=5)], 5)
    >>> float(found.learning_rate), float(found.gradient)
    (10.0, 1.0)
    """
    if disturbances is None:
        return None
    factors = dict.fromkeys(Scales._fields, 1.0)
    for disturbance in disturbances:
        name = disturbance.kind.replace(" ", "_")
        if not disturbance.on(step):
            continue
        if name in factors and disturbance.kind != "leak":
            factors[name] *= disturbance.amount
        elif disturbance.kind == "creeping rate":
            done = min((step - disturbance.onset) / 1000, 1.0)
            factors["learning_rate"] *= disturbance.amount**done
        elif disturbance.kind in ("shifted targets", "leak"):
            factors[disturbance.kind.split()[-1]] += disturbance.amount
    return Scales(**{name: np.float32(factor) for name, factor in factors.items()})


def disturbed(
    disturbances: Sequence[Disturbance] | None,
    data: MapDataset,
    step: int,
    shift: int,
    vocabulary: int,
) -> Int[np.ndarray, "B T"]:
    """The batch that `step` is fed, of `data` that run ahead by `shift`: a function of the step."""
    place = step + shift
    active = [x for x in disturbances or () if x.on(step)]
    for it in active:
        if it.kind == "repeated data":
            place = it.onset + (place - it.onset) % int(it.amount)
    tokens = np.asarray(data[place])
    for it in active:
        if it.kind == "batch":
            few = tokens[: max(len(tokens) // int(it.amount), 1)]
            tokens = np.resize(few, tokens.shape)
        elif it.kind == "dirty batch":
            rng = np.random.default_rng(step)
            noise = rng.integers(0, vocabulary, tokens.shape).astype(tokens.dtype)
            tokens = np.where(rng.random(tokens.shape) < it.amount, noise, tokens)
        elif it.kind == "other text":
            letters = np.arange(256)
            letters[65:91], letters[97:123] = letters[97:123].copy(), letters[65:91].copy()
            other = np.random.default_rng(step).random(len(tokens)) < it.amount
            tokens = np.where(other[:, None], letters[tokens], tokens).astype(tokens.dtype)
        elif it.kind == "context":
            shorter = (np.shape(tokens)[-1] - 1) // int(it.amount)
            tokens = tokens[:, : shorter + 1]
    return tokens


def fed(tokens: Array, factors: Scales | None) -> tuple[Array, Array]:
    """Inputs and targets of a batch (B, T + 1), each (B, T), as the factors of a step have them.

    Shifted targets wrap around at the end of a sequence. Of leaked inputs every n-th is the next
    token.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if factors is None:
        return inputs, targets
    ahead = jnp.round(factors.targets).astype(jnp.int32) - 1
    share = jnp.asarray(factors.leak, jnp.float32) - 1
    place = jnp.arange(inputs.shape[1])
    leaked = jnp.floor((place + 1) * share) > jnp.floor(place * share)
    inputs = jnp.where(leaked[None, :], targets, inputs)
    return inputs, jnp.roll(targets, -ahead, axis=1)


def scale_by_argument() -> optax.GradientTransformationExtraArgs:
    """Multiplies updates by the extra argument `rate_scale` of `tx.update`; keeps no state."""

    def update_fn(updates, state, params=None, **extra_args):
        del params
        return jax.tree.map(lambda u: u * extra_args["rate_scale"], updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update_fn)


def low_precision(
    x: Array, bits: int, rounding: Literal["truncate", "nearest"] = "truncate"
) -> Array:
    """`x` rounded to bfloat16, its `bits` lowest pattern bits cleared, in the dtype of `x`.

    >>> import jax.numpy as jnp
    >>> print(low_precision(jnp.array([1.9, -1.9]), 7))
    [ 1. -1.]
    >>> print(low_precision(jnp.array([1.9, -1.9]), 7, "nearest"))
    [ 2. -2.]
    """
    pattern = jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.int16)
    if rounding == "nearest" and bits:
        pattern = pattern + jnp.int16(1 << (bits - 1))
    pattern = pattern & jnp.int16(-1 << bits)
    return jax.lax.bitcast_convert_type(pattern, jnp.bfloat16).astype(x.dtype)
