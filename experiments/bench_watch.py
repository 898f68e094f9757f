"""What does `stabmon.Watch` cost a training loop that is not ours?

    python -m experiments.bench_watch            about 4 minutes on two cores

The step of `examples/nnx.py` with Watch and without, in turns; the host's part of a sample.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from rich.console import Console

import stabmon
from examples.nnx import GPT
from experiments.support.timing import Row, as_table
from stabmon.monitor import Readings


@dataclass(frozen=True)
class Config:
    """Steps that count, and those before them, in which everything is compiled."""

    steps: int = 3000
    first: int = 501


def main(config: Config) -> list[Row]:
    """The rows, printed as a table."""
    rows = [*step_rows(config), *observe_rows(config)]
    Console().print(as_table("Watch", rows))
    return rows


def trainer(watch: stabmon.Watch | None) -> Callable[[int], None]:
    """A function that takes a step of `examples/nnx.py`, watched or not, and waits for it."""
    graph, params = nnx.split(GPT(nnx.Rngs(0)))
    ours = () if watch is None else (watch.transforms(),)
    tx = optax.chain(optax.adamw(1e-3), *ours)
    state: Any = (params, tx.init(params))
    text = np.random.default_rng(0).integers(0, 256, (16, 65), dtype=np.int32)

    def loss_fn(params):
        logits = nnx.merge(graph, params)(text[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

    @partial(jax.jit, static_argnames="due", donate_argnames="state")
    def train_step(step, state, due):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, new = tx.update(grads, opt_state, params)
        seen = {"grads": grads, "updates": updates, "loss": loss}
        readings = watch.measure(step, *state, due=due, **seen) if watch else None
        return (optax.apply_updates(params, updates), new), readings

    def take(step: int) -> None:
        nonlocal state
        if watch is None:
            state, _ = train_step(step, state, ())
        else:
            beside = watch.measure(step, *state, due=watch.due(step, "delta", "weights"))
            state, readings = train_step(step, state, watch.due(step, "symptoms"))
            watch.observe(step, beside, readings)
        jax.block_until_ready(state)

    return take


def step_rows(config: Config) -> Iterator[Row]:
    """Steps with Watch and without, in turns; and how long each takes to its first sample."""
    with stabmon.Watch(tempfile.mkdtemp(), nnx.split(GPT(nnx.Rngs(0)))[1]) as watch:
        plans = {"without": trainer(None), "with": trainer(watch)}
        begun, seconds = {}, {"without": [], "with": []}
        for step in range(config.first + config.steps):
            for plan in np.random.default_rng(step).permutation(list(plans)):
                start = time.perf_counter()
                plans[plan](step)
                took = time.perf_counter() - start
                begun.setdefault(plan, took)
                if step >= config.first:
                    seconds[plan].append((watch.due(step), took))
        watch.flush()
    base = float(np.median([took for _, took in seconds["without"]]))
    kinds: dict[tuple[str, ...], list[float]] = {}
    for due, took in seconds["with"]:
        kinds.setdefault(due, []).append(took / base)
    unsampled, later = float(np.median(kinds[()])) - 1, begun["with"] - begun["without"]
    amortised = sum(len(x) * float(np.median(x)) for x in kinds.values()) / config.steps - 1
    yield Row("Watch, unsampled step", "≤ 0.5 %", f"{unsampled:+.2%}", unsampled <= 5e-3)
    yield Row("Watch, amortised", "≤ 1 %", f"{amortised:+.2%}", amortised <= 1e-2)
    yield Row("Watch, first step later by", "≤ 2 s", f"{later:.1f} s", later <= 2)


def observe_rows(config: Config) -> Iterator[Row]:
    """Host time of `observe` for a sample of 100 quantities."""
    params = nnx.split(GPT(nnx.Rngs(0)))[1]
    keys, took = tuple(f"delta200/layer_{i:02d}/delta2/entropy/mean" for i in range(100)), []
    with stabmon.Watch(tempfile.mkdtemp(), params, warmup=0, window=100) as watch:
        for step in range(min(config.steps, 1000)):
            drawn = jnp.asarray(np.random.default_rng(step).uniform(4, 5, 100).astype(np.float32))
            valid, values = {"delta200": np.bool_(True)}, {"delta200": drawn}
            readings = Readings(np.int32(step), valid, values, keys=(("delta200", keys),))
            start = time.perf_counter()
            watch.observe(step, readings, loss=2.0)
            took.append(time.perf_counter() - start)
    median = 1e3 * float(np.median(took))
    yield Row("observe, 100 quantities", "≤ 1 ms", f"{median:.2f} ms", median <= 1)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
