"""Where the query, key, value, output, MLP and router matrices lie in a parameter tree.

A `Layout` is data: path patterns, each with an einops pattern to canonical axes. Nothing is ever
guessed from the number of dimensions; a leaf that no rule fits is left out and reported. What is
measured on the collected matrices is decided in `monitor.py`.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import EinopsError, rearrange
from jaxtyping import Array, PyTree

# Axes as in the README: D model, N heads, K kv heads (here also n), H head dim, F ff, E experts.
CANONICAL = {
    "q": "n d h",
    "k": "n d h",
    "v": "n d h",
    "o": "n h d",
    "mlp_up": "d f",
    "mlp_gate": "d f",
    "mlp_down": "f d",
    "router": "e d",
    "expert_up": "e d f",
    "expert_gate": "e d f",
    "expert_down": "e f d",
}
GROUPS = {
    "attention": ("q", "k", "v", "o"),
    "mlp": ("mlp_up", "mlp_gate", "mlp_down", "expert_up", "expert_gate", "expert_down"),
    "router": ("router",),
}
GROUPS["all"] = tuple(CANONICAL)

Select = str | Callable[[str, Any], bool] | PyTree[bool] | None


@dataclass(frozen=True)
class Rule:
    """One matrix family.

    Attributes:
        role: A key of `CANONICAL`.
        path: Path of the leaf, `/`-separated; `*` stands for the layer number. Matches at the end
            of a longer path, so a wrapper around the parameters does no harm.
        pattern: einops pattern from the leaf's axes to the canonical ones, with a leading `l` on
            both sides where layers are stacked in one leaf.
    """

    role: str
    path: str
    pattern: str

    def __post_init__(self):
        if self.role not in CANONICAL:
            raise ValueError(f"unknown role {self.role!r}; one of {', '.join(CANONICAL)}")
        stacked = "l " if "*" not in self.path else ""
        expected = stacked + CANONICAL[self.role]
        if self.pattern.count("->") != 1 or self.right != expected:
            raise ValueError(
                f"rule for {self.path!r}: expected a pattern '… -> {expected}', "
                f"got {self.pattern!r}"
                + ("" if "*" in self.path else "; mark the layer number in the path with *")
            )

    @property
    def left(self) -> str:
        """The leaf's axes."""
        return self.pattern.split("->")[0].strip()

    @property
    def right(self) -> str:
        """The canonical axes."""
        return self.pattern.split("->")[1].strip()

    @property
    def rank(self) -> int:
        """How many axes the leaf has."""
        return len(re.sub(r"\([^)]*\)", "x", self.left).split())

    def layer(self, path: str) -> int | None:
        """The layer number in `path` (0 for a stacked leaf), or None if the rule does not fit."""
        glob = re.escape(self.path).replace(r"\*", r"(\d+)")
        found = re.search(rf"(?:^|/){glob}$", path)
        if found is None:
            return None
        return int(found.group(1)) if found.groups() else 0


@dataclass(frozen=True)
class Layout:
    """A named set of rules, hashable, with the sizes that its patterns need.

    Attributes:
        name: For messages.
        rules: The matrix families.
        sizes: Axis sizes that shapes alone do not tell, such as (("n", 8),).
        left_out: Filled by `find_layout`: (path, reason) of every leaf that no rule takes.
    """

    name: str
    rules: tuple[Rule, ...]
    sizes: tuple[tuple[str, int], ...] = ()
    left_out: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    def collect(self, params: PyTree, roles: Iterable[str] | None = None) -> dict[str, Array]:
        """Every role's matrices on canonical axes behind a layer axis, e.g. q: (L, N, D, H).

        Leaves of separate layers are stacked. Roles without a leaf are absent, and so are masked
        leaves. Jit-able.

        Raises:
            ValueError: A leaf's shape does not fit its pattern, or layers differ in shape.
        """
        wanted = set(CANONICAL if roles is None else roles)
        found: dict[str, dict[int, Array]] = {}
        for path, leaf in leaves_with_paths(params):
            for rule in self.rules:
                layer = rule.layer(path)
                if layer is not None and rule.role in wanted:
                    found.setdefault(rule.role, {})[layer] = self._canonical(rule, path, leaf)
        collected = {}
        for rule in self.rules:
            layers = found.pop(rule.role, None)
            if layers is None:
                continue
            shapes = {x.shape for x in layers.values()}
            if len(shapes) > 1:
                raise ValueError(f"layers of role {rule.role!r} differ in shape: {sorted(shapes)}")
            stack = [layers[i] for i in sorted(layers)]
            collected[rule.role] = stack[0] if "*" not in rule.path else jnp.stack(stack)
        return collected

    def selects(self, group: str) -> Callable[[str, Any], bool]:
        """A predicate (path, leaf) for the leaves of a group of roles, for `select=` arguments.

        Raises:
            ValueError: `group` is neither a role nor one of attention, mlp, router, all.
        """
        roles = GROUPS.get(group) or ((group,) if group in CANONICAL else None)
        if roles is None:
            names = ", ".join([*GROUPS, *CANONICAL])
            raise ValueError(f"unknown group of matrices {group!r}; one of {names}")
        chosen = [rule for rule in self.rules if rule.role in roles]
        return lambda path, leaf: any(rule.layer(path) is not None for rule in chosen)

    def _canonical(self, rule: Rule, path: str, leaf: Array) -> Array:
        named = {name: size for name, size in self.sizes if name in rule.left.split()}
        if leaf.ndim != rule.rank:
            raise ValueError(
                f"layout {self.name!r}: {path} has shape {leaf.shape}, expected axes "
                f"'{rule.left}'; declare a rule that fits, or drop this one"
            )
        try:
            return rearrange(leaf, rule.pattern, **named)
        except EinopsError as error:
            raise ValueError(
                f"layout {self.name!r}: {path} of shape {leaf.shape} does not fit "
                f"'{rule.pattern}' with {named}: {error}"
            ) from error


