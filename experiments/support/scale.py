"""How the papers train the presets of `models.presets`: a full step compiled, two reduced steps.

Not here: what is run, tables and conclusions (`scale_presets.py`).
"""

import resource
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.loop.optimizer import OptimizerConfig
from experiments.loop.step import MonitorConfig, make_step
from experiments.support.recorded import Row
from experiments.train import Config as TrainConfig
from models.gpt import init_params
from models.presets import PRESETS


@dataclass(frozen=True)
class Paper:
    """How a preset is trained in its paper.

    Attributes:
        rate: Base learning rate.
        tokens: A step.
        matrices: Factor of the block matrices' learning rate.
        others: Factor of all others' (the paper: the embeddings'; here the norms' too).
        source: Where it is from.
    """

    rate: float
    tokens: int
    matrices: float = 1.0
    others: float = 1.0
    source: str = "arXiv 2602.01734"


SIGMA = Paper(3.5e-4, 65_536, matrices=16.0, others=4.0)
PAPERS = {
    "nanogpt-5m": Paper(6e-4, 122_880, matrices=16.0, others=4.0),
    "sigma-40m-mha": SIGMA,
    "sigma-40m-mla": SIGMA,
    "llama-1b": Paper(1e-3, 65_536),
    "llama-moe-3b": Paper(1e-3, 65_536),
    "qwen3-moe-mini": Paper(1e-3, 65_536, source="rate and batch not published, as LLaMA"),
}
# (layers, tokens of a sequence) of the two steps that are taken, one sequence each.
REDUCED = {
    "nanogpt-5m": (24, 256),
    "sigma-40m-mha": (28, 128),
    "sigma-40m-mla": (28, 128),
    "llama-1b": (2, 64),
    "llama-moe-3b": (1, 64),
    "qwen3-moe-mini": (4, 64),
}


def paper_config(preset: str) -> TrainConfig:
    """A preset as its paper trains it; the linear decay goes on for ten times the warm-up."""
    model, paper = PRESETS[preset], PAPERS[preset]
    return TrainConfig(
        name=preset,
        steps=50_000,
        batch=paper.tokens // model.context,
        model=model,
        optimizer=OptimizerConfig(
            learning_rate=paper.rate * paper.others,
            rates=(("all", paper.rate * paper.matrices),),
            warmup=2000,
            schedule="linear",
            clip=1.0,
        ),
        monitor=MonitorConfig(weights=500, activations=100),
        evaluate_every=500,
        checkpoint_every=1000,
    )


def two_steps(name: str, layers: int, context: int, seed: int) -> Row:
    """The full step compiled; two steps of the reduced one, on random tokens."""
    full = paper_config(name)
    memory = compiled_memory(full)
    model = replace(full.model, layers=layers, context=context)
    init, step, _ = make_step(model, full.optimizer, MonitorConfig(delta=0), None)
    rng = np.random.default_rng(seed)
    losses, state = [], init(seed)
    before = np.array(jax.tree.leaves(state.params)[0])
    for _ in range(2):
        tokens = rng.integers(0, model.vocabulary, (1, context + 1), np.int32)
        state, _, loss = step(state, tokens, np.float32(0), due=())
        losses.append(float(loss))
    return {
        "preset": name,
        "parameters": count(full),
        "paper": {"rate": PAPERS[name].rate, "tokens": PAPERS[name].tokens},
        "source": PAPERS[name].source,
        "full": {"layers": full.model.layers, "context": full.model.context, "batch": full.batch},
        "full_bytes": memory,
        "reduced": {"layers": layers, "context": context, "batch": 1},
        "reduced_parameters": count(replace(full, model=model)),
        "losses": losses,
        "moved": bool((np.asarray(jax.tree.leaves(state.params)[0]) != before).any()),
        "uniform": float(np.log(model.vocabulary)),
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def count(config: TrainConfig) -> int:
    """Parameters of the model."""
    shapes = jax.eval_shape(lambda: init_params(config.model, 0))
    return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(shapes))


def compiled_memory(config: TrainConfig) -> int:
    """Bytes that the full step needs on one device, one sequence at a time, in bfloat16."""
    model = replace(config.model, dtype="bfloat16")
    init, step, _ = make_step(model, config.optimizer, MonitorConfig(delta=0), None)
    state = jax.eval_shape(lambda: init(0))
    tokens = jax.ShapeDtypeStruct((1, model.context + 1), jnp.int32)
    armed = jax.ShapeDtypeStruct((), jnp.float32)
    train_step: Any = step.train
    memory = train_step.lower(state, tokens, armed, due=()).compile().memory_analysis()
    held = memory.argument_size_in_bytes - memory.alias_size_in_bytes
    return held + memory.output_size_in_bytes + memory.temp_size_in_bytes
