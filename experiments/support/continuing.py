"""Is a ranking of checkpoints right? Each is continued without any fault, and the loss compared.

Here: `continue_all` of one run, and what orders and pairs of checkpoints say. Not here: the runs
(`grades.py`), nor the ranking itself (`stabmon.output.ranking`).
"""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np

from experiments.data import batches, load_corpus
from experiments.faults import scales
from experiments.loop.checkpoints import checkpoints
from experiments.loop.losses import make_evaluation
from experiments.support.states import compiled
from experiments.train import Config as TrainConfig
from stabmon.output.ranking import rank_checkpoints
from stabmon.runs.run import Run

Checkpoint = Mapping[str, Any]


def continue_all(
    settings: TrainConfig,
    run: Run,
    saved_at: Sequence[int],
    steps: int,
    known: Mapping[int, float] | None = None,
) -> list[dict[str, Any]]:
    """The checkpoints of a run, best first by health, each with its loss `steps` steps later.

    Args:
        settings: The run's.
        run: The run, with the events that its checkpoints are to be ranked by.
        saved_at: Steps of its checkpoints.
        steps: Healthy steps from each of them on: no fault, the run's own learning rate and data.
        known: Losses after these steps by checkpoint, where they were measured before: only the
            ranking is made anew.
    """
    ranked = rank_checkpoints(run, saved_at)
    order = [x.step for x in ranked]
    after = [known[x] for x in order] if known else continued(settings, order, steps)
    return [
        {
            "step": x.step,
            "state": x.against or "fit",
            "grade": x.grade,
            "rank_ratio": x.rank_ratio,
            "loss": x.loss,
            "alarms": len(x.alarms),
            "continued": loss,
        }
        for x, loss in zip(ranked, after, strict=True)
    ]


def continued(settings: TrainConfig, saved_at: Sequence[int], steps: int) -> list[float]:
    """Held-out loss `steps` healthy steps after each checkpoint of a recorded run."""
    corpus = load_corpus(settings.data)
    init, step_fn = compiled(settings)
    context = settings.model.context
    data = batches(corpus, seed=settings.seed, batch=settings.batch, context=context)
    held_out = make_evaluation(settings.model, corpus, settings.batch)
    factors = scales(None if settings.disturbances is None else (), 0)
    saved = checkpoints(settings.runs / settings.name, init(settings.seed))
    losses = []
    for first in saved_at:
        state = saved.restore(first)
        for step in range(first, first + steps):
            state, _, _ = step_fn(
                state, np.asarray(data[step]), np.float32(0), due=(), scales=factors
            )
        losses.append(float(held_out(state.params)))
    saved.close()
    return losses


def rank_correlation(first: Sequence[int], second: Sequence[int]) -> float:
    """Spearman's ρ of two orders of the same things; NaN for fewer than two.

    >>> rank_correlation([10, 20, 30], [10, 20, 30]), rank_correlation([10, 20, 30], [30, 20, 10])
    (1.0, -1.0)
    """
    if len(first) < 2:
        return float("nan")
    place = {x: i for i, x in enumerate(second)}
    apart = sum((i - place[x]) ** 2 for i, x in enumerate(first))
    n = len(first)
    return 1 - 6 * apart / (n * (n * n - 1))


def orders(checkpoints: Sequence[Checkpoint]) -> dict[str, list[int]]:
    """Steps of the checkpoints, best first: as ranked, by loss, and by the loss after continuing.

    What is not finite comes last; of equals the later step comes first.
    """
    by = lambda name: [
        x["step"]
        for x in sorted(
            checkpoints,
            key=lambda x: (x[name] if _finite(x[name]) else float("inf"), -x["step"]),
        )
    ]
    return {
        "health": [x["step"] for x in checkpoints],
        "loss": by("loss"),
        "continued": by("continued"),
    }


def disputed(checkpoints: Sequence[Checkpoint]) -> list[tuple[Checkpoint, Checkpoint]]:
    """Pairs that the rankings judge otherwise: healthier at a higher loss, and the other one."""
    pairs = []
    for i, better in enumerate(checkpoints):
        for worse in checkpoints[i + 1 :]:
            if _finite(worse["loss"]) and worse["loss"] < better["loss"]:
                pairs.append((better, worse))
    return pairs


def _finite(x: float | None) -> bool:
    return x is not None and isfinite(x)
