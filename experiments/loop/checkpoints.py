"""The training state and where its checkpoints lie; saving is `stabmon.OrbaxCheckpoints`."""

from pathlib import Path
from typing import Any, NamedTuple

from jaxtyping import Array, Int

import stabmon


class TrainState(NamedTuple):
    """All that a step reads and writes.

    Attributes:
        step: Updates applied so far, int32.
        params: Parameters, a nested dict.
        opt_state: Optimizer state, the snapshot ring included.
    """

    step: Int[Array, ""]
    params: Any
    opt_state: Any


def checkpoints(run: Path, like: TrainState) -> stabmon.OrbaxCheckpoints:
    """The checkpoints of a run, with states like one of its own."""
    return stabmon.OrbaxCheckpoints(run / "checkpoints", like)
