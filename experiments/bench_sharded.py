"""What does MSign cost on a mesh, its matrices spread over the devices or restored on each?

    python -m experiments.bench_sharded          a minute on two cores

Eight virtual CPU devices share the machine's cores, so what every device repeats costs eight times:
the ratio says what spreading saves, not how fast a real mesh is. Parameters are divided over D
("data", 4 devices) and over heads and F ("model", 2).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro
from rich.console import Console

from experiments.loop.placement import Placement, make_mesh, mesh_in_force, state_shardings
from experiments.support.timing import Row, as_table, interleaved
from models.config import GPTConfig
from models.gpt import init_params
from optax_ext._msign import msign


@dataclass(frozen=True)
class Config:
    """What to measure.

    Attributes:
        quick: A small model and few rounds, to see that it runs.
    """

    quick: bool = False


def main(config: Config) -> list[Row]:
    """One application on 4 × 2 devices, both ways, printed as a table."""
    width = 64 if config.quick else 256
    model = GPTConfig(layers=8, model=width, heads=8, context=16, vocabulary=64)
    placement = Placement("mixed", 2)
    mesh = make_mesh(placement)
    with mesh_in_force(mesh):
        whole = jax.sharding.NamedSharding(mesh, jax.P()) if mesh is not None else None
        ways = {
            "spread": application(model, placement, msign(1, "attention", "newton_schulz")),
            "repeated": application(
                model, placement, msign(1, "attention", "newton_schulz", sharding=whole)
            ),
        }
        seconds = interleaved(ways, 3 if config.quick else 9)
    row = Row(
        f"one MSign application on 4 × 2 virtual devices, 32 matrices of {width}², each restored "
        "on one device against on every device",
        "",
        f"{seconds['repeated'] / seconds['spread']:.1f}× faster",
    )
    Console().print(as_table("MSign on a mesh", [row]))
    return [row]


def application(model: GPTConfig, placement: Placement, tx: Any) -> Callable[[], Any]:
    """A function that applies `tx` to sharded parameters once more."""
    mesh = make_mesh(placement)
    assert mesh is not None
    shapes = jax.eval_shape(lambda: init_params(model, 0))
    where, places = state_shardings(tx, shapes, placement, mesh)
    params = jax.device_put(init_params(model, 0), where)
    state = jax.device_put(tx.init(params), places)
    updates = jax.device_put(jax.tree.map(jnp.zeros_like, params), where)

    @jax.jit
    def restore(updates, state, params):
        updates, state = tx.update(updates, state, params)
        return optax.apply_updates(params, updates), state

    return lambda: restore(updates, state, params)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main(tyro.cli(Config, description=__doc__))
