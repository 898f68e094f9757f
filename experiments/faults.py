"""Faults that can be injected into a training run, and when they are on.

A `Fault` is data: what is damaged, how much, and between which steps. The attention fault goes in
through the `backward` hook of `models.attention`, in the backward pass only. Learning-rate, batch
and router faults change the run's configuration and live with the experiments that ask for them.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


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
