"""Which curves a report shows: panels chosen from the keys that the runs have, and their data.

What lives here: `Panel`, `default_panels`, and the thinning of long series. What does not: which
quantities have a panel (`stabmon.quantities`), colours and Plotly (`figures`), the page (`report`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from stabmon.quantities import QUANTITIES, find, split_key, title_of
from stabmon.runs.run import Run

POINTS = 1500
_PANELS = list(dict.fromkeys(quantity.panel for quantity in QUANTITIES if quantity.panel))


@dataclass(frozen=True)
class Panel:
    """One chart: a quantity over steps, with its spread over layers and heads.

    Attributes:
        title: Above the chart.
        mean_key: Key of the line.
        low_key: Key of the lower edge of the band, such as a 10th percentile.
        high_key: Key of its upper edge; without it the lower edge is drawn as a line.
        worst_key: Key of the worst head.
        log: Whether the vertical axis is logarithmic.
        unit: Unit of the vertical axis.
    """

    title: str
    mean_key: str
    low_key: str | None = None
    high_key: str | None = None
    worst_key: str | None = None
    log: bool = False
    unit: str = ""


def default_panels(runs: Sequence[Run]) -> list[Panel]:
    """Returns the panels for which the runs have data, best known signals in a fixed order.

    Panels and their order are those of the registered quantities; spectra have one at each lag.
    Where none of these is there: all quantities, twelve at most.

    Args:
        runs: The runs to be shown together.
    """
    aggregates: dict[str, dict[str, str]] = {}
    for key in sorted({key for run in runs for key in run.metrics}):
        parts = split_key(key)
        if parts and parts.scope == "global":
            aggregates.setdefault(parts.quantity, {})[parts.aggregate] = key
    order = {quantity.name: i for i, quantity in enumerate(QUANTITIES)}
    shown: dict[tuple[int, tuple[str | int, ...]], tuple[int, Panel]] = {}
    for name, keys in aggregates.items():
        monitor, _, metric = name.partition("/")
        quantity = find(monitor, metric)
        if quantity is None or not quantity.panel:
            continue
        place = (_PANELS.index(quantity.panel), natural(monitor))
        drawn = _panel(title_of(name), keys, quantity.log, quantity.unit)
        if place not in shown or order[quantity.name] < shown[place][0]:
            shown[place] = (order[quantity.name], drawn)
    panels = [shown[place][1] for place in sorted(shown)]
    return panels or [_panel(name, keys) for name, keys in list(aggregates.items())[:12]]


def _panel(title: str, keys: dict[str, str], log: bool = False, unit: str = "") -> Panel:
    """A panel of one quantity from the keys of its aggregates."""
    first = next((keys[name] for name in ("mean", "value") if name in keys), min(keys.values()))
    worst = next((keys[name] for name in ("worst", "min", "max") if name in keys), None)
    return Panel(
        title,
        first,
        low_key=keys.get("p10"),
        high_key=keys.get("p90"),
        worst_key=worst if worst != first else None,
        log=log,
        unit=unit,
    )


def layers_over_steps(
    run: Run, panel: Panel
) -> tuple[list[str], Int[np.ndarray, " steps"], Float[np.ndarray, "layers steps"]] | None:
    """Returns the panel's quantity by layer: names, steps and values, None if it is not there.

    The aggregate is the panel's own line, or else the mean, the value or whatever there is. Steps
    at which a layer has no sample are NaN; longer series are thinned by dropping samples evenly.

    Args:
        run: Where to look.
        panel: What to look for.
    """
    wanted = split_key(panel.mean_key)
    by_aggregate: dict[str, dict[str, str]] = {}
    for key in run.metrics:
        parts = split_key(key)
        if wanted and parts and parts.quantity == wanted.quantity and parts.scope != "global":
            by_aggregate.setdefault(parts.aggregate, {})[parts.scope] = key
    if not wanted or not by_aggregate:
        return None
    order = (wanted.aggregate, "mean", "value", min(by_aggregate))
    keys = by_aggregate[next(name for name in order if name in by_aggregate)]
    layers = sorted(keys, key=natural)
    steps = np.unique(np.concatenate([run.metrics[keys[layer]][0] for layer in layers]))
    grid = np.full((len(layers), len(steps)), np.nan)
    for row, layer in enumerate(layers):
        at, values = run.metrics[keys[layer]]
        grid[row, np.searchsorted(steps, at)] = values
    stride = -(-len(steps) // (POINTS // 3))
    return layers, steps[::stride], grid[:, ::stride]


def thin(
    steps: Int[np.ndarray, " samples"], values: Float[np.ndarray, " samples"]
) -> tuple[Int[np.ndarray, " kept"], Float[np.ndarray, " kept"]]:
    """Returns a series short enough to draw, with every peak and the first non-finite value kept.

    Each of equally long stretches keeps its first sample, its lowest and its highest.

    Args:
        steps: Steps, rising.
        values: Values at these steps; NaN and infinities count as neither lowest nor highest.

    Example:
        >>> steps = np.arange(100_000)
        >>> kept, values = thin(steps, np.where(steps == 77_777, 9.0, 0.0))
        >>> len(kept) <= 1500, float(values.max())
        (True, 9.0)
    """
    if len(steps) <= POINTS:
        return steps, values
    stretches = np.array_split(np.arange(len(steps)), POINTS // 3 - 1)
    finite = np.isfinite(values)
    low, high = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
    kept = {int(np.argmin(finite))} if not finite.all() else set()
    for part in stretches:
        kept |= {int(part[0]), int(part[low[part].argmin()]), int(part[high[part].argmax()])}
    index = np.array(sorted(kept))
    return steps[index], values[index]


def natural(name: str) -> tuple[str | int, ...]:
    """Sorts `delta50` before `delta200`."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name))
