"""Samples by key in columns of numbers, so that half a million of them are read in seconds.

What lives here: `Columns`. What does not: lines of JSON (`jsonl`), which samples count (`follow`).
"""

from array import array
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from stabmon.runs.jsonl import number

Series = tuple[Int[np.ndarray, " samples"], Float[np.ndarray, " samples"]]
_LARGEST = 2**63


class Columns:
    """Grows by one sample at a time; gives steps and values of each key.

    Samples with the same keys share a table, which is why this takes no more than the numbers do.

    Attributes:
        step: Newest step, −1 without a sample.

    Example:
        >>> columns = Columns()
        >>> columns.add(10, {"loss": 2.5, "norm": None})
        >>> columns.add(20, {"loss": "NaN"})
        >>> columns.cut(10)
        >>> columns.add(20, {"loss": 2.25})
        >>> columns.series()
        {'loss': (array([10, 20]), array([2.5 , 2.25]))}
    """

    def __init__(self, wanted: Callable[[str], bool] = lambda key: True) -> None:
        """Begins without samples.

        Args:
            wanted: Which keys to keep.
        """
        self.step = -1
        self._wanted = wanted
        self._tables: dict[tuple[str, ...], _Table] = {}
        self._count = 0

    def add(self, step: Any, values: Any) -> None:
        """Takes one sample; of a step that comes twice the later value of each key counts.

        Args:
            step: A whole number.
            values: Key → number, also as the text "NaN", "Infinity" or "-Infinity"; None is not
                measured.

        Raises:
            TypeError: A step, a key or a value is of another kind. Nothing is taken.
            OverflowError: A step beyond 64 bits, a value beyond floats. Nothing is taken.
        """
        if type(step) is not int or not isinstance(values, Mapping):
            raise TypeError(
                f"a sample has a whole step and values by key, got {step!r}, {values!r}"
            )
        if not -_LARGEST <= step < _LARGEST:
            raise OverflowError(f"step {step} is beyond 64 bits")
        try:
            numbers = array("d", values.values())
        except TypeError:
            values = {key: number(x) for key, x in values.items() if x is not None}
            numbers = array("d", values.values())
        table = self._tables.get(keys := tuple(values))
        if table is None:
            table = self._tables[keys] = _Table(keys, self._wanted)
        if len(table.picked) < len(keys):
            numbers = array("d", [numbers[at] for at in table.picked])
        table.values.extend(numbers)
        table.steps.append(step)
        table.order.append(self._count)
        self._count += 1
        self.step = max(self.step, step)

    def cut(self, step: int) -> None:
        """Drops the samples of later steps.

        Args:
            step: The last one to stay.
        """
        for table in self._tables.values():
            table.cut(step)
        self.step = max((max(x.steps) for x in self._tables.values() if x.steps), default=-1)

    def at(self, step: int) -> dict[str, float]:
        """Returns the values at a step.

        Args:
            step: Which; without a sample of it there are none.
        """
        found: dict[str, tuple[int, float]] = {}
        for table in self._tables.values():
            for row in np.flatnonzero(np.array(table.steps, np.int64) == step).tolist():
                for column, key in enumerate(table.keys):
                    value = table.order[row], table.values[row * len(table.keys) + column]
                    found[key] = max(found.get(key, value), value, key=lambda x: x[0])
        return {key: value for key, (_, value) in found.items()}

    def series(self) -> dict[str, Series]:
        """Returns key → (steps, values), int64 and float64, steps rising and each there once."""
        pieces: dict[str, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
        for table in self._tables.values():
            steps, order = (np.array(x, np.int64) for x in (table.steps, table.order))
            grid = np.array(table.values, np.float64).reshape(len(steps), len(table.keys))
            for key, column in zip(table.keys, np.ascontiguousarray(grid.T), strict=True):
                if len(steps):
                    pieces.setdefault(key, []).append((steps, order, column))
        return {key: _one(of) for key, of in pieces.items()}


def is_sample(row: Mapping[str, Any]) -> bool:
    """Returns whether a line of `metrics.jsonl` is a sample.

    Args:
        row: The object on it.
    """
    try:
        Columns().add(row.get("step"), row.get("values"))
    except (TypeError, OverflowError):
        return False
    return True


class _Table:
    """Samples that have the same keys."""

    def __init__(self, keys: tuple[str, ...], wanted: Callable[[str], bool]) -> None:
        self.picked = [at for at, key in enumerate(keys) if wanted(key)]
        self.keys = [keys[at] for at in self.picked]
        self.steps, self.order, self.values = array("q"), array("q"), array("d")

    def cut(self, step: int) -> None:
        """Drops the samples of later steps."""
        kept = np.array(self.steps, np.int64) <= step
        if not kept.all():
            grid = np.array(self.values, np.float64).reshape(len(kept), len(self.keys))
            self.values = array("d", grid[kept].ravel().tobytes())
            self.steps, self.order = (
                array("q", np.array(x, np.int64)[kept].tobytes()) for x in (self.steps, self.order)
            )


def _one(pieces: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> Series:
    """One series from its pieces in several tables: by step, of equal steps the last written."""
    steps, order, values = pieces[0]
    if len(pieces) > 1:
        steps, order, values = (np.concatenate(x) for x in zip(*pieces, strict=True))
    if (np.diff(steps) > 0).all():
        return steps, values
    by = np.lexsort((order, steps))
    steps, values = steps[by], values[by]
    last = np.append(np.diff(steps) > 0, True)
    return steps[last], values[last]
