"""Which matrices of a parameter tree `msign` means, and how they lie in their leaves.

Static data from paths, shapes and a `stabmon.Layout`. What is done with the matrices is in
`_msign.py`.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from stabmon.layout import (
    CANONICAL,
    GROUPS,
    LIBRARIES,
    Layout,
    Rule,
    Select,
    find_layout,
    leaves_with_paths,
    selection,
)
from stabmon.layout.axes import Product, read, tokens

# Leaves with two axes that are no block matrix, for trees that no layout describes.
_OUTSIDE = re.compile(r"(?i)embed|wte|wpe|router|position|(^|[/_.])head($|[/_.])")
# What an axis of a leaf belongs to.
_STACK, _ROWS, _COLUMNS = range(3)


@dataclass(frozen=True)
class Matrices:
    """The matrices in one leaf. They are handed out tall: a wide matrix is transposed.

    Attributes:
        path: Path of the leaf.
        index: Its place among the leaves of the tree.
        shape: Its shape.
        sizes: Sizes of its axes; an axis that holds, say, heads of several roles is taken apart.
        sides: What each of these axes belongs to: the stack, the rows or the columns.
    """

    path: str
    index: int
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    sides: tuple[int, ...]

    @property
    def stack(self) -> tuple[int, ...]:
        """Sizes of the stack axes."""
        return tuple(n for n, side in zip(self.sizes, self.sides, strict=True) if side == _STACK)

    @property
    def count(self) -> int:
        """Number of matrices."""
        return math.prod(self.stack)

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of one matrix, rows ≥ columns."""
        pairs = [*zip(self.sizes, self.sides, strict=True)]
        rows, columns = (math.prod(n for n, s in pairs if s == side) for side in (_ROWS, _COLUMNS))
        return rows, columns

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each matrix, such as `layers/attn/q/kernel[2]`."""
        if not self.stack:
            return (self.path,)
        return tuple(f"{self.path}{list(place)}" for place in np.ndindex(self.stack))

    def split(self, leaf: Float[Array, "..."]) -> Float[Array, "count m n"]:
        """The matrices of the leaf."""
        x = leaf.reshape(self.sizes).transpose(self._order)
        return x.reshape(self.count, *self.matrix)

    def join(self, matrices: Float[Array, "count m n"]) -> Float[Array, "..."]:
        """The inverse of `split`."""
        x = matrices.reshape([self.sizes[i] for i in self._order])
        return x.transpose(np.argsort(self._order)).reshape(self.shape)

    def take(self, leaf: Float[Array, "..."], place: Int[Array, ""]) -> Float[Array, "m n"]:
        """One matrix of `split`, without touching the others."""
        start, size = self._slice(place)
        x = jax.lax.dynamic_slice(leaf.reshape(self.sizes), start, size)
        return x.transpose(self._order).reshape(self.matrix)

    def put(
        self, leaf: Float[Array, "..."], place: Int[Array, ""], matrix: Float[Array, "m n"]
    ) -> Float[Array, "..."]:
        """The leaf with one matrix of `split` replaced."""
        start, size = self._slice(place)
        x = matrix.reshape([size[i] for i in self._order]).transpose(np.argsort(self._order))
        full = jax.lax.dynamic_update_slice(leaf.reshape(self.sizes), x.astype(leaf.dtype), start)
        return full.reshape(self.shape)

    @property
    def _order(self) -> tuple[int, ...]:
        """The axes as stack, rows, columns."""
        return tuple(sorted(range(len(self.sides)), key=self.sides.__getitem__))

    def _slice(self, place: Int[Array, ""]) -> tuple[list[Array], list[int]]:
        where = iter(jnp.unravel_index(place, self.stack) if self.stack else ())
        zero = jnp.zeros_like(place)
        start = [next(where) if side == _STACK else zero for side in self.sides]
        pairs = zip(self.sizes, self.sides, strict=True)
        return start, [1 if side == _STACK else n for n, side in pairs]


def find_matrices(
    params: PyTree, select: Select | Sequence[str], layout: Layout | None
) -> tuple[Matrices, ...]:
    """The matrices that `select` and `layout` mean in `params`, in the order of its leaves.

    Args:
        params: Parameter tree; arrays or anything with `shape` and `dtype`.
        select: None, roles or groups, a regular expression, a predicate or a tree of booleans; see
            `msign`.
        layout: None: `stabmon.find_layout(params)`, where any leaf has a known name.

    A leaf that the layout describes holds one matrix for each layer, role and expert, all heads
    side by side. Any other is one matrix if it has two axes, and is refused otherwise. Where no
    name is known and `select` is None, all leaves with two axes are taken but embeddings, heads and
    routers, unless a leaf has more axes: stacked vectors then look like matrices.

    Raises:
        ValueError: Nothing is selected, a role is unknown, a selected leaf is not floating-point or
            does not tell its matrices.
    """
    leaves = leaves_with_paths(params)
    if not leaves:
        return ()
    roles = _roles(select)
    if layout is None and (roles is not None or _has_known_names(leaves)):
        layout = find_layout(params)
    if select is None and layout is not None:
        roles = {*GROUPS["attention"], *GROUPS["mlp"]}
    rules = [_rules(path, np.ndim(leaf), layout) for path, leaf in leaves]
    if roles is not None:
        held = zip(leaves, rules, strict=True)
        chosen = [_is_of_roles(path, found, roles) for (path, _), found in held]
    elif select is not None:
        chosen = jax.tree.leaves(selection(params, select))
    else:
        chosen = _plain_matrices(leaves)
    if not any(chosen):
        paths = ", ".join(path for path, _ in leaves[:12])
        raise ValueError(f"msign: {select!r} matches none of {len(leaves)} leaves: {paths}")
    return tuple(
        _matrices(path, index, leaf, rules[index], layout)
        for index, (path, leaf) in enumerate(leaves)
        if chosen[index]
    )


def _matrices(
    path: str, index: int, leaf: Any, rules: Sequence[Rule], layout: Layout | None
) -> Matrices:
    """The matrices of one selected leaf."""
    shape, dtype = np.shape(leaf), jnp.result_type(leaf)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"msign: {path} is {dtype}{list(shape)}; only real floating-point matrices can be "
            "restored, leave it out with select="
        )
    if rules and rules[0].end_to_end:
        raise ValueError(
            f"msign: {path} holds {', '.join(rules[0].roles)} end to end in one leaf, and cannot "
            "take them apart; leave it out with select="
        )
    if rules and layout is not None:
        axes = _cut(path, shape, rules[0], dict(layout.sizes))
    elif len(shape) == 2:
        axes = [(shape[0], _ROWS), (shape[1], _COLUMNS)]
    else:
        raise ValueError(
            f"msign: {path} of shape {shape} is selected, but nothing says which of its axes are "
            "a matrix's rows and columns; leave it out with select=, or describe it: "
            f"layout=stabmon.Layout('mine', (stabmon.Rule('mlp_up', {path!r}, "
            "'l d f -> l d f'), …))"
        )
    found = Matrices(path, index, shape, *(tuple(column) for column in zip(*axes, strict=True)))
    if found.matrix[0] >= found.matrix[1]:
        return found
    turned = {_STACK: _STACK, _ROWS: _COLUMNS, _COLUMNS: _ROWS}
    return Matrices(path, index, shape, found.sizes, tuple(turned[side] for side in found.sides))


def _cut(
    path: str, shape: Sequence[int], rule: Rule, sizes: dict[str, int]
) -> list[tuple[int, int]]:
    """Sizes of the leaf's axes, taken apart as far as needed, and what each belongs to.

    Axis d is the rows (in a factor of latent attention without it, the latent). So in a stack of
    square matrices of several roles the model axis comes first in all, and one sharding fits. All
    else that lies in a matrix is columns, heads and the part that RoPE turns among it.
    """
    right = tokens(rule.right)
    body = right[-3:] if CANONICAL[rule.roles[0]].startswith("n ") else right[-2:]
    stacked = {name for token in right[: -len(body)] for part in read(token) for name in part}
    rows = "d" if "d" in body else body[-2]
    if len(rule.roles) > 1:
        sizes = sizes | {right[0]: len(rule.roles)}

    def side(part: tuple[str, ...]) -> int:
        return _STACK if stacked.issuperset(part) else _ROWS if part == (rows,) else _COLUMNS

    axes = []
    for token, size in zip(tokens(rule.left), shape, strict=True):
        runs = [(kind, tuple(parts)) for kind, parts in groupby(rule.scoped(token), side)]
        known = [_size(parts, sizes) if len(runs) > 1 else size for _, parts in runs]
        rest = math.prod(n for n in known if n is not None)
        if known.count(None) > 1 or size % rest or (None not in known and size != rest):
            raise ValueError(
                f"msign: {path} has an axis of {size} for {token}, with sizes {sizes}; write "
                "layout=stabmon.find_layout(params, heads=…) with the number of heads"
            )
        parts = zip(runs, known, strict=True)
        axes += [(size // rest if n is None else n, kind) for (kind, _), n in parts]
    return axes


def _size(parts: Product, sizes: dict[str, int]) -> int | None:
    """Size of an axis composed of `parts`, None if it is not known."""
    if any(name not in sizes for part in parts for name in part):
        return None
    return math.prod(sum(sizes[name] for name in part) for part in parts)


def _rules(path: str, rank: int, layout: Layout | None) -> list[Rule]:
    """The rules for the matrices of a leaf, not for norm scales."""
    rules = [] if layout is None else layout.rules
    fits = lambda rule: rule.rank == rank and rule.layer(path) is not None
    return [rule for rule in rules if rule.roles[0] in CANONICAL and fits(rule)]


def _roles(select: object) -> set[str] | None:
    """The roles that `select` names, None if it names none."""
    names = (select,) if isinstance(select, str) else select
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        return None
    known = {role: (role,) for role in CANONICAL} | GROUPS
    if isinstance(select, str) and select not in known:
        return None
    if missing := [name for name in names if name not in known]:
        raise ValueError(f"msign: unknown roles {missing}; write some of {', '.join(known)}")
    return {role for name in names for role in known[name]}


def _is_of_roles(path: str, rules: Sequence[Rule], roles: set[str]) -> bool:
    """Whether a leaf is of the roles; one that holds others too cannot be taken in part."""
    held = {role for rule in rules for role in rule.roles}
    if held & roles and held - roles:
        raise ValueError(
            f"msign: {path} holds {', '.join(sorted(held))} in one leaf, but only "
            f"{', '.join(sorted(held & roles))} is selected; select all of them"
        )
    return bool(held & roles)


def _has_known_names(leaves: Sequence[tuple[str, Any]]) -> bool:
    """Whether any leaf has a name of a preset layout."""
    return any(_rules(path, np.ndim(leaf), layout) for layout in LIBRARIES for path, leaf in leaves)


def _plain_matrices(leaves: Sequence[tuple[str, Any]]) -> list[bool]:
    """Two-axis leaves outside embeddings, heads and routers, where no leaf has more axes."""
    stacked = [f"{path} {np.shape(leaf)}" for path, leaf in leaves if np.ndim(leaf) > 2]
    chosen = [np.ndim(leaf) == 2 and not _OUTSIDE.search(path) for path, leaf in leaves]
    if stacked or not any(chosen):
        raise ValueError(
            "msign: no known layout fits, and matrices cannot be told from stacked vectors by "
            f"their shape ({', '.join(stacked[:6]) or 'no leaf has two axes'}); write layout="
            "stabmon.Layout('mine', (stabmon.Rule('mlp_up', 'path/kernel', "
            "'l d f -> l d f'), …)) or select= with a predicate"
        )
    return chosen
