"""One training step: loss, fault, optimizer and monitor, compiled for a configuration.

The loop around it, with data, logging and checkpoints, is `train.py`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

import stabmon
from experiments.faults import AttentionFault, Scales, fed
from experiments.loop.checkpoints import TrainState
from experiments.loop.losses import next_token_loss
from experiments.loop.measuring import Due, divided, joined, make_measure, observe
from experiments.loop.optimizer import OptimizerConfig, make_optimizer
from experiments.loop.placement import ALONE, Placement, make_mesh, state_shardings
from models.config import GPTConfig
from models.gpt import apply, init_params
from models.moe import auxiliary_loss
from stabmon.watch.ahead import Ahead


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

    def compile_ahead(self, ahead: Ahead, given: tuple, dues: Iterable[Due]) -> None:
        """Compiles what steps with these `dues` need; `given`: state, tokens, armed and scales."""
        *first, scales = given
        for due in dues:
            inside, beside = divided(due)
            if beside:
                ahead.start(("measure", beside), self.measure, tuple(first[:2]), {"due": beside})
            if inside:
                options = {"due": inside, "scales": scales}
                ahead.start(("train", inside), self.train, tuple(first), options)

    def wait(self, ahead: Ahead, due: Due) -> None:
        """Returns once the programs of a step are compiled, or have failed to."""
        inside, beside = divided(due)
        ahead.wait(("measure", beside))
        ahead.wait(("train", inside))


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
        contracts=monitor.symptoms,  # together, so that the step is compiled twice only
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
        inputs, targets = fed(tokens, scales)
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
                batch=tokens,
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
