"""What do the monitors and MSign cost on a TPU pod, as the TPU's own compiler tells?

    make tpu                                            everything, in an environment of its own
    python -m experiments.tpu_study --models demo       one model

Question: the training step, compiled for v5e 2×4, v5e 16×16 and v5p 2×2×1 without a TPU: how many
seconds, how much code and memory do a sampled step's monitors and one MSign application add, what
do devices send each other, and what would they cost on the chip?

`libtpu` compiles for a topology on any machine; nothing runs. Shapes stand for arrays. FSDP ×
tensor parallel on a mesh of data × model, one sequence for each group of data-parallel devices.
As in the training loop the monitors are a program of their own beside the step, symptoms and MSign
are within it. Compile seconds are the processor's, of all threads, so that a busy machine changes
them little; code, memory and collectives are read from the compiled programs. Rows are written as
they come, and a program that has its row is not compiled again. Tables: `experiments/README.md`.
"""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# Before a backend is made: no TPU is asked for, and none is looked for.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import jax.numpy as jnp
import optax
import tyro
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding

import optax_ext
import stabmon
from experiments.loop.checkpoints import TrainState
from experiments.loop.losses import next_token_loss
from experiments.loop.measuring import make_measure, observe
from experiments.loop.placement import Placement, state_shardings
from experiments.scale_study import collectives
from experiments.support.tpu import tables
from models.config import GPTConfig
from models.gpt import apply, init_params
from models.moe import auxiliary_loss
from models.presets import LLAMA_1B, PRESETS
from models.sharding import batch_spec

MODELS = {
    "demo": replace(LLAMA_1B, vocabulary=4096, layers=4, model=512, heads=8, feedforward=1408),
    "llama-1b": LLAMA_1B,
    "llama-moe-3b": PRESETS["llama-moe-3b"],
    "7b": replace(LLAMA_1B, layers=32, model=4096, heads=32, feedforward=11_008),
}
MESHES = {"v5e:2x4": (4, 2), "v5e:16x16": (32, 8), "v5p:2x2x1": (2, 2)}
MONITORS = ("delta", "activations", "weights", "router")
PARTS = ("base", "forward", "monitors", "symptoms", "msign", "staggered", "polar")
_RESTORES = {
    "msign": {"period": 1},
    "staggered": {"period": 100, "stagger": True},
    "polar": {"period": 1, "method": "polar"},
}


@dataclass(frozen=True)
class Config:
    """What to compile.

    Attributes:
        models: Names in `MODELS`.
        topologies: Names in `MESHES`.
        parts: Which programs.
        out: File for the rows, one JSON object a line.
    """

    models: tuple[str, ...] = ("demo", "llama-1b")
    topologies: tuple[str, ...] = ("v5e:2x4", "v5e:16x16")
    parts: tuple[str, ...] = PARTS
    out: Path = Path("runs/tpu_study.jsonl")


def main(config: Config) -> list[dict[str, Any]]:
    """All rows, those of earlier runs too; printed as tables."""
    config.out.parent.mkdir(parents=True, exist_ok=True)
    lines = config.out.read_text(encoding="utf-8").splitlines() if config.out.exists() else []
    rows = [json.loads(line) for line in lines]
    known = {(row["model"], row["topology"], row["part"]) for row in rows}
    with config.out.open("a", encoding="utf-8") as file:
        for row in study(config, known):
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
    print(tables(rows))
    return rows


def study(config: Config, known: set[tuple[str, str, str]]) -> Iterator[dict[str, Any]]:
    """One row for each model, topology and part that has none."""
    for topology in config.topologies:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology)
        laid = topologies.make_mesh(devices, MESHES[topology], ("data", "model"))
        mesh = Mesh(laid.devices, laid.axis_names, axis_types=(AxisType.Auto,) * 2)
        for name in config.models:
            for part in config.parts:
                if (name, topology, part) not in known:
                    model = replace(MODELS[name], dtype="bfloat16")
                    yield {"model": name, "topology": topology, "part": part} | measured(
                        model, part, mesh
                    )


def measured(model: GPTConfig, part: str, mesh: Any) -> dict[str, Any]:
    """What the compiler says of one program."""
    lowered = lower(model, part, mesh)
    start, wall = time.process_time(), time.perf_counter()
    compiled = lowered.compile()
    seconds, wall = time.process_time() - start, time.perf_counter() - wall
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    return {
        "seconds": round(seconds, 1),
        "wall_seconds": round(wall, 1),
        "code_bytes": memory.generated_code_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "flops": cost["flops"],
        "bytes": cost["bytes accessed"],
        "collectives": collectives(compiled.as_text()),
    }


def lower(model: GPTConfig, part: str, mesh: Any) -> Any:
    """One of `PARTS`, from shapes alone, for the devices of `mesh`."""
    placement = Placement("mixed", mesh.shape["model"])
    shapes = jax.eval_shape(lambda: init_params(model, 0))
    layout = stabmon.find_layout(shapes)
    restore = optax.identity()
    if part in _RESTORES:
        restore = optax_ext.msign(layout=layout, **_RESTORES[part])
    ring = optax_ext.track_delta(50, 4, select=layout.selects("qk"))
    tx = optax.chain(optax.adamw(1e-3), restore, ring)
    monitor = stabmon.Monitor(layout)

    def step(state, tokens):
        params, opt_state = state.params, state.opt_state

        def objective(params):
            logits, losses = apply(model, params, tokens[:, :-1], losses=True)
            loss = next_token_loss(logits, tokens[:, 1:])
            return loss + auxiliary_loss(model, losses), loss

        grads, loss = jax.grad(objective, has_aux=True)(params)
        given = {"msign_due": True} if part in ("msign", "polar") else {}
        updates, new = tx.update(grads, opt_state, params, **given)
        readings = None
        if part == "symptoms":
            given = {"grads": grads, "updates": updates, "loss": loss}
            readings = monitor(state.step, params, opt_state, due=("symptoms",), **given)
        return TrainState(state.step + 1, optax.apply_updates(params, updates), new), readings

    def forward(state, tokens):
        return observe(model, state.params, tokens[:4, :-1], tokens[:4, 1:])

    where, states = state_shardings(tx, shapes, placement, mesh)
    places: Any = TrainState(*[NamedSharding(mesh, jax.P()), where, states])
    placed = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    counter = jax.ShapeDtypeStruct((), jnp.int32)
    begun = TrainState(*[counter, shapes, jax.eval_shape(tx.init, shapes)])
    state = jax.tree.map(placed, begun, places)
    batch = NamedSharding(mesh, batch_spec("mixed"))
    size = (mesh.shape["data"], model.context + 1)
    tokens = jax.ShapeDtypeStruct(size, jnp.int32, sharding=batch)
    with jax.set_mesh(mesh):
        if part == "forward":
            return jax.jit(forward).lower(state, tokens)
        if part == "monitors":
            due = MONITORS if model.experts else MONITORS[:-1]
            measure: Any = make_measure(model, monitor, 4)
            return measure.lower(state, tokens, due=due)
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(places, None))
        return jitted.lower(state, tokens)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
