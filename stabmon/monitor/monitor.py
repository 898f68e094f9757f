"""`Monitor`: measures a whole parameter tree at chosen cadences inside a jitted step.

Here are its settings and its arguments. How tiers are gated and packed is in `sampling.py`, what is
measured in `tiers.py` and `forward.py`, the form of the result in `readings.py`.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, PyTree

from stabmon.layout import Layout
from stabmon.metrics.jacobian import JacobianStats
from stabmon.monitor.intermediates import Intermediates, check_like_params
from stabmon.monitor.readings import Readings
from stabmon.monitor.sampling import Inputs, sample
from stabmon.quantities import Quantity

TIERS = ("router", "delta", "activations", "weights", "jacobian", "symptoms", "contracts")


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
        contracts: Of what must hold exactly: a few numbers a leaf, for `stabmon.contracts`.
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
    ['contracts', 'delta10', 'symptoms', 'weights']
    """

    layout: Layout
    router: int = 10
    delta: int = 50
    activations: int = 100
    weights: int = 500
    jacobian: int = 0
    symptoms: int = 10
    contracts: int = 100
    lags: tuple[int, ...] | None = None
    detail: str = "brief"
    include: str | None = None
    exclude: str | None = None
    top_k: int = 2
    balance_weight: float | int = 1e-2
    sharp: float | int = 0.5
    tokens: int = 512

    def __post_init__(self):
        for name, cadence in self.cadences.items():
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
        every = self.cadences.items()
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
        batch: PyTree | None = None,
        jacobian: Callable[[], JacobianStats] | None = None,
        due: Collection[str] | None = None,
    ) -> Readings:
        """Measure what is due at `step`.

        With `due=monitor.due(step)`, a static argument of the jitted step, a program is compiled
        for each combination of tiers that occurs, in which these are measured outright and nothing
        else is. That is the cheapest: a conditional makes XLA keep, and often copy, what it reads.

        Args:
            step: Updates applied so far, an integer scalar. The delta tier goes by the count of
                the snapshot ring instead, which an optimizer that skips steps holds back.
            params: Parameters before this step's update.
            opt_state: Optimizer state before this step's update, with a `track_delta` in it (not
                needed with delta=0).
            intermediates: What left the forward pass, as far as there is: "attention_entropy",
                "max_attention_logit", "sink_mass", "repeated_maximum" (L, N), "residual"
                (L, …, D), "router_logits" or, where there are none, "router_probabilities"
                (L, …, E), "dropped" (L,) choices beyond capacity, "router_lm_gradient" (L, E) of
                the mean expert probabilities; "mask" (B, T), True where a token counts, or the
                "tokens" (B, T), by which padding without a mask is noticed. Or a list of such
                dicts, one a layer; or what a module captured, as `collect_intermediates` takes it;
                or a function without arguments that computes it, called only where it is due.
            grads: Gradients of the parameters or of some of them, for symptoms and contracts.
            updates: The optimizer's updates, for symptoms and contracts.
            loss: Scalar loss, for symptoms and contracts.
            batch: What the step trains on, sequences on the first axis; for contracts.
            jacobian: Function without arguments for the Jacobian tier, such as
                `lambda: jacobian_alignment(layers, h)`; called only where it is due.
            due: Names of the tiers to measure, known outside of jit. None: all, each under a
                `lax.cond` on `step`.

        Raises:
            ValueError: Intermediates have an unknown name or other axes than documented, gradients
                or updates are of other parameters, a tier is unknown; or the delta tier is named
                at a count of the ring, known outside of jit, at which no lag is exact.
        """
        if unknown := set(due or ()) - set(self.cadences):
            raise ValueError(f"due: no tiers {sorted(unknown)}; some of {[*self.cadences]}")
        for name, tree in (("grads", grads), ("updates", updates)):
            check_like_params(name, tree, params)
        trees = (params, opt_state, intermediates, jacobian, grads, updates, loss, batch)
        inputs = Inputs(jnp.asarray(step), *trees)
        if jax.sharding.AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
            return sample(self, inputs, due)
        # On a mesh with explicit axes decompositions of sharded matrices are refused, so the
        # measuring is left to the compiler's choice of shardings. It then may not close over
        # arrays: what functions compute is computed before.
        seen = self._before(inputs.step, intermediates, ("activations", "router"), due)
        stats = self._before(inputs.step, jacobian, ("jacobian",), due)

        def measure(inputs: Inputs) -> Readings:
            stats = inputs.jacobian
            known: Any = None if stats is None else lambda: stats
            return sample(self, inputs._replace(jacobian=known), due)

        compiled: Any = jax.sharding.auto_axes(measure, out_sharding=jax.P())
        return compiled(inputs._replace(intermediates=seen, jacobian=stats))

    def _before(
        self, step: Array, compute: Any, tiers: tuple[str, ...], due: Collection[str] | None
    ) -> Any:
        """What `compute` returns if a tier that reads it is due, else zeros of the same form."""
        cadences = [cadence for tier, cadence in self.cadences.items() if tier in tiers]
        if not callable(compute) or not any(cadences):
            return None if callable(compute) else compute
        if due is not None:
            return compute() if set(due) & set(tiers) else None
        hits = jnp.any(jnp.stack([step % cadence == 0 for cadence in cadences if cadence]))
        zeros = lambda: jax.tree.map(jnp.zeros_like, jax.eval_shape(compute))
        return jax.lax.cond(hits, compute, zeros)

    @property
    def cadences(self) -> dict[str, int]:
        """Steps between samples of each tier, 0 for one that is off."""
        return {name: getattr(self, name) for name in TIERS}

    def keeps(self, monitor: str, quantity: Quantity, aggregate: str, by_layer: bool) -> bool:
        """Whether an aggregate is kept."""
        key = f"{monitor}/{quantity.metric}/{aggregate}"
        if self.exclude and re.search(self.exclude, key):
            return False
        if self.include:
            return bool(re.search(self.include, key))
        return self.detail == "full" or (not by_layer and aggregate in quantity.brief)
