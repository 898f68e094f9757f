"""What do the monitors and MSign cost on a pod, as far as a compiler can tell?

    python -m experiments.scale_study                 8, 64 and 256 devices, both models
    python -m experiments.scale_study --devices 8     two minutes

Question: the training step of LLaMA-1B and of the 3B mixture of experts, compiled ahead of time
from abstract shapes for virtual CPU devices (nothing runs): how much do a sampled step's monitors
and one MSign application add to its operations, to the peak memory of a device, to what devices
send each other, and how long does each program take to compile?

FSDP × tensor parallel on a mesh of data × model, 8 devices along "model" but for 8 in all (2); one
sequence of 2,048 tokens for each group of data-parallel devices. As in the training loop, monitors
are a program of their own beside the step, symptoms and MSign are within it; the first step waits
for its own program alone, the others are compiled while it runs (`ahead.py`). Every number is read
from the compiled programs: XLA's cost and memory analyses, and the shapes of their collectives (a
loop's body is counted once). Each device count needs a process of its own, since a backend's
devices are set once. Tables: `experiments/README.md`;
figure: `runs/scale_study.html`.
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
import plotly.graph_objects as go
import tyro

import optax_ext
import stabmon
from experiments.loop.checkpoints import TrainState
from experiments.loop.losses import next_token_loss
from experiments.loop.measuring import make_measure
from experiments.loop.placement import Placement, make_mesh, state_shardings
from experiments.support.ending import Result, ended
from experiments.support.figures import colour, line, panels
from models.config import GPTConfig
from models.gpt import apply, init_params
from models.moe import auxiliary_loss
from models.presets import PRESETS
from models.sharding import batch_spec

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
MONITORS = ("delta", "activations", "weights")
PARTS = ("base", "monitors", "symptoms", "msign")
DASHES = ("solid", "dash", "dot")
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


def main(config: Config) -> Result:
    """One row for each model, device count and part, each count in a process of its own."""
    rows = []
    for count in config.devices:
        program = (
            "import json, experiments\n"
            "from experiments.scale_study import Config, study\n"
            f"for row in study(Config({config.models!r}, (), {config.layers!r})):\n"
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
    return ended(config.out, rows, headline, tables, figure)


def study(config: Config) -> Iterator[dict[str, Any]]:
    """The rows for the devices of this process."""
    for name in config.models:
        model = replace(PRESETS[name], dtype="bfloat16")
        model = model if config.layers is None else replace(model, layers=config.layers)
        compile_program(model, "base")  # what is slow the first time only
        for part in PARTS:
            start = time.perf_counter()
            compiled = compile_program(model, part)
            seconds = time.perf_counter() - start
            memory = compiled.memory_analysis()
            held = memory.argument_size_in_bytes - memory.alias_size_in_bytes
            sent = collectives(compiled.as_text())
            yield {
                "model": name,
                "devices": jax.device_count(),
                "part": part,
                "compile_seconds": round(seconds, 2),
                "peak_bytes": held + memory.output_size_in_bytes + memory.temp_size_in_bytes,
                "flops": compiled.cost_analysis()["flops"],
                "collectives": sent,
                "sent_bytes": sum(x["bytes"] for x in sent.values()),
            }


def compile_program(model: GPTConfig, part: str) -> Any:
    """One of `PARTS`, compiled from shapes alone."""
    count = jax.device_count()
    placement = Placement("mixed", 2 if count <= 8 else 8)
    mesh = make_mesh(placement)
    assert mesh is not None
    shapes = jax.eval_shape(lambda: init_params(model, 0))
    layout = stabmon.find_layout(shapes)
    restore = optax_ext.msign(1, "attention", "newton_schulz", layout=layout)
    tx = optax.chain(
        optax.adamw(1e-3),
        restore if part == "msign" else optax.identity(),
        optax_ext.track_delta(50, 4, select=layout.selects("qk")),
    )
    monitor = stabmon.Monitor(layout)

    def step(state, tokens):
        params, opt_state = state.params, state.opt_state

        def objective(params):
            logits, losses = apply(model, params, tokens[:, :-1], losses=True)
            loss = next_token_loss(logits, tokens[:, 1:])
            return loss + auxiliary_loss(model, losses), loss

        grads, loss = jax.grad(objective, has_aux=True)(params)
        given = {"msign_due": True} if part == "msign" else {}
        updates, new = tx.update(grads, opt_state, params, **given)
        readings = None
        if part == "symptoms":
            given = {"grads": grads, "updates": updates, "loss": loss}
            readings = monitor(state.step, params, opt_state, due=("symptoms",), **given)
        return TrainState(state.step + 1, optax.apply_updates(params, updates), new), readings

    with jax.set_mesh(mesh):
        where, states = state_shardings(tx, shapes, placement, mesh)
        whole = jax.sharding.NamedSharding(mesh, jax.P())
        places: Any = TrainState(*[whole, where, states])
        placed = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
        begun = TrainState(jnp.zeros((), jnp.int32), shapes, jax.eval_shape(tx.init, shapes))
        state = jax.tree.map(placed, begun, places)
        batch = jax.sharding.NamedSharding(mesh, batch_spec("mixed"))
        tokens = placed(
            jax.ShapeDtypeStruct((mesh.shape["data"], model.context + 1), jnp.int32), batch
        )
        if part == "monitors":
            measure: Any = make_measure(model, monitor, 4)
            return measure.lower(state, tokens, due=MONITORS).compile()
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(places, None))
        return jitted.lower(state, tokens).compile()


def collectives(text: str) -> dict[str, dict[str, int]]:
    """{kind: number of them in the program, bytes of all results and of the largest, on a device}.

    A collective in a loop's body counts once.
    """
    found: dict[str, dict[str, int]] = {}
    pattern = rf"= (\(?[a-z]+\d*\[.*?) ({'|'.join(KINDS)})(?:-start)?\("
    for results, kind in re.findall(pattern, text):
        entry = found.setdefault(kind, {"count": 0, "bytes": 0, "largest": 0})
        entry["count"] += 1
        for dtype, shape in re.findall(r"([a-z]+\d*)\[([\d,]*)\]", results):
            size = BYTES.get(dtype, 4)
            for n in filter(None, shape.split(",")):
                size *= int(n)
            entry["bytes"] += size
            entry["largest"] = max(entry["largest"], size)
    return found


def tables(rows: list[dict[str, Any]]) -> str:
    """Markdown: memory and traffic of each program, then the compiler's time."""
    by = _by_part(rows)
    programs = list(dict.fromkeys((r["model"], r["devices"]) for r in rows))
    mib = lambda size: f"{size / 2**20:,.0f} MiB"
    lines = [
        "| model | devices | peak, base | sampled | MSign | sent, base (one layer) "
        "| sampled, besides | MSign, besides |",
        "|---" * 8 + "|",
    ]
    times = [
        "| model | devices | compiling the step | monitors | with symptoms | with MSign |",
        "|---" * 6 + "|",
    ]
    for name, count in programs:
        part = {part: by[name, count, part] for part in PARTS}
        base, sent = part["base"]["peak_bytes"], part["base"]["sent_bytes"]
        sampled = part["symptoms"]["sent_bytes"] - sent + part["monitors"]["sent_bytes"]
        cells = [
            mib(base),
            f"{_sampled_peak(part) / base - 1:+.1%}",
            f"{part['msign']['peak_bytes'] / base - 1:+.1%}",
            mib(sent),
            mib(sampled),
            mib(part["msign"]["sent_bytes"] - sent),
        ]
        lines.append(f"| {name} | {count} | " + " | ".join(cells) + " |")
        seconds = [f"{part[x]['compile_seconds']:.1f} s" for x in PARTS]
        times.append(f"| {name} | {count} | " + " | ".join(seconds) + " |")
    return "\n".join(lines) + "\n\n" + "\n".join(times)


