"""What a monitored step brings back: one short vector a monitor, and its flat, named form.

Aggregation over heads and layers happens here, on the device; keys are static, so that a step has
a handful of outputs however many values it measures. What is measured is decided in
`tiers.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from stabmon.contracts import Form
from stabmon.linalg.mesh import replicated
from stabmon.quantities import FIRST_NONFINITE, Quantity, find, unmeasured

_PADDED, _HALF = ("activations", "router"), 0.5


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Readings:
    """Result of one `Monitor` call; the same structure, shapes and dtypes on every step.

    Attributes:
        step: Step that was measured, int32.
        valid: Per monitor (such as "delta50"), whether it was sampled at this step and had all it
            needs.
        values: Per monitor, a float32 vector of its values; zeros where it is not valid.
        ring_step: Updates that the snapshot ring has counted, int32, where the delta tier was named
            by `due`; −1 elsewhere.
        keys: Per monitor, the keys of that vector; static.
        leaf_names: Paths of the parameters; static.
        form: What the numbers of the monitor "contracts" are, which has no keys; static.

    The fields are annotated loosely: JAX rebuilds the tree around shapes and placeholders too.
    """

    step: Any
    valid: dict[str, Any]
    values: dict[str, Any]
    ring_step: Any = -1
    keys: tuple[tuple[str, tuple[str, ...]], ...] = field(default=(), metadata={"static": True})
    leaf_names: tuple[str, ...] = field(default=(), metadata={"static": True})
    form: Form = field(default=Form(), metadata={"static": True})

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
            ring_step=jnp.maximum(self.ring_step, other.ring_step),
            keys=tuple((dict(self.keys) | dict(other.keys)).items()),
            leaf_names=other.leaf_names or self.leaf_names,
            form=other.form if other.form.blocks else self.form,
        )

    @property
    def unmeasured(self) -> dict[str, str]:
        """What the diagnosis would ask for and no monitor measures: {quantity: what it takes}.

        Of a call with `due=` only what is due there is measured.
        """
        return unmeasured(key for _, keys in self.keys for key in keys)

    def notes(self, values: Mapping[str, float]) -> dict[str, str]:
        """What is wrong with how the monitors are called: {kind: sentence}.

        Args:
            values: What `flatten` returned.
        """
        said, step, ring = {}, int(self.step), int(self.ring_step)
        shares = [values.get(f"{tier}/global/repeated_tokens/value", 0.0) for tier in _PADDED]
        if (share := max(shares)) >= _HALF:
            said["padding"] = (
                f"{share:.0%} of the tokens are alike and no mask was given: if they are padding, "
                "pass intermediates['mask'] (B, T), True where a token counts; until then ranks, "
                "entropies and expert load are those of the padding"
            )
        spectra = [flag for name, flag in self.valid.items() if name.startswith("delta")]
        if ring not in (-1, step) and not any(map(bool, spectra)):
            said["ring"] = (
                f"the snapshot ring counts {ring} updates at step {step}, so no lag was exact "
                "where the delta tier was due: steps were skipped, or the counts began apart; "
                "leave due=None to the delta tier, or ask monitor.due with the ring's count"
            )
        return said

    def offender(self) -> str | None:
        """Path of the first parameter whose gradient or update is not finite.

        None if all are finite, or the symptoms were not sampled at this step.
        """
        keys = dict(self.keys).get("symptoms", ())
        if FIRST_NONFINITE not in keys or not self.valid["symptoms"]:
            return None
        index = float(self.values["symptoms"][keys.index(FIRST_NONFINITE)])
        return self.leaf_names[int(index)] if index >= 0 else None


def aggregate(
    monitor: str,
    metrics: Mapping[str, Float[Array, "..."]],
    keep: Callable[[Quantity, str, bool], bool],
) -> tuple[tuple[str, ...], Float[Array, " values"]]:
    """Aggregates of one monitor's metrics, by layer and over everything, packed in a row.

    A scalar gives `metric/value`. An array (L,) gives by layer `metric/value`; an array (L, N)
    gives by layer mean, p10, p90, the extreme on the quantity's bad side (min or max) and the head
    that has it. Both give the same over all entries, with the layer
    and head of the worst. Never only a maximum or a mean: either hides a single collapsing head.

    Metrics of one shape are aggregated together: the size of the compiled program depends neither
    on their number nor on the depth.

    Args:
        monitor: First part of the keys.
        metrics: {metric: scalar, (L,) or (L, N)}.
        keep: Of (quantity, aggregate, whether it is by layer), which to keep; a metric of which
            nothing is kept is not computed.

    Returns:
        The keys, and the float32 values in their order.

    Raises:
        ValueError: A metric is not registered in `stabmon.quantities`.
    """
    known = {name: _registered(monitor, name) for name in metrics}
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, x in metrics.items():
        signs = _signs(x.ndim, known[name].extreme)
        if any(keep(known[name], tail, by_layer) for tail, by_layer in signs):
            by_shape.setdefault(x.shape, []).append(name)
    keys: list[str] = []
    rows: list[Array] = [jnp.zeros(0, jnp.float32)]
    for shape, names in by_shape.items():
        stack = replicated(jnp.stack([metrics[name].astype(jnp.float32) for name in names]))
        # The bad side is turned downwards, so that one minimum serves all.
        high = [known[name].bad == "up" for name in names]
        flip = jnp.where(jnp.asarray(high), jnp.float32(-1.0), jnp.float32(1.0))
        tables = _aggregates(stack, flip.reshape((-1,) + (1,) * len(shape)))
        for column, table in enumerate(tables):
            chosen = []
            for i, name in enumerate(names):
                tail, by_layer = _signs(len(shape), known[name].extreme)[column]
                layers = [f"layer_{l:02d}" for l in range(shape[0])] if by_layer else ["global"]
                if keep(known[name], tail, by_layer):
                    keys += [f"{monitor}/{layer}/{name}/{tail}" for layer in layers]
                    chosen.append(i)
            whole = len(chosen) == len(names)
            rows.append((table if whole else table[np.asarray(chosen, int)]).ravel())
    return tuple(keys), jnp.concatenate(rows)


def _registered(monitor: str, metric: str) -> Quantity:
    """The quantity of a metric that a tier emits."""
    quantity = find(monitor, metric)
    if quantity is None:
        raise ValueError(f"{monitor}/{metric} is not registered: add it to stabmon.quantities")
    return quantity


def _signs(ndim: int, side: str) -> list[tuple[str, bool]]:
    """Names of the aggregates of an array of `ndim` axes, and whether each is by layer."""
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
