"""Which curves a report shows: panels chosen from the keys that the runs have, and their data.

What lives here: `Panel`, `default_panels`, the split of a metric key into its parts, and the
thinning of long series. What does not: colours and Plotly (`figures`), the page (`report`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from stabmon.runs.runlog import Run

POINTS = 1500
_KEY = re.compile(r"([^/]+)/(global|layer_\d+)/(.+)/([^/]+)")
_MODES = ("modes", "effective_rank", "entropy", "stable_rank")
_STAT_NAMES = {"modes": "modes", "effective_rank": "effective rank", "entropy": "entropy"}


class Key(NamedTuple):
    """A metric key by its parts: `delta50/layer_03/delta2/modes/p10`.

    Attributes:
        monitor: `delta50`.
        scope: `layer_03`, or `global`.
        metric: `delta2/modes`.
        aggregate: `p10`.
    """

    monitor: str
    scope: str
    metric: str
    aggregate: str

    @property
    def quantity(self) -> str:
        """What is measured, wherever and however aggregated: `delta50/delta2/modes`."""
        return f"{self.monitor}/{self.metric}"


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


class _Rule(NamedTuple):
    """What to show if it is there: the first of `metrics` found, once for each monitor."""

    title: str
    monitor: str
    metrics: tuple[str, ...]
    log: bool = False
    unit: str = ""


def _spectra(*names: str) -> tuple[str, ...]:
    """The spectrum statistics of some matrices, best first."""
    return tuple(f"{name}/{stat}" for name in names for stat in _MODES)


_RULES = (
    _Rule("Held-out loss", "evaluation", ("loss",), unit="nats per token"),
    _Rule("Loss", "(?!evaluation).*", ("loss",), unit="nats per token"),
    _Rule("Gradient norm", ".*", ("grad_norm",), log=True),
    _Rule("Δ2 {stat}", r"delta\d+", _spectra("delta2")),
    _Rule("ΔW {stat}", r"delta\d+", _spectra("delta_w", "dw", "query", "dw_q", "key", "dw_k")),
    _Rule("Alignment of ΔW_q with W_q", r"delta\d+", ("q/radial_alignment", "radial_alignment")),
    _Rule("Attention entropy", ".*", ("attention_entropy", "attention/entropy"), unit="nats"),
    _Rule("Attention entropy", "attention", ("entropy",), unit="nats"),
    _Rule("Largest attention logit", ".*", ("max_logit", "attention/max_logit"), log=True),
    _Rule("Stable rank of W_q", "weights?|spectrum", ("q/stable_rank", "stable_rank")),
    _Rule("Norm of W_q", "weights?|spectrum", ("q/norm",)),
    _Rule("Rank ratio of activations", ".*", ("rank_ratio",)),
    _Rule("Router entropy", "router", ("entropy",), unit="nats"),
)


def split_key(key: str) -> Key | None:
    """Returns the parts of a metric key, None if it does not have the form.

    Args:
        key: Such as `delta50/global/delta2/modes/mean`.

    Example:
        >>> split_key("delta50/layer_03/delta2/modes/p10").quantity
        'delta50/delta2/modes'
        >>> split_key("loss") is None
        True
    """
    match = _KEY.fullmatch(key)
    return Key(*match.groups()) if match else None


def default_panels(runs: Sequence[Run]) -> list[Panel]:
    """Returns the panels for which the runs have data, best known signals in a fixed order.

    Loss and gradient norm, modes of Δ2 and ΔW at each lag, alignment, attention entropy and
    logits, ranks and norms of weights, activations, router. Where none of these is there: all
    quantities, twelve at most.

    Args:
        runs: The runs to be shown together.
    """
    aggregates: dict[str, dict[str, str]] = {}
    for key in sorted({key for run in runs for key in run.metrics}):
        parts = split_key(key)
        if parts and parts.scope == "global":
            aggregates.setdefault(parts.quantity, {})[parts.aggregate] = key
    monitors = sorted({name.split("/")[0] for name in aggregates}, key=_natural)
    panels = []
    for rule in _RULES:
        for monitor in filter(re.compile(rule.monitor).fullmatch, monitors):
            found = [m for m in rule.metrics if f"{monitor}/{m}" in aggregates]
            if found:
                keys = aggregates[f"{monitor}/{found[0]}"]
                title = rule.title.format(stat=_stat_name(found[0]))
                lag = re.fullmatch(r"delta(\d+)", monitor)
                title += f", lag {lag[1]}" if lag else ""
                panels.append(_panel(title, keys, rule.log, rule.unit))
    if not panels:
        panels = [_panel(name, keys) for name, keys in list(aggregates.items())[:12]]
    return panels


def _stat_name(metric: str) -> str:
    """What a person calls a spectrum statistic."""
    stat = metric.split("/")[-1]
    return _STAT_NAMES.get(stat, stat.replace("_", " "))


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
    layers = sorted(keys, key=_natural)
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


def _natural(name: str) -> tuple[str | int, ...]:
    """Sorts `delta50` before `delta200`."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name))
