"""Cells and lines of Markdown tables; which table says what is each experiment's."""

from collections.abc import Iterable, Sequence
from typing import Any


def head(cells: Sequence[Any]) -> list[str]:
    """The first two lines of a table.

    >>> head(["arm", "loss"])
    ['| arm | loss |', '|---|---|']
    """
    return [line(cells), "|---" * len(cells) + "|"]


def line(cells: Sequence[Any]) -> str:
    """One line of a table."""
    return "| " + " | ".join(str(x) for x in cells) + " |"


def numbers(values: Iterable[float | int], digits: int = 2, sign: str = "") -> str:
    """Numbers in a cell; with `sign` "+" also positive ones show theirs.

    >>> numbers([1.0, -0.25], sign="+")
    '+1.00, -0.25'
    """
    return ", ".join(f"{float(x):{sign}.{digits}f}" for x in values)


def steps(values: Iterable[int | None]) -> str:
    """Steps in a cell, a dash for what never came.

    >>> steps([20, None])
    '20, –'
    """
    return ", ".join("–" if x is None else str(x) for x in values)
