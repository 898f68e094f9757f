"""`Rule`: one family of matrices in a parameter tree, and the axes on which it is handed out.

What lives here: roles with their canonical axes, and pattern matching. What does not: how leaves
are cut and put in a stack (`gather.py`), the rules of known libraries (`libraries.py`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from stabmon.layout.axes import Product, read, tokens

# Axes as in the README: D model, N heads, K kv heads, H head dim, F ff, E experts; and of latent
# attention: R the query latent, C the key-value latent.
CANONICAL = {
    "q": "n d h",
    "k": "n d h",
    "v": "n d h",
    "o": "n h d",
    "q_down": "d r",
    "q_up": "n r h",
    "kv_down": "d c",
    "k_up": "n c h",
    "v_up": "n c h",
    "mlp_up": "d f",
    "mlp_gate": "d f",
    "mlp_down": "f d",
    "router": "e d",
    "expert_up": "e d f",
    "expert_gate": "e d f",
    "expert_down": "e f d",
}
# Matrices outside of the layers, one each; `collect` hands them out on request alone.
OUTER = {"embedding": "vocab d", "position": "t d", "head": "vocab d"}
# Learnable norm scales that are folded into a product; one vector, or one for each head.
SCALES = {
    "q_scale": ("h", "n h"),
    "k_scale": ("h", "n h"),
    "q_latent_scale": ("r",),
    "kv_latent_scale": ("c",),
}
# What q, k and v are the product of, as far as it is in the tree, in this order.
FACTORS = {
    "q": ("q_down", "q_latent_scale", "q_up", "q", "q_scale"),
    "k": ("kv_down", "kv_latent_scale", "k_up", "k", "k_scale"),
    "v": ("kv_down", "kv_latent_scale", "v_up", "v"),
}
LATENT = ("q_down", "q_up", "kv_down", "k_up", "v_up")
GROUPS = {
    "attention": ("q", "k", "v", "o", *LATENT),
    "mlp": ("mlp_up", "mlp_gate", "mlp_down", "expert_up", "expert_gate", "expert_down"),
    "router": ("router",),
}
GROUPS["all"] = tuple(CANONICAL)
# Other letters for an axis where it differs: K kv heads for n, V the values' head dim for h.
_ALIASES = {"n": ("k",), "h": ("v",)}
_NAMES = {
    "q": {"q", "query", "queries", "q_proj", "query_proj", "wq", "w_q", "q_einsum"},
    "k": {"k", "key", "keys", "k_proj", "key_proj", "wk", "w_k"},
    "v": {"v", "value", "values", "v_proj", "value_proj", "wv", "w_v"},
    "o": {"o", "out", "o_proj", "out_proj", "output_proj", "wo", "w_o"},
}


@dataclass(frozen=True)
class Rule:
    """One matrix family.

    Attributes:
        role: A key of `CANONICAL`, `OUTER` or `SCALES`; or several of one form, where one leaf
            holds several families: ("q", "k", "v").
        path: Path of the leaf, `/`-separated; `*` stands for the layer number, a second `*` for
            that of the expert or head, `?` for any part of one name. Matches at the end of a
            longer path, so a wrapper around the parameters does no harm. The dots of a flat state
            dict count as `/`.
        pattern: einops pattern from the leaf's axes to the canonical ones, with an `l` on both
            sides where layers are stacked in one leaf. `h+p` is an axis of two parts, of which the
            right side names one. Several roles either have an axis of their own, on the right
            before all others: "l d three n h -> three l n d h"; or lie end to end, in their order,
            and the right side is that of the first: "(n+k+k h) d -> n d h". In rules of k and v,
            n is K. The letters k for n and v for h name axes that are not as long as the query's;
            a composed axis such as (k g) stands for n.
        plus: What a scale adds to its parameter: 1 where it is stored as its difference from 1.
        centred: Whether the norm of this scale subtracts the mean over h first, as a LayerNorm.
        layers: (first, step): entry i of a stack, or the leaf numbered i, is layer
            first + i·step. A path as `first` is that of the stack whose layers come before:
            ("dense_layers", 1). With both an `l` and a `*`, the stack is of blocks, and `*` is the
            place in a block.

    Raises:
        ValueError: The role is unknown, the pattern does not lead to its canonical axes, or the
            path is named after another role.

    >>> rule = Rule(("q", "k", "v"), "h/*/attn/c_attn/weight", "d (three n h) -> three n d h")
    >>> rule.layer("transformer.h.11.attn.c_attn.weight"), rule.rank
    (11, 2)
    """

    role: str | tuple[str, ...]
    path: str
    pattern: str
    plus: float = 0.0
    centred: bool = False
    layers: tuple[int | str, int] = (0, 1)

    def __post_init__(self):
        known = {role: (axes,) for role, axes in (CANONICAL | OUTER).items()} | SCALES
        for role in self.roles:
            if role not in known:
                raise ValueError(f"unknown role {role!r}; one of {', '.join(known)}")
        if len({known[role] for role in self.roles}) > 1:
            raise ValueError(f"rule for {self.path!r}: roles {self.roles} differ in their axes")
        expected = [self._prefix + self._one_matrix(axes) for axes in known[self.roles[0]]]
        if self.pattern.count("->") != 1 or not any(self._fits(axes) for axes in expected):
            raise ValueError(
                f"rule for {self.path!r}: expected a pattern '… -> {' '.join(expected[0])}', "
                f"got {self.pattern!r}"
                + ("" if "*" in self.path else "; mark the layer number in the path with *")
            )
        summands = [part for token in tokens(self.left) for part in read(token)]
        named = self.named
        once = all(len(named.intersection(part)) == 1 for part in summands)
        if not once or named - {axis for part in summands for axis in part}:
            raise ValueError(
                f"rule for {self.path!r}: {self.pattern!r} has an axis on one side alone; of an "
                "axis 'h+p' of two parts the right side names one"
            )
        self._check_name()

    @property
    def roles(self) -> tuple[str, ...]:
        """The role or roles, as a tuple."""
        return (self.role,) if isinstance(self.role, str) else self.role

    @property
    def left(self) -> str:
        """The leaf's axes."""
        return self.pattern.split("->")[0].strip()

    @property
    def right(self) -> str:
        """The canonical axes."""
        return self.pattern.split("->")[1].strip()

    @property
    def named(self) -> set[str]:
        """All axes that the right side names."""
        return {axis for token in tokens(self.right) for part in read(token) for axis in part}

    @property
    def stacked(self) -> bool:
        """Whether the leaf holds several layers."""
        return "l" in tokens(self.left)

    @cached_property
    def rank(self) -> int:
        """How many axes the leaf has."""
        return len(tokens(self.left))

    @cached_property
    def products(self) -> tuple[Product, ...]:
        """The leaf's axes taken apart, with n called k where it is K."""
        return tuple(self.scoped(token) for token in tokens(self.left))

    @cached_property
    def cuts(self) -> tuple[str, ...]:
        """Axes whose sizes must be known before the leaf can be cut."""
        composed = [parts for parts in self.products if sum(map(len, parts)) > 1]
        axes = [axis for parts in composed for summands in parts for axis in summands]
        return tuple(axis for axis in axes if not axis.isdigit())

    @cached_property
    def end_to_end(self) -> tuple[str, ...]:
        """The parts of the axis along which several roles lie; empty where none does."""
        sums = [part for token in tokens(self.left) for part in read(token) if len(part) > 1]
        parts = [part for part in sums if len(part) == len(self.roles)]
        return parts[0] if parts and len(self.roles) > 1 else ()

    @property
    def of_keys(self) -> bool:
        """Whether n is K in this rule."""
        return {*self.roles} <= {"k", "v", "k_scale"}

    def scoped(self, token: str) -> Product:
        """An axis taken apart, with n called k where it is K."""
        heads = "k" if self.of_keys else "n"
        rename = lambda axis: heads if axis == "n" else axis
        return tuple(tuple(map(rename, summands)) for summands in read(token))

    def place(self, path: str) -> tuple[int, ...] | None:
        """The layer and expert numbers in `path`, as many as the rule has stars; None if no fit."""
        path = path.replace(".", "/")
        if not path.endswith(self._tail):
            return None
        found = self._regex.search(path)
        return None if found is None else tuple(map(int, found.groups()))

    def layer(self, path: str) -> int | None:
        """The layer number in `path` (0 for a stacked leaf), or None if the rule does not fit."""
        place = self.place(path)
        return None if place is None else (*place, 0)[0]

    @cached_property
    def _tail(self) -> str:
        return re.split(r"[*?]", self.path)[-1]

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        return path_regex(self.path)

    @property
    def _prefix(self) -> list[str]:
        apart = len(self.roles) > 1 and "->" in self.pattern and not self.end_to_end
        one = "*" in self.path or {*self.roles} <= OUTER.keys()
        return ([tokens(self.right)[0]] if apart else []) + (
            [] if one and not self.stacked else ["l"]
        )

    def _one_matrix(self, axes: str) -> list[str]:
        """Canonical axes of one leaf: without that of experts or heads in separate leaves."""
        apart = self.path.count("*") == 2 and axes.split()[0] in ("e", "n")
        return axes.split()[1 if apart else 0 :]

    def _fits(self, expected: Sequence[str]) -> bool:
        """Whether the right side names the expected axes, up to other letters for the same one."""
        right = tokens(self.right)
        same = lambda got, axis: (
            got == axis or got in _ALIASES.get(axis, ()) or (axis == "n" and got.startswith("("))
        )
        return len(right) == len(expected) and all(map(same, right, expected))

    def _check_name(self) -> None:
        """The path is not that of another role."""
        own = self.roles[0].split("_")[0]
        names = {*self.path.split("/")}
        if len(self.roles) > 1 or own not in _NAMES or names & _NAMES[own]:
            return
        if others := [x for x, taken in _NAMES.items() if x != own and names & taken]:
            raise ValueError(
                f"rule for {self.path!r}: role {self.role!r}, but the path names role "
                f"{others[0]!r}; write Rule({others[0]!r}, …) or the path of {self.role!r}"
            )


def path_regex(path: str) -> re.Pattern[str]:
    """What a path of a rule matches; a group for each `*`.

    >>> path_regex("?*/?/q").search("model/Block_3/Attention_0/q").groups()
    ('3',)
    """
    number = re.escape(path).replace(r"\*", r"(\d+)").replace(r"\?", "[^/]*?")
    return re.compile(rf"(?:^|/){number}$")
