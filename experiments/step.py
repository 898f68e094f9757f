"""One training step: optimizer, loss, fault and monitor, compiled for a configuration.

The loop around it, with data, logging and checkpoints, is `train.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

import optax_ext
import stabmon
from experiments.checkpoints import TrainState
from experiments.faults import AttentionFault, Scales, scale_by_argument
from experiments.losses import next_token_loss
from experiments.measuring import Due, divided, joined, make_measure, observe
from experiments.placement import ALONE, Placement, make_mesh, state_shardings
from models.config import GPTConfig
from models.gpt import apply, init_params
from models.moe import auxiliary_loss
from stabmon.paths import path_name


@dataclass(frozen=True)
class MsignConfig:
    """Options of `optax_ext.msign`, by the same names."""

    period: int = 100
    select: tuple[str, ...] = ("attention",)
    method: Literal["auto", "svd", "polar", "newton_schulz"] = "auto"
    stagger: bool = False
    trigger: float | None = None
    blend: float = 1.0


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with warm-up, what may follow it, and the snapshot ring behind both.

    Attributes:
        learning_rate: Peak learning rate.
        warmup: Steps of linear warm-up.
        schedule: What follows: "constant", or "linear" or "cosine" down to a tenth.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        weight_decay: On block matrices only.
        clip: Global gradient norm; None: no clipping.
        every: Steps between snapshots of the query and key matrices, and the router.
        keep: Snapshots kept.
        control: Whether the learning rate can be scaled while the run goes on.
        msign: Periodic matrix-sign restoration; None: none.
        rates: Peak learning rates of groups of the layout ("attention", "mlp", "all", a role),
            as pairs (group, rate), the groups disjoint; `learning_rate` is for all other leaves.
        base: "muon" for `optax.contrib.muon` on the block matrices of a "mha" model, its updates
            scaled to AdamW's RMS so that the same rates apply, and AdamW on the rest.
        qk_clip: Largest attention logit that `optax_ext.qk_clip` allows; None: any.
    """

    learning_rate: float = 1e-3
    warmup: int = 100
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    clip: float | None = None
    every: int = 50
    keep: int = 4
    control: bool = False
    msign: MsignConfig | None = None
    rates: tuple[tuple[str, float], ...] = ()
    base: Literal["adamw", "muon"] = "adamw"
    qk_clip: float | None = None


@dataclass(frozen=True)
class MonitorConfig:
    """Cadences of the monitor's tiers, and lags; see `stabmon.Monitor`."""

    lags: tuple[int, ...] | None = None
    router: int = 10
    delta: int = 50
    activations: int = 50
    weights: int = 50
    symptoms: int = 10
    detail: Literal["brief", "full"] = "brief"
    sequences: int = 4


def make_optimizer(config: OptimizerConfig, layout: stabmon.Layout, scaled: bool = False) -> Any:
    """The chain: clip → AdamW or Muon → learning-rate factor → QK-clip → MSign → snapshot ring.

    Where it is `scaled`, the base's updates are multiplied by `tx.update`'s argument `rate_scale`.
    """
    decay_steps = {
        "constant": lambda peak: optax.constant_schedule(peak),
        "linear": lambda peak: optax.linear_schedule(peak, peak / 10, 10 * config.warmup),
        "cosine": lambda peak: optax.cosine_decay_schedule(peak, 10 * config.warmup, 0.1),
    }
    peak = config.learning_rate
    schedule = optax.join_schedules(
        [optax.linear_schedule(0.0, peak, config.warmup), decay_steps[config.schedule](peak)],
        [config.warmup],
    )
    base = _with_rates(_make_base(config, schedule, layout), config, layout)
    return optax.chain(
        optax.identity() if config.clip is None else optax.clip_by_global_norm(config.clip),
        optax.chain(base, scale_by_argument()) if scaled else base,
        optax_ext.scale_by_control() if config.control else optax.identity(),
        *([] if config.qk_clip is None else [optax_ext.qk_clip(config.qk_clip, layout=layout)]),
        make_msign(config.msign, layout),
        optax_ext.track_delta(config.every, config.keep, select=layout.selects("qk", "router")),
    )


def _make_base(config: OptimizerConfig, schedule: optax.Schedule, layout: stabmon.Layout) -> Any:
    """AdamW or Muon, weight decay on block matrices only."""
    matrices = layout.selects("all")
    if config.base == "adamw":
        return optax.adamw(
            schedule,
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=lambda params: stabmon.selection(params, matrices),
        )
    merged, split = layout.selects("q", "k", "v"), layout.selects("o")

    def axes(path: Any, leaf: Any) -> Any:
        name, last = path_name(path), leaf.ndim - 1
        if not matrices(name, leaf):
            return None
        if merged(name, leaf):
            return optax.contrib.MuonDimensionNumbers((last - 2,), (last - 1, last))
        rows = (last - 2, last - 1) if split(name, leaf) else (last - 1,)
        return optax.contrib.MuonDimensionNumbers(rows, (last,))

    return optax.contrib.muon(
        schedule,
        weight_decay=config.weight_decay,
        adam_b1=config.beta1,
        adam_b2=config.beta2,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=lambda tree: jax.tree_util.tree_map_with_path(axes, tree),
    )


