"""A whole trainer to be copied: monitors, alarms, a report and recovery, through `stabmon.Watch`.

    python -m experiments.minimal --name first                 a minute on two cores
    python -m experiments.minimal --name first --steps 2000    goes on where it ended
    python -m experiments.minimal --name cared-for --act       carries out the recovery ladder too

Only `Config`, `init_params`, `apply` and `load_corpus` are this project's: put your own in their
place. What is sharded, evaluated or injected is in `train.py`.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import tyro

import stabmon
from experiments.data import batches, load_corpus
from models.config import GPTConfig
from models.gpt import apply, init_params
from stabmon.alarms.incidents import Change, Incident


@dataclass(frozen=True)
class Config:
    """One training run.

    Attributes:
        name: Folder under `runs`.
        runs: Where runs lie.
        steps: Length of the run.
        seed: Of initialisation and data order.
        batch: Sequences a step, of `model.context` tokens.
        learning_rate: Peak; reached after `warmup` steps, and then constant.
        warmup: Steps of linear warm-up.
        checkpoint_every: Steps between checkpoints.
        act: Whether the recovery ladder acts on the run; False: it only advises.
        webhook: URL that hears of incidents; None: none.
        model: Shape of the model.
    """

    name: str = "minimal"
    runs: Path = Path("runs")
    steps: int = 600
    seed: int = 0
    batch: int = 16
    learning_rate: float = 1e-3
    warmup: int = 100
    checkpoint_every: int = 200
    act: bool = False
    webhook: str | None = None
    model: GPTConfig = field(default_factory=GPTConfig)


def train(config: Config) -> stabmon.Watch:
    """Begins the run or goes on with it, and trains to its end; the closed watch.

    Args:
        config: The run. Another one under the same name is refused; the length may change.
    """
    settings = asdict(config)
    for name in ("name", "runs", "steps", "webhook"):  # they change nothing of what is learned
        del settings[name]
    rate = optax.warmup_constant_schedule(0.0, config.learning_rate, config.warmup)
    params = init_params(config.model, config.seed)
    tell = [stabmon.notify_webhook(config.webhook, run=config.name)] if config.webhook else []
    with stabmon.Watch(
        config.runs / config.name,
        params,
        config=settings,
        schedule=rate,
        on_incident=[show, *tell],
        act=config.act,
    ) as watch:
        tx = optax.chain(optax.adamw(rate), watch.transforms())
        step_fn = make_step(config.model, tx, watch)
        state = watch.resume((params, tx.init(params)))
        corpus = load_corpus()
        data = batches(corpus, seed=config.seed, batch=config.batch, context=config.model.context)
        while watch.step < config.steps:
            state = watch.apply(state)  # a rollback takes `watch.step` back
            if watch.stopped:
                break
            step, tokens = watch.step, np.asarray(data[watch.data_step])
            beside = watch.measure(step, *state, due=watch.due(step, "delta", "weights", "router"))
            state, readings = step_fn(step, state, tokens, due=watch.due(step, "symptoms"))
            watch.observe(step, beside, readings, tokens=(step + 1) * tokens[:, 1:].size)
            if watch.step % config.checkpoint_every == 0:
                watch.checkpoint(state)
        watch.checkpoint(state)
        print(watch.report())
    return watch


def make_step(
    model: GPTConfig, tx: optax.GradientTransformation, watch: stabmon.Watch
) -> Callable[..., Any]:
    """Returns the jitted, donated step: (step, state, tokens, due) -> (state, readings).

    Args:
        model: Shape of the model.
        tx: The optimizer, with `watch.transforms()` in it.
        watch: What measures.
    """

    def loss_fn(params, tokens):
        logits = apply(model, params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    @partial(jax.jit, static_argnames="due", donate_argnames="state")
    def step_fn(step, state, tokens, due):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, new = tx.update(grads, opt_state, params)
        seen = {"grads": grads, "updates": updates, "loss": loss}
        readings = watch.measure(step, params, opt_state, due=due, **seen)
        return (optax.apply_updates(params, updates), new), readings

    return step_fn


def show(change: Change, incident: Incident) -> None:
    """Prints what has become of an incident."""
    print(f"incident {change}: {incident.sentence()}")


if __name__ == "__main__":
    raise SystemExit(train(tyro.cli(Config, description=__doc__)).exit_code)
