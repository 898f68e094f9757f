"""Where the query, key, value, output, MLP and router matrices lie in a parameter tree.

A `Layout` is data: a set of `Rule`s (`rules.py`), each a path with an einops pattern to canonical
axes; `find_layout` picks one of `libraries.py`. Nothing is ever guessed from the number of
dimensions; a leaf that no rule fits is left out and reported, and shapes that contradict the rules
are an error. What is measured on the collected matrices is decided in `monitor.py`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from jaxtyping import Array, PyTree

from stabmon.layout.axes import Equation, Misfit, unknown
from stabmon.layout.gather import Found, compose, gather, is_whole, match, needed, resolve
from stabmon.layout.libraries import TABLE
from stabmon.layout.paths import leaves_with_paths
from stabmon.layout.rules import CANONICAL, FACTORS, GROUPS, LATENT, SCALES, Rule

_ROLES = tuple(role for role in CANONICAL if role not in LATENT)


@dataclass(frozen=True)
class Layout:
    """A named set of rules, hashable, with the sizes that its patterns need.

    Attributes:
        name: For messages.
        rules: The matrix families.
        sizes: Axis sizes that shapes alone do not tell, such as (("n", 8), ("k", 2)): n are the
            query heads, k the kv heads.
        left_out: Filled by `find_layout`: (path, reason) of every leaf, or part of one, that no
            rule takes.
        requires: Path of a leaf without which `find_layout` does not consider this layout.
    """

    name: str
    rules: tuple[Rule, ...]
    sizes: tuple[tuple[str, int], ...] = ()
    left_out: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    requires: str = ""

    def collect(
        self, params: PyTree, roles: Iterable[str] | None = None, *, fold: bool = True
    ) -> dict[str, Array]:
        """Every role's matrices on canonical axes behind a layer axis, e.g. q: (L, N, D, H).

        With `fold`, q, k and v are what acts on the normalised stream: columns times the learnable
        query-key norm scale, and for latent attention down · diag(norm scale) · up, each in
        float32. RoPE is not in them: it acts after the projection. The maps are then not linear in
        the leaves, so a change of q is `difference`, not `collect` of a change.

        Leaves of separate layers are stacked. Roles without a leaf are absent, and so are masked
        leaves. Jit-able.

        Args:
            params: Parameter tree.
            roles: Keys of `CANONICAL`; None: all but the factors of latent attention.
            fold: Whether to fold and compose. Without it each role is its leaves and nothing else,
                the factors of latent attention among them: for gradients and updates.

        Raises:
            ValueError: A leaf's shape does not fit its pattern or the other leaves, layers differ
                in shape, or a factor is missing.

        References:
            arXiv 2606.28116, the variants of its monitors; arXiv 2405.04434, latent attention.
        """
        found, sizes = self._match(params)
        if not fold:
            wanted = self._known(CANONICAL if roles is None else roles)
            return gather(self.name, found, wanted, sizes)
        wanted = self._known(_ROLES if roles is None else roles)
        parts = gather(self.name, found, self._parts(wanted), sizes, shift=True)
        whole = {role: compose(self.name, role, parts) for role in wanted}
        return {role: matrices for role, matrices in whole.items() if matrices is not None}

    def difference(
        self, params: PyTree, delta: PyTree, roles: Iterable[str] | None = None
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """The matrices of `params`, and how far each moved: (collect(now), collect(now − then)).

        For a product of factors the change is summed factor by factor,

            ΔABC = ΔA B C + A₀ ΔB C + A₀ B₀ ΔC,    A₀ = A − ΔA,

        which is exact and loses nothing to cancellation however small the change. Jit-able.

        Args:
            params: Parameter tree now.
            delta: Parameters now minus parameters then, a tree like `params`; leaves may be masked.
            roles: As in `collect`.

        Returns:
            Matrices now and their change, keyed by role. A role of which `delta` has no leaf is in
            the first alone.

        Raises:
            ValueError: As `collect`; or `delta` has some factors of a product, but not all.
        """
        found, sizes = self._match(params)
        wanted = self._known(_ROLES if roles is None else roles)
        chain = self._parts(wanted)
        parts = gather(self.name, found, chain, sizes, shift=True)
        moves = gather(self.name, self._found(delta), chain, sizes)
        now = {role: compose(self.name, role, parts) for role in wanted}
        moved = {role: compose(self.name, role, parts, moves) for role in wanted}
        present = lambda whole: {role: x for role, x in whole.items() if x is not None}
        return present(now), present(moved)

    def selects(self, *groups: str) -> Callable[[str, Any], bool]:
        """A predicate (path, leaf) for the leaves of groups of roles, for `select=` arguments.

        Groups hold matrices only, but for "qk": all that q and k are made of, norm scales
        included, which is what `track_delta` has to keep for the delta monitors.

        Raises:
            ValueError: A group is neither a role nor one of attention, mlp, router, all, qk.
        """
        known = GROUPS | {"qk": (*FACTORS["q"], *FACTORS["k"])}
        known |= {role: FACTORS.get(role, (role,)) for role in CANONICAL}
        if missing := [group for group in groups if group not in known]:
            names = ", ".join(known)
            raise ValueError(f"unknown group of matrices {missing[0]!r}; one of {names}")
        roles = {x for group in groups for x in known[group] if x not in SCALES or group == "qk"}
        chosen = [rule for rule in self.rules if roles.intersection(rule.roles)]
        return lambda path, leaf: any(rule.layer(path) is not None for rule in chosen)

    def _match(self, tree: PyTree) -> tuple[list[Found], dict[str, int]]:
        """The leaves that rules take, and the sizes of all axes."""
        found = self._found(tree)
        return found, resolve(self.name, found, dict(self.sizes))[0]

    def _found(self, tree: PyTree) -> list[Found]:
        found, misfits = match(self.rules, leaves_with_paths(tree))
        for path in misfits.keys() - dict(self.left_out).keys():
            raise ValueError(
                f"layout {self.name!r}: {path} {misfits[path]}; declare a rule that fits, or drop "
                "this one"
            )
        return found

    @staticmethod
    def _known(roles: Iterable[str]) -> list[str]:
        wanted = list(roles)
        if missing := [role for role in wanted if role not in CANONICAL]:
            raise ValueError(f"unknown roles {missing}; some of {', '.join(CANONICAL)}")
        return wanted

    @staticmethod
    def _parts(roles: Iterable[str]) -> list[str]:
        return list(dict.fromkeys(part for role in roles for part in FACTORS.get(role, (role,))))


PRESETS: tuple[Layout, ...] = tuple(
    Layout(preset.name, preset.rules, requires=preset.requires) for preset in TABLE
)


def find_layout(
    params: PyTree,
    presets: Sequence[Layout] = PRESETS,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Layout:
    """The preset whose rules take the most leaves of `params`, with what it leaves out and why.

    Where all heads lie in one axis (Hugging Face), shapes do not tell how many there are, unless
    a query-key norm gives the head dim; then `heads` is needed, as the model's config has it.

    Args:
        params: Parameter tree; arrays or `jax.ShapeDtypeStruct` leaves.
        presets: Layouts to choose from.
        heads: Query heads N.
        kv_heads: Key-value heads K, to be checked; it follows from N.
        sizes: Sizes of other axes by their letter in the rules.

    Raises:
        ValueError: No preset finds both query and key matrices, shapes contradict it or each
            other, or a size is needed.

    >>> import jax.numpy as jnp
    >>> attn = {name: {"kernel": jnp.zeros((2, 8, 4, 2))} for name in "qkv"}
    >>> layout = find_layout({"layers": {"attn": attn}, "norm": {"scale": jnp.ones(8)}})
    >>> layout.name, layout.left_out
    ('scanned GPT', (('norm/scale', 'no rule for shape (8,)'),))
    >>> weight = {"c_attn": {"weight": jnp.zeros((8, 24))}}
    >>> find_layout({"h": {"0": {"attn": weight}}}, heads=4).sizes
    (('n', 4), ('three', 3), ('h', 2))
    """
    given = {"n": heads, "k": kv_heads, **(sizes or {})}
    given = {name: size for name, size in given.items() if size is not None}
    leaves = leaves_with_paths(params)
    candidates = _candidates(leaves, presets)
    if not candidates:
        seen = ", ".join(f"{path} {tuple(leaf.shape)}" for path, leaf in leaves[:12])
        raise ValueError(
            f"no preset layout ({', '.join(x.name for x in presets)}) finds query and key "
            f"matrices among {len(leaves)} leaves: {seen}{' …' if len(leaves) > 12 else ''}; "
            "declare Layout('mine', (Rule('q', 'path/*/to/kernel', 'd n h -> n d h'), …))"
        )
    fitting, misfit = [], None
    for layout, found in candidates:
        if fitting and _count(found) < _count(fitting[0].found):
            break
        try:
            sizes = dict(layout.sizes) | given
            fitting.append(_Fit(layout, found, *resolve(layout.name, found, sizes)))
        except Misfit as error:
            misfit = misfit or error
    if misfit and not fitting:
        raise misfit
    best = fitting[0]
    other = [fit for fit in fitting if (fit.sizes, fit.rest) != (best.sizes, best.rest)]
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

    def as_layout(self, leaves: Sequence[tuple[str, Any]]) -> Layout:
        """The layout with the sizes of composed axes and what it leaves out."""
        cut = {axis for item in self.found for axis in item.rule.cuts}
        return replace(
            self.layout,
            sizes=tuple((axis, size) for axis, size in self.sizes.items() if axis in cut),
            left_out=tuple(_left_out(self.layout.rules, self.found, leaves)),
        )


def _left_out(
    rules: Sequence[Rule], found: Sequence[Found], leaves: Sequence[tuple[str, Any]]
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
        named = {axis for rule in taken[path] for axis in re.split(r"\W+", rule.right)}
        parts = [axis for axis in re.split(r"\W+", taken[path][0].left) if axis not in {*named, ""}]
        if parts:
            yield path, f"its part {', '.join(parts)} of '{taken[path][0].left}' is in no matrix"


def _candidates(
    leaves: Sequence[tuple[str, Any]], presets: Sequence[Layout]
) -> list[tuple[Layout, list[Found]]]:
    """Layouts that find queries and keys with the leaves they take, those with most first."""
    candidates = []
    for layout in presets:
        if layout.requires:
            marker = re.escape(layout.requires).replace(r"\*", r"\d+")
            if not any(re.search(rf"(?:^|/){marker}$", p.replace(".", "/")) for p, _ in leaves):
                continue
        found, _ = match(layout.rules, leaves)
        roles = {role for item in found for role in item.rule.roles}
        if is_whole("q", roles) and is_whole("k", roles):
            candidates.append((layout, found))
    return sorted(candidates, key=lambda x: (-_count(x[1]), not x[0].requires))


def _count(found: Sequence[Found]) -> int:
    """How many leaves there are."""
    return len({item.path for item in found})
