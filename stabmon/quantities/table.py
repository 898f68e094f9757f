"""The table of quantities: one entry each.

Readings, default alarms, diagnosis, panels, verdicts, comparison and the terminal's board derive
from it. To add a quantity, emit it in `monitor/tiers.py` and add an entry here; a test holds both
together. What does not live here: formulas (`metrics/`), detectors (`alarms/detectors/`).
"""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

from stabmon.quantities.contracts import contracts
from stabmon.quantities.matrices import PLACE, spectra, weights
from stabmon.quantities.quantity import Judged, Quantity, split_key
from stabmon.quantities.scalars import scalars


def _attention() -> Iterator[Quantity]:
    """Quantities of attention patterns and of the residual stream."""
    yield Quantity(
        *("attention", "entropy", "Attention entropy", "head", "down", "nats"),
        brief=("mean", "min", *PLACE),
        judged=(
            Judged("z", ("mean",), "down", floor=0.1),
            Judged("all heads", ("mean",), "down", evidence="all heads"),
        ),
        evidence="attention entropy",
        panel="Attention entropy",
        own_level=True,
    )
    yield Quantity(
        *("attention", "max_logit", "Largest attention logit", "head", "up"),
        brief=("mean", "max", *PLACE),
        judged=(
            Judged("limit", ("max",), "up", 1e4, dwell=1, from_start=True),
            Judged("z", ("max",), "up", floor=0.5),
        ),
        evidence="attention logit",
        panel="Largest attention logit",
        log=True,
        own_level=True,
    )
    yield Quantity(
        *("attention", "sharp_heads", "Share of sharp heads", "layer", "up"),
        brief=("mean", "worst_layer"),
        evidence="all heads",  # read together with the entropy
    )
    yield Quantity("attention", "sink_mass", "Attention on the first token", "head", "up")
    yield Quantity("attention", "repeated_maximum", "Repeated largest logits", "head", "up")
    yield Quantity(
        *("activations", "rank_ratio", "Rank ratio of activations", "layer", "down"),
        brief=("mean", "min", "worst_layer"),
        judged=(Judged("grade", ("min",), "down"),),
        evidence="rank",
        panel="Rank ratio of activations",
        own_level=True,
    )
    yield Quantity(
        *("activations", "grade", "Stability grade", "layer", "down"),
        brief=("mean", "min"),
        evidence="rank",
    )
    for half in ("front", "back"):
        title = f"Rank ratio, {half} half of the context"
        metric = f"rank_ratio_{half}"
        yield Quantity("activations", metric, title, "layer", "down", evidence="rank")
    yield Quantity("activations", "context", "Context, tokens", "none", "up", brief=("value",))
    title = "Correlation of neighbouring layers"
    yield Quantity("activations", "layer_correlation", title, "layer", "up")
    yield _padding("activations", "Share of equal tokens")


def _padding(monitor: str, title: str) -> Quantity:
    """What speaks of padding in a batch that came without a mask."""
    return Quantity(monitor, "repeated_tokens", title, "none", "up", brief=("value",))


def _router() -> Iterator[Quantity]:
    """Quantities of routers and expert load."""
    load, place = "expert load", "worst_layer"
    yield Quantity(
        *("router", "entropy", "Router entropy", "layer", "down", "nats"),
        brief=("mean", "min", place),
        judged=(
            # It falls by a third in a healthy run: no drift is judged, but a change of its course.
            Judged("z", ("mean", "min"), "down", floor=0.04, ratchet=True),
            Judged("shift", ("mean",), "down", 3.2, dwell=1, before=40, recent=20),
        ),
        evidence="router entropy",
        panel="Router entropy",
        own_level=True,
    )
    yield Quantity(
        *("router", "max_violation", "Expert load, largest violation", "layer", "up"),
        brief=("mean", "max", place),
        judged=(Judged("z", ("mean",), "up", floor=0.1),),
        evidence=load,
    )
    yield Quantity(
        *("router", "dead", "Share of dead experts", "layer", "up"),
        brief=("mean", "max", place),
        judged=(Judged("limit", ("mean",), "up", 0.5, dwell=3),),
        evidence=load,
    )
    yield Quantity(
        *("router", "effective_experts", "Effective experts", "layer", "down"),
        brief=("mean", "min", place),
        judged=(
            Judged("z", ("mean",), "down"),
            Judged("shift", ("mean",), "down", 4.0, dwell=1),
        ),
        evidence=load,
    )
    # A router that saturates pulls its choices apart, so the bad side of a margin is above.
    yield Quantity(
        *("router", "margin", "Router margin", "layer", "up"),
        brief=("mean", "max", place),
        judged=(Judged("z", ("mean",), "up", floor=0.05),),
        evidence="router margin",
    )
    for percent in ("10", "01"):
        title = f"Router margin, percentile {int(percent)}"
        metric = f"margin_p{percent}"
        yield Quantity("router", metric, title, "layer", "up", evidence="router margin")
    title = "Similarity of the router's rows"
    yield Quantity("router", "similarity", title, "layer", "up", brief=("mean", "max"))
    yield Quantity("router", "conditioning", "Router conditioning ε", "layer", "down")
    yield Quantity("router", "dropped", "Choices beyond capacity", "layer", "up", evidence=load)
    yield Quantity("router", "z", "Router z-loss term", "layer", "up")
    title = "Gradient of the balance loss over the language model's"
    yield Quantity("router", "balance_ratio", title, "layer", "up")
    yield _padding("router", "Share of equal tokens, routed")


