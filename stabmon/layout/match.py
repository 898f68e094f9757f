"""Which leaves the rules take, of which layers they are, and whether their shapes agree.

What lives here: `match`, `resolve`. What does not: the arithmetic of axes (`axes.py`), cutting
leaves (`gather.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from stabmon.layout.axes import Equation, Misfit, read, solve, tokens
from stabmon.layout.rules import CANONICAL, OUTER, SCALES, Rule

_ORDER = [*CANONICAL, *OUTER, *SCALES]
# Sizes that may differ from leaf to leaf.
_OWN = {"f", "vocab", "t"}
_STACK = (("l",),)


class Found(NamedTuple):
    """A leaf that a rule takes.

    Attributes:
        path: Where it lies.
        leaf: The leaf.
        rule: The rule.
        place: Numbers in its path: of layer and expert.
        layers: Numbers of the layers that it holds; empty outside of them.
    """

    path: str
    leaf: Any
    rule: Rule
    place: tuple[int, ...]
    layers: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the leaf."""
        return tuple(self.leaf.shape)


def match(
    rules: Sequence[Rule], leaves: Iterable[tuple[str, Any]]
) -> tuple[list[Found], dict[str, str]]:
    """The leaves that rules take, and what is wrong with those of the right path alone."""
    found, misfits = [], {}
    for path, leaf in leaves:
        named = [(rule, rule.place(path)) for rule in rules]
        named = [(rule, place) for rule, place in named if place is not None]
        fitting = [Found(path, leaf, *item) for item in named if item[0].rank == len(leaf.shape)]
        found += fitting
        if named and not fitting:
            axes = " or ".join(dict.fromkeys(f"'{rule.left}'" for rule, _ in named))
            misfits[path] = f"has shape {tuple(leaf.shape)}, expected axes {axes}"
    return _numbered(found), misfits


def layers_of(found: Iterable[Found]) -> dict[str, tuple[int, ...]]:
    """The layers in which each role is, ascending."""
    layers: dict[str, set[int]] = {}
    for item in found:
        for role in item.rule.roles:
            layers.setdefault(role, set()).update(item.layers)
    return {role: tuple(sorted(numbers)) for role, numbers in layers.items()}


def resolve(
    name: str, found: Sequence[Found], given: Mapping[str, int]
) -> tuple[dict[str, int], list[Equation]]:
    """Sizes of all axes, and the equations that leave some open; attention is looked at first.

    Raises:
        Misfit: Shapes contradict the rules, each other, or what is given; or two leaves claim to be
            the same matrix.
    """
    remedy = (
        "check heads= and kv_heads= against the model's config; if they are right the leaf is "
        "transposed or laid out otherwise: declare a Layout with rules for its axes"
    )
    found = sorted(found, key=lambda item: _ORDER.index(item.rule.roles[0]))
    claims: dict[tuple[Any, ...], str] = {}
    for item in found:
        for place in [(role, x) for role in item.rule.roles for x in item.layers or (None,)]:
            other = claims.setdefault((*place, *item.place[1:]), item.path)
            if other != item.path:
                layer = "" if place[1] is None else f" of layer {place[1]}"
                raise Misfit(
                    f"layout {name!r}: {other} and {item.path} are both role {place[0]!r}{layer}; "
                    "pass the subtree of one model"
                )
    try:
        sizes, rest = solve([e for item in found for e in _equations(item)], given)
    except Misfit as error:
        raise Misfit(f"layout {name!r}: {error}; {remedy}") from error
    if "n" in sizes and "k" in sizes and sizes["n"] % sizes["k"]:
        keys = next((x for x in found if x.rule.of_keys), found[0])
        raise Misfit(
            f"layout {name!r}: {sizes['n']} query heads do not divide over {sizes['k']} kv heads "
            f"({keys.path} of shape {keys.shape}, axes '{keys.rule.left}'); {remedy}"
        )
    return sizes, rest


def _equations(item: Found) -> list[Equation]:
    """What the shape of one leaf says of the sizes of axes.

    In rules of k and v, n is K. F may differ from leaf to leaf and is not compared.
    """
    rule, source = item.rule, f"{item.path} of shape {item.shape}"
    # Stacks of other layers may be longer or shorter.
    stack = _STACK if rule.layers == (0, 1) else ((f"l of {rule.layers}",),)
    said = [
        Equation(stack if product == _STACK else product, size, source, rule.left)
        for product, size in zip(rule.products, item.shape, strict=True)
        if not _OWN.intersection(name for summands in product for name in summands)
    ]
    if len(rule.roles) > 1 and not rule.end_to_end:
        said.append(Equation(read(tokens(rule.right)[0]), len(rule.roles), source, rule.left))
    if "(" in rule.right:
        heads = next(token for token in tokens(rule.right) if token.startswith("("))
        total = "k" if rule.of_keys else "n"
        said.append(Equation(rule.scoped(heads), total, source, rule.left))
        # k blocks of g query heads, one key head and one value head are n + k + k heads.
        if rule.end_to_end:
            outer = [x for x in read(heads) if not {*x} & {*rule.end_to_end}]
            parts = tuple(outer[0][0] if x == "1" else "n" for x in rule.end_to_end)
            axis = next(i for i, x in enumerate(rule.products) if rule.end_to_end in x)
            rest = [x for x in rule.products[axis] if x != rule.end_to_end and x not in outer]
            said.append(Equation((parts, *rest), item.shape[axis], source, rule.left))
    return said


def _numbered(found: Sequence[Found]) -> list[Found]:
    """The leaves with the layers that they hold; those that come first are numbered first."""
    done: dict[int, Found] = {}
    rest = dict(enumerate(found))
    while rest:
        known = len(done)
        for i, item in list(rest.items()):
            first = item.rule.layers[0]
            before = [x for x in found if isinstance(first, str) and x.rule.path.startswith(first)]
            paths = {x.path for x in before}
            numbers = [n for x in done.values() if x.path in paths for n in x.layers]
            if paths <= {x.path for x in done.values()}:
                start = first if isinstance(first, int) else max(numbers, default=-1) + 1
                done[i] = item._replace(layers=_layers(item, found, start))
                del rest[i]
        if len(done) == known:
            raise ValueError("rules: stacks name each other as the one that comes before")
    return [done[i] for i in range(len(found))]


def _layers(item: Found, found: Sequence[Found], first: int) -> tuple[int, ...]:
    """Numbers of the layers in one leaf."""
    rule, step = item.rule, item.rule.layers[1]
    if rule.roles[0] in OUTER:
        return ()
    if not rule.stacked:
        return (first + step * item.place[0],)
    count = item.shape[tokens(rule.left).index("l")]
    if item.place:
        step = len({x.place[0] for x in found if x.rule == rule})
        first += item.place[0]
    return tuple(first + step * i for i in range(count))
