"""What is measured beside the training step, in a program of its own.

Spectra, activations and router need parameters, snapshots and a small forward pass, nothing that
only exists within the step. Compiled apart from it they cost a fraction of what a second training
step costs to compile, however they are combined. Gradients and updates exist within the step alone,
so symptoms and contracts are measured there (`step.py`).
"""

from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any

import jax
import jax.numpy as jnp

import stabmon
from experiments.loop.checkpoints import TrainState
from experiments.loop.losses import next_token_loss
from models.config import GPTConfig
from models.gpt import apply

Due = tuple[str, ...] | None
INSIDE = ("symptoms", "contracts")


def divided(due: Due) -> tuple[Due, tuple[str, ...]]:
    """Tiers to measure within the step, and those beside it; None stays within."""
    if due is None:
        return None, ()
    return tuple(x for x in due if x in INSIDE), tuple(x for x in due if x not in INSIDE)


def joined(*readings: stabmon.Readings | None) -> stabmon.Readings | None:
    """What several programs measured at one step, those that did."""
    found = [x for x in readings if x is not None]
    return reduce(or_, found) if found else None


def observe(
    model: GPTConfig, params: Any, inputs: jax.Array, targets: jax.Array
) -> dict[str, jax.Array]:
    """What the monitors read of a forward pass of its own, over a few sequences.

    With experts also the gradient of the loss with respect to their mean probabilities. Under jit
    only what a tier that is due makes use of is computed.
    """
    seen = apply(model, params, inputs, capture=True)[1]
    if model.experts:
        probe = jnp.zeros((model.layers, model.experts))
        loss = lambda probe: next_token_loss(apply(model, params, inputs, probe_LE=probe), targets)
        seen["router_lm_gradient"] = jax.grad(loss)(probe)
    return seen


def make_measure(model: GPTConfig, watch: stabmon.Monitor, sequences: int) -> Callable:
    """Jitted (state, tokens, due) -> readings, of the first `sequences` of `tokens`; `due` static.

    It is to be called before the step, which donates the state.
    """

    def measure(state: TrainState, tokens: jax.Array, due: Due):
        inputs, targets = tokens[:sequences, :-1], tokens[:sequences, 1:]
        seen = lambda: observe(model, state.params, inputs, targets)
        return watch(state.step, state.params, state.opt_state, seen, due=due)

    return jax.jit(measure, static_argnames="due")
