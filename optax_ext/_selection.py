"""Which matrices of a parameter tree `msign` means.

`find_matrices` turns `select=` and `layout=` into `MatrixView`s at trace time. How matrices lie in
a leaf is `_patterns.py`, what is done with them `_msign.py`.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from optax_ext._matrix_view import MatrixView
from optax_ext._patterns import Patterns, find_pattern, rules_for, view
from stabmon.layout import (
    CANONICAL,
    GROUPS,
    PRESETS,
    Layout,
    Select,
    find_layout,
    leaves_with_paths,
    selection,
)

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

    Under a `Layout`, rows are a projection's inputs and columns its outputs, all heads side by
    side; parts of a fused leaf are matrices of their own. A leaf that the layout does not describe
    is taken as one matrix if it has two axes, and otherwise refused. Where no name is known and
    `select` is None, all leaves with two axes are taken but embeddings, heads and routers, unless
    a leaf has more axes: then matrices may be stacked, and stacked vectors look like matrices.

    Raises:
        ValueError: Nothing is selected, a role is unknown, a selected leaf has three or more axes
            and no pattern, or a pattern does not fit its leaf.
    """
    leaves = leaves_with_paths(params)
    if not leaves:
        return ()
    roles = _roles(select)
    if layout is None and (roles is not None or _known_names(leaves)):
        layout = find_layout(params)
    if select is None and isinstance(layout, Layout):
        roles = {*GROUPS["attention"], *GROUPS["mlp"]}
    if roles is not None:
        if not isinstance(layout, Layout):
            raise ValueError(
                f"msign: select={select!r} names roles, which a mapping of patterns does not know; "
                "write a regular expression or a predicate, or pass a stabmon.Layout"
            )
        chosen = jax.tree.leaves(selection(params, _of_roles(layout, roles)))
    elif select is not None:
        chosen = jax.tree.leaves(selection(params, select))
    elif layout is not None:
        pattern = lambda path, leaf: find_pattern(path, len(leaf.shape), layout, per_head)
        chosen = [pattern(path, leaf) is not None for path, leaf in leaves]
    else:
        chosen = _plain_matrices(leaves)
    views = [
        view(path, i, tuple(leaf.shape), layout, per_head)
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


def _of_roles(layout: Layout, roles: set[str]) -> Callable[[str, Any], bool]:
    """Whether a leaf is of the roles; a leaf that holds others too cannot be taken in part."""

    def chosen(path: str, leaf: Any) -> bool:
        rules = [rule for rule in rules_for(path, layout) if rule.rank == len(leaf.shape)]
        held = {role for rule in rules for role in rule.roles}
        if held & roles and held - roles:
            raise ValueError(
                f"msign: {path} holds {', '.join(sorted(held))} in one leaf, but only "
                f"{', '.join(sorted(held & roles))} is selected; select all of them"
            )
        return bool(held & roles)

    return chosen


def _known_names(leaves: Sequence[tuple[str, Any]]) -> bool:
    """Whether any leaf has a name of a preset layout."""
    return any(rules_for(path, layout) for layout in PRESETS for path, _ in leaves)


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
