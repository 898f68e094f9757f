"""What do the monitors and MSign cost on a pod, as far as a compiler can tell?

    python -m experiments.scale_study                 8, 64 and 256 devices, both models
    python -m experiments.scale_study --devices 8     a minute

Question: the training step of LLaMA-1B and of the 3B mixture of experts, compiled ahead of time
from abstract shapes for virtual CPU devices (nothing runs): how much do a sampled step's monitors
and one MSign application add to its operations, to the peak memory of a device, to what devices
send each other, and to the time the compiler takes?

FSDP × tensor parallel on a mesh of data × model, 8 devices along "model" but for 8 in all (2); one
sequence of 2,048 tokens for each group of data-parallel devices. Every number is read from the
compiled program: XLA's cost and memory analyses (a loop's body is counted once by the former, so
layers are unrolled in a second, two-layer program to extrapolate), and the shapes of its
collectives. Each device count needs a process of its own, since a backend's devices are set once.
Table: `experiments/README.md`.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro
from rich.console import Console
from rich.table import Table

import optax_ext
import stabmon
from experiments.losses import next_token_loss
from experiments.placement import Placement, make_mesh, state_shardings
from models.config import GPTConfig
from models.gpt import apply, init_params
from models.moe import auxiliary_loss
from models.presets import PRESETS
from models.sharding import batch_spec

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
PARTS = {"base": (), "monitors": ("delta", "weights", "symptoms"), "msign": ("msign",)}
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8}


@dataclass(frozen=True)
class Config:
    """What to compile.

    Attributes:
        models: Names in `models.presets`.
        devices: Numbers of virtual devices.
        layers: Layers instead of the preset's; None: all.
        out: File for the rows, one JSON object a line; they are printed too.
    """

    models: tuple[str, ...] = ("llama-1b", "llama-moe-3b")
    devices: tuple[int, ...] = (8, 64, 256)
    layers: int | None = None
    out: Path = Path("runs/scale_study.jsonl")


def main(config: Config) -> list[dict[str, Any]]:
    """One row for each model, device count and part, each count in a process of its own."""
    rows = []
    for count in config.devices:
        program = (
            "import json, experiments\n"
            "from experiments.scale_study import Config, study\n"
            f"for row in study(Config(models={config.models!r}, layers={config.layers!r})):\n"
            "    print('ROW', json.dumps(row), flush=True)\n"
        )
        flags = f"--xla_force_host_platform_device_count={count}"
        environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{count} devices: {done.stderr[-2000:]}")
        rows += [json.loads(line[4:]) for line in done.stdout.splitlines() if line[:4] == "ROW "]
    config.out.parent.mkdir(parents=True, exist_ok=True)
    config.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    Console().print(table(rows))
    return rows


def study(config: Config) -> Iterator[dict[str, Any]]:
    """The rows for the devices of this process."""
    for name in config.models:
        model = replace(PRESETS[name], dtype="bfloat16")
        model = model if config.layers is None else replace(model, layers=config.layers)
        for part in PARTS:
            start = time.perf_counter()
            compiled = compiled_step(model, PARTS[part])
            seconds = time.perf_counter() - start
            memory = compiled.memory_analysis()
            held = memory.argument_size_in_bytes - memory.alias_size_in_bytes
            sent = collectives(compiled.as_text())
            yield {
                "model": name,
                "devices": jax.device_count(),
                "part": part,
                "compile_seconds": round(seconds, 1),
                "peak_bytes": held + memory.output_size_in_bytes + memory.temp_size_in_bytes,
                "flops": compiled.cost_analysis()["flops"],
                "collectives": sent,
                "sent_bytes": sum(x["bytes"] for x in sent.values()),
            }


def compiled_step(model: GPTConfig, extras: tuple[str, ...]) -> Any:
    """A training step with what `extras` names measured or applied, from shapes alone."""
    count = jax.device_count()
    placement = Placement("mixed", 2 if count <= 8 else 8)
    mesh = make_mesh(placement)
    assert mesh is not None
    shapes = jax.eval_shape(lambda: init_params(model, 0))
    layout = stabmon.find_layout(shapes)
    restore = optax_ext.msign(1, "attention", "newton_schulz", layout=layout)
    tx = optax.chain(
        optax.adamw(1e-3),
        restore if "msign" in extras else optax.identity(),
        optax_ext.track_delta(50, 4, select=layout.selects("qk")),
    )
    monitor = stabmon.Monitor(layout)
    tiers = tuple(name for name in extras if name != "msign")

    def step(params, state, tokens):
        def objective(params):
            logits, losses = apply(model, params, tokens[:, :-1], losses=True)
            loss = next_token_loss(logits, tokens[:, 1:])
            return loss + auxiliary_loss(model, losses), loss

        grads, loss = jax.grad(objective, has_aux=True)(params)
        updates, new = tx.update(grads, state, params)
        readings = None
        if tiers:
            given = {"grads": grads, "updates": updates, "loss": loss}
            readings = monitor(0, params, state, due=tiers, **given)
        return optax.apply_updates(params, updates), new, readings

    with jax.set_mesh(mesh):
        where, states = state_shardings(tx, shapes, placement, mesh)
        placed = lambda tree, shardings: jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
        )
        batch = jax.sharding.NamedSharding(mesh, batch_spec("mixed"))
        shape = (mesh.shape["data"], model.context + 1)
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch)
        jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(where, states, None))
        state = placed(jax.eval_shape(tx.init, shapes), states)
        return jitted.lower(placed(shapes, where), state, tokens).compile()


def collectives(text: str) -> dict[str, dict[str, int]]:
    """{kind: number of them in the program, and bytes of their results on a device}.

    A collective in a loop's body counts once.
    """
    found: dict[str, dict[str, int]] = {}
    pattern = rf"= (\(?[a-z]+\d*\[.*?) ({'|'.join(KINDS)})(?:-start)?\("
    for results, kind in re.findall(pattern, text):
        entry = found.setdefault(kind, {"count": 0, "bytes": 0})
        entry["count"] += 1
        for dtype, shape in re.findall(r"([a-z]+\d*)\[([\d,]*)\]", results):
            size = 1
            for n in filter(None, shape.split(",")):
                size *= int(n)
            entry["bytes"] += size * BYTES.get(dtype, 4)
    return found


def table(rows: list[dict[str, Any]]) -> Table:
    """Rows for the terminal, what monitors and MSign add beside the base."""
    base = {(r["model"], r["devices"]): r for r in rows if r["part"] == "base"}
    shown = Table(title="Compiled training steps")
    columns = ("model", "devices", "part", "compile", "peak a device", "sent a device")
    for column in columns:
        shown.add_column(column)
    for row in rows:
        start = base[row["model"], row["devices"]]
        share = lambda key, row=row, start=start: f"{row[key] / start[key] - 1:+.1%}"
        first = row["part"] == "base"
        shown.add_row(
            row["model"],
            str(row["devices"]),
            row["part"],
            f"{row['compile_seconds']:.1f} s",
            f"{row['peak_bytes'] / 2**20:.0f} MiB" if first else share("peak_bytes"),
            f"{row['sent_bytes'] / 2**20:.1f} MiB"
            if first
            else f"+{(row['sent_bytes'] - start['sent_bytes']) / 2**20:.1f} MiB",
        )
    return shown


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
