"""Quantities of the whole model: losses, norms, counters of steps.

The other quantities, and the table of all, are in `table.py`.
"""

from collections.abc import Iterator

from stabmon.quantities.quantity import Judged, Quantity

PER_RATE = "symptoms/global/update_per_rate/value"


def scalars() -> Iterator[Quantity]:
    """Quantities of the whole model, among them those that a trainer gives by itself."""
    nats = "nats per token"
    yield Quantity(
        *("evaluation", "loss", "Held-out loss", "none", "up", nats),
        judged=(
            Judged("z", ("value",), "up", ratchet=True),
            Judged("level", ("value",), "up", dwell=2),
            Judged("impossible", ("value",), "down", dwell=1),
        ),
        evidence="held-out loss",
        panel="Held-out loss",
    )
    yield Quantity(
        *("symptoms", "loss", "Loss", "none", "up", nats, ("value",)),
        judged=(
            # One batch of a healthy run can be six deviations off: more, or for longer.
            Judged("spike", ("value",), "up", threshold=10.0, dwell=1),
            Judged("surge", ("value",), "up", threshold=5.0),
            Judged("shift", ("value",), "down", threshold=5.0, dwell=1),
            Judged("level", ("value",), "up", dwell=3, evidence="loss level"),
            Judged("impossible", ("value",), "down", dwell=1),
        ),
        evidence="loss",
        panel="Loss",
    )
    yield Quantity(
        *("symptoms", "grad_norm", "Gradient norm", "none", "up", "", ("value",)),
        judged=(
            Judged("spike", ("value",), "up", threshold=12.0, dwell=1),
            Judged("surge", ("value",), "up"),
            Judged("shift", ("value",), "up", 4.0, dwell=1, evidence="gradient level"),
        ),
        evidence="gradient norm",
        panel="Gradient norm",
        log=True,
    )
    for metric, title in (("update_norm", "Update norm"), ("update_ratio", "Update over weight")):
        yield Quantity(
            *("symptoms", metric, title, "none", "up", "", ("value",)),
            judged=(
                Judged("surge", ("value",), "up", dwell=3, unless=PER_RATE),
                Judged("low", ("value",), "down", threshold=1e-4, dwell=3, unless=PER_RATE),
            ),
            evidence="update size",
        )
    # The size of updates over the schedule's rate, where that is known: it keeps still under any.
    yield Quantity(
        *("symptoms", "update_per_rate", "Update over weight and rate", "none", "up"),
        judged=(
            Judged("surge", ("value",), "up", dwell=3),
            Judged("z", ("value",), "up", floor=0.2, dwell=3, ratchet=True),
            Judged("low", ("value",), "down", threshold=0.05, dwell=3),
        ),
        evidence="update size",
    )
    yield Quantity("symptoms", "param_norm", "Weight norm", "none", "up", "", ("value",))
    yield Quantity(
        *("symptoms", "nonfinite", "Non-finite leaves", "none", "up", "", ("value",)),
        judged=(Judged("limit", ("value",), "up", 0.0, dwell=1, from_start=True),),
        evidence="non-finite",
    )
    for metric, title in (
        ("skipped", "Steps skipped so far"),
        ("nonfinite_steps", "Non-finite steps so far"),
    ):
        yield Quantity(
            *("symptoms", metric, title, "none", "up", "", ("value",)),
            judged=(Judged("count", ("value",), "up", 2.0, dwell=1),),
            evidence="lost steps",
        )
    for metric, title in (
        ("worst_grad_norm", "Largest gradient norm between samples"),
        ("worst_update_norm", "Largest update norm between samples"),
        ("worst_loss", "Largest loss between samples"),
    ):
        yield Quantity("symptoms", metric, title, "none", "up", "", ("value",))
    first = "Index of the first non-finite leaf"
    yield Quantity("symptoms", "first_nonfinite", first, "none", "up", "", ("value",))
    rate = "Learning rate"
    yield Quantity("schedule", "learning_rate", rate, "none", "up", panel=rate)
    yield Quantity("schedule", "changed", "Step of the last declared change", "none", "up")
