"""Where each parameter axis of the model lies on a device mesh: one table, and what follows.

Here: the axes of every parameter by name, the kinds of parallelism as axis → mesh axis, and trees
of `PartitionSpec`. Not here: meshes and device placement (`jax.make_mesh`, `jax.device_put`), which
the training loop does.

    data     parameters whole everywhere, the batch divided
    fsdp     parameters divided over their D axis, on the mesh axis that divides the batch
    tensor   heads, F and the vocabulary divided over "model"
    expert   experts divided over "model", all else as data
    mixed    fsdp on "data" and tensor on "model"

Optimizer state needs no table: Optax states are sharded like their parameters where `tx.init` runs
on sharded ones.
"""

from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec

Parallelism = Literal["data", "fsdp", "tensor", "expert", "mixed"]

# Axes of each parameter, by the end of its path; L is never divided: a scan runs over it.
AXES = {
    "embed/embedding": "V D",
    "positions/embedding": "T D",
    "head/kernel": "D V",
    "q/kernel": "L D N H",
    "k/kernel": "L D K H",
    "v/kernel": "L D K H",
    "o/kernel": "L N H D",
    "q_down/kernel": "L D R",
    "kv_down/kernel": "L D R",
    "q_up/kernel": "L R N H",
    "k_up/kernel": "L R N H",
    "v_up/kernel": "L R N H",
    "q_rope/kernel": "L R N P",
    "k_rope/kernel": "L D P",
    "router/kernel": "L D E",
    "mlp/up/kernel": "L D F",
    "mlp/gate/kernel": "L D F",
    "mlp/down/kernel": "L F D",
    "shared/up/kernel": "L D F",
    "shared/gate/kernel": "L D F",
    "shared/down/kernel": "L F D",
    "moe/up/kernel": "L E D F",
    "moe/gate/kernel": "L E D F",
    "moe/down/kernel": "L E F D",
}
_TENSOR = {"N": "model", "K": "model", "F": "model", "V": "model"}
PLACES: dict[Parallelism, dict[str, str]] = {
    "data": {},
    "fsdp": {"D": "data"},
    "tensor": _TENSOR,
    "expert": {"E": "model"},
    "mixed": {"D": "data", **_TENSOR},
}


def specs(params: Any, parallelism: Parallelism, mesh: jax.sharding.Mesh) -> Any:
    """A tree of `PartitionSpec` like `params`, arrays or shapes, for a mesh of "data" and "model".

    Norm scales are whole everywhere. With experts, F is not divided where E is.

    Raises:
      ValueError: an unknown parallelism, a mesh without an axis that it needs, or an axis that does
        not divide; the message names the parameter.

    >>> mesh = jax.make_mesh((1, 1), ("data", "model"))
    >>> shape = jax.ShapeDtypeStruct((2, 8, 4, 2), "float32")
    >>> specs({"layers": {"attn": {"q": {"kernel": shape}}}}, "mixed", mesh)
    {'layers': {'attn': {'q': {'kernel': P(None, 'data', 'model', None)}}}}
    """
    if parallelism not in PLACES:
        raise ValueError(f"parallelism={parallelism!r} is not offered; one of {[*PLACES]}")
    places = PLACES[parallelism]
    if missing := set(places.values()) - set(mesh.axis_names):
        raise ValueError(
            f"parallelism={parallelism!r} needs the mesh axes {sorted(missing)}, the mesh has "
            f"{mesh.axis_names}; write jax.make_mesh((…, …), ('data', 'model'))"
        )

    def spec(key: Any, leaf: Any) -> PartitionSpec:
        path = jax.tree_util.keystr(key, simple=True, separator="/")
        axes = next((a for end, a in AXES.items() if f"/{path}".endswith(f"/{end}")), None)
        if axes is None:
            return PartitionSpec()
        names: list[str | None] = []
        for axis, size in zip(axes.split(), leaf.shape, strict=True):
            name = places.get(axis)
            if name in names:  # one mesh axis divides one axis: E before F
                name = None
            if name is not None and size % mesh.shape[name]:
                raise ValueError(
                    f"{path}: its axis {axis} of {size} does not divide over {mesh.shape[name]} "
                    f"devices of mesh axis {name!r}; choose another mesh or parallelism"
                )
            names.append(name)
        return PartitionSpec(*names)

    return jax.tree_util.tree_map_with_path(spec, params)


def shardings(params: Any, parallelism: Parallelism, mesh: jax.sharding.Mesh) -> Any:
    """`specs` as a tree of `NamedSharding`, for `jax.device_put` and `out_shardings`."""
    place = lambda spec: jax.sharding.NamedSharding(mesh, spec)
    tree = specs(params, parallelism, mesh)
    return jax.tree.map(place, tree, is_leaf=lambda x: isinstance(x, PartitionSpec))


def batch_spec(parallelism: Parallelism) -> PartitionSpec:
    """Of tokens (B, T): divided over "data", but whole for tensor and expert parallelism."""
    return PartitionSpec("data") if parallelism in ("data", "fsdp", "mixed") else PartitionSpec()
