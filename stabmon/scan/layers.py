"""Which leaves make a layer, and how one layer at a time is read from a checkpoint.

What lives here: `Plan`, a layout found from shapes alone and the pieces of each layer. What does
not: file formats (`stabmon.checkpoints`), what is measured (`health`).

A layer is read as a tree of its own, under the same paths for every layer, so that what measures
one layer is compiled once for all that look alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from stabmon.checkpoints.source import Checkpoint, numpy_dtype
from stabmon.layout import LIBRARIES, Layout
from stabmon.layout.axes import tokens
from stabmon.layout.find import best_fit
from stabmon.layout.match import Found, match
from stabmon.layout.rules import SCALES
from stabmon.layout.suspects import refuse_suspects

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
        outer: Embedding, positions and head, as far as the layout has them.
        found: All that the layout takes.
    """

    checkpoint: Checkpoint
    layout: Layout
    layers: dict[int, tuple[Piece, ...]]
    outer: tuple[Piece, ...]
    found: tuple[Found, ...]

    @property
    def vectors(self) -> tuple[str, ...]:
        """Paths of leaves that are in no matrix: norm scales, biases, what no rule takes."""
        matrices = {x.path for x in self.found if not SCALES.keys() >= {*x.rule.roles}}
        return tuple(path for path in self.checkpoint.leaves if path not in matrices)

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
        return {piece.name: self.read(piece) for piece in self.layers[layer]}

    def read(self, piece: Piece) -> np.ndarray:
        """Reads a leaf, or one layer of it.

        Args:
            piece: One of `layers` or `outer`.
        """
        axis, i = piece.axis, piece.index
        read = self.checkpoint.read
        return read(piece.path) if axis is None else read(piece.path, axis, i, i + 1)


def make_plan(
    checkpoint: Checkpoint,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    layouts: Sequence[Layout] = LIBRARIES,
) -> Plan:
    """Finds the layout of a checkpoint from its shapes, and what makes each layer.

    Args:
        checkpoint: A checkpoint; nothing of it is read.
        heads: Query heads N, where shapes do not tell; None: as its `config.json` says.
        kv_heads: Key-value heads K, likewise.
        layouts: Layouts to choose from.

    Raises:
        ValueError: No layout fits, or one fits only with `heads`; or a leaf beside queries and keys
            is not explained.
    """
    tree = {
        path: jax.ShapeDtypeStruct(leaf.shape, numpy_dtype(leaf.dtype))
        for path, leaf in checkpoint.leaves.items()
    }
    given = {"n": heads or checkpoint.heads, "k": kv_heads or checkpoint.kv_heads}
    try:
        sizes = {axis: size for axis, size in given.items() if size is not None}
        layout = best_fit([*tree.items()], layouts, sizes)
        found, _ = match(layout.rules, tree.items())
        refuse_suspects(layout.name, layout.ignores, found, tree.items())
    except ValueError as error:
        asks = "heads=" in str(error)
        remedy = "--heads, --kv-heads" if asks else "--layout with a file of rules or ignores"
        raise ValueError(f"{checkpoint.path}: {error}; for stabmon scan: {remedy}") from error
    # Several rules may take parts of one leaf; the longest path fits all of them.
    chosen: dict[str, Found] = {}
    for item in found:
        known = chosen.get(item.path)
        if known is None or len(item.rule.path) > len(known.rule.path):
            chosen[item.path] = item
    layers: dict[int, list[Piece]] = {}
    for item in chosen.values():
        for i, layer in enumerate(item.layers):
            layers.setdefault(layer, []).append(_piece(item, i))
    return Plan(
        checkpoint,
        layout,
        {layer: tuple(layers[layer]) for layer in sorted(layers)},
        tuple(_piece(item, 0) for item in chosen.values() if not item.layers),
        tuple(found),
    )


def _piece(item: Found, index: int) -> Piece:
    """A leaf, or one of its layers."""
    name = item.rule.path.replace("?", "x")
    for number in (0, *item.place[1:]):
        name = name.replace("*", str(number), 1)
    axis = tokens(item.rule.left).index("l") if item.rule.stacked else None
    return Piece(item.path, name, axis, index)
