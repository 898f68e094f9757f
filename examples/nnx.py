"""Flax NNX, and `stabmon.Watch`; also how to measure beside the step, which is compiled less often.

python -m examples.nnx runs/nnx                         300 healthy steps; goes on if it is there
python -m examples.nnx runs/broken --factor 40          the learning rate is wrong from 150 on
"""

import argparse
import os
from functools import partial

import jax
import numpy as np
import optax
from flax import nnx

import stabmon


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm_1, self.norm_2 = nnx.RMSNorm(64, rngs=rngs), nnx.RMSNorm(64, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(4, 64, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attn(self.norm_1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class GPT(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.head = nnx.Embed(256, 64, rngs=rngs), nnx.Linear(64, 256, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, text):
        x = self.embed(text)
        for block in self.blocks:
            x = block(x, nnx.make_causal_mask(text))
        return self.head(x)


def main(folder, steps, factor):
    text = np.fromfile(os.__file__, np.uint8).astype(np.int32)
    graph, params = nnx.split(GPT(nnx.Rngs(0)))
    rate = optax.warmup_constant_schedule(0.0, 1e-3, 20)
    wrong = lambda step: rate(step) * jax.numpy.where(step < 150, 1.0, factor)
    # A short run: sampled more often than by default, and judged after 120 steps.
    monitor = stabmon.Monitor(stabmon.find_layout(params), router=0, delta=25, symptoms=5)
    with stabmon.Watch(folder, params, schedule=rate, monitor=monitor, window=100) as watch:
        tx = optax.chain(optax.adamw(wrong), watch.transforms())

        def loss_fn(params, batch):
            logits = nnx.merge(graph, params)(batch[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

        @partial(jax.jit, static_argnames="due", donate_argnames=("params", "state"))
        def train_step(step, params, state, batch, due):
            loss, grads = jax.value_and_grad(loss_fn)(params, batch)
            updates, new = tx.update(grads, state, params)
            seen = {"grads": grads, "updates": updates, "loss": loss}
            readings = watch.measure(step, params, state, due=due, **seen)
            return optax.apply_updates(params, updates), new, readings

        params, state = watch.resume((params, tx.init(params)))
        for step in range(watch.step, steps):
            at = np.random.default_rng(step).integers(0, len(text) - 65, (16, 1)) + np.arange(65)
            beside = watch.measure(step, params, state, due=watch.due(step, "delta", "weights"))
            due = watch.due(step, "symptoms")
            params, state, readings = train_step(step, params, state, text[at], due)
            watch.observe(step, beside, readings)
        watch.checkpoint((params, state))
        print(watch.report())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--factor", type=float, default=1.0)
    main(**vars(parser.parse_args()))
