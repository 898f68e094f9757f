"""What a monitored step brings back: one short vector a monitor, and its flat, named form.

Aggregation over heads and layers happens here, on the device; keys are static, so that a step has
a handful of outputs however many values it measures. What is measured is decided in
`tiers.py`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from stabmon.layout import CANONICAL
from stabmon.linalg.mesh import replicated

FIRST_NONFINITE = "symptoms/global/first_nonfinite/value"
# What detail="brief" keeps: the earliest signal of each kind, with where it is worst.
BRIEF = re.compile(
    r"(delta\d+/(delta2/effective_rank|delta2/entropy|query/entropy)/(mean|p10|min)"
    r"|delta\d+/delta2/effective_rank/worst_(layer|head)"
    r"|delta\d+/q/radial_alignment/(mean|max)"
    r"|weights/(q|k|mlp_up|mlp_down)/(stable_rank|norm)/mean"
    r"|attention/(entropy|max_logit)/(mean|min|max)|attention/entropy/worst_(layer|head)"
    r"|attention/sharp_heads/mean"
    r"|activations/(rank_ratio|grade)/(mean|min)|activations/rank_ratio/worst_layer"
    r"|jacobian/(norm|forward)/(mean|max)|jacobian/(growth|danger|converged)/value"
    r"|router/(entropy|effective_experts|margin)/(mean|min)"
    r"|router/(similarity|max_violation|dead)/(mean|max)|router/entropy/worst_layer"
    r"|symptoms/(loss|grad_norm|update_norm|param_norm|update_ratio|nonfinite|first_nonfinite)/value)"
)
# Metrics whose bad side is above; of all others it is below.
WORST_IS_HIGH = frozenset(
    {
        "similarity",
        "layer_correlation",
        "norm",
        "forward",
        "reversed",
        "query/outliers",
        "query/excess",
        "key/outliers",
        "key/excess",
        "max_violation",
        "dead",
        "z",
        "max_logit",
        *(f"{role}/norm" for role in CANONICAL),
        *(f"{role}/spectral_norm" for role in CANONICAL),
        *(f"{role}/{tree}_norm" for role in CANONICAL for tree in ("grad", "update")),
        *(f"{role}/radial_alignment" for role in "qk"),
        *(f"{name}/lag_exponent" for name in ("query", "key")),
        "sharp_heads",
        "sink_mass",
        "repeated_maximum",
        "dropped",
        "balance_ratio",
        *(f"{name}/norm" for name in ("delta1", "delta2", "delta3", "query", "key")),
        *(f"{name}/spectral_norm" for name in ("delta1", "delta2", "delta3", "query", "key")),
    }
)


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

    def __or__(self, other: "Readings") -> "Readings":
        """Both, measured at one step; of a monitor in both, what `other` has."""
        return Readings(
            step=self.step,
            valid=self.valid | other.valid,
            values=self.values | other.values,
            keys=tuple((dict(self.keys) | dict(other.keys)).items()),
            leaf_names=other.leaf_names or self.leaf_names,
        )

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
    monitor: str,
    metrics: Mapping[str, Float[Array, "..."]],
    worst_is_high: frozenset[str],
    keep: Callable[[str, bool], bool],
) -> tuple[tuple[str, ...], Float[Array, " values"]]:
    """Aggregates of one monitor's metrics, by layer and over everything, packed in a row.

    A scalar gives `metric/value`. An array (L,) gives by layer `metric/value`; an array (L, N)
    gives by layer mean, p10, p90, the extreme on the bad side (min, or max for the names in
    `worst_is_high`) and the head that has it. Both give the same over all entries, with the layer
    and head of the worst. Never only a maximum or a mean: either hides a single collapsing head.

    Metrics of one shape are aggregated together: the size of the compiled program depends neither
    on their number nor on the depth.

    Args:
        monitor: First part of the keys.
        metrics: {metric: scalar, (L,) or (L, N)}.
        worst_is_high: Metrics whose bad side is above.
        keep: Of ("monitor/metric/aggregate", whether it is by layer), which to keep; a metric of
            which nothing is kept is not computed.

    Returns:
        The keys, and the float32 values in their order.
    """
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, x in metrics.items():
        signs = _signs(x.ndim, name in worst_is_high)
        if any(keep(f"{monitor}/{name}/{tail}", by_layer) for tail, by_layer in signs):
            by_shape.setdefault(x.shape, []).append(name)
    keys: list[str] = []
    rows: list[Array] = [jnp.zeros(0, jnp.float32)]
    for shape, names in by_shape.items():
        stack = replicated(jnp.stack([metrics[name].astype(jnp.float32) for name in names]))
        # The bad side is turned downwards, so that one minimum serves all.
        high = [name in worst_is_high for name in names]
        flip = jnp.where(jnp.asarray(high), jnp.float32(-1.0), jnp.float32(1.0))
        tables = _aggregates(stack, flip.reshape((-1,) + (1,) * len(shape)))
        for column, table in enumerate(tables):
            chosen = []
            for i, name in enumerate(names):
                tail, by_layer = _signs(len(shape), high[i])[column]
                layers = [f"layer_{l:02d}" for l in range(shape[0])] if by_layer else ["global"]
                if keep(f"{monitor}/{name}/{tail}", by_layer):
                    keys += [f"{monitor}/{layer}/{name}/{tail}" for layer in layers]
                    chosen.append(i)
            whole = len(chosen) == len(names)
            rows.append((table if whole else table[np.asarray(chosen, int)]).ravel())
    return tuple(keys), jnp.concatenate(rows)


def _signs(ndim: int, high: bool) -> list[tuple[str, bool]]:
    """Names of the aggregates of an array of `ndim` axes, and whether each is by layer."""
    side = "max" if high else "min"
    if ndim == 0:
        return [("value", False)]
    overall = [(tail, False) for tail in ("mean", "p10", "p90", side, "worst_layer")]
    if ndim == 1:
        return [("value", True), *overall]
    by_layer = [(tail, True) for tail in ("mean", "p10", "p90", side, "worst_head")]
    return [*by_layer, *overall, ("worst_head", False)]


def _aggregates(stack: Float[Array, "M ..."], flip: Float[Array, "M ..."]) -> list[Array]:
    """The aggregates that `_signs` names, each (M,) or (M, L)."""
    if stack.ndim == 1:
        return [stack]
    count = stack.shape[0]
    turned = stack * flip
    flat, turned_flat = stack.reshape(count, -1), turned.reshape(count, -1)
    worst = jnp.argmin(turned_flat, axis=1)
    heads = 1 if stack.ndim == 2 else stack.shape[2]
    p10, p90 = jnp.percentile(flat, jnp.asarray([10.0, 90.0]), axis=1)
    overall = [
        jnp.mean(flat, axis=1),
        p10,
        p90,
        jnp.min(turned_flat, axis=1) * flip.reshape(count),
        (worst // heads).astype(jnp.float32),
    ]
    if stack.ndim == 2:
        return [stack, *overall]
    p10, p90 = jnp.percentile(stack, jnp.asarray([10.0, 90.0]), axis=2)
    by_layer = [
        jnp.mean(stack, axis=2),
        p10,
        p90,
        jnp.min(turned, axis=2) * flip[..., 0],
        jnp.argmin(turned, axis=2).astype(jnp.float32),
    ]
    return [*by_layer, *overall, (worst % heads).astype(jnp.float32)]
