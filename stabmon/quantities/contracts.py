"""Contracts as quantities: for each, the number of leaves that break it.

What each asks is `stabmon.contracts`'s; the words are here, so that a report needs no JAX.
"""

from collections.abc import Iterator

from stabmon.quantities.quantity import Judged, Quantity

TITLES = {
    "moves": "every leaf that the optimizer owns moves",
    "frozen": "what is frozen does not move",
    "gradients": "every leaf that the optimizer owns gets gradients",
    "backward": "some gradient is not zero",
    "zeroed": "gradients do not pile up from step to step",
    "answers": "where there is a gradient there is an update",
    "moments": "moments move when gradients do",
    "precision": "precision does not swallow the updates",
    "masters": "low-precision parameters are their float32 copies, rounded",
    "counts": "the optimizer's counters advance with the steps",
    "rate": "the learning rate is as declared",
    "replicas": "copies on all devices are equal",
    "batch": "sequences of a batch are different",
    "ties": "tied leaves are equal",
    "first_loss": "the first loss is that of a model that knows nothing",
    "types": "dtypes are those of the start",
    "restore": "what is restored is what was saved",
    "evaluation": "two evaluations of one batch are equal",
}


def contracts() -> Iterator[Quantity]:
    """Quantities of contracts: leaves that are broken, 0 where a contract holds."""
    for name, title in TITLES.items():
        yield Quantity(
            *("contracts", name, f"Broken contract: {title}", "none", "up", "leaves", ("value",)),
            judged=(Judged("limit", ("value",), "up", 0.0, dwell=1, from_start=True),),
        )
