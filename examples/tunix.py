"""Tunix, whose trainer owns the step: the monitors go with the optimizer, a hook looks after it.

python -m examples.tunix runs/tunix                     300 healthy steps; goes on if it is there
python -m examples.tunix runs/broken --factor 40        the learning rate is wrong from 150 on
"""

import argparse
import os
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.sft import hooks, peft_trainer

import optax_ext
import stabmon

SIZES = {"num_layers": 2, "vocab_size": 256, "embed_dim": 64, "hidden_dim": 128, "num_heads": 4}
SIZES |= {"num_kv_heads": 2, "head_dim": 16, "rope_theta": 10000, "norm_eps": 1e-6}


class Watching(hooks.TrainingHooks):
    def __init__(self, watch):
        self.watch = watch

    def on_train_step_end(self, train_ctx, train_step, train_loss):
        step, readings = self.watch.step, None
        if self.watch.due(step):  # the next step takes these arrays away: copy them
            found = optax_ext.read_monitored(nnx.as_pure(train_ctx.optimizer.opt_state))
            readings = jax.device_get(found)
        self.watch.observe(step, readings, loss=train_loss)

    def on_train_start(self, train_ctx):
        self.watch.step = train_ctx.train_steps

    ignored = lambda self, *_: None
    on_train_end = on_train_step_start = on_eval_step_start = on_eval_step_end = ignored


def loss_fn(model, text):
    mask = np.broadcast_to(np.tri(64, dtype=bool), (len(text), 64, 64))
    places = np.broadcast_to(np.arange(64), (len(text), 64))
    logits, _ = model(text[:, :-1], places, None, mask)
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


def main(folder, steps, factor):
    text = np.fromfile(os.__file__, np.uint8).astype(np.int32)
    model = Llama3(ModelConfig(**SIZES), rngs=nnx.Rngs(0))
    # Tunix makes its MLPs zero, for a checkpoint to fill them.
    draw = lambda w: w if w.ndim < 2 else jax.random.normal(jax.random.key(w.size), w.shape) / 8
    params = jax.tree.map(draw, nnx.state(model, nnx.Param))
    nnx.update(model, params)
    rate = optax.warmup_constant_schedule(0.0, 1e-3, 20)
    wrong = lambda step: rate(step) * jax.numpy.where(step < 150, 1.0, factor)
    # A short run: sampled more often than by default, and judged after 120 steps.
    monitor = stabmon.Monitor(stabmon.find_layout(params), router=0, delta=25, symptoms=5)
    with stabmon.Watch(folder, params, schedule=rate, monitor=monitor, window=100) as watch:
        tx = optax_ext.monitored(optax.chain(optax.adamw(wrong), watch.transforms()), monitor)
        sizes = {"max_steps": steps, "eval_every_n_steps": steps}
        saved = str(Path(folder, "tunix").absolute())
        config = peft_trainer.TrainingConfig(checkpoint_root_directory=saved, **sizes)
        trainer = peft_trainer.PeftTrainer(model, tx, config).with_loss_fn(loss_fn)
        trainer.with_training_hooks(Watching(watch))
        trainer.with_gen_model_input_fn(lambda batch: {"text": batch})
        at = [np.random.default_rng(i).integers(0, len(text) - 65, (16, 1)) for i in range(steps)]
        trainer.train([text[x + np.arange(65)] for x in at])
        print(watch.report())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--factor", type=float, default=1.0)
    main(**vars(parser.parse_args()))
