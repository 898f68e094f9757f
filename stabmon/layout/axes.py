"""Sizes of named axes, from the shapes of the leaves that have them.

A leaf's axes are written as in einops, `(n h)` for an axis that holds n blocks of h, with one
addition: `h+p` is an axis of which the first h entries belong to h and the rest to p. A number is
an axis of that size. Here is the arithmetic of such patterns. Which leaf has which pattern is
`rules.py` and `layout.py`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

# One axis of a leaf: the factors it is composed of, each a sum of axes laid end to end.
Product = tuple[tuple[str, ...], ...]


class Misfit(ValueError):
    """Shapes that contradict a pattern, each other, or a size that was given."""


class Equation(NamedTuple):
    """The size of one axis of one leaf.

    Attributes:
        product: What the axis is composed of.
        total: Its size, or the name of the axis that has this size.
        source: The leaf and its shape, for messages.
        axes: All axes of the leaf, for messages.
    """

    product: Product
    total: int | str
    source: str
    axes: str = ""


def tokens(side: str) -> list[str]:
    """The axes on one side of a pattern, composed ones in parentheses.

    >>> tokens("d (three n h)")
    ['d', '(three n h)']
    """
    return re.findall(r"\([^)]*\)|\S+", side)


def read(token: str) -> Product:
    """An axis taken apart.

    >>> read("(n h+p)")
    (('n',), ('h', 'p'))
    """
    return tuple(tuple(factor.split("+")) for factor in token.strip("()").split())


def write(product: Product) -> str:
    """The inverse of `read`."""
    text = " ".join("+".join(summands) for summands in product)
    return f"({text})" if len(product) > 1 else text


def solve(
    equations: Iterable[Equation], given: Mapping[str, int]
) -> tuple[dict[str, int], list[Equation]]:
    """Sizes of all axes that follow from the equations, and the equations left open.

    Every equation with one unknown gives it, until none does. Equations without an unknown must
    hold.

    Args:
        equations: Axes of leaves and their sizes.
        given: Sizes known beforehand.

    Raises:
        Misfit: An axis does not divide, would be empty, or two leaves disagree on its size.

    >>> solve([Equation(read("(n h)"), 24, "q"), Equation(read("(k h)"), 8, "k")], {"n": 6})
    ({'n': 6, 'h': 4, 'k': 2}, [])
    >>> solve([Equation(read("(n+k+k h)"), 40, "qkv")], {"n": 6, "h": 4})
    ({'n': 6, 'h': 4, 'k': 2}, [])
    """
    equations = list(equations)
    known = {name: (size, "as given") for name, size in given.items()}
    letters = {name for e in equations for summands in e.product for name in summands}
    known |= {name: (int(name), "as written") for name in letters if name.isdigit()}
    first: dict[tuple[Product, bool], Equation] = {}
    rest = []
    for equation in equations:
        kind = equation.product, isinstance(equation.total, str)
        same = first.setdefault(kind, equation)
        if same is equation:
            rest.append(equation)
        elif same.total != equation.total:
            raise Misfit(
                f"{equation.source} does not fit '{equation.axes}': '{write(equation.product)}' is "
                f"{equation.total} here, but {same.total} in {same.source}, '{same.axes}'"
            )
    while True:
        still = [equation for equation in rest if not _use(equation, known)]
        if len(still) == len(rest):
            sizes = {name: size for name, (size, _) in known.items() if not name.isdigit()}
            return sizes, rest
        rest = still


def unknown(equations: Sequence[Equation], sizes: Mapping[str, int]) -> list[str]:
    """Names in the equations whose sizes are not known, in their order."""
    names = (name for e in equations for summands in e.product for name in summands)
    return list(dict.fromkeys(x for x in names if x not in sizes and not x.isdigit()))


def _use(equation: Equation, known: dict[str, tuple[int, str]]) -> bool:
    """Whether an equation is used up: it gave a size, which is now in `known`, or it holds."""
    product, total, source, _ = equation
    size = lambda summands: sum(known[name][0] for name in summands if name in known)
    is_open = lambda summands: any(name not in known for name in summands)
    free = [summands for summands in product if is_open(summands)]
    rest = prod(size(summands) for summands in product if not is_open(summands))
    if isinstance(total, str):
        if total not in known:
            if not free:
                known[total] = rest, f"from {source}"
            return not free
        total = known[total][0]
    if not free:
        if total != rest:
            raise _misfit(equation, total, known)
        return True
    missing = [name for summands in free for name in summands if name not in known]
    if len(free) > 1 or len({*missing}) > 1:
        return False
    left = total // rest - size(free[0])
    found = left // len(missing)
    if total % rest or left % len(missing) or found < 1:
        raise _misfit(equation, total, known)
    known[missing[0]] = found, f"from {source}"
    return True


def _misfit(equation: Equation, total: int, known: Mapping[str, tuple[int, str]]) -> Misfit:
    """What an equation says against the sizes known, and where those come from."""
    names = list(dict.fromkeys(name for summands in equation.product for name in summands))
    against = "; ".join(
        f"{name} = {known[name][0]} ({known[name][1]})" for name in names if name in known
    )
    return Misfit(
        f"{equation.source} does not fit '{equation.axes}': {total} is no "
        f"'{write(equation.product)}' with {against}"
    )
