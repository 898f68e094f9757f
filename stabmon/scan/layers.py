"""Which leaves make a layer, and how one layer at a time is read from a checkpoint.

What lives here: `Plan`, a layout found from shapes alone and the pieces of each layer. What does
not: file formats (`stabmon.checkpoints`), what is measured (`health`).

A layer is read as a tree of its own, under the same paths for every layer, so that what measures
one layer is compiled once for all that look alike.
"""

from dataclasses import dataclass

import jax
import numpy as np

from stabmon.checkpoints.source import Checkpoint, numpy_dtype
from stabmon.layout import Layout, find_layout
from stabmon.layout.axes import tokens
from stabmon.layout.match import Found, match

Tree = dict[str, np.ndarray]


@dataclass(frozen=True)
class Piece:
    """A leaf, or one layer of a leaf that holds all of them.

    Attributes:
        path: Where it lies in the checkpoint.
        name: Where it lies in the tree of its layer.
        axis: The layer axis, None where the leaf is one layer's.
        index: Place on it.
    """

    path: str
    name: str
    axis: int | None
    index: int


@dataclass(frozen=True)
class Plan:
    """How to go through one checkpoint.

    Attributes:
        checkpoint: The checkpoint.
        layout: Where its matrices lie.
        layers: Layer number → its pieces.
        rest: Paths of leaves of which the layout takes nothing.
    """

    checkpoint: Checkpoint
    layout: Layout
    layers: dict[int, tuple[Piece, ...]]
    rest: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that are read in all."""
        return sum(leaf.nbytes for leaf in self.checkpoint.leaves.values())

    def size(self, layer: int) -> int:
        """Returns the bytes of one layer, as stored.

        Args:
            layer: A key of `layers`.
        """
        total = 0
        for piece in self.layers[layer]:
            leaf = self.checkpoint.leaves[piece.path]
            total += leaf.nbytes // (1 if piece.axis is None else leaf.shape[piece.axis])
        return total

    def load(self, layer: int) -> Tree:
        """Reads one layer: its matrices, and the norm scales that belong to them.

        Args:
            layer: A key of `layers`.

        Raises:
            ValueError: A file ends before an array does.
        """
        read = self.checkpoint.read
        return {
            piece.name: read(piece.path)
            if piece.axis is None
            else read(piece.path, piece.axis, piece.index, piece.index + 1)
            for piece in self.layers[layer]
        }


def make_plan(
    checkpoint: Checkpoint, *, heads: int | None = None, kv_heads: int | None = None
) -> Plan:
    """Finds the layout of a checkpoint from its shapes, and what makes each layer.

    Args:
        checkpoint: A checkpoint; nothing of it is read.
        heads: Query heads N, where shapes do not tell; None: as its `config.json` says.
        kv_heads: Key-value heads K, likewise.

    Raises:
        ValueError: No layout fits, or one fits only with `heads`.
    """
    tree = {
        path: jax.ShapeDtypeStruct(leaf.shape, numpy_dtype(leaf.dtype))
        for path, leaf in checkpoint.leaves.items()
    }
    try:
        layout = find_layout(
            tree, heads=heads or checkpoint.heads, kv_heads=kv_heads or checkpoint.kv_heads
        )
    except ValueError as error:
        remedy = "; for stabmon scan: --heads, --kv-heads" if "heads=" in str(error) else ""
        raise ValueError(f"{checkpoint.path}: {error}{remedy}") from error
    found, _ = match(layout.rules, tree.items())
    # Several rules may take parts of one leaf; the longest path fits all of them.
    chosen: dict[str, Found] = {}
    for item in found:
        known = chosen.get(item.path)
        if known is None or len(item.rule.path) > len(known.rule.path):
            chosen[item.path] = item
    layers: dict[int, list[Piece]] = {}
    for item in chosen.values():
        for layer, piece in _pieces(item):
            layers.setdefault(layer, []).append(piece)
    return Plan(
        checkpoint,
        layout,
        {layer: tuple(layers[layer]) for layer in sorted(layers)},
        tuple(path for path in tree if path not in chosen),
    )


def _pieces(item: Found) -> list[tuple[int, Piece]]:
    """The layers of one leaf."""
    if item.place:
        name = item.rule.path
        for number in (0, *item.place[1:]):
            name = name.replace("*", str(number), 1)
        return [(item.place[0], Piece(item.path, name, None, 0))]
    axis = tokens(item.rule.left).index("l")
    count = item.shape[axis]
    return [(layer, Piece(item.path, item.rule.path, axis, layer)) for layer in range(count)]
