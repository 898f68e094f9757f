"""Matrices of equal shape from many leaves as one stack, and their distribution over a period.

Static data and the gathering and scattering that follows from it. The restoration itself is
`_restore.py`, the transform `_msign.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from optax_ext._matrix_view import MatrixView

# By place in the tree.
Leaves = dict[int, Array]


class Piece(NamedTuple):
    """Matrices `start` … `start + size − 1` of one group.

    The first `stale` belong to the piece before: the last piece of a group reaches back, so that
    all its pieces have one size.
    """

    group: int
    start: int
    size: int
    stale: int


@dataclass(frozen=True)
class Group:
    """Matrices of equal shape and dtype.

    Attributes:
        views: The leaves that hold them.
        starts: Where the matrices of each view start in the per-matrix state.
    """

    views: tuple[MatrixView, ...]
    starts: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of matrices."""
        return sum(view.count for view in self.views)

    @property
    def interleaved(self) -> bool:
        """Whether the stack runs over views first, then over places.

        So it does where all leaves hold equally many: then a stack of leaves that are sharded over
        layers is sharded over layers too, and needs no communication.
        """
        return len({view.count for view in self.views}) == 1

    @property
    def order(self) -> list[tuple[int, int]]:
        """(view, place) of each matrix of the stack."""
        pairs = [(k, i) for k, view in enumerate(self.views) for i in range(view.count)]
        return sorted(pairs, key=lambda pair: pair[::-1]) if self.interleaved else pairs

    @property
    def rows(self) -> Int[np.ndarray, " count"]:
        """Where each matrix of the stack stands in the per-matrix state."""
        return np.asarray([self.starts[k] + i for k, i in self.order])

    def split(self, leaves: Leaves) -> Float[Array, "count m n"]:
        """All matrices of the group as one stack."""
        parts = [view.split(leaves[view.index]) for view in self.views]
        if not self.interleaved:
            return jnp.concatenate(parts)
        return jnp.stack(parts, axis=1).reshape(self.count, *parts[0].shape[1:])

    def join(self, leaves: Leaves, stack: Float[Array, "count m n"]) -> Leaves:
        """The leaves with all matrices of the group replaced."""
        if self.interleaved:
            by_view = stack.reshape(-1, len(self.views), *stack.shape[1:])
            parts = [by_view[:, k] for k in range(len(self.views))]
        else:
            ends = np.cumsum([view.count for view in self.views])[:-1].tolist()
            parts = jnp.split(stack, ends)
        leaves = dict(leaves)
        for view, part in zip(self.views, parts, strict=True):
            leaves[view.index] = view.join(part).astype(leaves[view.index].dtype)
        return leaves

    def take(self, leaves: Leaves, positions: Int[Array, " size"]) -> Float[Array, "size m n"]:
        """The matrices at some positions; the other leaves are not read."""
        branches = [
            lambda place, view=view: view.take(leaves[view.index], place) for view in self.views
        ]
        holder, place = self._places
        one = lambda i: jax.lax.switch(holder[i], branches, place[i])
        return jax.lax.map(one, positions)

    def put(
        self, leaves: Leaves, positions: Int[Array, " size"], stack: Float[Array, "size m n"]
    ) -> Leaves:
        """The leaves with the matrices at some positions replaced."""
        holder, place = self._places

        def write(j, held):
            branches = [
                lambda matrix, place, held, k=k, view=view: [
                    *held[:k],
                    view.put(held[k], place, matrix),
                    *held[k + 1 :],
                ]
                for k, view in enumerate(self.views)
            ]
            i = positions[j]
            return jax.lax.switch(holder[i], branches, stack[j], place[i], held)

        held = [leaves[view.index] for view in self.views]
        held = jax.lax.fori_loop(0, stack.shape[0], write, held)
        leaves = dict(leaves)
        for view, leaf in zip(self.views, held, strict=True):
            leaves[view.index] = leaf
        return leaves

    @property
    def _places(self) -> tuple[Int[Array, " count"], Int[Array, " count"]]:
        """Which view holds each matrix, and at which place."""
        holder, place = zip(*self.order, strict=True)
        return jnp.asarray(holder, jnp.int32), jnp.asarray(place, jnp.int32)


def group(views: Sequence[MatrixView], keys: Sequence[tuple]) -> tuple[Group, ...]:
    """Groups of views with equal keys, in order of first appearance."""
    firsts = np.cumsum([0, *(view.count for view in views)]).tolist()
    found: dict[tuple, tuple[list[MatrixView], list[int]]] = {}
    for view, key, first in zip(views, keys, firsts, strict=False):
        members, starts = found.setdefault(key, ([], []))
        members.append(view)
        starts.append(first)
    return tuple(Group(tuple(members), tuple(starts)) for members, starts in found.values())


def pieces(counts: Sequence[int], period: int) -> list[Piece]:
    """Cuts groups of the given sizes into as few as `period` pieces, each as small as possible.

    >>> [tuple(piece) for piece in pieces([4, 3], 4)]
    [(0, 0, 2, 0), (0, 2, 2, 0), (1, 0, 2, 0), (1, 1, 2, 1)]
    """
    size = -(-sum(counts) // period)
    while size < max(counts) and sum(-(-count // size) for count in counts) > period:
        size += 1
    cut = []
    for i, count in enumerate(counts):
        width = min(size, count)
        for start in range(0, count, width):
            moved = min(start, count - width)
            cut.append(Piece(i, moved, width, start - moved))
    return cut


def slots(count: int, period: int) -> Int[np.ndarray, "rounds period"]:
    """Which of `count` pieces is due at each step of a period, −1 for none, evenly spread.

    >>> slots(3, 8).tolist()
    [[0, -1, 1, -1, -1, 2, -1, -1]]
    """
    rounds = -(-count // period)
    table = np.full((rounds, period), -1, np.int32)
    for i in range(count):
        each = min(count, period)
        table[i // period, (i % period) * period // each] = i
    return table
