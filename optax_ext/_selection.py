"""Which matrices of a parameter tree `msign` means.

`find_matrices` turns `select=` and `layout=` into `MatrixView`s at trace time. How matrices lie in
a leaf is `_matrix_view.py`, what is done with them `_msign.py`.
"""

import fnmatch
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from optax_ext._matrix_view import MatrixView, Order
from stabmon.layout import (
    CANONICAL,
    GROUPS,
    Layout,
    Select,
    find_layout,
    leaves_with_paths,
    selection,
)

Patterns = Mapping[str, str | tuple[str, Mapping[str, int]]]

# Two-axis leaves that are no block matrix, for trees that no layout describes.
_OUTSIDE = re.compile(r"(?i)embed|wte|wpe|router|position|(^|[/_.])head($|[/_.])")


def find_matrices(
    params: PyTree,
    select: Select | Sequence[str] = None,
    layout: Layout | Patterns | None = None,
    per_head: bool = False,
) -> tuple[MatrixView, ...]:
    """The matrices that `select` and `layout` mean in `params`, in the order of its leaves.

    Args:
        params: Parameter tree; arrays or anything with `shape` and `dtype`.
        select: Which leaves. None: attention and MLP matrices. A role or group of the layout
            ("attention", "mlp", "router", "all", "q" …) or a sequence of them; any other string
            is a regular expression on the path; a predicate (path, leaf); a tree of booleans.
        layout: Which matrices a leaf holds. None: `stabmon.find_layout(params)`. A mapping from a
            path glob to an einops pattern whose last two axes are rows and columns, such as
            {"*/attn/qkv/kernel": ("d (three n h) -> three d (n h)", {"three": 3, "n": 12})}.
        per_head: Each head's D × H (or H × D) block instead of all heads side by side.

    A leaf that the layout does not describe is taken as one matrix if it has two axes, and
    otherwise refused. Where no layout is known and `select` is None, all leaves with two axes are
    taken but embeddings, heads and routers, unless a leaf has more axes: then matrices may be
    stacked, and stacked vectors look like matrices.

    Raises:
        ValueError: Nothing is selected, a role is unknown, a selected leaf has three or more axes
            and no pattern, or a pattern does not fit its leaf.
    """
    leaves = leaves_with_paths(params)
    if not leaves:
        return ()
    unknown = "write a regular expression or a predicate beside a mapping"
    if layout is None:
        try:
            layout = find_layout(params)
        except ValueError as error:
            unknown = str(error)
    roles = _roles(select)
    if select is None and isinstance(layout, Layout):
        roles = {*GROUPS["attention"], *GROUPS["mlp"]}
    if roles is not None:
        if not isinstance(layout, Layout):
            raise ValueError(f"msign: the roles {select!r} need a stabmon.Layout; {unknown}")
        rules = [rule for rule in layout.rules if rule.role in roles]
        named = lambda path, leaf: any(rule.layer(path) is not None for rule in rules)
        chosen = jax.tree.leaves(selection(params, named))
    elif select is not None:
        chosen = jax.tree.leaves(selection(params, select))
    elif layout is not None:
        chosen = [_pattern(path, layout, per_head) is not None for path, _ in leaves]
    else:
        chosen = _plain_matrices(leaves)
    views = [
        _view(path, i, leaf, layout, per_head)
        for i, ((path, leaf), wanted) in enumerate(zip(leaves, chosen, strict=True))
        if wanted
    ]
    if not views:
        paths = ", ".join(path for path, _ in leaves[:12])
        raise ValueError(f"msign: the layout matches none of {len(leaves)} leaves: {paths}")
    return tuple(views)


def _roles(select: object) -> set[str] | None:
    """The roles that `select` names, None if it is no role."""
    names = (select,) if isinstance(select, str) else select
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        return None
    known = {**GROUPS, **{role: (role,) for role in CANONICAL}}
    if isinstance(select, str) and select not in known:
        return None
    if missing := [name for name in names if name not in known]:
        raise ValueError(f"msign: unknown roles {missing}; write some of {', '.join(known)}")
    return {role for name in names for role in known[name]}