def _with_rates(base: Any, config: OptimizerConfig, layout: stabmon.Layout) -> Any:
    """`base` with the updates of each group of `rates` scaled to its rate, if there are any."""
    if not config.rates:
        return base
    scaled = []
    for group, rate in config.rates:
        chosen = layout.selects(group)
        mask = lambda tree, chosen=chosen: stabmon.selection(tree, chosen)
        scaled.append(optax.masked(optax.scale(rate / config.learning_rate), mask))
    return optax.chain(base, *scaled)


def make_msign(config: MsignConfig | None, layout: stabmon.Layout) -> Any:
    """`optax_ext.msign` as configured, or a transform that does nothing."""
    if config is None:
        return optax.identity()
    return optax_ext.msign(
        config.period,
        config.select,
        config.method,
        config.stagger,
        layout=layout,
        trigger=config.trigger,
        blend=config.blend,
    )


@dataclass(frozen=True)
class Step:
    """A training step, and what is measured beside it; see `make_step`.

    Attributes:
        train: The jitted step: (state, tokens, armed, due, scales), `due` static.
        measure: As from `measuring.make_measure`.
    """

    train: Callable
    measure: Callable

    def __call__(
        self,
        state: TrainState,
        tokens: ArrayLike,
        armed: ArrayLike,
        due: Due,
        scales: Scales | None = None,
    ) -> tuple[TrainState, stabmon.Readings | None, jax.Array]:
        """The state after the step, what was measured before and in it, and the loss."""
        inside, beside = divided(due)
        before = self.measure(state, tokens, due=beside) if beside else None
        state, readings, loss = self.train(state, tokens, armed, due=inside, scales=scales)
        return state, joined(before, readings), loss


@lru_cache(maxsize=8)
def make_step(
    model: GPTConfig,
    optimizer: OptimizerConfig,
    monitor: MonitorConfig,
    fault: AttentionFault | None,
    placement: Placement = ALONE,
    scaled: bool = False,
) -> tuple[Callable, Step, stabmon.Monitor]:
    """(init, step, monitor) for one configuration, compiled once for all its seeds.

    On several devices call both with the mesh of `placement` in force (`jax.set_mesh`).

    init(seed) -> TrainState. step(state, tokens, armed, due) -> (state, readings, loss), donating
    the state; `due` is from `monitor.due(step)`. Where it is empty readings are None; None itself
    stands for one program for all steps, its tiers under conditionals. Where it is `scaled`, the
    step takes `scales` besides, the factors of `faults.Scales`.

    What needs gradients and updates is measured in a second program of the step, the rest in a
    program of its own before it (`measuring.py`): the step is compiled twice, whatever is due.
    """
    shapes = jax.eval_shape(lambda: init_params(model, 0))
    layout = stabmon.find_layout(shapes)
    tx = make_optimizer(optimizer, layout, scaled)
    watch = stabmon.Monitor(
        layout,
        router=monitor.router if model.experts else 0,
        delta=monitor.delta,
        activations=monitor.activations,
        weights=monitor.weights,
        symptoms=monitor.symptoms,
        lags=monitor.lags,
        detail=monitor.detail,
        top_k=model.top_k,
        balance_weight=model.auxiliary_weight,
    )

    def init(seed: int) -> TrainState:
        params = init_params(model, seed)
        return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params))

    def train(
        state: TrainState,
        tokens: jax.Array,
        armed: jax.Array,
        due: Due,
        scales: Scales | None = None,
    ):
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        options: dict[str, Any] = {}
        if fault is not None:
            gate = fault.gate(state.step, model.layers) * armed
            options = {"gate_L": gate, "backward": fault}
        clips = optimizer.qk_clip is not None

        def objective(params):
            returned = apply(model, params, inputs, losses=True, capture=clips, **options)
            loss = next_token_loss(returned[0], targets)
            peaks = returned[2]["max_attention_logit"] if clips else None
            if not model.experts:
                return loss, (loss, peaks)
            extra = auxiliary_loss(model, returned[1])
            total = loss + (extra if scales is None else extra * scales.auxiliary)
            return total, (loss, peaks)

        grads, (loss, peaks) = jax.grad(objective, has_aux=True)(state.params)
        extra_args = {"max_attention_logits": peaks} if clips else {}
        if scales is not None:
            grads = jax.tree.map(lambda g: g * scales.gradient, grads)
            extra_args["rate_scale"] = scales.learning_rate
        updates, opt_state = tx.update(grads, state.opt_state, state.params, **extra_args)
        readings = None
        if due != ():
            few = monitor.sequences
            readings = watch(
                state.step,
                state.params,
                state.opt_state,
                lambda: observe(model, state.params, inputs[:few], targets[:few]),
                grads=grads,
                updates=updates,
                loss=loss,
                due=due,
            )
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, opt_state), readings, loss

    options: dict[str, Any] = {"donate_argnums": 0, "static_argnames": "due"}
    mesh = make_mesh(placement)
    if mesh is not None:
        params, opt_state = state_shardings(tx, shapes, placement, mesh)
        whole = jax.sharding.NamedSharding(mesh, jax.P())
        places: Any = TrainState(*[whole, params, opt_state])
        init = jax.jit(init, static_argnums=0, out_shardings=places)
        options["out_shardings"] = (places, None, whole)
    step = Step(jax.jit(train, **options), make_measure(model, watch, monitor.sequences))
    return init, step, watch
