"""What a monitored step brings back: one fixed-structure tree of small arrays, and its flat form.

Aggregation over heads and layers happens here, on the device; naming (`delta50/layer_03/…`) happens
in `Readings.flatten`, on the host. What is measured is decided in `tiers.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Readings:
    """Result of one `Monitor` call; the same structure, shapes and dtypes on every step.

    Attributes:
        step: Step that was measured, int32.
        valid: Per monitor (such as "delta50"), whether it was sampled at this step and had all it
            needs. Values of a monitor that is not valid are NaN.
        values: {monitor: {"metric/aggregate": scalar, "metric/aggregate@layer": (L,)}}.
        leaf_names: Paths of the parameters, static.
    """

    step: Int[Array, ""]
    valid: dict[str, Bool[Array, ""]]
    values: dict[str, dict[str, Array]]
    leaf_names: tuple[str, ...] = field(default=(), metadata={"static": True})

    def flatten(self) -> dict[str, float]:
        """Values of the valid monitors by key; blocks until the device has them.

        Keys are `{monitor}/layer_{i}/{metric}/{aggregate}` and
        `{monitor}/global/{metric}/{aggregate}`.
        """
        valid, values = jax.device_get((self.valid, self.values))
        flat = {}
        for monitor, metrics in values.items():
            if not valid[monitor]:
                continue
            for name, value in metrics.items():
                if value.ndim == 0:
                    flat[f"{monitor}/global/{name}"] = float(value)
                for layer, x in enumerate(value if value.ndim else ()):
                    flat[f"{monitor}/layer_{layer:02d}/{name.removesuffix('@layer')}"] = float(x)
        return flat

    def offender(self) -> str | None:
        """Path of the first parameter whose gradient or update is not finite.

        None if all are finite, or the symptoms were not sampled at this step.
        """
        index = self.values.get("symptoms", {}).get("first_nonfinite/value")
        if index is None or not float(index) >= 0:
            return None
        return self.leaf_names[int(index)]


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
            out[f"{name}/value@layer"] = x
        else:
            out[f"{name}/mean@layer"] = jnp.mean(x, axis=1)
            out[f"{name}/p10@layer"] = jnp.percentile(x, 10, axis=1)
            out[f"{name}/p90@layer"] = jnp.percentile(x, 90, axis=1)
            out[f"{name}/{side}@layer"] = extreme(x, axis=1)
            out[f"{name}/worst_head@layer"] = pick(x, axis=1).astype(jnp.float32)
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


def empty_like(shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Array]:
    """NaN arrays of the given shapes."""
    return {name: jnp.full(s.shape, np.nan, s.dtype) for name, s in shapes.items()}
