"""Quantities of weight matrices: spectra of their changes, their norms and ranks, by role.

The other quantities, and the table of all, are in `table.py`.
"""

from collections.abc import Iterator

from stabmon.layout import CANONICAL
from stabmon.quantities.quantity import Judged, Quantity, Side

_ROLE_TITLES = {
    "mlp_up": "W_up",
    "mlp_gate": "W_gate",
    "mlp_down": "W_down",
    "router": "W_router",
}
_STATS: dict[str, tuple[str, Side]] = {
    "modes": ("modes", "down"),
    "effective_rank": ("effective rank", "down"),
    "entropy": ("entropy", "down"),
    "stable_rank": ("stable rank", "down"),
    "norm": ("norm", "up"),
    "spectral_norm": ("spectral norm", "up"),
}
_WEIGHTS: dict[str, tuple[str, Side]] = {
    "stable_rank": ("Stable rank", "down"),
    "norm": ("Norm", "up"),
    "spectral_norm": ("Spectral norm", "up"),
    "relative_stable_rank": ("Stable rank over a Gaussian's", "down"),
}
_PRODUCTS = {"delta1": "Δ1", "delta2": "Δ2", "delta3": "Δ3", "query": "ΔW_q", "key": "ΔW_k"}
PLACE = ("worst_layer", "worst_head")
# Spectra are judged by the best that the run has been, downwards only: they rise while it learns.
_SPECTRUM = (
    Judged("z", ("mean", "p10"), "down", threshold=5.0, floor=0.03, ratchet=True),
    Judged("drift", ("mean", "p10"), "down", threshold=20.0, floor=0.03, ratchet=True, dwell=1),
)
_SPREAD = ("mean", "p10", "min")


def _role_title(role: str) -> str:
    return _ROLE_TITLES.get(role, f"W_{role}")


def spectra() -> Iterator[Quantity]:
    """Quantities of ΔW and of the QK increment, for every lag of the ring."""
    briefs = {
        ("delta2", "effective_rank"): (*_SPREAD, *PLACE),
        ("delta2", "entropy"): (*_SPREAD, *PLACE),
        ("query", "entropy"): (*_SPREAD, *PLACE),
    }
    panels = {"delta2": "Δ2", "query": "ΔW"}
    for product, symbol in _PRODUCTS.items():
        for stat, (words, bad) in _STATS.items():
            spectrum = bad == "down" and stat != "stable_rank"
            yield Quantity(
                *("delta", f"{product}/{stat}", f"{symbol} {words}", "head", bad),
                brief=briefs.get((product, stat), ()),
                judged=_SPECTRUM if spectrum and product in ("delta1", "delta2", "query") else (),
                evidence="ΔW" if product in ("query", "key") else "Δ2",
                panel=panels.get(product, "") if bad == "down" else "",
            )
    for product in ("query", "key"):
        for stat, words in (
            ("outliers", "outliers"),
            ("excess", "σ₁ over the noise edge"),
            ("lag_exponent", "lag exponent"),
        ):
            title = f"{_PRODUCTS[product]} {words}"
            yield Quantity("delta", f"{product}/{stat}", title, "head", "up", evidence="ΔW")
    for role in "qk":
        yield Quantity(
            *("delta", f"{role}/radial_alignment", f"Alignment of ΔW_{role} with W_{role}"),
            *("head", "up"),
            brief=("mean", "max", *PLACE) if role == "q" else (),
            # Small initial weights grow along themselves: healthy runs of eight trainers had at
            # most 0.25.
            judged=(Judged("limit", ("mean",), "up", threshold=0.3),),
            evidence="radial alignment",
            panel="Alignment of ΔW_q with W_q" if role == "q" else "",
        )
    yield Quantity(
        *("delta", "qk_over_vo/modes", "Modes of ΔW_q and ΔW_k over those of ΔW_v and ΔW_o"),
        *("none", "down"),
        brief=("value",),
        judged=(Judged("z", ("value",), "down", threshold=5.0, floor=0.03),),
        evidence="q, k against v, o",
    )
    for stat in ("modes", "effective_rank", "stable_rank", "norm", "spectral_norm"):
        words, bad = _STATS[stat]
        yield Quantity("delta", f"router/{stat}", f"ΔW_router {words}", "layer", bad)


def weights() -> Iterator[Quantity]:
    """Quantities of the matrices themselves, and of their gradients and updates, by role."""
    for role in CANONICAL:
        title, brief = _role_title(role), role in ("q", "k", "mlp_up", "mlp_down")
        experts = role.startswith("expert")
        for stat, (words, bad) in _WEIGHTS.items():
            kept = brief and stat in ("stable_rank", "norm")
            shown = f"{words} of W_q" if role == "q" and stat in ("stable_rank", "norm") else ""
            yield Quantity(
                *("weights", f"{role}/{stat}", f"{words} of {title}"),
                *("head" if experts else "layer", bad),
                brief=("mean",) if kept else (),
                panel=shown,
                own_level=stat in ("stable_rank", "norm"),
            )
        for tree, words in (("grad_norm", "Gradient norm"), ("update_norm", "Update norm")):
            yield Quantity("symptoms", f"{role}/{tree}", f"{words} of {title}", "layer", "up")
