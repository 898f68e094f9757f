"""Equinox, and `stabmon.Watch`.

python -m examples.equinox runs/equinox                 300 healthy steps; goes on if it is there
python -m examples.equinox runs/broken --factor 40      the learning rate is wrong from 150 on
"""

import argparse
import os

import equinox as eqx
import jax
import numpy as np
import optax

import stabmon


class Block(eqx.Module):
    norms: list
    attn: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, width, key):
        self.norms = [eqx.nn.RMSNorm(width) for _ in range(2)]
        self.attn = eqx.nn.MultiheadAttention(4, width, key=key)
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=key)

    def __call__(self, x):
        y, mask = jax.vmap(self.norms[0])(x), np.tri(len(x), dtype=bool)
        x = x + self.attn(y, y, y, mask=mask)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


def main(folder, steps, factor):
    text = np.fromfile(os.__file__, np.uint8).astype(np.int32)
    keys = jax.random.split(jax.random.key(0), 4)
    model = {"blocks": [Block(64, keys[0]), Block(64, keys[1])]}
    model |= {"embed": eqx.nn.Embedding(256, 64, key=keys[2])}
    model |= {"head": eqx.nn.Linear(64, 256, key=keys[3])}
    params, static = eqx.partition(model, eqx.is_inexact_array)
    rate = optax.warmup_constant_schedule(0.0, 1e-3, 20)
    wrong = lambda step: rate(step) * jax.numpy.where(step < 150, 1.0, factor)
    layout = stabmon.find_layout(params, heads=4)
    # A short run: sampled more often than by default, and judged after 120 steps.
    monitor = stabmon.Monitor(layout, router=0, delta=25, symptoms=5)
    with stabmon.Watch(folder, params, schedule=rate, monitor=monitor, window=100) as watch:
        tx = optax.chain(optax.adamw(wrong), watch.transforms())

        def loss_fn(params, batch):
            model = eqx.combine(params, static)
            x = jax.vmap(jax.vmap(model["embed"]))(batch[:, :-1])
            for block in model["blocks"]:
                x = jax.vmap(block)(x)
            logits = jax.vmap(jax.vmap(model["head"]))(x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

        @jax.jit
        def train_step(step, params, state, batch):
            loss, grads = jax.value_and_grad(loss_fn)(params, batch)
            updates, new = tx.update(grads, state, params)
            seen = {"grads": grads, "updates": updates, "loss": loss}
            readings = watch.measure(step, params, state, **seen)
            return optax.apply_updates(params, updates), new, readings

        params, state = watch.resume((params, tx.init(params)))
        for step in range(watch.step, steps):
            at = np.random.default_rng(step).integers(0, len(text) - 65, (16, 1))
            params, state, readings = train_step(step, params, state, text[at + np.arange(65)])
            watch.observe(step, readings)
        watch.checkpoint((params, state))
        print(watch.report())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--factor", type=float, default=1.0)
    main(**vars(parser.parse_args()))
