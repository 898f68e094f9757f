"""Leaves of a parameter tree by path, and which of them an argument `select=` means.

What the leaves are is `layout.py`.
"""

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

_OPTIMIZER = {"opt_state", "optimizer_state"}
Select = str | Callable[[str, Any], bool] | PyTree[bool] | None


def leaves_with_paths(tree: PyTree) -> list[tuple[str, Any]]:
    """Leaves with their `/`-separated paths, named by `path_name`."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(path_name(path), leaf) for path, leaf in flat]


def path_name(path: Sequence[Any]) -> str:
    """A key path as `layers/attn/q/kernel`.

    The `value` under a Flax variable and the nameless child of a named array are no steps.
    """
    match path[-1:]:
        case [jax.tree_util.FlattenedIndexKey()] | [jax.tree_util.GetAttrKey(name="value")]:
            path = path[:-1]
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def parameters(tree: PyTree) -> list[tuple[str, Any]]:
    """The arrays of a tree with their paths, without those of an optimizer's state.

    A tree is a dict, a `FrozenDict`, a `TrainState`, an Equinox module, an NNX module or its state,
    or anything else with arrays, or their shapes, as leaves.

    >>> import numpy as np
    >>> state = {"params": {"w": np.ones(2)}, "opt_state": {"mu": {"w": np.ones(2)}}, "f": len}
    >>> [path for path, _ in parameters(state)]
    ['params/w']
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(tree, nnx.Module):
        tree = nnx.state(tree)
    leaves = leaves_with_paths(tree)
    arrays = [(path, x) for path, x in leaves if hasattr(x, "shape") and hasattr(x, "dtype")]
    mine = [(path, x) for path, x in arrays if not _OPTIMIZER.intersection(path.split("/")[:2])]
    return mine or arrays


def selection(params: PyTree, select: Select) -> PyTree[bool]:
    """A tree of booleans: which leaves of `params` an argument `select=` means.

    Args:
        params: Parameter tree.
        select: None for every real floating-point leaf; a regular expression searched in the path;
            a predicate (path, leaf) -> bool, such as `layout.selects("attention")`; or a tree of
            booleans like `params`.

    Raises:
        ValueError: Nothing is selected, or a boolean tree has another structure.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    if callable(select):
        chosen = [bool(select(path_name(path), leaf)) for path, leaf in leaves]
    elif isinstance(select, str):
        chosen = [re.search(select, path_name(path)) is not None for path, _ in leaves]
    elif select is None:
        kinds = [getattr(leaf, "dtype", type(leaf)) for _, leaf in leaves]
        chosen = [jnp.issubdtype(kind, jnp.floating) for kind in kinds]
    else:
        flags, given = jax.tree.flatten(select)
        if given != structure:
            raise ValueError(f"select: expected a tree of booleans like {structure}, got {given}")
        chosen = [bool(flag) for flag in flags]
    if leaves and not any(chosen):
        paths = ", ".join(path_name(path) for path, _ in leaves[:12])
        raise ValueError(f"select: {select!r} matches none of {len(leaves)} leaves: {paths}")
    return jax.tree.unflatten(structure, chosen)
