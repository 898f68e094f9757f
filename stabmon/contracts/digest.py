"""The few numbers of each leaf that contracts are about, taken in one pass inside the jitted step.

What they say is judged on the host, in the files of contracts. Nothing here is an alarm.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PyTree

from stabmon.contracts.bits import bits
from stabmon.contracts.parts import Leaf, find_leaves, owner, vocabulary
from stabmon.layout import Layout, leaves_with_paths
from stabmon.layout.paths import parameters, path_name
from stabmon.linalg.mesh import replicated

# A float32 holds whole numbers up to 2²⁴ exactly.
_SHIFT = 8
# Rows of a batch that are told apart.
_ROWS = 256
COUNTS = ("count", "step", "gradient_step", "delta_step", "iteration")


class Form(NamedTuple):
    """What the numbers of a digest are; static, so that it can be compared and hashed.

    Attributes:
        leaves: The parameters.
        blocks: (quantity, path, how many numbers) in their order.
        zeroing: Whether the optimizer sets the updates of some leaves to zero.
        vocabulary: Tokens that the model knows, None where that is not known.
    """

    leaves: tuple[Leaf, ...] = ()
    blocks: tuple[tuple[str, str, int], ...] = ()
    zeroing: bool = False
    vocabulary: int | None = None

    def unpack(self, row: np.ndarray) -> dict[tuple[str, str], np.ndarray]:
        """Returns the numbers by (quantity, path).

        Args:
            row: What `digest` returned, on the host.
        """
        ends = np.cumsum([size for _, _, size in self.blocks])
        pieces = np.split(np.asarray(row), ends[:-1])
        names = [(quantity, path) for quantity, path, _ in self.blocks]
        return dict(zip(names, pieces, strict=True))


def digest(
    layout: Layout,
    params: PyTree,
    opt_state: PyTree = None,
    grads: PyTree | None = None,
    updates: PyTree | None = None,
    loss: ArrayLike | None = None,
    batch: PyTree | None = None,
    seen: Mapping[str, Any] | None = None,
    own: tuple[type, ...] = (),
) -> tuple[Float[Array, " numbers"], Form]:
    """Returns the numbers in a float32 row, and what they are. Jit-able.

    Of each part of a leaf (a layer, an expert): "gradient" and "update", the largest absolute
    entry; "size", the root mean square of the update; "bits", a digest of the parameter; "changed",
    of low-precision parameters the fraction of entries with an update that it changes. Of moments
    "bits" by the name of their tree, and of float32 ones the fraction of entries that round to the
    parameter. Whole: "count", "rate", "loss", "rows" of the batch, "rest" of the state.

    Args:
        layout: Where the matrices lie.
        params: Parameters before the update.
        opt_state: Optimizer state before the update.
        grads: Gradients.
        updates: The optimizer's updates.
        loss: Scalar loss.
        batch: What the step trains on; leaves with the sequences on their first axis.
        seen: What left the forward pass, of which only dtypes are read; shapes will do.
        own: Types of states that are not the optimizer's, such as rings of snapshots.

    Example:
        >>> from stabmon.layout.rules import Rule
        >>> layout = Layout("mine", (Rule("q", "layers/q", "l d n h -> l n d h"),))
        >>> params = {"layers": {"q": jnp.ones((2, 4, 1, 4))}}
        >>> row, form = digest(layout, params, grads=params)
        >>> form.unpack(np.asarray(row))["gradient", "layers/q"].tolist()
        [1.0, 1.0]
    """
    leaves = find_leaves(layout, params)
    row = _Row()
    values = dict(parameters(params))
    given = {"gradient": grads, "update": updates}
    trees = {name: dict(leaves_with_paths(tree)) for name, tree in given.items()}
    for leaf in leaves:
        x = values[leaf.path]
        row.add("bits", leaf.path, _short(bits(x, leaf.axes)))
        for name, tree in trees.items():
            if leaf.path in tree and _is_float(tree[leaf.path]):
                row.add(name, leaf.path, _reduce(jnp.max, jnp.abs(tree[leaf.path]), leaf))
        update = trees["update"].get(leaf.path)
        if update is not None and _is_float(update):
            square = jnp.square(update.astype(jnp.float32))
            row.add("size", leaf.path, jnp.sqrt(_reduce(jnp.mean, square, leaf)))
        if update is not None and leaf.low and _is_float(update):
            row.add("changed", leaf.path, _changed(x, update, leaf))
        if not leaf.axes and len(leaf.shape) == 1 and leaf.shape[0] > 1 and _is_float(x):
            row.add("spread", leaf.path, (jnp.max(x) - jnp.min(x)).astype(jnp.float32))
    zeroing = _state(row, opt_state, leaves, values, own)
    if loss is not None:
        row.add("loss", "loss", jnp.asarray(loss).astype(jnp.float32))
    if batch is not None:
        row.add("rows", "batch", _rows(batch))
    for name, tree in {"parameter": values, **trees}.items():
        if tree:
            codes = [dtype_code(tree[x.path]) if x.path in tree else 0 for x in leaves]
            row.add("types", name, jnp.asarray(codes, jnp.float32))
    for name, x in (seen or {}).items():
        row.add("type", name, jnp.asarray(dtype_code(x), jnp.float32))
    packed, blocks = row.packed()
    return packed, Form(tuple(leaves), blocks, zeroing, vocabulary(layout, params))


def dtype_code(x: Any) -> int:
    """Returns a number that stands for the dtype of `x`; `dtype_name` is its inverse.

    Args:
        x: An array.
    """
    return zlib.crc32(str(x.dtype).encode()) & 0xFFFFFF


def dtype_name(code: float | int) -> str:
    """Returns the dtype that a number stands for.

    Args:
        code: From `dtype_code`.

    Example:
        >>> dtype_name(dtype_code(jnp.zeros(2, jnp.bfloat16)))
        'bfloat16'
    """
    names = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
    known = {zlib.crc32(name.encode()) & 0xFFFFFF: name for name in names}
    return known.get(int(code), "another dtype")


class _Row:
    """Numbers as they come."""

    def __init__(self) -> None:
        self._blocks: list[tuple[str, str, int]] = []
        self._pieces: list[Array] = []

    def add(self, quantity: str, path: str, x: Array) -> None:
        piece = x.reshape(-1)
        self._blocks.append((quantity, path, piece.shape[0]))
        self._pieces.append(piece.astype(jnp.float32))

    def packed(self) -> tuple[Array, tuple[tuple[str, str, int], ...]]:
        return replicated(jnp.concatenate(self._pieces)), tuple(self._blocks)


def _state(
    row: _Row,
    opt_state: PyTree,
    leaves: Sequence[Leaf],
    values: Mapping[str, Any],
    own: tuple[type, ...],
) -> bool:
    """Add moments, counts and the rest; whether somewhere updates of some leaves are zeroed."""
    is_own = lambda x: isinstance(x, own)
    flat, _ = jax.tree_util.tree_flatten_with_path(opt_state, is_leaf=is_own)
    found = []
    for place, x in flat:
        if not is_own(x):
            found.append((path_name(place), x))
        elif hasattr(x, "delta_step"):
            found.append((f"{path_name(place)}/delta_step", x.delta_step))
    paths = {path for path, _ in found}
    for path, x in found:
        x = jnp.asarray(x)
        leaf = owner(path, x.shape, leaves) if x.ndim else None
        name = path.rpartition("/")[2].removesuffix("/value")
        if leaf is not None:
            kind = path[: -len(leaf.path) - 1]
            row.add(f"bits of {kind}", leaf.path, _short(bits(x, leaf.axes)))
            if leaf.low and x.dtype == jnp.float32:
                same = x.astype(leaf.dtype) == values[leaf.path]
                row.add(
                    f"copy of {kind}", leaf.path, _reduce(jnp.mean, same.astype(jnp.float32), leaf)
                )
        elif x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.integer):
            plateau = path.removesuffix(name) + "plateau_count" in paths
            if name in COUNTS and not plateau:
                row.add("count", path, x)
        elif x.ndim == 0 and "learning_rate" in path and _is_float(x):
            row.add("rate", path, x)
        elif x.size:
            row.add("rest", path, _short(bits(x)))
    return any(_zeroes(x) for x in jax.tree.leaves(opt_state, is_leaf=_is_masked))


def _is_masked(x: Any) -> bool:
    return isinstance(x, optax.MaskedState)


def _zeroes(x: Any) -> bool:
    """Whether a node masks a transform without a state, as `set_to_zero` is."""
    return _is_masked(x) and not jax.tree.leaves(x.inner_state)


def _short(x: Array) -> Array:
    """24 bits of a digest, as a float32 holds them."""
    return (x >> jnp.uint32(_SHIFT)).astype(jnp.float32)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and x.size > 0


def _reduce(reduction: Callable[..., Array], x: Array, leaf: Leaf) -> Array:
    """A reduction over all axes but those that tell parts apart."""
    rest = tuple(axis for axis in range(x.ndim) if axis not in leaf.axes)
    return reduction(x, axis=rest).astype(jnp.float32)


def _changed(x: Array, update: Array, leaf: Leaf) -> Array:
    """Of the entries with an update, the fraction that it changes; 1 without any."""
    wide = x.astype(jnp.float32) + update.astype(jnp.float32)
    moved = (wide.astype(x.dtype) != x).astype(jnp.float32)
    asked = (update != 0).astype(jnp.float32)
    total = _reduce(jnp.sum, asked, leaf)
    ones = jnp.ones_like(total)
    return jnp.where(total > 0, _reduce(jnp.sum, moved, leaf) / jnp.maximum(total, ones), ones)


def _rows(batch: PyTree) -> Array:
    """A digest of each of the first rows of a batch, all its leaves together."""
    total = jnp.zeros((), jnp.uint32)
    for i, x in enumerate(jax.tree.leaves(batch)):
        if jnp.ndim(x):
            x = jnp.asarray(x)[:_ROWS]
            total = total + bits(x, (0,)) * jnp.uint32(2 * i + 1)
    return _short(jnp.atleast_1d(total))
