"""Flax linen with a TrainState, and `stabmon.Watch`.

python -m examples.linen runs/linen                     300 healthy steps; goes on if it is there
python -m examples.linen runs/broken --factor 40        the learning rate is wrong from 150 on
"""

import argparse
import os

import jax
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import stabmon


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        x = x + nn.MultiHeadDotProductAttention(4)(nn.RMSNorm()(x), mask=mask)
        return x + nn.Dense(64)(nn.gelu(nn.Dense(256)(nn.RMSNorm()(x))))


class GPT(nn.Module):
    @nn.compact
    def __call__(self, text):
        x, mask = nn.Embed(256, 64)(text), nn.make_causal_mask(text)
        for _ in range(2):
            x = Block()(x, mask)
        return nn.Dense(256)(x)


def main(folder, steps, factor):
    text = np.fromfile(os.__file__, np.uint8).astype(np.int32)
    model = GPT()
    params = model.init(jax.random.key(0), text[None, :64])
    rate = optax.warmup_constant_schedule(0.0, 1e-3, 20)
    wrong = lambda step: rate(step) * jax.numpy.where(step < 150, 1.0, factor)
    # A short run: sampled more often than by default, and judged after 120 steps.
    monitor = stabmon.Monitor(stabmon.find_layout(params), router=0, delta=25, symptoms=5)
    with stabmon.Watch(folder, params, schedule=rate, monitor=monitor, window=100) as watch:
        tx = optax.chain(optax.adamw(wrong), watch.transforms())

        @jax.jit
        def train_step(state, batch):
            def loss_fn(params):
                logits = state.apply_fn(params, batch[:, :-1])
                return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

            loss, grads = jax.value_and_grad(loss_fn)(state.params)
            updates, opt_state = tx.update(grads, state.opt_state, state.params)
            seen = {"grads": grads, "updates": updates, "loss": loss}
            readings = watch.measure(state.step, state.params, state.opt_state, **seen)
            params = optax.apply_updates(state.params, updates)
            return state.replace(step=state.step + 1, params=params, opt_state=opt_state), readings

        state = watch.resume(TrainState.create(apply_fn=model.apply, params=params, tx=tx))
        for step in range(watch.step, steps):
            at = np.random.default_rng(step).integers(0, len(text) - 65, (16, 1))
            state, readings = train_step(state, text[at + np.arange(65)])
            watch.observe(step, readings)
        watch.checkpoint(state)
        print(watch.report())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--factor", type=float, default=1.0)
    main(**vars(parser.parse_args()))
