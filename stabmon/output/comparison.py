"""`stabmon compare`: runs replayed against a reference, and how early each monitor spoke.

What lives here: which metrics are compared and how each is judged, and `compare`. What does not:
references, detectors and lead times themselves (`stabmon.alarms`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console

from stabmon.alarms.detectors.bands import BandDetector
from stabmon.alarms.lead import Lead, first_by_key, lead_times
from stabmon.alarms.reference import Judged, Reference, learn
from stabmon.output.panels import default_panels
from stabmon.output.terminal import show_json, table
from stabmon.output.verdict import first_onset
from stabmon.quantities import HELD_OUT, LOSS, quantity_of, split_key, title_of
from stabmon.runs.run import Run


@dataclass(frozen=True)
class Comparison:
    """One run against a reference.

    Attributes:
        run: The run.
        onset: First step of its first injected fault, None without one.
        table: Lead times, earliest first, monitors that never fired last.
    """

    run: Run
    onset: int | None
    table: list[Lead]


def learn_reference(runs: Sequence[Run], window: tuple[int, int] | None = None) -> Reference:
    """Returns a reference from clean runs, of the quantities that a report would show.

    Args:
        runs: At least two clean runs of one configuration.
        window: Healthy steps, (first, last), for metrics judged by the run's own level; None: from
            a twentieth to three twentieths of the shortest run.

    Raises:
        ValueError: There are fewer than two runs, or they have no metric in common.
    """
    if len(runs) < 2:
        raise ValueError(
            f"--reference: a spread needs at least two clean runs, got {len(runs)}; give more "
            "seeds, or a reference file"
        )
    given = [(run.name, run.folder.resolve()) for run in runs]
    if twice := {name for name, folder in given if given.count((name, folder)) > 1}:
        raise ValueError(f"--reference: {', '.join(sorted(twice))} is given twice: no other seed")
    last = min(_last_step(run) for run in runs)
    window = window or (last // 20, 3 * last // 20)
    judged: dict[str, Judged] = {key: _judged(key) for key in _keys(runs)}
    keys: dict[str, Judged] = {
        key: how for key, how in judged.items() if _usable(runs, key, how, window)
    }
    if not keys:
        names = ", ".join(run.name for run in runs)
        raise ValueError(
            f"runs {names} have no metric in common that is finite at three common steps, with one "
            f"of them in the healthy window {window}: give --window"
        )
    return learn(runs, keys, window, source={"steps": last})


def compare(
    runs: Sequence[Run], reference: Reference, *, threshold: float | int = 5.0, dwell: int = 2
) -> list[Comparison]:
    """Replays runs against a reference.

    Args:
        runs: Runs as they were read; none of those that the reference was learned from.
        reference: The reference.
        threshold: Spreads that are too many.
        dwell: Samples running that make an alarm.

    Raises:
        ValueError: A run is part of the reference, or has none of its metrics.
    """
    out = []
    for run in runs:
        if run.name in reference.source.get("runs", ()):
            raise ValueError(f"run {run.name} is in the reference: it would judge itself")
        bands = [key for key in reference.bands if key in run.metrics]
        if not bands:
            raise ValueError(
                f"run {run.name} has none of the reference's metrics, such as "
                f"{', '.join(list(reference.bands)[:3])}"
            )
        alarms = first_by_key(run, BandDetector(reference, threshold=threshold, dwell=dwell))
        onset = first_onset(run)
        loss = next((key for key in (HELD_OUT, LOSS) if key in bands), "")
        names = _names(bands)
        out.append(Comparison(run, onset, lead_times(alarms, names, loss, _last_step(run), onset)))
    return out


def show_comparison(console: Console, found: Sequence[Comparison], as_json: bool = False) -> None:
    """Prints it.

    Args:
        console: Where to.
        found: As of `compare`.
        as_json: JSON instead of tables.
    """
    if as_json:
        rows = [
            {"run": x.run.name, "onset": x.onset, "table": [asdict(lead) for lead in x.table]}
            for x in found
        ]
        show_json(console, rows)
        return
    columns = ("monitor", "first alarm", "after onset", "lead over loss")
    for x in found:
        rows = []
        for lead in x.table:
            bound = "≥ " if lead.lead_is_bound else ""
            ahead = f"{bound}{lead.lead:,}" if lead.lead else None
            first = "never" if lead.first is None else lead.first
            rows.append((lead.monitor, first, lead.after, ahead))
        onset = "no fault" if x.onset is None else f"fault from step {x.onset:,}"
        console.print(table(f"First alarms of {x.run.name}, {onset}", rows, columns))


def _keys(runs: Sequence[Run]) -> list[str]:
    """Keys of what is compared: of each panel the aggregate that its quantity is compared by."""
    common = set.intersection(*(set(run.metrics) for run in runs))
    chosen = []
    for panel in default_panels(runs):
        parts, quantity = split_key(panel.mean_key), quantity_of(panel.mean_key)
        keys = [panel.mean_key]
        if parts and quantity:
            keys.insert(0, f"{parts.monitor}/global/{parts.metric}/{quantity.low}")
        chosen += [key for key in keys if key in common][:1]
    return chosen


def _names(keys: Sequence[str]) -> Mapping[str, str]:
    """Name for people → key, for the keys of a reference."""
    names: dict[str, str] = {}
    for key in keys:
        parts = split_key(key)
        name = title_of(parts.quantity) if parts else key
        names[name if name not in names else key] = key
    return names


def _judged(key: str) -> Judged:
    """How a metric is judged."""
    quantity = quantity_of(key)
    return "own" if quantity is not None and quantity.own_level else "reference"


def _usable(runs: Sequence[Run], key: str, judged: Judged, window: tuple[int, int]) -> bool:
    """Whether a band can be learned: finite at three common steps, one of them in the window."""
    finite = [set(run.metrics[key][0][np.isfinite(run.metrics[key][1])].tolist()) for run in runs]
    steps = set.intersection(*finite)
    inside = any(window[0] <= step <= window[1] for step in steps)
    return len(steps) >= 3 and (inside or judged == "reference")


def _last_step(run: Run) -> int:
    """Step of the newest sample."""
    return max((int(steps[-1]) for steps, _ in run.metrics.values()), default=0)
