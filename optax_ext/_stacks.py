"""A function of stacks of matrices, applied to the leaves that hold them: at once, or spread.

Matrices of equal shape from many leaves form one `Stack`. `rewrite` has all stacks rewritten under
one conditional, `rewrite_in_turn` a share of them at each step, `over_devices` divides a stack
among devices. Nothing here knows what the function does (`_msign.py`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, PyTree

from optax_ext._matrices import Matrices

# By place in the tree.
Leaves = dict[int, Array]
# (updates, params, rows of the record) -> (updates, rows of the record), each of one stack.
Treat = Callable[[Array, Array, Any], tuple[Array, Any]]


@dataclass(frozen=True)
class Stack:
    """Matrices of equal shape and dtype.

    Attributes:
        views: The leaves that hold them.
        starts: Where the matrices of each leaf begin in the record, which has a row a matrix.
    """

    views: tuple[Matrices, ...]
    starts: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of matrices."""
        return sum(view.count for view in self.views)

    @property
    def interleaved(self) -> bool:
        """Whether the stack runs over leaves first, then over places in them.

        So it does where all leaves hold equally many: then a stack of leaves that are sharded over
        layers is sharded over layers too, and needs no communication.
        """
        return len({view.count for view in self.views}) == 1

    @property
    def order(self) -> list[tuple[int, int]]:
        """(leaf, place) of each matrix of the stack."""
        pairs = [(k, i) for k, view in enumerate(self.views) for i in range(view.count)]
        return sorted(pairs, key=lambda pair: pair[::-1]) if self.interleaved else pairs

    @property
    def rows(self) -> Int[np.ndarray, " count"]:
        """Row of each matrix of the stack in the record."""
        return np.asarray([self.starts[k] + i for k, i in self.order])

    def split(self, leaves: Leaves) -> Float[Array, "count m n"]:
        """All matrices as one stack."""
        parts = [view.split(leaves[view.index]) for view in self.views]
        if not self.interleaved:
            return jnp.concatenate(parts)
        return jnp.stack(parts, axis=1).reshape(self.count, *parts[0].shape[1:])

    def join(self, leaves: Leaves, stack: Float[Array, "count m n"]) -> Leaves:
        """The leaves with all matrices of the stack replaced."""
        if self.interleaved:
            by_view = stack.reshape(-1, len(self.views), *stack.shape[1:])
            parts = [by_view[:, k] for k in range(len(self.views))]
        else:
            ends = np.cumsum([view.count for view in self.views])[:-1].tolist()
            parts = jnp.split(stack, ends)
        joined = zip(self.views, parts, strict=True)
        return leaves | {view.index: view.join(part) for view, part in joined}

    def take(self, leaves: Leaves, positions: Int[Array, " size"]) -> Float[Array, "size m n"]:
        """The matrices at some positions; the other leaves are not read."""
        branches = [
            lambda place, view=view: view.take(leaves[view.index], place) for view in self.views
        ]
        holder, place = self._places
        return jax.lax.map(lambda i: jax.lax.switch(holder[i], branches, place[i]), positions)

    def put(
        self, leaves: Leaves, positions: Int[Array, " size"], stack: Float[Array, "size m n"]
    ) -> Leaves:
        """The leaves with the matrices at some positions replaced."""
        holder, place = self._places

        def write(j, held):
            branches = [
                lambda held, i, view=view: (
                    held | {view.index: view.put(held[view.index], place[i], stack[j])}
                )
                for view in self.views
            ]
            return jax.lax.switch(holder[positions[j]], branches, held, positions[j])

        held = {view.index: leaves[view.index] for view in self.views}
        return leaves | jax.lax.fori_loop(0, stack.shape[0], write, held)

    @property
    def _places(self) -> tuple[Int[Array, " count"], Int[Array, " count"]]:
        """Which leaf holds each matrix, and at which place."""
        holder, place = zip(*self.order, strict=True)
        return jnp.asarray(holder, jnp.int32), jnp.asarray(place, jnp.int32)


def stacked(views: Sequence[Matrices], kinds: Sequence[tuple]) -> list[Stack]:
    """Matrices of equal shape and kind together, in order of first appearance."""
    starts = np.cumsum([0, *(view.count for view in views)]).tolist()
    found: dict[tuple, list[tuple[Matrices, int]]] = {}
    for view, kind, start in zip(views, kinds, starts, strict=False):
        found.setdefault((view.matrix, kind), []).append((view, start))
    return [Stack(*zip(*members, strict=True)) for members in found.values()]


def rewrite(
    stacks: Sequence[Stack],
    treat: Treat,
    due: Bool[Array, ""] | bool,
    updates: Leaves,
    params: Leaves,
    record: PyTree,
) -> tuple[Leaves, PyTree]:
    """All matrices, if it is due; with a Python bool there is no conditional."""

    def now(updates, params, record):
        for stack in stacks:
            new, part = treat(stack.split(updates), stack.split(params), _at(record, stack.rows))
            updates, record = stack.join(updates, new), _set(record, stack.rows, part)
        return updates, record

    if isinstance(due, bool):
        return now(updates, params, record) if due else (updates, record)
    keep = lambda updates, params, record: (updates, record)
    return jax.lax.cond(due, now, keep, updates, params, record)


