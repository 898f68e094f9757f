"""`find_layout`: which library's naming a parameter tree has.

What lives here: the choice between layouts, and what a chosen one leaves out. What does not: the
layouts (`libraries.py`), the message where none fits (`suggest.py`), what makes a layout refuse
(`suspects.py`).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jaxtyping import PyTree

from stabmon.layout.axes import Equation, Misfit, unknown
from stabmon.layout.compose import is_whole
from stabmon.layout.gather import needed
from stabmon.layout.layout import Layout
from stabmon.layout.libraries import LIBRARIES
from stabmon.layout.match import Found, match, resolve
from stabmon.layout.paths import parameters
from stabmon.layout.rules import Rule, path_regex
from stabmon.layout.suggest import nothing_fits

Leaves = Sequence[tuple[str, Any]]


def find_layout(
    params: PyTree,
    layouts: Sequence[Layout] = LIBRARIES,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    sizes: Mapping[str, int] | None = None,
    rules: Sequence[Rule] = (),
    ignores: Sequence[str] = (),
) -> Layout:
    """The layout whose rules take the most leaves of `params`, with what it leaves out and why.

    Where all heads lie in one axis (Hugging Face), shapes do not tell how many there are, unless
    a query-key norm gives the head dim; then `heads` is needed, as the model's config has it.

    Args:
        params: Parameter tree of arrays or `jax.ShapeDtypeStruct`: a dict, a `TrainState`, an
            Equinox module, an NNX module or its state.
        layouts: Layouts to choose from.
        heads: Query heads N.
        kv_heads: Key-value heads K, to be checked; it follows from N.
        sizes: Sizes of other axes by their letter in the rules.
        rules: What this tree has beside the leaves that a library is known for.
        ignores: Paths, as in `Rule`, of leaves beside queries and keys that do not change their
            product.

    Returns:
        The layout, with the rules that match something.

    Raises:
        ValueError: No layout finds both query and key matrices, shapes contradict it or each
            other, a size is needed, a leaf beside queries and keys is not explained, queries and
            keys are of different layers, or one of `rules` matches nothing.

    >>> import jax.numpy as jnp
    >>> attn = {name: {"kernel": jnp.zeros((2, 8, 4, 2))} for name in "qkv"}
    >>> layout = find_layout({"layers": {"attn": attn}, "norm": {"scale": jnp.ones(8)}})
    >>> layout.name, layout.left_out
    ('scanned GPT', (('norm/scale', 'no rule for shape (8,)'),))
    >>> weight = {"c_attn": {"weight": jnp.zeros((8, 24))}}
    >>> find_layout({"h": {"0": {"attn": weight}}}, heads=4).sizes
    (('n', 4), ('three', 3), ('h', 2))
    """
    own = [replace(x, rules=(*x.rules, *rules), ignores=(*x.ignores, *ignores)) for x in layouts]
    given = {"n": heads, "k": kv_heads, **(sizes or {})}
    leaves = parameters(params)
    best = best_fit(leaves, own, {axis: size for axis, size in given.items() if size is not None})
    replace(best, rules=(*best.rules, *(x for x in rules if x not in best.rules))).check(params)
    return best


def best_fit(leaves: Leaves, layouts: Sequence[Layout], given: Mapping[str, int]) -> Layout:
    """`find_layout` without its check of what is left out and of missing layers.

    Args:
        leaves: Arrays, or anything with shape and dtype, by path.
        layouts: Layouts to choose from.
        given: Sizes of axes.
    """
    candidates = _candidates(leaves, layouts)
    if not candidates:
        raise ValueError(nothing_fits(leaves, layouts))
    fitting, misfit = [], None
    for layout, found in candidates:
        if (fitting or misfit) and _count(found) < _count(candidates[0][1]):
            break
        try:
            sizes = dict(layout.sizes) | dict(given)
            fitting.append(_Fit(layout, found, *resolve(layout.name, found, sizes)))
        except Misfit as error:
            misfit = misfit or error
    if misfit and not fitting:
        raise misfit
    best = fitting[0]
    other = [fit for fit in fitting if fit.differs(best)]
    if best.rest or (other and not best.layout.requires):
        rest = best.rest or other[0].rest
        missing = unknown(rest, best.sizes) or ["n"]
        source = f": {rest[0].source}, axes '{rest[0].axes}'" if rest else ""
        raise ValueError(
            f"layout {best.layout.name!r}: shapes do not tell the size of {', '.join(missing)}"
            f"{source}; {needed(missing)}"
        )
    return best.as_layout(leaves)


class _Fit(NamedTuple):
    """A layout without contradictions in the tree."""

    layout: Layout
    found: list[Found]
    sizes: dict[str, int]
    rest: list[Equation]

    def differs(self, other: "_Fit") -> bool:
        """Whether two layouts disagree on the size of an axis that both have."""
        common = self.sizes.keys() & other.sizes.keys()
        return self.rest != other.rest or any(self.sizes[x] != other.sizes[x] for x in common)

    def as_layout(self, leaves: Leaves) -> Layout:
        """The layout with the rules that match, sizes of composed axes and what it leaves out."""
        cut = {axis for item in self.found for axis in item.rule.cuts}
        matched = {item.rule for item in self.found}
        return replace(
            self.layout,
            rules=tuple(rule for rule in self.layout.rules if rule in matched),
            sizes=tuple((axis, size) for axis, size in self.sizes.items() if axis in cut),
            left_out=tuple(_left_out(self.layout.rules, self.found, leaves)),
        )


def _left_out(
    rules: Sequence[Rule], found: Sequence[Found], leaves: Leaves
) -> Iterator[tuple[str, str]]:
    """Leaves that no rule takes, and parts of leaves that are in no matrix, with the reason."""
    _, misfits = match(rules, leaves)
    taken: dict[str, list[Rule]] = {}
    for item in found:
        taken.setdefault(item.path, []).append(item.rule)
    for path, leaf in leaves:
        if path not in taken:
            yield path, misfits.get(path, f"no rule for shape {tuple(leaf.shape)}")
            continue
        left = taken[path][0].left
        named = {axis for rule in taken[path] for axis in (*rule.named, *rule.end_to_end)}
        parts = [axis for axis in re.split(r"\W+", left) if axis not in {*named, ""}]
        if parts:
            yield path, f"its part {', '.join(parts)} of '{left}' is in no matrix"


def _candidates(leaves: Leaves, layouts: Sequence[Layout]) -> list[tuple[Layout, list[Found]]]:
    """Layouts that find queries and keys with the leaves they take, those with most first."""
    candidates = []
    for layout in layouts:
        if layout.requires:
            marker = path_regex(layout.requires)
            if not any(marker.search(path.replace(".", "/")) for path, _ in leaves):
                continue
        found, _ = match(layout.rules, leaves)
        roles = {role for item in found for role in item.rule.roles}
        if is_whole("q", roles) and is_whole("k", roles):
            candidates.append((layout, found))
    return sorted(candidates, key=lambda x: (-_count(x[1]), not x[0].requires))


def _count(found: Sequence[Found]) -> int:
    """How many leaves there are."""
    return len({item.path for item in found})
