"""How small arrays lie on the mesh in force: divided for work, gathered for what follows.

Only the mesh set by `jax.set_mesh` counts, and inside `jax.shard_map` there is none: whoever
divides the work himself has done so. Big arrays are left to the partitioner.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree


def mesh_in_force() -> jax.sharding.AbstractMesh | None:
    """The mesh of `jax.set_mesh`; None if there is none, it is trivial, or axes are manual."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = jax.sharding.AxisType.Manual in mesh.axis_types
    return None if mesh.empty or mesh.size == 1 or manual else mesh


def spread(whole: Callable[..., Any], *stacks: Array) -> Any:
    """`whole(*stacks)`, the first axis divided over all devices of the mesh in force.

    Small matrices that every device holds, or can soon, are decomposed once among all devices and
    not once on each; the results are gathered at once, so that what follows is local.
    """
    mesh = mesh_in_force()
    if mesh is None:
        return whole(*stacks)
    count = len(stacks[0])
    fill = lambda x: jnp.pad(x, [(0, -count % mesh.size)] + [(0, 0)] * (x.ndim - 1))
    spec = jax.P(mesh.axis_names)
    stacks = replicated(stacks)
    divided = jax.shard_map(whole, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.tree.map(lambda x: x[:count], replicated(divided(*map(fill, stacks))))


def replicated(small: PyTree[Float[Array, "..."]]) -> PyTree[Float[Array, "..."]]:
    """The same arrays, whole on every device of the mesh in force."""
    if mesh_in_force() is None:
        return small
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, jax.P()), small)


def divided_along(x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """The array with one axis divided over all devices of the mesh in force, if it divides.

    One mesh axis after the other: each that leaves another axis for this one is one all-to-all,
    where several at once may end in a gather of the whole array.
    """
    mesh = mesh_in_force()
    if mesh is None or x.shape[axis] % mesh.size:
        return x
    for end in range(1, len(mesh.axis_names) + 1):
        spec: list = [jax.P.UNCONSTRAINED] * x.ndim
        spec[axis] = mesh.axis_names[:end]
        x = jax.lax.with_sharding_constraint(x, jax.P(*spec))
    return x


def in_auto_mode(f: Callable[..., Any], like: PyTree) -> Callable[..., Any]:
    """`f` with the compiler choosing shardings, also on a mesh with explicit axes.

    There, decompositions and reshapes of sharded axes are refused. Results are sharded as `like`.
    """
    if jax.sharding.AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return f
    shardings = jax.tree.map(lambda x: jax.typeof(x).sharding, like)
    return jax.sharding.auto_axes(f, out_sharding=shardings)
