"""What the rows of `router_fault.py` say to each claim of the paper (arXiv 2606.28116)."""

from collections.abc import Callable
from math import isfinite

from experiments.support.markdown import numbers
from experiments.support.router_growth import slope
from experiments.support.rows import Row


def exponents(rows: list[Row], mark: str) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Exponents of drift and noise by seed: in the learning rate, and in one over the batch.

    Of the margins `mark` steps after the branch.
    """
    found: tuple[dict[str, list[float]], dict[str, list[float]]] = ({}, {})
    for into, axis in zip(found, ("rate", "batch"), strict=True):
        other = "batch" if axis == "rate" else "rate"
        on_axis = [r for r in rows if r[other] == 1 and r["auxiliary"] == 1]
        for name in ("drift", "noise"):
            for seed in dict.fromkeys(row["seed"] for row in on_axis):
                of = [row for row in on_axis if row["seed"] == seed]
                if len(of) > 1:
                    values = [row["after"][mark][name] for row in of]
                    fitted = slope([row[axis] for row in of], values)
                    into.setdefault(name, []).append(fitted)
    return found


def claims(rows: list[Row]) -> list[tuple[str, str, str]]:
    """(claim, verdict, numbers) for each claim of the paper that the rows can speak to."""
    runs = [row for row in rows if row["kind"] == "run"]
    growth = [row for row in rows if row["kind"] == "growth"]
    clean = {row["seed"]: row for row in runs if row["arm"] == "clean"}

    def against(arm: str, of: Callable[[Row], float], base: str = "clean") -> list[float]:
        bases = {row["seed"]: row for row in runs if row["arm"] == base}
        pairs = [(r, bases[r["seed"]]) for r in runs if r["arm"] == arm and r["seed"] in bases]
        return [of(row) - of(other) for row, other in pairs]

    entropy = lambda row: row["after"]["router entropy"]
    margin = lambda row: row["after"]["margin"]
    spread = lambda row: row["text"]["max_violation"]
    delta = lambda row: row["late"]["Δ2 p10"]
    found: list[tuple[str, str, str]] = []

    def claim(words: str, parts: dict[str, list[float]], sign: int) -> None:
        if not any(parts.values()):
            return
        changes = [sign * x for values in parts.values() for x in values]
        held = sum(x > 0 for x in changes)
        share = "reproduces" if held == len(changes) else "partly" if held else "not at this size"
        cells = "; ".join(f"{k}: {numbers(v, 2, '+')}" for k, v in parts.items() if v)
        found.append((words, share, f"{held} of {len(changes)}: {cells}"))

    rates = ("learning rate ×10", "learning rate ×40")
    claim(
        "A higher learning rate lowers router entropy", {x: against(x, entropy) for x in rates}, -1
    )
    claim("A higher learning rate widens margins", {x: against(x, margin) for x in rates}, 1)
    claim("A smaller batch lowers router entropy", {"batch ÷8": against("batch ÷8", entropy)}, -1)
    both = "learning rate ×10, balance loss off"
    claim(
        "Without the balance loss the learning rate lowers entropy more",
        {both: against(both, entropy, rates[0])},
        -1,
    )
    off = ("balance loss off", both, "batch ÷8, balance loss off")
    claim("Without the balance loss the load is less even", {x: against(x, spread) for x in off}, 1)
    claim(
        "Similarity of the router's rows rises as it collapses",
        {x: against(x, lambda row: row["text"]["similarity"]) for x in (*rates, both)},
        1,
    )
    claim(
        "ε of the router's rows falls as it collapses",
        {x: against(x, lambda row: row["text"]["conditioning"]) for x in (*rates, both)},
        -1,
    )
    blind = {x: against(x, delta) for x in (*rates, "batch ÷8") if against(x, delta)}
    if blind and len(clean) > 1:
        values = [delta(row) for row in clean.values()]
        width = max(values) - min(values)
        held = sum(abs(x) <= width for part in blind.values() for x in part)
        count = sum(map(len, blind.values()))
        word = "reproduces" if held == count else "partly" if held else "not at this size"
        cells = "; ".join(f"{k}: {numbers(v, 2, '+')}" for k, v in blind.items())
        words = "Spectra of attention updates do not react to learning rate and batch"
        found.append((words, word, f"{held} of {count} within clean runs' {width:.2f}: {cells}"))
    if growth:
        mark = min(growth[0]["after"], key=int)
        grown = {(_branch(r), r["seed"]): r["after"][mark]["growth"] for r in growth}
        faster = {
            f"×{rate:g}": [
                grown[(rate, 1.0, 1.0), seed] - grown[(1.0, 1.0, 1.0), seed]
                for seed in dict.fromkeys(row["seed"] for row in growth)
                if ((rate, 1.0, 1.0), seed) in grown and ((1.0, 1.0, 1.0), seed) in grown
            ]
            for rate in (3.0, 10.0, 40.0)
        }
        claim(f"The winner's margin grows faster at a higher rate, {mark} steps", faster, 1)
        rate, batch = exponents(growth, mark)
        finite = lambda values: [x for x in values if isfinite(x)]
        claim(
            "What margins' changes have in common rises with the rate (exponent)",
            {"drift": finite(rate.get("drift", []))},
            1,
        )
        claim(
            "Margin noise rises as the batch shrinks (exponent)",
            {"noise": finite(batch.get("noise", []))},
            1,
        )
    return found


def _branch(row: Row) -> tuple[float, float, float]:
    return row["rate"], row["batch"], row["auxiliary"]
