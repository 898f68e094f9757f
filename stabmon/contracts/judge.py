"""`Contracts`: what digests say of a run, sample after sample; verdicts in the end.

What lives here: unpacking, copies on several devices, what is learned, streaks. What does not: what
is asked, one file for each subject; where verdicts are written (`watch`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from stabmon.contracts import answers, counts, losses, moves, replicas
from stabmon.contracts.contract import CONTRACTS, Contract, Known, Sample
from stabmon.contracts.digest import Form
from stabmon.contracts.memory import (
    packed_known,
    packed_sample,
    unpacked_known,
    unpacked_sample,
)

SUBJECTS = (moves, answers, counts, replicas, losses)
_PAST = 12


class Verdict(NamedTuple):
    """A contract that is broken.

    Attributes:
        contract: Its name.
        leaf: The leaf, with layer and expert where it is not all of it.
        step: When it was known.
        since: Step of the first sample that showed it.
        sentence: What is broken, in words.
        source: Where such a fault was published.
    """

    contract: str
    leaf: str
    step: int
    since: int
    sentence: str
    source: str

    def event(self) -> dict[str, Any]:
        """The row of `events.jsonl`, less kind."""
        return self._asdict()


@dataclass
class Contracts:
    """Asks all contracts of every sample.

    Attributes:
        known: What is declared and what was learned.
        broken: The leaves that are broken now, by contract, with the step since when.
        asked: Contracts that were asked at least once.

    >>> import jax.numpy as jnp
    >>> from stabmon.layout import Layout
    >>> from stabmon.layout.rules import Rule
    >>> from stabmon.contracts.digest import digest
    >>> layout = Layout("mine", (Rule("q", "layers/q", "l d n h -> l n d h"),))
    >>> params = {"layers": {"q": jnp.ones((2, 4, 1, 4))}}
    >>> judge = Contracts()
    >>> for step in range(3):
    ...     row, form = digest(layout, params, grads=params, updates=params)
    ...     values, verdicts = judge.observe(step, row, form)
    >>> print(verdicts[0].leaf, verdicts[0].sentence)
    layers/q it does not move, though it has gradients
    """

    known: Known = field(default_factory=Known)
    broken: dict[str, dict[str, int]] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    _before: Sample | None = None
    _kept: Any = None
    _streaks: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    @classmethod
    def declared(cls, frozen: Callable[[str], bool]) -> "Contracts":
        """Returns contracts of a run some of whose leaves are declared frozen.

        Args:
            frozen: Whether a leaf is, by its path.
        """
        return cls(Known(frozen=frozen))

    def observe(
        self,
        step: int,
        row: Any,
        form: Form,
        rate: float | None = None,
        rate_before: float | None = None,
    ) -> tuple[dict[str, float], list[Verdict]]:
        """Takes one digest: the number of broken leaves by key, and what is broken anew.

        Args:
            step: The step.
            row: The numbers; an array of the device may have a copy on each.
            form: What they are.
            rate: Learning rate that is declared for this step.
            rate_before: And for the one before.
        """
        numbers, unequal = _copies(row, form)
        if self._kept is not None:
            self._before, self._kept = unpacked_sample(self._kept, form), None
        now = Sample(step, form, form.unpack(numbers), rate, unequal, rate_before)
        before = self._before if self._before and self._before.step < step else None
        self._note(now, before)
        values, verdicts = {}, []
        for contract in CONTRACTS.values():
            found = contract.rule(now, before, self.known)
            if found is None:
                continue
            self.asked.add(contract.name)
            verdicts += self._judged(contract, dict(found), step)
            values[contract.key] = float(len(self.broken.get(contract.name, ())))
        self._learn(now, before)
        self._before = now
        if lost := self.broken.get("restore"):
            values["contracts/global/restore/value"] = float(len(lost))
        return values, verdicts

    def held_out(self, step: int, loss: float) -> None:
        """Takes a held-out loss.

        Args:
            step: The step at which it was taken.
            loss: The loss.
        """
        self.known.held_out.setdefault(step, []).append(loss)
        for old in sorted(self.known.held_out)[:-4]:
            del self.known.held_out[old]

    def restored(self, step: int, broken: Mapping[str, str]) -> None:
        """Takes what a restore audit found.

        Args:
            step: The step that was restored.
            broken: The leaves that are not what was saved.
        """
        self.broken["restore"] = dict.fromkeys(broken, step)

    def begin_again(self) -> None:
        """Hears that a new attempt begins: nothing is compared across it."""
        self._before = self._kept = None
        self._streaks.clear()
        self.known.past.clear()
        self.known.held_out.clear()

    def state(self) -> dict[str, Any]:
        """What has been learned, as JSON can hold it."""
        return {
            "before": self._kept or packed_sample(self._before),
            "known": packed_known(self.known),
            "streaks": [[*key, *value] for key, value in self._streaks.items()],
            "broken": self.broken,
            "asked": sorted(self.asked),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state`."""
        self._before, self._kept = None, state["before"]
        unpacked_known(self.known, state["known"])
        self._streaks = {(a, b): [int(c), int(d)] for a, b, c, d in state["streaks"]}
        self.broken = {name: dict(leaves) for name, leaves in state["broken"].items()}
        self.asked = set(state["asked"])

    @property
    def holding(self) -> list[str]:
        """Names of the contracts that were asked and are not broken."""
        return [name for name in CONTRACTS if name in self.asked and not self.broken.get(name)]

    def _judged(self, contract: Contract, found: dict[str, str], step: int) -> list[Verdict]:
        """The verdicts of one contract, with streaks counted."""
        verdicts = []
        broken = self.broken.setdefault(contract.name, {})
        for name, leaf in [key for key in self._streaks if key[0] == contract.name]:
            if leaf not in found:
                del self._streaks[name, leaf]
                broken.pop(leaf, None)
        for leaf, sentence in found.items():
            streak = self._streaks.setdefault((contract.name, leaf), [step, 0])
            streak[1] += 1
            if streak[1] >= contract.patience and leaf not in broken:
                broken[leaf] = streak[0]
                verdicts.append(
                    Verdict(contract.name, leaf, step, streak[0], sentence, contract.source)
                )
        return verdicts

    def _note(self, now: Sample, before: Sample | None) -> None:
        """Take down what rules read of several samples."""
        gradient = sum(float(x.sum()) for x in now.all("gradient").values())
        sizes = {path: float(np.mean(x)) for path, x in now.all("size").items()}
        self.known.past = [*self.known.past, (now.step, gradient, now.rate, sizes)][-_PAST:]
        if not self.known.types:
            self.known.types = losses.types_of(now)
        copies = {name for name, _ in now.values if name.startswith("copy of ")}
        if before is not None and self.known.masters is None and copies:
            self.known.masters = {
                name.removeprefix("copy of ")
                for name in copies
                if all((x == 1).all() for s in (before, now) for x in s.all(name).values())
            }

    def _learn(self, now: Sample, before: Sample | None) -> None:
        """Learn from a sample what later ones are held to."""
        known, kinds = self.known, now.kinds
        if known.still is None and now.any("update"):
            idle = {path for path, x in now.all("update").items() if not x.any()}
            owned = set().union(*kinds.values()) if kinds else set(idle)
            known.still = idle if now.form.zeroing else idle - owned
        for kind in kinds:
            self._count(kind, now, before, f"bits of {kind}")
        for path in now.all("count"):
            self._count(path, now, before, "count", path)
        self._learn_ties(now, before)

    def _count(
        self, name: str, now: Sample, before: Sample | None, quantity: str, path: str | None = None
    ) -> None:
        """Count in how many samples running a tree of moments, or a counter, has moved."""
        if before is None:
            return
        paths = now.all(quantity) if path is None else [path]
        pairs = [(now.get(quantity, x), before.get(quantity, x)) for x in paths]
        moved = any(a is not None and b is not None and (a != b).any() for a, b in pairs)
        self.known.moved[name] = self.known.moved.get(name, 0) + 1 if moved else 0

    def _learn_ties(self, now: Sample, before: Sample | None) -> None:
        """Note leaves that are equal at the start, and whether they then moved together."""
        known = self.known
        if known.ties is None:
            known.ties = {}
            seen: dict[tuple[Any, ...], str] = {}
            for leaf in now.form.leaves:
                row = now.get("bits", leaf.path)
                if row is None or len(leaf.shape) < 2:
                    continue
                key = (leaf.shape, leaf.dtype, *row.tolist())
                first = seen.setdefault(key, leaf.path)
                if first != leaf.path:
                    known.ties[first, leaf.path] = False
        elif before is not None:
            for (a, b), together in list(known.ties.items()):
                one, other, old = now.get("bits", a), now.get("bits", b), before.get("bits", a)
                if together or one is None or other is None or old is None:
                    continue
                if np.array_equal(one, other):
                    known.ties[a, b] = not np.array_equal(one, old)
                else:
                    del known.ties[a, b]


def _copies(row: Any, form: Form) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """The numbers, and the leaves of which copies differ; None where there is one copy only."""
    rows = [np.asarray(x) for x in _shards(row)]
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        rows += list(np.asarray(multihost_utils.process_allgather(rows[0])))
    if len(rows) == 1:
        return rows[0], None
    first = form.unpack(rows[0])
    unequal: dict[str, None] = {}
    for other in map(form.unpack, rows[1:]):
        for (quantity, path), x in other.items():
            if not np.array_equal(x, first[quantity, path], equal_nan=True):
                unequal[path or quantity] = None
    return rows[0], tuple(unequal)


def _shards(row: Any) -> list[Any]:
    """The copies of a row on this process's devices."""
    if isinstance(row, jax.Array) and row.sharding.is_fully_replicated:
        return [shard.data for shard in row.addressable_shards]
    return [row]
