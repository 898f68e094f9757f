"""Flax NNX: a small GPT with `stabmon.Watch`.

    python examples/nnx.py runs/nnx                          300 healthy steps
    python examples/nnx.py runs/broken --factor 40           the learning rate is wrong from 150 on

A run that is started again goes on from its newest checkpoint. What needs gradients is measured in
the jitted step, the rest by a program of its own before it: the step is compiled twice, no more.
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
    def __init__(self, rngs, width):
        self.norm_1, self.norm_2 = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.up, self.down = (
            nnx.Linear(width, 4 * width, rngs=rngs),
            nnx.Linear(4 * width, width, rngs=rngs),
        )

    def __call__(self, x, mask):
        x = x + self.attn(self.norm_1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class GPT(nnx.Module):
    def __init__(self, rngs, width=64, layers=2):
        self.embed = nnx.Embed(256, width, rngs=rngs)
        self.blocks = nnx.List([Block(rngs, width) for _ in range(layers)])
        self.head = nnx.Linear(width, 256, rngs=rngs)

    def __call__(self, text):
        x, mask = self.embed(text), nnx.make_causal_mask(text)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def main(folder, steps=300, factor=1.0):
    text = np.fromfile(os.__file__, np.uint8).astype(np.int32)
    graph, params = nnx.split(GPT(nnx.Rngs(0)))
    rate = optax.warmup_constant_schedule(0.0, 1e-3, 20)
    fault = lambda step: rate(step) * jax.numpy.where(step < 150, 1.0, factor)
    with stabmon.Watch(folder, params, schedule=rate, window=100) as watch:
        tx = optax.chain(optax.adamw(fault), watch.transforms())

        def loss_fn(params, batch):
            logits = nnx.merge(graph, params)(batch[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

        @partial(jax.jit, static_argnames="due")
        def train_step(step, params, state, batch, due):
            loss, grads = jax.value_and_grad(loss_fn)(params, batch)
            updates, new = tx.update(grads, state, params)
            seen = {"grads": grads, "updates": updates, "loss": loss}
            readings = watch.measure(step, params, state, due=due, **seen)
            return optax.apply_updates(params, updates), new, readings

        params, state = watch.resume((params, tx.init(params)))
        for step in range(watch.step, steps):
            at = np.random.default_rng(step).integers(0, len(text) - 65, (16, 1))
            beside = watch.measure(step, params, state, due=watch.due(step, "delta", "weights"))
            params, state, readings = train_step(
                step, params, state, text[at + np.arange(65)], watch.due(step, "symptoms")
            )
            watch.observe(step, beside, readings)
        watch.checkpoint((params, state))
        print(watch.report())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--factor", type=float, default=1.0)
    main(**vars(parser.parse_args()))
