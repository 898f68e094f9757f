"""`monitored`: an optimizer that measures itself, for trainers that hide step and gradients.

What is measured is `stabmon.Monitor`'s business, and the snapshots that it reads are
`track_delta`'s.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from stabmon.monitor.monitor import Monitor
from stabmon.monitor.readings import Readings
from stabmon.monitor.snapshots import find_state


class MonitoredState(NamedTuple):
    """State of `monitored`.

    Attributes:
        monitored_readings: The newest sample: `step` is when it was taken, −1 for never. Where a
            monitor was not due at that step, its values are those of its own newest sample.
        monitored_steps: By monitor, when that was, −1 for never; int32 scalars.
        monitored_inner: State of the optimizer.
    """

    monitored_readings: Any
    monitored_steps: Any
    monitored_inner: PyTree


def monitored(
    optimizer: optax.GradientTransformation, monitor: Monitor
) -> optax.GradientTransformationExtraArgs:
    """Runs `optimizer`, and `monitor` on its gradients, updates, parameters and snapshots.

    For trainers that own the train step and let nobody in but through the optimizer: the newest
    `Readings` are in its state, where `read_monitored` finds them. Updates are `optimizer`'s own.
    The step is the number of updates applied, as the snapshot ring counts them: it
    survives restarts, and `Monitor`'s cadences are multiples of the ring's.

    Place in the chain: around all of it. Inside `optax.MultiSteps` gradients are the accumulated
    ones (a due step is then measured at each of its micro-steps, and one result is used); around
    `optax.MultiSteps` a step is measured when its update is applied, with the last micro-step's
    gradient. Neither loss nor intermediates are known here, so the monitors of activations and
    routing that need them stay silent.

    Args:
        optimizer: The whole chain, with one `track_delta` in it.
        monitor: What to measure, at which cadences.

    Returns:
        A transform whose state is `MonitoredState`.

    Raises:
        ValueError: In `init`, there is no `track_delta` in the optimizer, or the monitor does not
            fit it or the parameters; in `update`, `params` is None.

    >>> import stabmon
    >>> from optax_ext import track_delta
    >>> params = {"layers": {"attn": {x: {"kernel": jnp.ones((1, 4, 2, 2))} for x in "qk"}}}
    >>> monitor = stabmon.Monitor(stabmon.find_layout(params), delta=2, symptoms=1)
    >>> tx = monitored(optax.chain(optax.sgd(0.1), track_delta(every=2, keep=2)), monitor)
    >>> _, state = tx.update(params, tx.init(params), params)
    >>> readings = read_monitored(state)
    >>> int(readings.step), round(readings.flatten()["symptoms/global/grad_norm/value"], 3)
    (0, 5.657)
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def measure(step, params, state, grads, updates) -> Readings:
        return monitor(step, params, state, grads=grads, updates=updates)

    def init_fn(params):
        inner: Any = optimizer.init(params)
        ring = find_state(inner)
        # Of the placeholders of `optax.tree.map_params` nothing can be measured.
        readings, steps = jnp.zeros(()), jnp.zeros(())
        if jax.tree.leaves(params):
            form = jax.eval_shape(measure, ring.delta_step, params, inner, params, params)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), form)
            readings = dataclasses.replace(zeros, step=jnp.full((), -1, jnp.int32))
            steps = {name: jnp.full((), -1, jnp.int32) for name in form.valid}
        return MonitoredState(readings, steps, inner)

    def update_fn(updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError(
                "monitored: `update` got params=None; call tx.update(grads, state, params)"
            )
        before = state.monitored_inner
        new_updates, inner = optimizer.update(updates, before, params, **extra_args)
        step, after = find_state(before).delta_step, find_state(inner).delta_step

        def sample(readings, steps):
            new = measure(step, params, before, updates, new_updates)
            at = {name: jnp.where(hit, new.step, steps[name]) for name, hit in new.valid.items()}
            values = {
                name: jnp.where(hit, new.values[name], readings.values[name])
                for name, hit in new.valid.items()
            }
            taken = jnp.any(jnp.stack([*new.valid.values()]))
            new = dataclasses.replace(new, values=values)
            kept = dataclasses.replace(readings, values=values)
            return jax.tree.map(lambda a, b: jnp.where(taken, a, b), new, kept), at

        keep = lambda readings, steps: (readings, steps)
        # Where the optimizer holds its update back (`optax.MultiSteps`), there is nothing to see.
        readings, steps = jax.lax.cond(
            after != step, sample, keep, state.monitored_readings, state.monitored_steps
        )
        new_state: Any = MonitoredState(readings, steps, inner)
        return new_updates, new_state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def read_monitored(opt_state: PyTree) -> Readings:
    """The newest sample in the state of a `monitored` optimizer; its `step` is −1 if there is none.

    Jit-able, and does not wait for the device. Whoever looks after every step sees all samples,
    each until the next one, so tell them apart by `step`; else see `monitored_since`.

    Raises:
        ValueError: The state holds no `monitored`, or several.
    """
    return _find(opt_state).monitored_readings


def monitored_since(opt_state: PyTree, step: int) -> list[Readings]:
    """What was sampled after `step`, of each monitor the newest, in the order of the steps.

    For a host that looks at the state once in a while, at its log steps or checkpoints: a sample of
    the symptoms does not hide one of the spectra 40 steps before. Waits for the device.

    Args:
        opt_state: State of a `monitored` optimizer.
        step: The newest step seen so far, −1 for none.

    Raises:
        ValueError: The state holds no `monitored`, or several.
    """
    state = jax.device_get(_find(opt_state))
    steps = {name: int(at) for name, at in state.monitored_steps.items()}
    return [
        dataclasses.replace(
            state.monitored_readings,
            step=np.int32(at),
            valid={name: np.bool_(steps[name] == at) for name in steps},
        )
        for at in sorted({at for at in steps.values() if at > step})
    ]


def _find(opt_state: PyTree) -> MonitoredState:
    """The one `MonitoredState` inside an optimizer state."""
    is_state = lambda x: isinstance(x, MonitoredState)
    found = [x for x in jax.tree.leaves(opt_state, is_leaf=is_state) if is_state(x)]
    if len(found) != 1:
        raise ValueError(
            f"expected one `monitored` optimizer in the state, found {len(found)}; write "
            "tx = optax_ext.monitored(optax.chain(optimizer, optax_ext.track_delta()), monitor) "
            "and pass the state that `tx.init` or `tx.update` returned"
        )
    return found[0]