SCANNED_GPT = Layout(
    "scanned GPT",
    (
        Rule("q", "layers/attn/q/kernel", "l d n h -> l n d h"),
        Rule("k", "layers/attn/k/kernel", "l d n h -> l n d h"),
        Rule("v", "layers/attn/v/kernel", "l d n h -> l n d h"),
        Rule("o", "layers/attn/o/kernel", "l n h d -> l n h d"),
        Rule("mlp_up", "layers/mlp/up/kernel", "l d f -> l d f"),
        Rule("mlp_gate", "layers/mlp/gate/kernel", "l d f -> l d f"),
        Rule("mlp_down", "layers/mlp/down/kernel", "l f d -> l f d"),
        Rule("router", "layers/moe/router/kernel", "l d e -> l e d"),
        Rule("expert_up", "layers/moe/up/kernel", "l e d f -> l e d f"),
        Rule("expert_gate", "layers/moe/gate/kernel", "l e d f -> l e d f"),
        Rule("expert_down", "layers/moe/down/kernel", "l e f d -> l e f d"),
    ),
)
PRESETS: tuple[Layout, ...] = (SCANNED_GPT,)


def find_layout(params: PyTree, presets: Sequence[Layout] = PRESETS) -> Layout:
    """The preset whose rules take the most leaves of `params`, with what it leaves out and why.

    Args:
        params: Parameter tree; arrays or `jax.ShapeDtypeStruct` leaves.
        presets: Layouts to choose from.

    Raises:
        ValueError: No preset finds both query and key matrices.

    >>> import jax.numpy as jnp
    >>> attn = {name: {"kernel": jnp.zeros((2, 8, 4, 2))} for name in "qkv"}
    >>> layout = find_layout({"layers": {"attn": attn}, "norm": {"scale": jnp.ones(8)}})
    >>> layout.name, layout.left_out
    ('scanned GPT', (('norm/scale', 'no rule for shape (8,)'),))
    """
    leaves = leaves_with_paths(params)
    best, taken = None, {}
    for layout in presets:
        fits = {
            path: rule.role
            for path, leaf in leaves
            for rule in layout.rules
            if rule.layer(path) is not None and len(leaf.shape) == rule.rank
        }
        if {"q", "k"} <= set(fits.values()) and len(fits) > len(taken):
            best, taken = layout, fits
    if best is None:
        seen = ", ".join(f"{path} {tuple(leaf.shape)}" for path, leaf in leaves[:12])
        raise ValueError(
            f"no preset layout ({', '.join(x.name for x in presets)}) finds query and key "
            f"matrices among {len(leaves)} leaves: {seen}{' …' if len(leaves) > 12 else ''}; "
            "declare Layout('mine', (Rule('q', 'path/*/to/kernel', 'd n h -> n d h'), …))"
        )
    left_out = tuple(
        (path, f"no rule for shape {tuple(leaf.shape)}")
        for path, leaf in leaves
        if path not in taken
    )
    return Layout(best.name, best.rules, best.sizes, left_out)


def leaves_with_paths(tree: PyTree) -> list[tuple[str, Any]]:
    """Leaves with their `/`-separated paths; the `value` under a Flax variable is not a step."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(path_name(path), leaf) for path, leaf in flat]


def path_name(path: Sequence[Any]) -> str:
    """A key path as `layers/attn/q/kernel`."""
    if path and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value":
        path = path[:-1]
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def selection(params: PyTree, select: Select) -> PyTree[bool]:
    """A tree of booleans: which leaves of `params` an argument `select=` means.

    Args:
        params: Parameter tree.
        select: None for every floating-point leaf; a regular expression searched in the path; a
            predicate (path, leaf) -> bool, such as `layout.selects("attention")`; or a tree of
            booleans like `params`.

    Raises:
        ValueError: Nothing is selected, or a boolean tree has another structure.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    if callable(select):
        chosen = [bool(select(path_name(path), leaf)) for path, leaf in leaves]
    elif isinstance(select, str):
        chosen = [re.search(select, path_name(path)) is not None for path, _ in leaves]
    elif select is None:
        chosen = [
            np.issubdtype(leaf.dtype, np.inexact) or leaf.dtype == jnp.bfloat16
            for _, leaf in leaves
        ]
    else:
        flags, given = jax.tree.flatten(select)
        if given != structure:
            raise ValueError(f"select: expected a tree of booleans like {structure}, got {given}")
        chosen = [bool(flag) for flag in flags]
    if leaves and not any(chosen):
        paths = ", ".join(path_name(path) for path, _ in leaves[:12])
        raise ValueError(f"select: {select!r} matches none of {len(leaves)} leaves: {paths}")
    return jax.tree.unflatten(structure, chosen)