def _jacobian() -> Iterator[Quantity]:
    """Quantities of the layers' Jacobians."""
    both = ("mean", "max")
    yield Quantity("jacobian", "norm", "Norm of the Jacobians", "layer", "up", brief=both)
    title = "Alignment of neighbouring Jacobians"
    yield Quantity("jacobian", "forward", title, "layer", "up", brief=both)
    yield Quantity("jacobian", "reversed", f"{title}, reversed", "layer", "up")
    for metric, title in (
        ("growth", "Growth of the product of Jacobians"),
        ("danger", "Whether that product grows"),
    ):
        yield Quantity("jacobian", metric, title, "none", "up", brief=("value",))
    title = "Whether the Jacobian tier converged"
    yield Quantity("jacobian", "converged", title, "none", "down", brief=("value",))


_TIERS = (*spectra(), *_attention(), *weights(), *_router(), *_jacobian())
QUANTITIES = (*scalars(), *_TIERS, *contracts())
_BY_NAME = {quantity.name: quantity for quantity in QUANTITIES}


def find(monitor: str, metric: str) -> Quantity | None:
    """Returns the registered quantity of a monitor's metric, None if it is not registered.

    Args:
        monitor: Such as "delta50" or "router".
        metric: Such as "delta2/modes".

    Example:
        >>> find("delta200", "delta2/modes").title
        'Δ2 modes'
    """
    kind = "delta" if re.fullmatch(r"delta\d+", monitor) else monitor
    return _BY_NAME.get(f"{kind}/{metric}")


@lru_cache(maxsize=4096)
def quantity_of(key: str) -> Quantity | None:
    """Returns the registered quantity of a metric key, None if it is not registered.

    Args:
        key: Such as "delta50/global/delta2/modes/p10".

    Example:
        >>> quantity_of("router/global/margin/mean").bad
        'up'
    """
    parts = split_key(key)
    return find(parts.monitor, parts.metric) if parts else None


def is_brief(key: str) -> bool:
    """Whether `detail="brief"` keeps a metric key.

    Args:
        key: Such as "delta50/global/delta2/entropy/p10".

    Example:
        >>> is_brief("router/global/margin/mean"), is_brief("router/layer_00/margin/value")
        (True, False)
    """
    parts, quantity = split_key(key), quantity_of(key)
    if parts is None or quantity is None:
        return False
    return parts.scope == "global" and parts.aggregate in quantity.brief


@lru_cache(maxsize=4096)
def title_of(quantity: str) -> str:
    """Returns what a person calls `monitor/metric`, with the lag; itself if not registered.

    Args:
        quantity: `Key.quantity`, such as "delta50/delta2/modes".

    Example:
        >>> title_of("delta50/delta2/modes")
        'Δ2 modes, lag 50'
    """
    monitor, _, metric = quantity.partition("/")
    found = find(monitor, metric)
    if found is None:
        return quantity
    return found.title + (f", lag {monitor[5:]}" if found.monitor == "delta" else "")


# Signs in a diagnosis, and what they take to be measured.
NEEDS = {
    "loss": "loss=",
    "gradient norm": "grads=",
    "update size": "updates=",
    "Δ2": "the delta tier",
    "attention entropy": "intermediates with attention_entropy",
    "attention logit": "intermediates with max_attention_logit",
    "rank": "intermediates with residual",
    "router entropy": "intermediates with router_logits",
}


def unmeasured(keys: Iterable[str]) -> dict[str, str]:
    """Returns what a run that samples these keys never measures: sign → what that would take.

    Args:
        keys: Metric keys. Of a run without keys of a router its signs are not missed.

    Example:
        >>> unmeasured(["symptoms/global/loss/value", "delta50/global/delta2/entropy/p10"])
        ... # doctest: +ELLIPSIS
        {'gradient norm': 'grads=', 'update size': 'updates=', 'attention entropy': ...
    """
    found = [quantity for key in keys if (quantity := quantity_of(key))]
    seen = {quantity.evidence for quantity in found}
    if not any(quantity.monitor == "router" for quantity in found):
        seen.add("router entropy")
    return {sign: needs for sign, needs in NEEDS.items() if sign not in seen}


LOSS = "symptoms/global/loss/value"
HELD_OUT = "evaluation/global/loss/value"
GRAD_NORM = "symptoms/global/grad_norm/value"
UPDATE_NORM = "symptoms/global/update_norm/value"
UPDATE_RATIO = "symptoms/global/update_ratio/value"
CONTEXT = "activations/global/context/value"
CHANGED = "schedule/global/changed/value"
LEARNING_RATE = "schedule/global/learning_rate/value"
FIRST_NONFINITE = "symptoms/global/first_nonfinite/value"
