"""From leaves to matrices: matching rules, cutting leaves, stacking layers, composing factors.

The working parts of `Layout` (`layout.py`), which says what they are for.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array

from stabmon.layout.axes import Equation, Misfit, read, solve, tokens
from stabmon.layout.rules import CANONICAL, FACTORS, SCALES, Rule


class Found(NamedTuple):
    """A leaf that a rule takes; `place` holds its layer and expert numbers."""

    path: str
    leaf: Any
    rule: Rule
    place: tuple[int, ...]

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
    return found, misfits


def equations(item: Found) -> list[Equation]:
    """What the shape of one leaf says of the sizes of axes.

    In rules of k and v, n is K. F may differ from leaf to leaf and is not compared.
    """
    rule, source = item.rule, f"{item.path} of shape {item.shape}"
    said = [
        Equation(product, size, source, rule.left)
        for product, size in zip(rule.products, item.shape, strict=True)
        if product != (("f",),)
    ]
    if len(rule.roles) > 1:
        said.append(Equation(read(tokens(rule.right)[0]), len(rule.roles), source, rule.left))
    if "(" in rule.right:
        heads = next(token for token in tokens(rule.right) if token.startswith("("))
        said.append(Equation(rule.scoped(heads), "n", source, rule.left))
    return said


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
    order = [*CANONICAL, *SCALES]
    found = sorted(found, key=lambda item: order.index(item.rule.roles[0]))
    claims: dict[tuple[str, tuple[int, ...]], str] = {}
    for item in found:
        for role in item.rule.roles:
            other = claims.setdefault((role, item.place), item.path)
            if other != item.path:
                raise Misfit(
                    f"layout {name!r}: {other} and {item.path} are both role {role!r} of layer "
                    f"{(*item.place, 0)[0]}; pass the subtree of one model"
                )
    try:
        sizes, rest = solve([e for item in found for e in equations(item)], given)
    except Misfit as error:
        raise Misfit(f"layout {name!r}: {error}; {remedy}") from error
    if "n" in sizes and "k" in sizes and sizes["n"] % sizes["k"]:
        keys = next((x for x in found if x.rule.of_keys), found[0])
        raise Misfit(
            f"layout {name!r}: {sizes['n']} query heads do not divide over {sizes['k']} kv heads "
            f"({keys.path} of shape {keys.shape}, axes '{keys.rule.left}'); {remedy}"
        )
    return sizes, rest


def gather(
    name: str,
    found: Sequence[Found],
    roles: Collection[str],
    sizes: Mapping[str, int],
    *,
    shift: bool = False,
) -> dict[str, Array]:
    """The leaves of each role on canonical axes, stacked over layers; in the order of `roles`.

    Args:
        name: Of the layout, for messages.
        found: Leaves with their rules.
        roles: Keys of `CANONICAL` and `SCALES`.
        sizes: Of all axes that leaves are cut into.
        shift: Whether scales that are stored as a difference from 1 become scales.

    Raises:
        ValueError: A size is not known, or layers differ in shape.
    """
    slots: dict[str, dict[tuple[int, ...], Any]] = {}
    for item in found:
        if set(item.rule.roles) & set(roles):
            for role, matrices in _cut(name, item, sizes, shift).items():
                slots.setdefault(role, {})[item.place] = matrices
    return {role: _stack(name, role, slots[role]) for role in roles if role in slots}


def compose(
    name: str, role: str, parts: Mapping[str, Array], moves: Mapping[str, Array] | None = None
) -> Array | None:
    """The product of a role's factors; with `moves`, their change, how far the product moved.

    None where the role is not in the tree, or in `moves`.

    Args:
        name: Of the layout, for messages.
        role: A key of `CANONICAL`.
        parts: Factors now, each (L, …).
        moves: Factors now minus factors then.

    Raises:
        ValueError: A factor is missing, or is there for other layers.
    """
    chain = [part for part in FACTORS.get(role, (role,)) if part in parts]
    own = {role, f"{role}_up"}
    if not own.intersection(chain):
        return None
    if not is_whole(role, chain):
        raise ValueError(f"layout {name!r}: {role!r} is a product, but only {chain} is in the tree")
    if moves is not None:
        tracked = [part for part in chain if part in moves]
        if not own.intersection(tracked):
            return None
        if tracked != chain:
            raise ValueError(
                f"layout {name!r}: {role!r} is the product of {chain}, but the change holds only "
                f"{tracked}; keep all of them: track_delta(select=layout.selects('qk'))"
            )
    if len(chain) == 1:
        return (moves or parts)[role]
    layers = {part: parts[part].shape[0] for part in chain}
    if len(set(layers.values())) > 1:
        raise ValueError(f"layout {name!r}: factors of {role!r} are of other layers: {layers}")
    terms = [_axes(part, parts[part].ndim) for part in chain]
    equation = f"{','.join(terms)}->l{CANONICAL[role].replace(' ', '')}"
    multiply = lambda factors: jnp.einsum(equation, *factors, precision=jax.lax.Precision.HIGHEST)
    now = [parts[part].astype(jnp.float32) for part in chain]
    if moves is None:
        return multiply(now)
    change = [moves[part].astype(jnp.float32) for part in chain]
    then = [x - dx for x, dx in zip(now, change, strict=True)]
    swaps = [multiply([*then[:i], change[i], *now[i + 1 :]]) for i in range(len(chain))]
    return jnp.sum(jnp.stack(swaps), axis=0)


def is_whole(role: str, parts: Iterable[str]) -> bool:
    """Whether `parts` hold the role itself, or else all matrices that it is the product of."""
    factors = [part for part in FACTORS.get(role, (role,)) if part not in SCALES]
    here = [part for part in factors if part in set(parts)]
    return here in ([role], [part for part in factors if part != role])


def _axes(part: str, rank: int) -> str:
    """Subscripts of a factor with its layer axis."""
    axes = SCALES[part][rank - 2] if part in SCALES else CANONICAL[part]
    return "l" + axes.replace(" ", "")


def _cut(name: str, item: Found, sizes: Mapping[str, int], shift: bool) -> dict[str, Any]:
    """The matrices in one leaf by role, on canonical axes."""
    rule = item.rule
    if missing := [axis for axis in rule.cuts if axis not in sizes]:
        raise ValueError(
            f"layout {name!r}: {item.path} of shape {item.shape}, axes '{rule.left}', does not "
            f"tell the size of {', '.join(missing)}; {needed(missing)}"
        )
    total = lambda axes: sum(sizes["k" if axis == "n" and rule.of_keys else axis] for axis in axes)
    left, right = rule.left, tokens(rule.right)
    lengths, parts, joined = {}, [], {}
    for token in tokens(rule.left):
        if not token.startswith("(") and "+" not in token:
            continue
        for summands in read(token):
            whole = "_".join(summands)
            lengths[whole] = total(summands)
            if len(summands) > 1:
                left = left.replace("+".join(summands), whole)
                kept = next(axis for axis in summands if axis in right)
                start = total(summands[: summands.index(kept)])
                parts.append((right.index(kept), slice(start, start + total([kept]))))
                joined[kept] = whole
    target = " ".join(joined.get(token, token) for token in right)
    matrices = rearrange(item.leaf, f"{left} -> {target}", **lengths)
    for axis, part in parts:
        matrices = matrices[(slice(None),) * axis + (part,)]
    if shift and rule.plus:
        matrices = jnp.asarray(matrices).astype(jnp.float32) + jnp.float32(rule.plus)
    if len(rule.roles) == 1:
        return {rule.roles[0]: matrices}
    return {role: matrices[i] for i, role in enumerate(rule.roles)}


def needed(missing: Sequence[str]) -> str:
    """What to write so that the sizes of axes are known."""
    arguments = {"n": "heads=…", "k": "kv_heads=…"}
    first = next((axis for axis in ("n", "k") if axis in missing), missing[0])
    argument = arguments.get(first, f"sizes={{'{first}': …}}")
    return f"write find_layout(params, {argument}) or Layout(…, sizes=(('{first}', …),))"


def _stack(name: str, role: str, arrays: Mapping[tuple[int, ...], Any]) -> Array:
    """Layers, and experts within them, in numerical order on leading axes."""
    shapes = {tuple(x.shape) for x in arrays.values()}
    if len(shapes) > 1 or len({len(place) for place in arrays}) > 1:
        raise ValueError(
            f"layout {name!r}: layers of role {role!r} differ in shape: {sorted(shapes)}"
        )
    numpy = all(isinstance(x, np.ndarray) for x in arrays.values())
    stack = np.stack if numpy else jnp.stack
    depth = len(next(iter(arrays)))
    for length in range(depth, 0, -1):
        outer: dict[tuple[int, ...], list[Any]] = {}
        for place in sorted(arrays):
            outer.setdefault(place[: length - 1], []).append(arrays[place])
        counts = {len(inner) for inner in outer.values()}
        if len(counts) > 1:
            raise ValueError(
                f"layout {name!r}: layers of role {role!r} differ in their number of experts: "
                f"{sorted(counts)}"
            )
        arrays = {place: stack(inner) for place, inner in outer.items()}
    return jnp.asarray(arrays[()])
