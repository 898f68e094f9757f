"""What a contract is, what it is told, and the list of all of them.

What lives here: `Contract`, `Sample`, `Known` and the decorator that enters a function in the list.
What does not: the contracts themselves, one file for each subject; streaks and verdicts
(`judge.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from stabmon.contracts.digest import Form
from stabmon.contracts.parts import Leaf
from stabmon.quantities.contracts import TITLES

# Of each broken leaf, or part of one, what is broken in words; None: it could not be asked.
Finding = Mapping[str, str] | None


@dataclass(frozen=True)
class Sample:
    """What one step told.

    Attributes:
        step: The step.
        form: What the numbers are.
        values: The numbers, by (quantity, path).
        rate: Learning rate that the schedule declares, None without one.
        unequal: Leaves of which devices hold different copies; None with a single copy.
        rate_before: The declared rate of the step before.
    """

    step: int
    form: Form
    values: Mapping[tuple[str, str], np.ndarray]
    rate: float | None = None
    unequal: tuple[str, ...] | None = None
    rate_before: float | None = None

    def get(self, quantity: str, path: str) -> np.ndarray | None:
        """Returns the numbers of a quantity of a leaf, None where they were not measured."""
        return self.values.get((quantity, path))

    def all(self, quantity: str) -> dict[str, np.ndarray]:
        """Returns the numbers of a quantity by path."""
        return {path: x for (name, path), x in self.values.items() if name == quantity}

    def any(self, quantity: str) -> bool | None:
        """Whether a quantity is not zero somewhere; None where it was not measured."""
        found = self.all(quantity)
        return any(bool((x != 0).any()) for x in found.values()) if found else None

    @property
    def finite(self) -> bool:
        """Whether gradients and updates are finite."""
        rows = [*self.all("gradient").values(), *self.all("update").values()]
        return all(bool(np.isfinite(x).all()) for x in rows)

    @property
    def kinds(self) -> dict[str, set[str]]:
        """The trees of moments by name, each with the paths of the parameters that it has."""
        kinds: dict[str, set[str]] = {}
        for name, path in self.values:
            if name.startswith("bits of "):
                kinds.setdefault(name.removeprefix("bits of "), set()).add(path)
        return kinds


@dataclass
class Known:
    """What is declared of a run, and what its earlier samples have shown.

    Attributes:
        frozen: Whether a leaf is declared frozen, by its path.
        still: Leaves that the optimizer was seen to leave alone from the first.
        moved: Trees of moments, and counts, that have moved, with how often in a row.
        masters: Trees of float32 copies that low-precision parameters are rounded from.
        ties: Pairs of leaves that are equal: False as long as they were not seen to move together.
        types: Numbers of the dtypes that the first sample had.
        past: Of the newest samples (step, size of the gradient, rate, sizes by leaf).
        held_out: Held-out losses by step.
    """

    frozen: Callable[[str], bool] = lambda path: False
    still: set[str] | None = None
    moved: dict[str, int] = field(default_factory=dict)
    masters: set[str] | None = None
    ties: dict[tuple[str, str], bool] | None = None
    types: dict[str, float] = field(default_factory=dict)
    past: list[tuple[int, float, float | None, dict[str, float]]] = field(default_factory=list)
    held_out: dict[int, list[float]] = field(default_factory=dict)

    def owned(self, sample: Sample) -> list[Leaf]:
        """Returns the leaves that the optimizer trains."""
        still = self.still or set()
        return [
            leaf
            for leaf in sample.form.leaves
            if not self.frozen(leaf.path)
            and leaf.path not in still
            and not leaf.dtype.startswith(("int", "uint", "bool"))
        ]

    def has_master(self, sample: Sample, path: str) -> bool:
        """Whether a low-precision leaf is rounded from a float32 copy."""
        return any((f"copy of {kind}", path) in sample.values for kind in self.masters or ())


Rule = Callable[[Sample, Sample | None, Known], Finding]


class Contract(NamedTuple):
    """One thing that must hold exactly.

    Attributes:
        name: Its name, the last part of its key.
        title: What holds, in words.
        patience: Samples in a row for which a leaf must break it.
        rule: The function that asks.
    """

    name: str
    title: str
    patience: int
    rule: Rule

    @property
    def key(self) -> str:
        """Under which the number of broken leaves is recorded."""
        return f"contracts/global/{self.name}/value"

    @property
    def source(self) -> str:
        """Where such a fault was published, from the rule's docstring."""
        _, _, text = (self.rule.__doc__ or "").partition("References:")
        return " ".join(text.split())


CONTRACTS: dict[str, Contract] = {}


def contract(patience: int = 1) -> Callable[[Rule], Rule]:
    """Enters a function in the list of contracts, under its own name; its words are registered.

    Args:
        patience: Samples in a row for which a leaf must break it.
    """

    def enter(rule: Any) -> Rule:
        name = rule.__name__
        CONTRACTS[name] = Contract(name, TITLES[name], patience, rule)
        return rule

    return enter
