"""How router margins move under a learning rate and a batch: the stable-winner analysis, measured.

Here: `measure`, which branches a trained state. Not here: the runs that it branches from, nor what
is concluded (`router_fault.py`).

From one state the training goes on for some steps, several times over other data, at a multiple of
the learning rate and a fraction of the batch. On a text that stays the same, the margin of each
token is the logit of the expert that won before the branch less that of the runner-up then; the
two are held fixed. What all replicas have in common of its change is growth, what differs between
them is noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from experiments.data import Corpus, batches
from experiments.faults import Disturbance, Scales, disturbed
from experiments.support.recorded import Row
from experiments.support.states import compiled, held_out_inputs
from experiments.support.tables import grouped
from experiments.train import Config as TrainConfig
from models.config import GPTConfig
from models.gpt import apply

PROBE = 8


@dataclass(frozen=True)
class Branch:
    """What holds after the branch.

    Attributes:
        rate: Factor of the learning rate.
        batch: By what the batch is divided.
        auxiliary: Factor of the balance loss.
    """

    rate: float = 1.0
    batch: float = 1.0
    auxiliary: float = 1.0


def measure(
    settings: TrainConfig,
    state: Any,
    branch: Branch,
    corpus: Corpus,
    marks: Sequence[int],
    replicas: int,
) -> dict[str, dict[str, float]]:
    """{steps after the branch: growth and noise of the margins, in units of a logit}.

    Args:
        settings: The run that `state` is of.
        state: Where to branch; it is kept.
        branch: What holds from there on.
        corpus: The data.
        marks: Steps after the branch at which the margins are taken, ascending.
        replicas: How often, each time with data of another order; at least 2.

    Raises:
        ValueError: Fewer than two replicas.
    """
    if replicas < 2:
        raise ValueError(f"noise is what differs between replicas: at least 2, got {replicas}")
    step_fn = compiled(settings)[1]
    context, batch = settings.model.context, settings.batch
    inputs = held_out_inputs(settings.data, context, PROBE)
    logits = _logits(settings.model)
    before = np.asarray(logits(state.params, inputs))
    factors = Scales(*(np.float32(x) for x in (branch.rate, branch.auxiliary, 1.0)))
    wrong = [Disturbance("batch", branch.batch, 0)]
    after: dict[int, list[np.ndarray]] = {mark: [] for mark in marks}
    for replica in range(replicas):
        data = batches(corpus, seed=1000 + replica, batch=batch, context=context)
        now = jax.tree.map(jnp.copy, state)
        for step in range(marks[-1]):
            tokens = disturbed(wrong, data, step, 0, corpus.vocabulary)
            now, _, _ = step_fn(now, tokens, np.float32(0), due=(), scales=factors)
            if step + 1 in after:
                after[step + 1].append(np.asarray(logits(now.params, inputs)))
    return {str(mark): margins(before, np.stack(found)) for mark, found in after.items()}


def margins(
    before: Float[np.ndarray, "tokens E"], after: Float[np.ndarray, "replicas tokens E"]
) -> dict[str, float]:
    """Growth, drift and noise of margins whose two experts are those of `before`.

    growth: mean change; drift: root mean square, over tokens, of the change that replicas have in
    common; noise: that of the spread between them; kept: share of tokens whose winner still wins.

    >>> before = np.array([[2.0, 1.0, 0.0]])
    >>> found = margins(before, np.array([[[3.0, 1.0, 0.0]], [[5.0, 1.0, 0.0]]]))
    >>> round(found["growth"], 2), round(found["noise"], 2), found["kept"]
    (2.0, 1.41, 1.0)
    """
    order = np.argsort(-before, axis=-1)
    winner, second = order[:, :1], order[:, 1:2]
    of = lambda z, index: np.take_along_axis(z, index, axis=-1)[..., 0]
    start = of(before, winner) - of(before, second)
    change = np.stack([of(z, winner) - of(z, second) for z in after]) - start
    common, variance = change.mean(axis=0), change.var(axis=0, ddof=1)
    # The mean of a few replicas holds a share of their noise.
    drift = np.mean(common**2 - variance / len(change))
    return {
        "growth": float(change.mean()),
        "drift": float(np.sqrt(max(drift, 0.0))),
        "noise": float(np.sqrt(variance.mean())),
        "kept": float(np.mean(after.argmax(axis=-1) == winner[:, 0])),
    }


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Exponent of a power law through points, by least squares of the logarithms.

    Points that are not positive are left out; NaN for fewer than two others.

    >>> round(slope([1.0, 10.0, 100.0, 1000.0], [2.0, 20.0, 200.0, 0.0]), 3)
    1.0
    """
    points = [(a, b) for a, b in zip(x, y, strict=True) if a > 0 and b > 0]
    if len(points) < 2:
        return float("nan")
    along, up = np.log(np.asarray(points)).T
    return float(np.polyfit(along, up, 1)[0])


def exponents(rows: Sequence[Row], mark: str) -> dict[str, dict[str, list[float]]]:
    """{"rate" and "batch": {"drift" and "noise": exponents by seed}}, of the margins at a mark.

    In the learning rate, and in one over the batch.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for axis, other in (("rate", "batch"), ("batch", "rate")):
        on_axis = [row for row in rows if row[other] == 1 and row["auxiliary"] == 1]
        seeds = [of for of in grouped(on_axis, "seed").values() if len(of) > 1]
        found[axis] = {
            name: [
                slope([x[axis] for x in of], [x["after"][mark][name] for x in of]) for of in seeds
            ]
            for name in ("drift", "noise")
        }
    return found


@lru_cache(maxsize=2)
def _logits(model: GPTConfig) -> Any:
    """Jitted: router logits of all layers' tokens, one below the other."""

    def logits(params: Any, inputs: Any) -> Any:
        seen = apply(model, params, inputs, capture=True)[1]["router_logits"]
        return seen.reshape(-1, seen.shape[-1])

    return jax.jit(logits)
