"""Where a training state lies: a device mesh, shardings of everything on it, batches placed on it.

Here: from a kind of parallelism to placed arrays. Which parameter axis goes to which mesh axis is
`models/sharding.py`; several processes are started and kept in agreement by `cluster.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from models.sharding import Parallelism, batch_spec, shardings


@dataclass(frozen=True)
class Placement:
    """How a run is divided over devices.

    Attributes:
        parallelism: Kind; see `models.sharding`. None: one device, no mesh.
        model_axis: Devices along the mesh axis "model"; "data" gets the rest.
    """

    parallelism: Parallelism | None = None
    model_axis: int = 1


ALONE = Placement()


def make_mesh(placement: Placement) -> Mesh | None:
    """The mesh of all devices of all processes, None for a run on one device.

    Raises:
        ValueError: `model_axis` does not divide the number of devices.
    """
    if placement.parallelism is None:
        return None
    count = jax.device_count()
    if placement.model_axis < 1 or count % placement.model_axis:
        raise ValueError(
            f"model_axis={placement.model_axis} does not divide {count} devices; write a divisor"
        )
    shape = (count // placement.model_axis, placement.model_axis)
    return jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@contextmanager
def mesh_in_force(mesh: Mesh | None) -> Iterator[Mesh | None]:
    """`jax.set_mesh`, or nothing without a mesh."""
    if mesh is None:
        yield None
        return
    with jax.set_mesh(mesh):
        yield mesh


def state_shardings(tx: Any, params: Any, placement: Placement, mesh: Mesh) -> tuple[Any, Any]:
    """Trees of `NamedSharding` for parameters (given as shapes) and the optimizer state.

    Optimizer state that stands beside a parameter lies as it does; all else is whole everywhere.
    """
    assert placement.parallelism is not None
    whole = NamedSharding(mesh, PartitionSpec())
    where = shardings(params, placement.parallelism, mesh)
    state = jax.eval_shape(tx.init, params)
    masked = lambda x: isinstance(x, optax.MaskedNode)
    beside = lambda x, sharding: x if masked(x) else sharding
    rest = lambda _: whole
    places = optax.tree.map_params(
        tx, beside, state, where, transform_non_params=rest, is_leaf=masked
    )
    return where, places


def place_batch(tokens: np.ndarray, placement: Placement, mesh: Mesh | None) -> Any:
    """Tokens (B, T) that every process has whole, as one array on the mesh; as they are without.

    Raises:
        ValueError: B does not divide over the devices of "data".
    """
    if mesh is None or placement.parallelism is None:
        return tokens
    spec = batch_spec(placement.parallelism)
    if len(spec) and len(tokens) % mesh.shape["data"]:
        raise ValueError(
            f"a batch of {len(tokens)} does not divide over {mesh.shape['data']} devices; write "
            f"--batch {mesh.shape['data'] * -(-len(tokens) // mesh.shape['data'])}"
        )
    where = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(tokens.shape, where, lambda index: tokens[index])
