"""Colours, dashes and numbers of the charts, and which run is drawn how.

What lives here: the palette, `Style` and `styles`, `numbers`. What does not: charts (`figures`).

Colours are those of Okabe and Ito, told apart under every common colour blindness; each run has a
dash of its own besides.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from stabmon.runs.run import Run

INK, MUTED, GRID, FAULT = "#1f2430", "#667085", "#eceef2", "#8a5a00"
_CLEAN = ("#0072B2", "#009E73", "#56B4E9")
_FAULTY = ("#D55E00", "#CC79A7", "#E69F00")
_DASHES = ("solid", "5px,1.5px", "10px,3px", "8px,2px,2px,2px")


@dataclass(frozen=True)
class Style:
    """How a run is drawn everywhere.

    Attributes:
        run: The run.
        color: As `#rrggbb`.
        dash: Plotly's dash of its mean line.
    """

    run: Run
    color: str
    dash: str

    def shade(self, alpha: float) -> str:
        """Returns the colour as `rgba(...)`.

        Args:
            alpha: 0 (invisible) to 1.
        """
        red, green, blue = (int(self.color[i : i + 2], 16) for i in (1, 3, 5))
        return f"rgba({red},{green},{blue},{alpha})"


def styles(runs: Sequence[Run]) -> list[Style]:
    """Returns a style for each run: clean ones in cool colours, faulty ones in warm ones.

    Args:
        runs: The runs to be shown together.
    """
    used = {True: 0, False: 0}
    out = []
    for run in runs:
        faulty = bool(run.faults)
        count = used[faulty]
        # Three colours and four dashes come together again only with the thirteenth run.
        color = (_FAULTY if faulty else _CLEAN)[count % 3]
        out.append(Style(run, color, _DASHES[(count + faulty) % 4]))
        used[faulty] += 1
    return out


def numbers(values: Float[np.ndarray, " samples"]) -> list[float | None]:
    """Returns values as JSON can hold them, to six digits: None, a gap, where they are not finite.

    Args:
        values: What is drawn.

    Example:
        >>> numbers(np.array([1.23456789, np.nan, np.inf]))
        [1.23457, None, None]
    """
    return [float(f"{v:.6g}") if np.isfinite(v) else None for v in values.tolist()]
