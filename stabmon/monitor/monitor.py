"""`Monitor`: measures a whole parameter tree at chosen cadences inside a jitted step.

It decides when to measure, filters and aggregates. What is measured lives in `tiers.py`, the form
of the result in `readings.py`, where matrices lie in `layout.py`.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, PyTree

from stabmon.layout import Layout, leaves_with_paths
from stabmon.metrics.jacobian import JacobianStats
from stabmon.monitor import tiers
from stabmon.monitor.readings import Readings, aggregate
from stabmon.monitor.snapshots import find_state, read_delta
from stabmon.quantities import Quantity

TIERS = ("router", "delta", "activations", "weights", "jacobian", "symptoms")
Intermediates = Mapping[str, Array] | Callable[[], Mapping[str, Array]] | None


@dataclass(frozen=True)
class Monitor:
    """Measures parameters, their changes and activations, each tier at its own cadence.

    Call it inside the jitted train step, before `tx.update`. Each tier stands under one scalar
    `lax.cond` on the step counter, so an unsampled step computes nothing. The counter comes from
    the training state, hence is the same on every host and after a restart.

    Attributes:
        layout: Where the matrices lie; `stabmon.find_layout(params)`.
        router: Steps between samples of the router tier; 0 is off, as for all tiers.
        delta: Of spectra of ΔW and of the QK increments, one monitor "delta{lag}" for each lag;
            a multiple of `track_delta`'s `every`, so that each lag is exact.
        activations: Of the attention and activation monitors (from `intermediates`).
        weights: Of norms and stable ranks of the weights themselves.
        jacobian: Of the layers' Jacobians; off by default, since it takes many products.
        symptoms: Of norms of gradients, updates, parameters and the loss.
        lags: Which lags of the ring to measure; None: the longest, which sees most, and with
            detail="full" the shortest too, which gives the lag exponent.
        detail: "brief" (at most 80 keys, whatever the depth) or "full" (all, by layer).
        include: Regular expression on `monitor/metric/aggregate`; only these are kept.
        exclude: Regular expression; these are dropped.
        top_k: Experts a token visits, for the router tier.
        balance_weight: Weight of the load-balance loss in the loss, for `balance_ratio`.
        sharp: Attention entropy in nats below which a head counts as sharp.
        tokens: Bound on the tokens whose activations are decomposed.

    Raises:
        ValueError: A cadence is negative, `detail` is unknown, a pattern is no regular expression;
            when called: a cadence that is no multiple of the ring's `every`, an unknown lag, or
            patterns that leave nothing.

    >>> import jax.numpy as jnp, optax, optax_ext, stabmon
    >>> attn = {name: {"kernel": jnp.ones((2, 8, 4, 2))} for name in "qkv"}
    >>> params = {"layers": {"attn": attn}}
    >>> tx = optax.chain(optax.sgd(0.1), optax_ext.track_delta(every=5, keep=2))
    >>> monitor = stabmon.Monitor(stabmon.find_layout(params), delta=5)
    >>> readings = monitor(jnp.int32(5), params, tx.init(params))
    >>> sorted(readings.valid)
    ['delta10', 'symptoms', 'weights']
    """

    layout: Layout
    router: int = 10
    delta: int = 50
    activations: int = 100
    weights: int = 500
    jacobian: int = 0
    symptoms: int = 10
    lags: tuple[int, ...] | None = None
    detail: str = "brief"
    include: str | None = None
    exclude: str | None = None
    top_k: int = 2
    balance_weight: float | int = 1e-2
    sharp: float | int = 0.5
    tokens: int = 512

    def __post_init__(self):
        for name, cadence in self._cadences().items():
            if cadence < 0:
                raise ValueError(f"{name}: expected a cadence >= 0 (0 is off), got {cadence}")
        if self.detail not in ("brief", "full"):
            raise ValueError(f"detail is 'brief' or 'full', got {self.detail!r}")
        for name in ("include", "exclude"):
            try:
                re.compile(getattr(self, name) or "")
            except re.error as error:
                raise ValueError(f"{name}: no regular expression: {error}") from error

    def due(self, step: int) -> tuple[str, ...]:
        """Names of the tiers that are sampled at `step`; empty if none is. For the host."""
        every = self._cadences().items()
        return tuple(name for name, cadence in every if cadence and step % cadence == 0)

    def __call__(
        self,
        step: ArrayLike,
        params: PyTree,
        opt_state: PyTree,
        intermediates: Intermediates = None,
        *,
        grads: PyTree | None = None,
        updates: PyTree | None = None,
        loss: ArrayLike | None = None,
        jacobian: Callable[[], JacobianStats] | None = None,
        due: Collection[str] | None = None,
    ) -> Readings:
        """Measure what is due at `step`.

        With `due=monitor.due(step)`, a static argument of the jitted step, a program is compiled
        for each combination of tiers that occurs, in which these are measured outright and nothing
        else is. That is the cheapest: a conditional makes XLA keep, and often copy, what it reads.

        Args:
            step: Updates applied so far, an integer scalar.
            params: Parameters before this step's update.
            opt_state: Optimizer state before this step's update, with a `track_delta` in it (not
                needed with delta=0).
            intermediates: What left the forward pass, as far as there is: "attention_entropy",
                "max_attention_logit", "sink_mass", "repeated_maximum" (L, N), "residual"
                (L, …, D), "router_logits" (L, …, E), "dropped" (L,) choices beyond capacity,
                "router_lm_gradient" (L, E) of the mean expert probabilities; or a function without
                arguments that computes it, called only where it is due.
            grads: Gradients, for the symptoms.
            updates: The optimizer's updates, for the symptoms.
            loss: Scalar loss, for the symptoms.
            jacobian: Function without arguments for the Jacobian tier, such as
                `lambda: jacobian_alignment(layers, h)`; called only where it is due.
            due: Names of the tiers to measure, known outside of jit. None: all, each under a
                `lax.cond` on `step`.
        """
        if unknown := set(due or ()) - set(self._cadences()):
            raise ValueError(f"due: no tiers {sorted(unknown)}; some of {[*self._cadences()]}")
        step = jnp.asarray(step)
        if jax.sharding.AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
            return self._measure(
                step, params, opt_state, intermediates, jacobian, grads, updates, loss, due
            )
        # On a mesh with explicit axes decompositions of sharded matrices are refused, so the
        # measuring is left to the compiler's choice of shardings. It then may not close over
        # arrays: what functions compute is computed before.
        seen = self._before(step, intermediates, ("activations", "router"), due)
        stats = self._before(step, jacobian, ("jacobian",), due)

        def measure(step, params, opt_state, seen, stats, grads, updates, loss):
            known: Any = None if stats is None else lambda: stats
            return self._measure(step, params, opt_state, seen, known, grads, updates, loss, due)

        compiled: Any = jax.sharding.auto_axes(measure, out_sharding=jax.P())
        return compiled(step, params, opt_state, seen, stats, grads, updates, loss)

    def _before(
        self, step: Array, compute: Any, tiers: tuple[str, ...], due: Collection[str] | None
    ) -> Any:
        """What `compute` returns if a tier that reads it is due, else zeros of the same form."""
        cadences = [cadence for tier, cadence in self._cadences().items() if tier in tiers]
        if not callable(compute) or not any(cadences):
            return None if callable(compute) else compute
        if due is not None:
            return compute() if set(due) & set(tiers) else None
        hits = jnp.any(jnp.stack([step % cadence == 0 for cadence in cadences if cadence]))
        zeros = lambda: jax.tree.map(jnp.zeros_like, jax.eval_shape(compute))
        return jax.lax.cond(hits, compute, zeros)

    def _measure(
        self,
        step: Array,
        params: PyTree,
        opt_state: PyTree,
        intermediates: Intermediates,
        jacobian: Callable[[], JacobianStats] | None,
        grads: PyTree | None,
        updates: PyTree | None,
        loss: ArrayLike | None,
        due: Collection[str] | None,
    ) -> Readings:
        """`__call__`, with arguments checked."""
        self.layout.check(params)
        nothing: dict[str, Array] = {}
        get = intermediates if callable(intermediates) else lambda: intermediates or nothing
        valid, values, keys = {}, {}, {}

        def sample(
            tier: str,
            measure: Callable[[], dict[str, tiers.Metrics]],
            ready: Callable[[], dict[str, Bool[Array, ""]]] | None = None,
        ) -> None:
            """Measure the monitors of one tier, of those the `ready` ones, if it is due."""
            cadence = self._cadences()[tier]
            if not cadence or (due is not None and tier not in due):
                return
            names: dict[str, tuple[str, ...]] = {}

            def kept():
                rows = {}
                for name, metrics in measure().items():
                    keep = partial(self._keeps, name)
                    names[name], rows[name] = aggregate(name, metrics, keep)
                return rows

            rows = jax.eval_shape(kept)
            if not any(row.size for row in rows.values()):
                return
            now = jnp.ones((), bool) if due is not None else step % cadence == 0
            hits = {name: now & flag for name, flag in ready().items()} if ready else {}
            hits = {name: hits.get(name, now) for name in rows}
            if due is not None:
                packed = kept()
            else:
                empty = lambda: jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), rows)
                packed = jax.lax.cond(jnp.any(jnp.stack([*hits.values()])), kept, empty)
            for name in (name for name, row in rows.items() if row.size):
                missing = jnp.full_like(packed[name], jnp.nan)
                keys[name], valid[name] = names[name], hits[name]
                values[name] = jnp.where(hits[name], packed[name], missing)

        def lag_is_exact() -> dict[str, Bool[Array, ""]]:
            state = find_state(opt_state)
            return {f"delta{lag}": state.age(lag) == lag for lag in self._lags(opt_state)}

        def change() -> dict[str, tiers.Metrics]:
            # Differences are taken inside the conditional, where they cost nothing unsampled.
            deltas = read_delta(opt_state, params)
            moved = {lag: deltas[lag].tree for lag in self._lags(opt_state)}
            found = tiers.delta_metrics(self.layout, params, moved)
            return {f"delta{lag}": metrics for lag, metrics in found.items()}

        def geometry() -> dict[str, tiers.Metrics]:
            weight = self.balance_weight
            found = tiers.router_metrics(self.layout, params, get(), self.top_k, weight)
            return {"router": found}

        def products() -> dict[str, tiers.Metrics]:
            if jacobian is None:
                raise ValueError(
                    "the Jacobian tier needs jacobian=lambda: jacobian_alignment(layers, h) in the "
                    "call; or set jacobian=0"
                )
            return {"jacobian": tiers.jacobian_metrics(jacobian())}

        def symptoms() -> dict[str, tiers.Metrics]:
            found = tiers.symptom_metrics(self.layout, params, grads, updates, loss)
            return {"symptoms": found}

        sample("delta", change, lag_is_exact)
        sample("weights", lambda: {"weights": tiers.weight_metrics(self.layout, params)})
        sample("activations", lambda: tiers.activation_tier(get(), self.tokens, self.sharp))
        sample("router", geometry)
        sample("jacobian", products)
        sample("symptoms", symptoms)
        if not values and due is None:
            raise ValueError(
                f"the monitor would measure nothing: cadences {self._cadences()}, "
                f"include={self.include!r}, exclude={self.exclude!r}, detail={self.detail!r}"
            )
        return Readings(
            step=step.astype(jnp.int32),
            valid=valid,
            values=values,
            keys=tuple(keys.items()),
            leaf_names=tuple(path for path, _ in leaves_with_paths(params)),
        )

    def _cadences(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in TIERS}

    def _lags(self, opt_state: PyTree) -> tuple[int, ...]:
        state = find_state(opt_state)
        if self.delta % state.every:
            raise ValueError(
                f"delta={self.delta} is no multiple of track_delta's every={state.every}: "
                f"lags would be inexact; use delta={state.every * -(-self.delta // state.every)} "
                f"or track_delta(every={self.delta})"
            )
        both = tuple(dict.fromkeys((state.lags[0], state.lags[-1])))
        lags = self.lags or (both if self.detail == "full" else both[-1:])
        unknown = set(lags) - set(state.lags)
        if unknown:
            raise ValueError(f"lags {sorted(unknown)} are not tracked; one of {state.lags}")
        return lags

    def _keeps(self, monitor: str, quantity: Quantity, aggregate: str, by_layer: bool) -> bool:
        """Whether an aggregate is kept."""
        key = f"{monitor}/{quantity.metric}/{aggregate}"
        if self.exclude and re.search(self.exclude, key):
            return False
        if self.include:
            return bool(re.search(self.include, key))
        return self.detail == "full" or (not by_layer and aggregate in quantity.brief)