def _plain_matrices(leaves: Sequence[tuple[str, Any]]) -> list[bool]:
    """Two-axis leaves outside embeddings, heads and routers, where no leaf has more axes."""
    stacked = [f"{path} {tuple(leaf.shape)}" for path, leaf in leaves if len(leaf.shape) > 2]
    chosen = [len(leaf.shape) == 2 and not _OUTSIDE.search(path) for path, leaf in leaves]
    if stacked or not any(chosen):
        raise ValueError(
            "msign: no known layout fits and matrices cannot be told from stacked vectors by "
            f"their shape ({', '.join(stacked[:6]) or 'no leaf has two axes'}); write layout="
            "{'path/*/kernel': 'l d f -> l d f'} with the last two axes rows and columns, or "
            "select= with a predicate"
        )
    return chosen


def _view(
    path: str, index: int, leaf: Any, layout: Layout | Patterns | None, per_head: bool
) -> MatrixView:
    """The view of one selected leaf."""
    shape = tuple(leaf.shape)
    found = _pattern(path, layout, per_head)
    if found is None:
        if len(shape) != 2:
            raise ValueError(
                f"msign: {path} of shape {shape} is selected, but nothing says which axes are a "
                f"matrix's rows and columns; write layout={{{path!r}: 'l d f -> l d f'}}, or "
                "leave it out with select="
            )
        found = "rows columns", ((), ("rows",), ("columns",)), {}
    left, order, given = found
    groups = [token.strip("()").split() for token in re.findall(r"\([^)]*\)|\S+", left)]
    axes = tuple(axis for group in groups for axis in group)
    if len(groups) != len(shape) or sorted(axes) != sorted(a for group in order for a in group):
        raise ValueError(f"msign: {path} of shape {shape} does not fit the pattern of '{left}'")
    sizes = [_split_axis(path, shape[i], group, given) for i, group in enumerate(groups)]
    return MatrixView(path, index, axes, tuple(n for part in sizes for n in part), order, shape)


def _split_axis(path: str, size: int, group: Sequence[str], given: Mapping[str, int]) -> list[int]:
    """Sizes of the axes that one axis of the leaf is composed of."""
    known = math.prod(given[axis] for axis in group if axis in given)
    free = [axis for axis in group if axis not in given]
    if len(free) > 1 or size % known or (not free and size != known):
        raise ValueError(
            f"msign: {path} has an axis of {size} for ({' '.join(group)}) with sizes "
            f"{dict(given)}; write the sizes of all axes in it but one, and let them divide it"
        )
    return [given.get(axis, size // known) for axis in group]


def _pattern(
    path: str, layout: Layout | Patterns | None, per_head: bool
) -> tuple[str, Order, Mapping[str, int]] | None:
    """Axes of the leaf, their (stack, rows, columns) order, and sizes; None without a rule."""
    if isinstance(layout, Layout):
        rule = next((rule for rule in layout.rules if rule.layer(path) is not None), None)
        if rule is None:
            return None
        axes = tuple(rule.right.split())
        order = axes[:-2], axes[-2:-1], axes[-1:]
        if not per_head and rule.role in ("q", "k", "v"):
            order = axes[:-3], ("d",), ("n", "h")
        elif not per_head and rule.role == "o":
            order = axes[:-3], ("n", "h"), ("d",)
        return rule.left, order, dict(layout.sizes)
    for glob, value in (layout or {}).items():
        if fnmatch.fnmatchcase(path, glob):
            pattern, given = (value, {}) if isinstance(value, str) else value
            left, _, right = pattern.partition("->")
            groups = [tuple(t.strip("()").split()) for t in re.findall(r"\([^)]*\)|\S+", right)]
            if len(groups) < 2:
                raise ValueError(
                    f"msign: expected a pattern 'axes -> … rows columns', got {pattern!r}"
                )
            stack = tuple(axis for group in groups[:-2] for axis in group)
            return left, (stack, groups[-2], groups[-1]), given
    return None
