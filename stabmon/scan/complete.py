"""Whether a checkpoint has all that a model of its kind has: layers, matrices, experts.

What lives here: `missing`. What does not: what is wrong with a matrix that is there (`health`).
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from stabmon.layout.layout import shortened
from stabmon.layout.rules import GROUPS, SCALES
from stabmon.scan.layers import Plan

_FAMILIES = {
    "attention": ({*GROUPS["attention"], *SCALES},),
    "feed-forward": (
        {"mlp_up", "mlp_gate", "mlp_down"},
        {"router", "expert_up", "expert_gate", "expert_down"},
    ),
}


def missing(plan: Plan) -> Iterator[str]:
    """Yields what is not there, in words.

    A layer of another kind, such as a convolution among attention, is one that has matrices of its
    own that no rule takes.

    Args:
        plan: The checkpoint and its layout.
    """
    roles: dict[int, set[str]] = {}
    experts: dict[int, Counter[str]] = {}
    for item in plan.found:
        for layer in item.layers:
            roles.setdefault(layer, set()).update(item.rule.roles)
            if len(item.place) > 1:
                experts.setdefault(layer, Counter()).update(item.rule.roles)
    others = _others(plan)
    count = max([plan.checkpoint.layers or 0, *(layer + 1 for layer in roles)])
    absent = [layer for layer in range(count) if layer not in roles and layer not in others]
    if absent:
        says = plan.checkpoint.layers
        config = f"; its config.json says {says} layers" if says and says > len(roles) else ""
        yield f"{shortened(absent)} missing{config}"
    for family, kinds in _FAMILIES.items():
        yield from _incomplete(family, kinds, roles, others)
    usual = Counter[str]()
    for number in experts.values():
        usual |= number
    for layer, number in experts.items():
        for role in sorted(x for x in number if number[x] < usual[x]):
            yield f"layer {layer} has {number[role]} of {usual[role]} matrices of {role}"


def _incomplete(
    family: str,
    kinds: tuple[set[str], ...],
    roles: Mapping[int, set[str]],
    others: Mapping[int, list[str]],
) -> Iterator[str]:
    """Layers that have some, but not all of the matrices that most layers of a family have."""
    common: list[set[str]] = []
    for kind in kinds:
        sets = Counter(frozenset(x & kind) for x in roles.values() if x & kind)
        common.append({*max(sets, key=lambda x: (sets[x], len(x)), default=())})
    if not any(common):
        return
    for layer, here in sorted(roles.items()):
        beside = others.get(layer, [])
        hint = f"; left out there: {', '.join(beside[:3])}" if beside else ""
        if not any(here & kind for kind in kinds):
            if not beside:
                yield f"layer {layer} has no {family} matrices"
            continue
        for kind, usual in zip(kinds, common, strict=True):
            if here & kind and (lost := sorted(usual - here)):
                yield f"layer {layer} has no {', '.join(lost)}, as other layers have{hint}"


def _others(plan: Plan) -> dict[int, list[str]]:
    """Matrices that no rule takes, by the number of their layer."""
    taken = {item.path for item in plan.found}
    found: dict[int, list[str]] = {}
    for path, leaf in plan.checkpoint.leaves.items():
        number = re.search(r"(?:^|[./])(?:\w*?_)?(\d+)[./]", path)
        if path not in taken and number and len(leaf.shape) > 1:
            found.setdefault(int(number[1]), []).append(path)
    return found
