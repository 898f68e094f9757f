"""One `Monitor` call: which tiers are measured now, and what each brings, packed in `Readings`.

Settings and arguments are `monitor.py`'s; what is measured lives in `tiers.py` and `forward.py`.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, PyTree

from stabmon.contracts import Form
from stabmon.layout import leaves_with_paths
from stabmon.monitor import forward, tiers
from stabmon.monitor.between import between_metrics
from stabmon.monitor.exact import sample_contracts
from stabmon.monitor.intermediates import Intermediates, read_intermediates
from stabmon.monitor.readings import Readings, aggregate
from stabmon.monitor.snapshots import TrackDeltaState, find_state, read_delta

if TYPE_CHECKING:
    from stabmon.monitor.monitor import Monitor

Measure = Callable[[], dict[str, tiers.Metrics]]


class Inputs(NamedTuple):
    """The arguments of a `Monitor` call."""

    step: Array
    params: PyTree
    opt_state: PyTree
    intermediates: Intermediates
    jacobian: Any
    grads: PyTree | None
    updates: PyTree | None
    loss: Any
    batch: PyTree | None = None


def sample(monitor: "Monitor", inputs: Inputs, due: Collection[str] | None) -> Readings:
    """Measure what is due; see `Monitor.__call__`."""
    monitor.layout.check(inputs.params)
    places = _places(monitor, inputs.params)
    given = inputs.intermediates
    known = {} if callable(given) else read_intermediates(given, places)
    get = lambda: read_intermediates(given(), places) if callable(given) else known
    wanted = [name for name in monitor.cadences if due is None or name in due]
    wanted = [name for name in wanted if monitor.cadences[name]]
    exact = sample_contracts(monitor, inputs, get, due)
    wanted = [name for name in wanted if name != "contracts"]
    ring = find_state(inputs.opt_state) if "delta" in wanted else None
    if due is not None and ring is not None:
        _check_count(inputs.step, ring)
    valid, values, keys = {}, {}, {}
    for tier in wanted:
        measure = _measure(monitor, inputs, tier, get)
        names: dict[str, tuple[str, ...]] = {}

        def kept(measure=measure, names=names, reads=tier in ("activations", "router")):
            rows = {}
            for name, metrics in measure().items():
                names[name], rows[name] = aggregate(name, metrics, partial(monitor.keeps, name))
            mask = get().get("mask") if reads else None
            return rows, jnp.ones((), bool) if mask is None else jnp.any(mask)

        rows, _ = jax.eval_shape(kept)
        if not any(row.size for row in rows.values()):
            continue
        hits = _hits(monitor, inputs.step, ring, tier, [*rows], due is not None)
        if due is not None:
            packed, counts = kept()
        else:
            # Zeros, for JAX's search for NaN (`jax_debug_nans`) takes no notice of `valid`.
            empty = lambda rows=rows: (_zeros(rows), jnp.zeros((), bool))
            packed, counts = jax.lax.cond(jnp.any(jnp.stack([*hits.values()])), kept, empty)
        for name in (name for name, row in rows.items() if row.size):
            # A batch of padding alone is no sample.
            keys[name], valid[name] = names[name], hits[name] & counts
            missing = jnp.zeros_like(packed[name])
            values[name] = jnp.where(valid[name], packed[name], missing)
    if not values and wanted and due is None:
        raise ValueError(
            f"the monitor would measure nothing: cadences {monitor.cadences}, "
            f"include={monitor.include!r}, exclude={monitor.exclude!r}, detail={monitor.detail!r}"
        )
    form = Form()
    if exact is not None:
        valid["contracts"], values["contracts"], form = exact
    return Readings(
        step=inputs.step.astype(jnp.int32),
        valid=valid,
        values=values,
        ring_step=jnp.full((), -1, jnp.int32) if ring is None or due is None else ring.delta_step,
        keys=tuple(keys.items()),
        leaf_names=tuple(path for path, _ in leaves_with_paths(inputs.params)),
        form=form,
    )


def _zeros(form: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), form)


def _measure(monitor: "Monitor", inputs: Inputs, tier: str, get: Callable[[], Any]) -> Measure:
    """A function that measures the monitors of one tier: {monitor: {metric: array}}."""
    layout, params, opt_state = monitor.layout, inputs.params, inputs.opt_state

    def delta() -> dict[str, tiers.Metrics]:
        # Differences are taken inside the conditional, where they cost nothing unsampled.
        deltas = read_delta(opt_state, params)
        moved = {lag: deltas[lag].tree for lag in lags(monitor, find_state(opt_state))}
        found = tiers.delta_metrics(layout, params, moved)
        return {f"delta{lag}": metrics for lag, metrics in found.items()}

    def router() -> dict[str, tiers.Metrics]:
        settings = (monitor.top_k, monitor.balance_weight)
        return {"router": forward.router_metrics(layout, params, get(), *settings)}

    def jacobian() -> dict[str, tiers.Metrics]:
        if inputs.jacobian is None:
            raise ValueError(
                "the Jacobian tier needs jacobian=lambda: jacobian_alignment(layers, h) in the "
                "call; or set jacobian=0"
            )
        return {"jacobian": tiers.jacobian_metrics(inputs.jacobian())}

    def symptoms() -> dict[str, tiers.Metrics]:
        trees = (inputs.grads, inputs.updates, inputs.loss)
        found = tiers.symptom_metrics(layout, params, *trees)
        return {"symptoms": found | between_metrics(opt_state, monitor.symptoms)}

    return {
        "delta": delta,
        "weights": lambda: {"weights": tiers.weight_metrics(layout, params)},
        "activations": lambda: forward.activation_tier(get(), monitor.tokens, monitor.sharp),
        "router": router,
        "jacobian": jacobian,
        "symptoms": symptoms,
    }[tier]


def _hits(
    monitor: "Monitor",
    step: Array,
    ring: TrackDeltaState | None,
    tier: str,
    names: list[str],
    outright: bool,
) -> dict[str, Bool[Array, ""]]:
    """Whether each monitor of a tier has a sample now."""
    if tier != "delta" or ring is None:
        now = jnp.ones((), bool) if outright else step % monitor.cadences[tier] == 0
        return dict.fromkeys(names, now)
    # The ring counts the updates that were applied, which a caller's step may differ from.
    now = jnp.ones((), bool) if outright else ring.delta_step % monitor.delta == 0
    exact = {f"delta{lag}": ring.age(lag) == lag for lag in lags(monitor, ring)}
    return {name: now & exact[name] for name in names}


def lags(monitor: "Monitor", ring: TrackDeltaState) -> tuple[int, ...]:
    """The lags that the delta tier measures."""
    if monitor.delta % ring.every:
        raise ValueError(
            f"delta={monitor.delta} is no multiple of track_delta's every={ring.every}: "
            f"lags would be inexact; use delta={ring.every * -(-monitor.delta // ring.every)} "
            f"or track_delta(every={monitor.delta})"
        )
    both = tuple(dict.fromkeys((ring.lags[0], ring.lags[-1])))
    chosen = monitor.lags or (both if monitor.detail == "full" else both[-1:])
    if unknown := set(chosen) - set(ring.lags):
        raise ValueError(f"lags {sorted(unknown)} are not tracked; one of {ring.lags}")
    return chosen


def _check_count(step: Array, ring: TrackDeltaState) -> None:
    """Raises ValueError where no lag is exact at the ring's count, if both are known by now."""
    if any(isinstance(x, Tracer) for x in (step, ring.delta_step)):
        return
    if count := int(ring.delta_step) % ring.every:
        raise ValueError(
            f"due: the delta tier is named at step {int(step)}, but the snapshot ring has counted "
            f"{int(ring.delta_step)} updates, {count} past a multiple of every={ring.every}: no "
            "lag is exact; ask monitor.due(…) with the ring's count, "
            "stabmon.monitor.snapshots.find_state(opt_state).delta_step"
        )


def _places(monitor: "Monitor", params: PyTree) -> dict[str, dict[str, int]]:
    """Sizes of the roles that intermediates are held against, by the names of their axes."""
    shapes = jax.eval_shape(lambda: monitor.layout.collect(params, ("q", "router")))
    axes = {"q": "LNDH", "router": "LED"}
    return {role: dict(zip(axes[role], x.shape, strict=True)) for role, x in shapes.items()}
