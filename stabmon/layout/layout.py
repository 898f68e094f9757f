"""Where the query, key, value, output, MLP and router matrices lie in a parameter tree.

A `Layout` is data: a set of `Rule`s (`rules.py`), each a path with an einops pattern to canonical
axes; `find_layout` (`find.py`) picks one of `libraries.py`. Nothing is ever guessed from the number
of dimensions; a leaf that no rule fits is left out and reported, and shapes that contradict the
rules are an error. What is measured on the collected matrices is decided in `monitor.py`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Array, PyTree

from stabmon.layout.compose import compose
from stabmon.layout.gather import gather
from stabmon.layout.match import Found, layers_of, match, resolve
from stabmon.layout.paths import parameters
from stabmon.layout.rules import CANONICAL, FACTORS, GROUPS, LATENT, OUTER, SCALES, Rule
from stabmon.layout.suspects import refuse_suspects

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
        requires: Path of a leaf, as in `Rule`, without which `find_layout` does not consider this
            layout.
        ignores: Paths, as in `Rule`, of leaves beside q and k that are known not to change their
            product.
        refuses: Why no product of queries and keys can be read off a tree that this fits.
    """

    name: str
    rules: tuple[Rule, ...]
    sizes: tuple[tuple[str, int], ...] = ()
    left_out: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    requires: str = ""
    ignores: tuple[str, ...] = ()
    refuses: str = ""

    @property
    def qk_norm(self) -> bool:
        """Whether queries or keys pass a norm with a learnable scale before their product."""
        return self.has("q_scale") or self.has("k_scale")

    def has(self, role: str) -> bool:
        """Whether there is a rule for a role; after `find_layout`: whether the tree has it.

        Raises:
            ValueError: The role is unknown.

        >>> Layout("mine", (Rule("q", "h/*/q", "d n h -> n d h"),)).has("router")
        False
        """
        if role not in CANONICAL | OUTER | SCALES:
            raise ValueError(f"unknown role {role!r}; one of {', '.join(CANONICAL | OUTER)}")
        return any(role in rule.roles for rule in self.rules)

    def layers(self, params: PyTree) -> dict[str, tuple[int, ...]]:
        """The layers that each role is in; entry i of a collected stack is the i-th of them."""
        return layers_of(self._found(params))

    def check(self, params: PyTree) -> None:
        """Whether this layout describes a tree, as `find_layout` asks of those that it returns.

        Raises:
            ValueError: The layout is of models that are refused; a rule matches nothing; queries
                and keys are of different layers; or a leaf beside them that no rule takes may
                change their product, such as a norm scale.
        """
        if self.refuses:
            raise ValueError(f"layout {self.name!r}: {self.refuses}; declare a layout of your own")
        found = self._found(params)
        if idle := [rule for rule in self.rules if all(rule != item.rule for item in found)]:
            raise ValueError(
                f"layout {self.name!r}: nothing in the tree matches the rule for {idle[0].role!r}, "
                f"{idle[0].path!r} with axes '{idle[0].left}'; correct its path, or drop it"
            )
        _check_aligned(self.name, found)
        refuse_suspects(self.name, self.ignores, found, parameters(params))

    def collect(
        self, params: PyTree, roles: Iterable[str] | None = None, *, fold: bool = True
    ) -> dict[str, Array]:
        """Every role's matrices on canonical axes behind a layer axis, e.g. q: (L, N, D, H).

        Those outside of the layers have none and come on request alone: embedding, head: (V, D).
        Layers are those that have the role, in their order; `layers` has their numbers.

        With `fold`, q, k and v are what acts on the normalised stream: columns times the learnable
        query-key norm scale (of a LayerNorm: without their mean first), and for latent attention
        down · diag(norm scale) · up, each in float32. RoPE is not in them: it acts after the
        projection. The maps are then not linear in the leaves, so a change of q is `difference`,
        not `collect` of a change.

        Leaves of separate layers are stacked. Roles without a leaf are absent, and so are masked
        leaves. Jit-able.

        Args:
            params: Parameter tree.
            roles: Keys of `CANONICAL` and `OUTER`; None: those of `CANONICAL` but the factors of
                latent attention.
            fold: Whether to fold and compose. Without it each role is its leaves and nothing else,
                the factors of latent attention among them: for gradients and updates.

        Raises:
            ValueError: A leaf's shape does not fit its pattern or the other leaves, layers differ
                in shape, a factor is missing, or queries and keys are of different layers.

        References:
            arXiv 2606.28116, the variants of its monitors; arXiv 2405.04434, latent attention.
        """
        found, sizes = self._match(params)
        if not fold:
            wanted = self._known(CANONICAL if roles is None else roles)
            return gather(self.name, found, wanted, sizes)
        wanted = self._known(_ROLES if roles is None else roles)
        _check_aligned(self.name, found, wanted)
        parts = gather(self.name, found, self._parts(wanted), sizes, shift=True)
        whole = {role: self._compose(role, parts) for role in wanted}
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
            ValueError: As `collect`; or `delta` has some factors of a product, or some layers of a
                role, but not all.
        """
        found, sizes = self._match(params)
        wanted = self._known(_ROLES if roles is None else roles)
        _check_aligned(self.name, found, wanted)
        changed = self._found(delta)
        _check_whole(self.name, layers_of(found), layers_of(changed), self._parts(wanted))
        chain = self._parts(wanted)
        parts = gather(self.name, found, chain, sizes, shift=True)
        moves = gather(self.name, changed, chain, sizes)
        now = {role: self._compose(role, parts) for role in wanted}
        moved = {role: self._compose(role, parts, moves) for role in wanted}
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
        known |= {role: FACTORS.get(role, (role,)) for role in CANONICAL | OUTER}
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
        found, misfits = match(self.rules, parameters(tree))
        for path in misfits.keys() - dict(self.left_out).keys():
            raise ValueError(
                f"layout {self.name!r}: {path} {misfits[path]}; declare a rule that fits, or drop "
                "this one"
            )
        return found

    @staticmethod
    def _known(roles: Iterable[str]) -> list[str]:
        wanted = list(roles)
        if missing := [role for role in wanted if role not in CANONICAL | OUTER]:
            raise ValueError(f"unknown roles {missing}; some of {', '.join(CANONICAL | OUTER)}")
        return wanted

    def _compose(
        self, role: str, parts: Mapping[str, Array], moves: Mapping[str, Array] | None = None
    ) -> Array | None:
        centred = [rule.roles[0] for rule in self.rules if rule.centred]
        return compose(self.name, role, parts, moves, centred)

    @staticmethod
    def _parts(roles: Iterable[str]) -> list[str]:
        return list(dict.fromkeys(part for role in roles for part in FACTORS.get(role, (role,))))


def _check_aligned(name: str, found: Sequence[Found], roles: Iterable[str] = ("q", "k")) -> None:
    """Queries, keys and all that each is a product of are of the same layers."""
    layers = layers_of(found)
    parts = {part for role in ("q", "k") if role in roles for part in FACTORS[role]}
    here = {part: layers[part] for part in FACTORS["q"] + FACTORS["k"] if part in layers}
    here = {part: numbers for part, numbers in here.items() if part in parts}
    if len({*here.values()}) > 1:
        counts = ", ".join(f"{part} in {shortened(x)}" for part, x in here.items())
        raise ValueError(
            f"layout {name!r}: queries and keys are of different layers: {counts}; a matrix is "
            "missing or named differently, or layers share their keys; write rules for the layers "
            "that have both"
        )


def _check_whole(
    name: str,
    now: Mapping[str, tuple[int, ...]],
    moved: Mapping[str, tuple[int, ...]],
    roles: Iterable[str],
) -> None:
    """What moved of a role, moved in all of its layers."""
    for role in roles:
        if role in moved and moved[role] != now.get(role):
            raise ValueError(
                f"layout {name!r}: the change holds {role!r} in {shortened(moved[role])}, the "
                f"parameters in {shortened(now.get(role, ()))}; keep all layers: "
                "track_delta(select=layout.selects('qk'))"
            )


def shortened(layers: Sequence[int]) -> str:
    """Layer numbers for messages.

    >>> shortened((0, 1, 2, 4)), shortened(())
    ('layers 0-2, 4', 'no layer')
    """
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    if not runs:
        return "no layer"
    text = ", ".join(str(x[0]) if len(x) == 1 else f"{x[0]}-{x[-1]}" for x in runs)
    return f"layer {text}" if len(layers) == 1 else f"layers {text}"
