"""Curves in a terminal: series drawn with the dots of braille characters, two by four a cell.

What lives here: `Curve`, `draw`. What does not: what is drawn (`board`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from rich.style import Style
from rich.text import Text

# Bits of the dots of one cell, by row and column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


class Curve(NamedTuple):
    """One series.

    Attributes:
        samples: Step → value.
        style: Its colour; also the only thing told by colour alone, so name it in words too.
    """

    samples: Mapping[int, float | int]
    style: str


@dataclass(frozen=True)
class Scale:
    """The vertical axis.

    Attributes:
        low: Value at the lower edge, None: the lowest there is.
        high: Value at the upper edge, None: the highest there is.
        log: Whether it is logarithmic.
    """

    low: float | int | None = None
    high: float | int | None = None
    log: bool = False


def draw(
    curves: Sequence[Curve],
    width: int,
    height: int,
    scale: Scale,
    *,
    ascii_only: bool = False,
) -> list[Text]:
    r"""Returns lines of text with the curves, the range of values at the left.

    Steps run from the first to the last of any curve. Non-finite values are gaps. Where several
    samples fall on a column, the line goes through all of them, so no peak is lost.

    Args:
        curves: What to draw, the most important last.
        width: Columns, at least 12.
        height: Lines, at least 1.
        scale: The vertical axis.
        ascii_only: For terminals without Unicode.

    Example:
        >>> lines = draw([Curve({0: 0.0, 1: 1.0}, "blue")], 14, 2, Scale())
        >>> print("\n".join(line.plain for line in lines))
             1 ⠀⠀⠀⢀⡠⠔⠊
             0 ⡠⠔⠊⠁⠀⠀⠀
    """
    series = [_series(curve, scale.log) for curve in curves]
    values = np.concatenate([y for _, y in series]) if series else np.zeros(0)
    finite = values[np.isfinite(values)]
    edge = lambda given, found: (
        found if given is None else math.log10(given) if scale.log else given
    )
    low = edge(scale.low, float(finite.min()) if finite.size else 0.0)
    high = edge(scale.high, float(finite.max()) if finite.size else 1.0)
    if high <= low:
        low, high = low - abs(low) / 10 - 1e-9, high + abs(high) / 10 + 1e-9
    label = lambda v: f"{10**v if scale.log else v:6.3g}"[:6] + " "
    left = [" " * 7] * height
    left[-1] = label(low)
    left[0] = label(high) if height > 1 else left[0]
    columns = max(width - 7, 1)
    cells = np.zeros((height, columns), np.uint8)
    owner = np.zeros((height, columns), np.int64)
    steps = np.concatenate([x for x, _ in series]) if series else np.zeros(0, np.int64)
    first, last = (int(steps.min()), int(steps.max())) if steps.size else (0, 1)
    for i, (x, y) in enumerate(series):
        place = (x - first) / max(last - first, 1) * (2 * columns - 1)
        level = (high - np.clip(y, low, high)) / (high - low) * (4 * height - 1)
        for column, row in _dots(place, level):
            cells[row // 4, column // 2] |= _DOTS[row % 4][column % 2]
            owner[row // 4, column // 2] = i
    lines = []
    for row in range(height):
        line = Text(left[row], Style(dim=True), no_wrap=True)
        for bits, i in zip(cells[row].tolist(), owner[row].tolist(), strict=True):
            empty = " " if ascii_only else "⠀"
            mark = "*" if ascii_only else chr(0x2800 + bits)
            line.append(mark if bits else empty, Style.parse(f"not dim {curves[i].style}"))
        lines.append(line)
    return lines


def _series(
    curve: Curve, log: bool
) -> tuple[Int[np.ndarray, " samples"], Float[np.ndarray, " samples"]]:
    """Steps in order, and values on the axis; what is not on it is NaN."""
    steps = np.array(sorted(curve.samples), np.int64)
    values = np.array([curve.samples[step] for step in steps.tolist()], np.float64)
    values = np.where(np.isfinite(values) & ((values > 0) | (not log)), values, np.nan)
    return steps, np.log10(values) if log else values


def _dots(
    place: Float[np.ndarray, " samples"], level: Float[np.ndarray, " samples"]
) -> list[tuple[int, int]]:
    """The dots of a line through the samples, interrupted where one is not finite."""
    dots: set[tuple[int, int]] = set()
    before: tuple[float, float] | None = None
    for x, y in zip(place.tolist(), level.tolist(), strict=True):
        if not math.isfinite(y):
            before = None
            continue
        x0, y0 = before or (x, y)
        count = max(1, math.ceil(max(abs(x - x0), abs(y - y0))))
        for i in range(count + 1):
            part = i / count
            dots.add((round(x0 + part * (x - x0)), round(y0 + part * (y - y0))))
        before = x, y
    return sorted(dots)
