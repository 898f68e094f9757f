"""A trainer that knows nothing of this project, with `Watch` around it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import stabmon
from stabmon.monitor import Monitor

D, N, H, V = 8, 4, 2, 16
# Of such a model only symptoms and weights are worth a sample; each tier is due at few steps.
CADENCES = {"router": 0, "delta": 10, "activations": 0, "weights": 10, "symptoms": 1}


class State(NamedTuple):
    """What a step reads and writes."""

    params: dict
    opt_state: object


def init_params(seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    q, k = (0.8 * jax.random.normal(key, (2, D, N, H)) for key in keys[:2])
    attn = {"q": {"kernel": q}, "k": {"kernel": k}, "v": {"kernel": q + k}}
    return {"layers": {"attn": attn}, "head": 0.3 * jax.random.normal(keys[2], (D, V))}


def loss_fn(params, batch):
    x, y = batch
    attn = params["layers"]["attn"]
    for layer in range(2):
        q, k = attn["q"]["kernel"][layer], attn["k"]["kernel"][layer]
        x = x + 0.1 * jnp.einsum("bd,dnh,enh->be", x, q, k)
    logits = x @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def batch_of(step):
    x, y = jax.random.split(jax.random.fold_in(jax.random.key(7), step))
    return jax.random.normal(x, (32, D)), jax.random.randint(y, (32,), 0, V)


def build(folder, rate=0.003, **options):
    """(watch, tx, state) of a fresh run."""
    params = init_params()
    options = {"window": 20, "warmup": 5} | options
    monitor = Monitor(stabmon.find_layout(params), **CADENCES)
    watch = stabmon.Watch(folder, params, monitor=monitor, schedule=rate, **options)
    base = optax.chain(optax.trace(0.9), optax.scale_by_sign(), optax.scale(-rate))
    tx = optax.chain(base, watch.transforms())
    return watch, tx, State(params, tx.init(params))


def make_step(watch, tx):
    """The jitted step; `gain` multiplies the gradients."""

    @jax.jit
    def step(i, state, batch, gain):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        grads = jax.tree.map(lambda g: gain * g, grads)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        readings = watch.measure(
            i, state.params, state.opt_state, grads=grads, updates=updates, loss=loss
        )
        return State(optax.apply_updates(state.params, updates), opt_state), readings, loss

    return step


def run(watch, tx, state, steps, gain=lambda step: 1.0, every=10, before=None):
    """Train to `steps` as a user would; the state at the end."""
    step_fn = make_step(watch, tx)
    while watch.step < steps and not watch.stopped:
        state = watch.apply(state)
        step = watch.step
        if step >= steps:
            break
        if before is not None:
            before(step)
        state, readings, loss = step_fn(
            jnp.int32(step), state, batch_of(watch.data_step), jnp.float32(gain(step))
        )
        watch.observe(step, readings, loss=loss)
        if watch.recovery.save is not None and watch.step % every == 0:
            watch.checkpoint(state)
    return state