def rewrite_in_turn(
    stacks: Sequence[Stack],
    treat: Treat,
    step: Int[Array, ""],
    period: int,
    updates: Leaves,
    params: Leaves,
    record: PyTree,
) -> tuple[Leaves, PyTree]:
    """Each matrix once in `period` steps, as evenly spread as can be."""
    cut = pieces([stack.count for stack in stacks], period)
    which, start, _, stale = (jnp.asarray(column, jnp.int32) for column in zip(*cut, strict=True))

    def treated(stack: Stack, size: int):
        rows = jnp.asarray(stack.rows, jnp.int32)

        def branch(start, stale, updates, params, record):
            at = start + jnp.arange(size, dtype=jnp.int32)
            old_updates, old = stack.take(updates, at), _at(record, rows[at])
            new, part = treat(old_updates, stack.take(params, at), old)
            fresh = jnp.arange(size) >= stale
            pick = lambda a, b: jnp.where(fresh.reshape((-1,) + (1,) * (a.ndim - 1)), a, b)
            new, part = jax.tree.map(pick, (new, part), (old_updates, old))
            return stack.put(updates, at, new), _set(record, rows[at], part)

        return branch

    sizes = {piece.stack: piece.size for piece in cut}
    branches = [lambda start, stale, updates, params, record: (updates, record)]
    branches += [treated(stack, sizes[i]) for i, stack in enumerate(stacks)]
    for slot in jnp.asarray(slots(len(cut), period)):
        i = slot[step % period]
        branch = jnp.where(i >= 0, which[i] + 1, 0)
        updates, record = jax.lax.switch(
            branch, branches, start[i], stale[i], updates, params, record
        )
    return updates, record


class Piece(NamedTuple):
    """Matrices `start` … `start + size − 1` of one stack.

    The first `stale` belong to the piece before: the last piece of a stack reaches back, so that
    all its pieces have one size.
    """

    stack: int
    start: int
    size: int
    stale: int


def pieces(counts: Sequence[int], period: int) -> list[Piece]:
    """Cuts stacks of the given sizes into as few as `period` pieces, each as small as possible.

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
    table = np.full((-(-count // period), period), -1, np.int32)
    each = min(count, period)
    for i in range(count):
        table[i // period, (i % period) * period // each] = i
    return table


def over_devices(
    f: Callable[[Array, Any], PyTree], sharding: jax.sharding.NamedSharding | None, moved: bool
) -> Callable[[Array, Any], PyTree]:
    """`f(stack, record)` on a stack that is sharded so, padded with zeros until it divides.

    Args:
        f: Returns a tree of arrays with the stack axis first, of which the first is a stack.
        sharding: Of the stack; None: wherever it lies.
        moved: Whether no leaf is divided along the stack axis beforehand.
    """
    if sharding is None:
        return f
    names = _stack_axes(sharding)
    shards = math.prod(sharding.mesh.shape[name] for name in names)

    def divided(w, record):
        missing = -len(w) % shards
        fill = lambda x: jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))
        new, *rest = f(_move(fill(w), sharding, moved), jax.tree.map(fill, record))
        new = _move(new, sharding, moved, back=True)
        return jax.tree.map(lambda x: x[: len(w)], (new, *rest))

    return divided


def _move(
    w: Float[Array, "filled m n"],
    sharding: jax.sharding.NamedSharding,
    moved: bool,
    back: bool = False,
) -> Float[Array, "filled m n"]:
    """The stack brought to its sharding, or away from it, a mesh axis at a time.

    A mesh axis that leaves the matrices for the stack axis is one all-to-all, in which a device
    sends each number once. Asked for several at once, XLA's partitioner gathers the whole stack on
    every device instead ("involuntary full rematerialization"); so it does where it carries the
    division back through the merging of layers and leaves, hence the fixed start of leaves that
    were not divided along the stack.
    """
    free, names = jax.P.UNCONSTRAINED, _stack_axes(sharding)
    stages = [jax.P(names[:i] or None, free, free) for i in range(len(names))] + [sharding.spec]
    stages = stages if moved else stages[1:]
    for spec in reversed(stages) if back else stages:
        # On a mesh with explicit axes this runs in auto mode, where only the spec is accepted.
        bare = not jax.sharding.get_abstract_mesh().empty
        where = spec if bare else jax.sharding.NamedSharding(sharding.mesh, spec)
        w = jax.lax.with_sharding_constraint(w, where)
    return w


def _stack_axes(sharding: jax.sharding.NamedSharding) -> tuple[str, ...]:
    """The mesh axes that divide the stack."""
    first = sharding.spec[0] if sharding.spec else None
    names = first if isinstance(first, tuple) else (first,)
    return tuple(name for name in names if name is not None)


def _at(record: PyTree, rows: ArrayLike) -> PyTree:
    return jax.tree.map(lambda x: x[rows], record)


def _set(record: PyTree, rows: ArrayLike, part: PyTree) -> PyTree:
    return jax.tree.map(lambda x, new: x.at[rows].set(new), record, part)
