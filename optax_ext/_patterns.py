"""From the pattern of a leaf to the `MatrixView` of its matrices.

A pattern comes from a rule of a `stabmon.Layout` or is written out by the user. Which leaves are
meant is decided in `_selection.py`.
"""

import fnmatch
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from optax_ext._matrix_view import MatrixView, Order
from stabmon.layout import CANONICAL, Layout, Rule
from stabmon.layout.axes import Product, read, tokens, write

Patterns = Mapping[str, str | tuple[str, Mapping[str, int]]]


class Pattern(NamedTuple):
    """How matrices lie in a leaf.

    Attributes:
        leaf: Each axis of the leaf, taken apart as far as needed.
        order: The parts as stack, row and column axes.
        sizes: Of parts, where the leaf's shape does not tell.
    """

    leaf: tuple[tuple[str, ...], ...]
    order: Order
    sizes: Mapping[str, int]


def view(
    path: str,
    index: int,
    shape: tuple[int, ...],
    layout: Layout | Patterns | None,
    per_head: bool,
) -> MatrixView:
    """The view of one selected leaf.

    Raises:
        ValueError: The leaf has three or more axes and no pattern, or does not fit its pattern.
    """
    pattern = find_pattern(path, len(shape), layout, per_head)
    if pattern is None:
        if len(shape) != 2:
            raise ValueError(
                f"msign: {path} of shape {shape} is selected, but nothing says which axes are a "
                f"matrix's rows and columns; write layout={{{path!r}: 'l d f -> l d f'}}, or "
                "leave it out with select="
            )
        pattern = Pattern((("rows",), ("columns",)), ((), ("rows",), ("columns",)), {})
    axes = tuple(chain(*pattern.leaf))
    if len(pattern.leaf) != len(shape) or sorted(axes) != sorted(chain(*pattern.order)):
        wanted = " ".join(write(tuple((axis,) for axis in group)) for group in pattern.leaf)
        raise ValueError(f"msign: {path} of shape {shape} does not fit the pattern of '{wanted}'")
    sizes = [
        _divide(path, size, group, pattern.sizes)
        for size, group in zip(shape, pattern.leaf, strict=True)
    ]
    return MatrixView(path, index, axes, tuple(chain(*sizes)), pattern.order, shape)


def find_pattern(
    path: str, rank: int, layout: Layout | Patterns | None, per_head: bool
) -> Pattern | None:
    """The pattern of the leaf at `path`, None if the layout has none."""
    if isinstance(layout, Layout):
        fitting = [rule for rule in rules_for(path, layout) if rule.rank == rank]
        return _of_rule(fitting[0], dict(layout.sizes), per_head) if fitting else None
    for glob, value in (layout or {}).items():
        if fnmatch.fnmatchcase(path, glob):
            return _written(*((value, {}) if isinstance(value, str) else value))
    return None


def rules_for(path: str, layout: Layout) -> list[Rule]:
    """The rules whose path fits and that describe matrices, not norm scales."""
    rules = [rule for rule in layout.rules if rule.roles[0] in CANONICAL]
    return [rule for rule in rules if rule.layer(path) is not None]


def _written(pattern: str, sizes: Mapping[str, int]) -> Pattern:
    """A pattern 'axes of the leaf -> … rows columns'."""
    left, _, right = pattern.partition("->")
    groups = [tuple(token.strip("()").split()) for token in tokens(right)]
    if len(groups) < 2:
        raise ValueError(f"msign: expected a pattern 'axes -> … rows columns', got {pattern!r}")
    leaf = tuple(tuple(token.strip("()").split()) for token in tokens(left))
    return Pattern(leaf, (tuple(chain(*groups[:-2])), groups[-2], groups[-1]), sizes)


def _of_rule(rule: Rule, sizes: dict[str, int], per_head: bool) -> Pattern:
    """All heads side by side as one matrix, or each head on its own.

    Rows are the inputs, the canonical axis before the last (of o: after the heads); whatever else
    lies in the leaf, a part that RoPE turns among it, is a column.
    """
    canonical, right = CANONICAL[rule.roles[0]].split(), tokens(rule.right)
    width = 3 if canonical[0] == "n" else 2
    lead, body = right[:-width], right[-width:]
    names = lambda axes: {name for axis in axes for part in read(axis) for name in part}
    heads = names(body[:1]) if width == 3 else set()
    stacked = names(lead) | (heads if per_head else set())
    outward = rule.roles[0] == "o"
    single = names(body[2:]) if outward else names(body[-2:-1])

    def place(part: tuple[str, ...]) -> int:
        if stacked.issuperset(part):
            return 0
        return 1 + ((not single.issuperset(part)) ^ outward)

    order: tuple[list[str], list[str], list[str]] = ([], [], [])
    leaf = []
    for token in tokens(rule.left):
        parts = read(token)
        whole = len({place(part) for part in parts}) == 1 and place(parts[0]) > 0
        named = (write(parts),) if whole else tuple(write((part,)) for part in parts)
        for name, part in zip(named, parts, strict=False):
            order[place(part)].append(name)
        leaf.append(named)
    first = [name for axis in [*lead, *body[:1]] for name in axis.strip("()").split()]
    stack = sorted(order[0], key=first.index)
    return Pattern(
        tuple(leaf), (tuple(stack), tuple(order[1]), tuple(order[2])), _sizes(rule, sizes)
    )


def _sizes(rule: Rule, sizes: dict[str, int]) -> dict[str, int]:
    """Sizes by the names of a rule's parts: n is K in rules of keys, h+p the sum of both."""
    if rule.of_keys and "k" in sizes:
        sizes = sizes | {"n": sizes["k"]}
    if len(rule.roles) > 1:
        sizes = sizes | {tokens(rule.right)[0]: len(rule.roles)}
    parts: list[Product] = [read(token) for token in tokens(rule.left)]
    sums = [part for product in parts for part in product if set(part) <= sizes.keys()]
    return sizes | {write((part,)): sum(sizes[name] for name in part) for part in sums}


def _divide(path: str, size: int, group: Sequence[str], given: Mapping[str, int]) -> list[int]:
    """Sizes of the parts that one axis of the leaf is composed of."""
    if len(group) == 1:
        return [size]
    known = math.prod(given[axis] for axis in group if axis in given)
    free = [axis for axis in group if axis not in given]
    if len(free) > 1 or size % known or (not free and size != known):
        raise ValueError(
            f"msign: {path} has an axis of {size} for ({' '.join(group)}) with sizes "
            f"{dict(given)}; write the sizes of all axes in it but one, and let them divide it"
        )
    return [given.get(axis, size // known) for axis in group]
