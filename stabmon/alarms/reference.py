"""What a healthy run looks like: an expected course with a spread for each metric.

Learned from clean runs, or frozen from a healthy window of the run itself; saved as a small JSON
file that can be shipped. What is made of a deviation is decided in `detectors/`; the same window
as a stream, sample by sample, is `detectors/window.py`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from stabmon.alarms.detectors.window import median_and_spread
from stabmon.runs.run import Run

FORMAT = 1
Judged = Literal["reference", "own", "after"]


@dataclass(frozen=True)
class Band:
    """Expected course of one metric.

    Attributes:
        steps: Steps of the course, ascending.
        mean: Expected value at each of them.
        sd: Spread of clean runs around it at each of them, positive.
        judged: "reference": a value is compared with the course itself. "own": the course gives
            only the trend; the run's own mean deviation over the healthy window is taken off
            first, since the metric sits at another level for every seed. "after": as "reference",
            but nothing is judged before the healthy window has ended.
    """

    steps: np.ndarray
    mean: np.ndarray
    sd: np.ndarray
    judged: Judged = "reference"

    def __call__(self, step: int) -> tuple[float, float]:
        """Expected value and spread at `step`, interpolated; constant beyond either end."""
        at = lambda y: float(np.interp(step, self.steps, y))
        return at(self.mean), at(self.sd)


@dataclass(frozen=True)
class Reference:
    """Bands by metric key, and the steps that count as healthy in every run.

    Attributes:
        bands: {key: Band}.
        window: First and last step of the healthy window, for bands judged by the run's own level.
        source: How it was made, for people.
    """

    bands: dict[str, Band]
    window: tuple[int, int]
    source: dict[str, Any]

    def save(self, path: Path) -> None:
        """Write as JSON, five digits a number."""
        digits = lambda x: [float(f"{v:.5g}") for v in x]
        bands = {
            key: {
                "steps": band.steps.tolist(),
                "mean": digits(band.mean),
                "sd": digits(band.sd),
                "judged": band.judged,
            }
            for key, band in self.bands.items()
        }
        content = {"format": FORMAT, "window": self.window, "source": self.source, "bands": bands}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Reference":
        """Read what `save` wrote.

        Raises:
            ValueError: The file is no reference, or of a newer format.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] > FORMAT:
                raise ValueError(f"{path} has format {content['format']}, this code reads {FORMAT}")
            bands = {
                key: Band(
                    steps=np.asarray(band["steps"]),
                    mean=np.asarray(band["mean"]),
                    sd=np.asarray(band["sd"]),
                    judged=band["judged"],
                )
                for key, band in content["bands"].items()
            }
            return cls(bands, tuple(content["window"]), content["source"])
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is no reference file: {error!r}") from error


def learn(
    runs: Sequence[Run],
    keys: Mapping[str, Judged],
    window: tuple[int, int],
    bandwidth: int = 6,
    source: Mapping[str, Any] | None = None,
) -> Reference:
    """A reference from clean runs of one configuration, each of another seed.

    The course is a local linear fit over all runs; the spread is the root mean square of the runs'
    residuals over the same neighbourhood, widened by √(1 + 1/runs) for the error of the course.
    Non-finite values are left out.

    Args:
        runs: At least two clean runs.
        keys: {metric key: how it is judged}.
        window: Healthy steps, (first, last).
        bandwidth: Neighbours to each side of a sample that a local fit uses.
        source: Kept with the reference.

    Raises:
        ValueError: Fewer than two runs, or a key that a run lacks.
    """
    if len(runs) < 2:
        raise ValueError(f"a spread needs at least two clean runs, got {len(runs)}")
    bands = {}
    for key, judged in keys.items():
        columns = []
        for run in runs:
            if key not in run.metrics:
                near = sorted(k for k in run.metrics if k.split("/")[0] == key.split("/")[0])
                raise ValueError(f"run {run.name} has no {key!r}; of this monitor it has {near}")
            steps, values = run.metrics[key]
            columns.append(dict(zip(steps.tolist(), values.tolist(), strict=True)))
        steps = np.asarray(sorted(set.intersection(*(set(column) for column in columns))))
        table = np.asarray([[column[s] for s in steps] for column in columns])
        table = np.where(np.isfinite(table), table, np.nan)
        if judged == "own":
            course = _local_linear(steps, np.nanmean(table, axis=0), bandwidth)
            inside = (steps >= window[0]) & (steps <= window[1])
            table = table - np.nanmean(table[:, inside] - course[inside], axis=1, keepdims=True)
        mean = _local_linear(steps, np.nanmean(table, axis=0), bandwidth)
        square = np.nanmean((table - mean) ** 2, axis=0) * len(runs) / (len(runs) - 1)
        spread = np.sqrt(_local_mean(steps, square, bandwidth) * (1 + 1 / len(runs)))
        floor = 1e-6 * np.maximum(np.abs(mean), 1e-30)
        bands[key] = Band(steps, mean, np.maximum(spread, floor), judged)
    provenance = {"runs": [run.name for run in runs], **dict(source or {})}
    return Reference(bands, window, provenance)


