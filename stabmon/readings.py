"""What a monitored step brings back: one short vector a monitor, and its flat, named form.

Aggregation over heads and layers and packing happen here, on the device; keys are static, so that
a step has a handful of outputs however many values it measures. What is measured is decided in
`tiers.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

LAYER = "@layer"
FIRST_NONFINITE = "symptoms/global/first_nonfinite/value"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Readings:
    """Result of one `Monitor` call; the same structure, shapes and dtypes on every step.

    Attributes:
        step: Step that was measured, int32.
        valid: Per monitor (such as "delta50"), whether it was sampled at this step and had all it
            needs.
        values: Per monitor, a float32 vector of its values; NaN where it is not valid.
        keys: Per monitor, the keys of that vector; static.
        leaf_names: Paths of the parameters; static.

    The fields are annotated loosely: JAX rebuilds the tree around shapes and placeholders too.
    """

    step: Any
    valid: dict[str, Any]
    values: dict[str, Any]
    keys: tuple[tuple[str, tuple[str, ...]], ...] = field(default=(), metadata={"static": True})
    leaf_names: tuple[str, ...] = field(default=(), metadata={"static": True})

    def flatten(self) -> dict[str, float]:
        """Values of the valid monitors by key, on the host; blocks until the device has them.

        Keys are `{monitor}/layer_{i}/{metric}/{aggregate}` and
        `{monitor}/global/{metric}/{aggregate}`.
        """
        valid, values = jax.device_get((self.valid, self.values))
        return {
            key: value
            for monitor, keys in self.keys
            if valid[monitor]
            for key, value in zip(keys, values[monitor].tolist(), strict=True)
        }

    def offender(self) -> str | None:
        """Path of the first parameter whose gradient or update is not finite.

        None if all are finite, or the symptoms were not sampled at this step.
        """
        keys = dict(self.keys).get("symptoms", ())
        if FIRST_NONFINITE not in keys:
            return None
        index = float(self.values["symptoms"][keys.index(FIRST_NONFINITE)])
        return self.leaf_names[int(index)] if index >= 0 else None


def aggregate(
    metrics: Mapping[str, Float[Array, "..."]], worst_is_high: frozenset[str]
) -> dict[str, Array]:
    """Aggregates of every metric, by layer and over everything.

    A scalar gives `metric/value`. An array (L,) gives by layer `metric/value`; an array (L, N)
    gives by layer mean, p10, p90, the extreme on the bad side (min, or max for the names in
    `worst_is_high`) and the head that has it. Both give the same over all entries, with the layer
    and head of the worst. Never only a maximum or a mean: either hides a single collapsing head.

    Returns:
        {"metric/aggregate": scalar}, and {"metric/aggregate@layer": (L,)}.
    """
    out: dict[str, Array] = {}
    for name, x in metrics.items():
        x = x.astype(jnp.float32)
        high = name in worst_is_high
        extreme, pick, side = (jnp.max, jnp.argmax, "max") if high else (jnp.min, jnp.argmin, "min")
        if x.ndim == 0:
            out[f"{name}/value"] = x
            continue
        if x.ndim == 1:
            out[f"{name}/value{LAYER}"] = x
        else:
            out[f"{name}/mean{LAYER}"] = jnp.mean(x, axis=1)
            out[f"{name}/p10{LAYER}"] = jnp.percentile(x, 10, axis=1)
            out[f"{name}/p90{LAYER}"] = jnp.percentile(x, 90, axis=1)
            out[f"{name}/{side}{LAYER}"] = extreme(x, axis=1)
            out[f"{name}/worst_head{LAYER}"] = pick(x, axis=1).astype(jnp.float32)
        out[f"{name}/mean"] = jnp.mean(x)
        out[f"{name}/p10"] = jnp.percentile(x, 10)
        out[f"{name}/p90"] = jnp.percentile(x, 90)
        out[f"{name}/{side}"] = extreme(x)
        worst = pick(x.ravel())
        heads = 1 if x.ndim == 1 else x.shape[1]
        out[f"{name}/worst_layer"] = (worst // heads).astype(jnp.float32)
        if x.ndim == 2:
            out[f"{name}/worst_head"] = (worst % heads).astype(jnp.float32)
    return out


def pack(aggregates: Mapping[str, Array]) -> Float[Array, " values"]:
    """All values of one monitor in a row, in the order of `packed_keys`."""
    rows = [jnp.ravel(x).astype(jnp.float32) for _, x in sorted(aggregates.items())]
    return jnp.concatenate(rows)


def packed_keys(monitor: str, aggregates: Mapping[str, jax.ShapeDtypeStruct]) -> tuple[str, ...]:
    """Keys of the values that `pack` puts in a row."""
    keys: list[str] = []
    for name, shape in sorted(aggregates.items()):
        if name.endswith(LAYER):
            tail = name.removesuffix(LAYER)
            keys += [f"{monitor}/layer_{i:02d}/{tail}" for i in range(int(np.prod(shape.shape)))]
        else:
            keys.append(f"{monitor}/global/{name}")
    return tuple(keys)
