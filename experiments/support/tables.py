"""Markdown tables from rows: `table`, and the cells that most of its columns need.

Not here: what the tables of a question are; each question's file says that.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

T = TypeVar("T")
# A field of a row, as "name" or "outer/inner", or a function of the row.
Value = str | Callable[[Any], Any]
Cell = Callable[[list[Any]], Any]


def table(rows: Iterable[T], by: str | Mapping[str, Value], columns: Mapping[str, Cell]) -> str:
    """A Markdown table: a line for each group of rows.

    Args:
        rows: What is shown; groups come in the order of their first row.
        by: {head: value}: rows with equal values are a group, and these values are its first
            cells. A field's name alone is both.
        columns: {head: cell}, where a cell is a function of the group's rows.

    >>> rows = [{"arm": "a", "loss": 2.0}, {"arm": "b", "loss": 3.0}, {"arm": "a", "loss": 2.5}]
    >>> print(table(rows, "arm", {"runs": len, "loss": each("loss", ".1f")}))
    | arm | runs | loss |
    |---|---|---|
    | a | 2 | 2.0, 2.5 |
    | b | 1 | 3.0 |
    """
    heads: Mapping[str, Value] = {by: by} if isinstance(by, str) else by
    groups = grouped(rows, lambda row: tuple(value_of(row, x) for x in heads.values()))
    lines = [[*of, *(cell(group) for cell in columns.values())] for of, group in groups.items()]
    return _markdown([*heads, *columns], lines)


def crossed(
    head: str, names: Iterable[str], groups: Mapping[str, T], cell: Callable[[T, str], Any]
) -> str:
    """A Markdown table with a line for each name and a column for each group.

    >>> print(crossed("monitor", ["Δ2"], {"a": [3, 5], "b": [4]}, lambda of, name: max(of)))
    | monitor | a | b |
    |---|---|---|
    | Δ2 | 5 | 4 |
    """
    columns = {name: lambda of, group=group: cell(group, of[0]) for name, group in groups.items()}
    return table(names, {head: str}, columns)


def listing(lines: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of mappings whose keys are the heads.

    >>> print(listing([{"target": "quiet", "met": "yes"}]))
    | target | met |
    |---|---|
    | quiet | yes |
    """
    return _markdown(list(lines[0]), [list(line.values()) for line in lines])


def grouped(rows: Iterable[T], by: Value) -> dict[Any, list[T]]:
    """Rows by a value, in the order in which the values first come.

    >>> grouped([{"arm": "a"}, {"arm": "b"}], "arm")
    {'a': [{'arm': 'a'}], 'b': [{'arm': 'b'}]}
    """
    groups: dict[Any, list[T]] = {}
    for row in rows:
        groups.setdefault(value_of(row, by), []).append(row)
    return groups


def value_of(row: Any, value: Value) -> Any:
    """A field of a row, or a function's value.

    >>> value_of({"late": {"Δ2": 0.5}}, "late/Δ2"), value_of(3, lambda x: x + 1)
    (0.5, 4)
    """
    if callable(value):
        return value(row)
    for name in value.split("/"):
        row = row[name]
    return row


def each(value: Value, form: str = "", unit: str = "", join: str = ", ") -> Cell:
    """A cell with the value of every row of the group; a dash for None, and for no rows."""
    return lambda rows: listed([value_of(row, value) for row in rows], form, unit, join)


def first(value: Value) -> Cell:
    """A cell with the value of the group's first row."""
    return lambda rows: value_of(rows[0], value)


def listed(values: Iterable[Any], form: str = "", unit: str = "", join: str = ", ") -> str:
    """Values in a cell.

    >>> listed([1.0, None, -0.25], "+.2f", " %")
    '+1.00 %, –, -0.25 %'
    """
    return join.join("–" if x is None else f"{x:{form}}{unit}" for x in values) or "–"


def median_range(values: Sequence[int | None]) -> str:
    """Median and range of steps, and how many never came.

    >>> median_range([500, 700, None]), median_range([None])
    ('600 (500–700), 1 never', 'never')
    """
    there = [x for x in values if x is not None]
    if not there:
        return "never"
    text = f"{median(there):g}"
    if len(there) > 1:
        text += f" ({min(there)}–{max(there)})"
    missing = len(values) - len(there)
    return text + (f", {missing} never" if missing else "")


def _markdown(heads: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    text = ["| " + " | ".join(map(str, cells)) + " |" for cells in [heads, *lines]]
    return "\n".join([text[0], "|---" * len(heads) + "|", *text[1:]])