def freeze(
    run: Run,
    keys: Sequence[str],
    window: tuple[int, int],
    warmup: int = 0,
    floor: float = 0.02,
) -> Reference:
    """A reference from a healthy window of the run that is to be judged: median and MAD, constant.

    For a run that has no clean sisters. The bands do not move afterwards: a rolling baseline would
    absorb a slow collapse. Nothing is judged before the window has ended.

    Args:
        run: The run so far.
        keys: Metrics to take.
        window: Healthy steps, (first, last).
        warmup: Steps of learning-rate warm-up, which the window must not reach into.
        floor: Smallest spread, as a fraction of the median.

    Raises:
        ValueError: The window begins within the warm-up, or holds fewer than three finite values
            of a metric.
    """
    if window[0] < warmup:
        raise ValueError(
            f"the healthy window {window} begins within the warm-up of {warmup} steps, whose "
            f"course is not the run's: let it begin at {warmup} or later"
        )
    bands = {}
    for key in keys:
        steps, values = run.metrics.get(key, (np.zeros(0, int), np.zeros(0)))
        inside = values[(steps >= window[0]) & (steps <= window[1]) & np.isfinite(values)]
        if len(inside) < 3:
            raise ValueError(
                f"run {run.name} has {len(inside)} finite values of {key!r} in steps {window}; a "
                "spread needs at least 3: take a longer window"
            )
        median, spread = median_and_spread(inside, floor)
        at = np.asarray([window[1]])
        bands[key] = Band(at, np.asarray([median]), np.asarray([spread]), "after")
    return Reference(bands, window, {"runs": [run.name], "frozen": list(window)})


def _weights(steps: np.ndarray, i: int, bandwidth: int) -> tuple[slice, np.ndarray, np.ndarray]:
    """Neighbourhood of sample i, distances, and tricube weights."""
    near = slice(max(0, i - bandwidth), i + bandwidth + 1)
    distance = (steps[near] - steps[i]).astype(float)
    reach = max(float(np.max(np.abs(distance))), 1.0) * 1.001
    return near, distance, (1 - np.abs(distance / reach) ** 3) ** 3


def _local_linear(steps: np.ndarray, y: np.ndarray, bandwidth: int) -> np.ndarray:
    fitted = np.empty(len(steps))
    for i in range(len(steps)):
        near, distance, weight = _weights(steps, i, bandwidth)
        weight = weight * np.isfinite(y[near])
        design = np.stack([np.ones_like(distance), distance], axis=1)
        gram = design.T @ (weight[:, None] * design)
        moment = design.T @ (weight * np.nan_to_num(y[near]))
        fitted[i] = np.linalg.lstsq(gram, moment, rcond=1e-10)[0][0]
    return fitted


def _local_mean(steps: np.ndarray, y: np.ndarray, bandwidth: int) -> np.ndarray:
    mean = np.empty(len(steps))
    for i in range(len(steps)):
        near, _, weight = _weights(steps, i, bandwidth)
        weight = weight * np.isfinite(y[near])
        mean[i] = np.sum(weight * np.nan_to_num(y[near])) / max(np.sum(weight), 1e-30)
    return mean