def headline(rows: list[dict[str, Any]]) -> str:
    """One line: what the monitors add at the largest number of devices."""
    largest = max(r["devices"] for r in rows)
    peaks, seconds = [], {part: [] for part in PARTS}
    for name in dict.fromkeys(r["model"] for r in rows):
        part = {r["part"]: r for r in rows if r["model"] == name and r["devices"] == largest}
        peaks.append(_sampled_peak(part) / part["base"]["peak_bytes"] - 1)
        for x in PARTS:
            seconds[x].append(f"{part[x]['compile_seconds']:.1f}")
    met = "met" if max(peaks) < 0.05 else "not met"
    return (
        f"peak memory {met}: {max(peaks):+.1%} at {largest} devices [< 5 %]; compiling the step "
        f"takes {', '.join(seconds['base'])} s, the monitors {', '.join(seconds['monitors'])} s, "
        "in the background"
    )


def figure(rows: list[dict[str, Any]]) -> go.Figure:
    """What devices send each other, and how long a program takes to compile, by devices."""
    drawn = panels(("sent by a device besides the base step, MiB", "compile time, s"), columns=2)
    shown: set[str] = set()
    names, value = list(dict.fromkeys(r["model"] for r in rows)), _by_part(rows)
    for i, (name, part) in enumerate((name, part) for name in names for part in PARTS):
        counts = [r["devices"] for r in rows if (r["model"], r["part"]) == (name, part)]
        base = 0 if part == "monitors" else 1
        sent = [
            (value[name, n, part]["sent_bytes"] - base * value[name, n, "base"]["sent_bytes"])
            / 2**20
            for n in counts
        ]
        seconds = [value[name, n, part]["compile_seconds"] for n in counts]
        for column, y in ((1, sent), (2, seconds)):
            label, dash = f"{name}, {part}", DASHES[names.index(name) % 3]
            style = {"color": colour(i % len(PARTS)), "dash": dash, "width": 2}
            if (column, part) != (1, "base"):
                drawn.add_trace(line((counts, y), label, label, shown, **style), row=1, col=column)
    drawn.update_xaxes(title="devices", type="log", tickvals=sorted({r["devices"] for r in rows}))
    return drawn


def _by_part(rows: list[dict[str, Any]]) -> dict[tuple[str, int, str], dict[str, Any]]:
    return {(r["model"], r["devices"], r["part"]): r for r in rows}


def _sampled_peak(part: dict[str, dict[str, Any]]) -> float:
    """The larger of the peaks of a sampled step's programs, which run one after the other."""
    return max(part[name]["peak_bytes"] for name in ("base", "monitors", "symptoms"))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
