"""How the leaves of a tree are told apart by layer and expert, and whose a moment is.

What is measured of each part is `digest.py`'s.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import PyTree

from stabmon.layout import Layout
from stabmon.layout.axes import tokens
from stabmon.layout.match import match
from stabmon.layout.paths import parameters


class Leaf(NamedTuple):
    """One leaf of the parameters.

    Attributes:
        path: Its path.
        dtype: Name of its dtype.
        shape: Its shape.
        axes: The axes along which it is told apart, ascending.
        names: What each of them counts: "layer" or "expert".
        layers: Numbers of the layers that it holds, where it holds several.
        group: Experts that are leaves of their own have their common path here, else "".
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    axes: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    group: str = ""

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many parts there are along each axis."""
        return tuple(self.shape[axis] for axis in self.axes)

    @property
    def low(self) -> bool:
        """Whether it has fewer bits than float32."""
        return self.dtype in ("bfloat16", "float16") or self.dtype.startswith("float8")

    def named(self, broken: np.ndarray) -> Iterator[str]:
        """Names of the parts where `broken`; of the leaf alone where that is all of them.

        Args:
            broken: Booleans, one for each part.

        Example:
            >>> leaf = Leaf("up", "float32", (2, 3, 8), (0, 1), ("layer", "expert"))
            >>> list(leaf.named(np.array([0, 0, 0, 1, 1, 1], bool)))
            ['up, layer 1']
        """
        if broken.all():
            yield self.path
            return
        grid = broken.reshape(self.sizes)
        place = lambda axis, i: f", {self.names[axis]} {self._number(axis, i)}"
        for i in np.flatnonzero(grid.reshape(len(grid), -1).any(axis=1)).tolist():
            row = grid[i]
            if row.all():
                yield f"{self.path}{place(0, i)}"
            else:
                experts = np.flatnonzero(row).tolist()
                yield from (f"{self.path}{place(0, i)}{place(1, j)}" for j in experts)

    def _number(self, axis: int, i: int) -> int:
        """The number of the layer or expert at place `i` of an axis."""
        if self.names[axis] == "layer" and len(self.layers) == self.sizes[axis]:
            return self.layers[i]
        return i


def find_leaves(layout: Layout, params: PyTree) -> list[Leaf]:
    """Returns the leaves of a tree, with the axes of layers and experts of those that are stacked.

    Leaves that no rule of the layout takes, such as norm scales, are told apart by layer where they
    lie beside leaves that are stacked and have as many entries along the same axis.

    Args:
        layout: Where the matrices lie.
        params: Parameter tree, real or abstract.
    """
    leaves = parameters(params)
    found: dict[str, Leaf] = {}
    stacked: Counter[tuple[int, int]] = Counter()
    for item in match(layout.rules, leaves)[0]:
        axes = tokens(item.rule.left)
        kept = [(axes.index(x), name) for x, name in (("l", "layer"), ("e", "expert")) if x in axes]
        kept.sort()
        is_expert = len(item.place) == 2
        group = re.sub(r"\d+(?=\D*$)", "*", item.path) if is_expert else ""
        at = tuple(axis for axis, _ in kept)
        names = tuple(name for _, name in kept)
        layers = item.layers if "layer" in names else ()
        kind = str(item.leaf.dtype)
        found[item.path] = Leaf(item.path, kind, item.shape, at, names, layers, group)
        if "l" in axes:
            stacked[axes.index("l"), item.shape[axes.index("l")]] += 1
    numbers = next((x.layers for x in found.values() if x.layers), ())
    prefix = _common([leaf.path for leaf in found.values() if "layer" in leaf.names])
    result = []
    for path, x in leaves:
        leaf = found.get(path) or Leaf(path, str(x.dtype), tuple(x.shape))
        if path not in found and prefix and path.startswith(prefix) and stacked:
            (axis, layers), _ = stacked.most_common(1)[0]
            if len(x.shape) > axis and x.shape[axis] == layers:
                leaf = leaf._replace(axes=(axis,), names=("layer",), layers=numbers)
        result.append(leaf)
    return result


def owner(path: str, shape: Sequence[int], leaves: Sequence[Leaf]) -> Leaf | None:
    """Returns the parameter that a leaf of the optimizer's state belongs to, None without one.

    It has the parameter's shape, and a path that ends with the parameter's.

    Args:
        path: Path within the optimizer's state.
        shape: Its shape.
        leaves: The parameters.
    """
    fits = [x for x in leaves if x.shape == tuple(shape) and f"/{path}".endswith(f"/{x.path}")]
    return max(fits, key=lambda x: len(x.path), default=None)


def vocabulary(layout: Layout, params: PyTree) -> int | None:
    """Returns how many tokens the model knows, None where the layout does not tell.

    Args:
        layout: Where the matrices lie.
        params: Parameter tree, real or abstract.
    """
    for item in match(layout.rules, parameters(params))[0]:
        axes = tokens(item.rule.left)
        if {"embedding", "head"} & set(item.rule.roles) and "vocab" in axes:
            return item.shape[axes.index("vocab")]
    return None


def _common(paths: Sequence[str]) -> str:
    """The folder that all paths lie in, with its slash; empty without one."""
    if not paths:
        return ""
    split = [path.split("/")[:-1] for path in paths]
    same = []
    for names in zip(*split, strict=False):
        if len(set(names)) > 1:
            break
        same.append(names[0])
    return "".join(f"{name}/" for name in same)
