"""What to say where no layout fits: what nearly did, and the rules to write.

What lives here: `nothing_fits`. It only proposes, by the names of leaves; what is taken is never
guessed from names or from the number of axes.
"""

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

from stabmon.layout.layout import Layout
from stabmon.layout.match import match
from stabmon.layout.rules import CANONICAL

_KINDS = 12
_WORDS = {
    "q": r"q|query|queries|wq|w_q|q_\w+|query_\w+",
    "k": r"k|key|keys|wk|w_k|k_\w+|key_\w+",
    "v": r"v|value|values|wv|w_v|v_\w+|value_\w+",
    "qkv": r"w?qkv\w*|query_key_value|c_attn|in_proj\w*|fused_qkv\w*",
    "o": r"o|wo|w_o|o_\w+|out_\w+|output\w*",
    "mlp_gate": r"gate\w*|w1|w_gate|wi_0",
    "mlp_up": r"up\w*|fc1|fc_in|w3|c_fc|w_in|wi\w*|dense_h_to_4h|linear1",
    "mlp_down": r"down\w*|fc2|fc_out|w2|w_out|dense_4h_to_h|linear2",
}
# Axes of a leaf in × out, and of PyTorch's and Equinox's out × in, by how many there are.
_INWARD = {3: "d n h -> n d h", 2: "d (n h) -> n d h"}
_OUTWARD = {3: "n h d -> n d h", 2: "(n h) d -> n d h"}


def nothing_fits(leaves: Sequence[tuple[str, Any]], layouts: Sequence[Layout]) -> str:
    """The message of an error: what nearly fitted, the leaves by kind, the rules to write.

    Args:
        leaves: Arrays, or anything with shape and dtype, by path.
        layouts: Those that were tried.
    """
    kinds: dict[str, tuple[int, ...]] = {}
    for path, leaf in leaves:
        kinds.setdefault(_kind(path), tuple(leaf.shape))
    if not kinds:
        return "no layout: the tree holds no arrays"
    matrices = {path: shape for path, shape in kinds.items() if len(shape) > 1}
    first = [path for path in matrices if any(_fits(x, path) for x in _WORDS)]
    shown = [*first, *(path for path in kinds if path not in first)][:_KINDS]
    seen = ", ".join(f"{path} {kinds[path]}" for path in shown)
    return (
        f"no layout finds query and key matrices among {len(leaves)} leaves; "
        f"{_nearest(leaves, kinds, layouts)}; "
        f"the tree has {len(kinds)} kinds of leaves (* numbers): {seen}"
        f"{' …' if len(kinds) > len(shown) else ''}; declare them, with n heads, k kv heads, "
        f"h head dim, d model, f feed-forward: Layout('mine', ({_rules(matrices)}, …))"
    )


def _kind(path: str) -> str:
    """A path with its numbers folded."""
    return re.sub(r"\d+(?=/|$)", "*", path.replace(".", "/"))


def _fits(role: str, path: str) -> bool:
    """Whether the end of a path is named as a role often is."""
    return any(re.fullmatch(_WORDS[role], name) for name in path.split("/")[-2:])


def _nearest(
    leaves: Sequence[tuple[str, Any]], kinds: dict[str, Any], layouts: Sequence[Layout]
) -> str:
    """Which layout nearly fitted, what it finds, and where it would expect the rest."""
    best: tuple[float, str] = (-1.0, "")
    for layout in layouts:
        found, _ = match(layout.rules, leaves)
        roles = {role for item in found for role in item.rule.roles}
        rules = [rule for rule in layout.rules if rule.roles[0] in ("q", "q_up")]
        near = max(_alike(rule.path, kind) for rule in rules for kind in kinds)
        score = near + len({x.path for x in found}) / len(leaves)
        if score > best[0]:
            wanted = ", ".join(f"{'/'.join(x.roles)} at {x.path} '{x.left}'" for x in rules[:2])
            has = f"finds {', '.join(sorted(roles))}, but not " if roles else "would have "
            best = score, f"nearest is {layout.name!r}, which {has}{wanted}"
    return best[1]


def _alike(path: str, kind: str) -> float:
    """How alike the path of a rule and the end of a path are, from 0 to 1."""
    tail = "/".join(kind.split("/")[-path.count("/") - 1 :])
    return SequenceMatcher(None, path, tail).ratio()


def _rules(matrices: dict[str, tuple[int, ...]]) -> str:
    """Rules for leaves that are named like roles; examples where none is."""
    lines = []
    for role in _WORDS:
        path = next((x for x in matrices if _fits(role, x)), None)
        if path is None:
            continue
        rank, star = len(matrices[path]), path.count("*")
        axes = _OUTWARD if path.endswith("weight") else _INWARD
        if role == "qkv":
            left, named = ("d (three n h)", "three n d h") if rank == 2 else ("…", "three n d h")
            lines.append(f"Rule(('q', 'k', 'v'), '{path}', '{left} -> {named}')")
            continue
        pattern = axes.get(rank - (0 if star else 1), f"… -> {CANONICAL[role]}")
        if role == "o" or role.startswith("mlp"):
            left = {"o": ("n h d", "(n h) d", "d (n h)"), "mlp_down": ("f d", "f d", "d f")}
            left = left.get(role, ("d f", "d f", "f d"))[
                2 if axes is _OUTWARD else 3 - min(rank, 3)
            ]
            pattern = f"{left} -> {CANONICAL[role]}"
        if not star:
            pattern = "l " + pattern.replace("-> ", "-> l ")
        lines.append(f"Rule('{role}', '{path}', '{pattern}')")
    return ", ".join(lines) or "Rule('q', 'path/*/to/kernel', 'd n h -> n d h')"
