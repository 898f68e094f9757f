"""From leaves to matrices: cutting leaves, and putting the layers of a role in one stack.

What lives here: `gather`. What does not: which leaves (`match.py`), products (`compose.py`).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array

from stabmon.layout.axes import read, tokens
from stabmon.layout.match import Found
from stabmon.layout.rules import Rule

# Layers with their matrices behind an axis for them.
Block = tuple[tuple[int, ...], Any]


def gather(
    name: str,
    found: Sequence[Found],
    roles: Collection[str],
    sizes: Mapping[str, int],
    *,
    shift: bool = False,
) -> dict[str, Array]:
    """The leaves of each role on canonical axes, stacked over layers; in the order of `roles`.

    Roles outside of the layers have no axis for them.

    Args:
        name: Of the layout, for messages.
        found: Leaves with their rules.
        roles: Keys of `CANONICAL`, `OUTER` and `SCALES`.
        sizes: Of all axes that leaves are cut into.
        shift: Whether scales that are stored as a difference from 1 become scales.

    Raises:
        ValueError: A size is not known, or layers differ in shape.
    """
    single: dict[str, dict[tuple[int, ...], Any]] = {}
    stacks: dict[str, list[Block]] = {}
    outer: dict[str, Any] = {}
    for item in found:
        if not set(item.rule.roles) & set(roles):
            continue
        for role, matrices in _cut(name, item, sizes, shift).items():
            if item.rule.stacked:
                stacks.setdefault(role, []).append((item.layers, matrices))
            elif item.layers:
                place = (*item.layers, *item.place[1:])
                single.setdefault(role, {})[place] = matrices
            else:
                outer[role] = jnp.asarray(matrices)
    for role, arrays in single.items():
        stacks.setdefault(role, []).append(_stack(name, role, arrays))
    whole = {role: _join(name, role, blocks) for role, blocks in stacks.items()}
    return {role: (whole | outer)[role] for role in roles if role in whole or role in outer}


def needed(missing: Sequence[str]) -> str:
    """What to write so that the sizes of axes are known."""
    arguments = {"n": "heads=…", "k": "kv_heads=…"}
    first = next((axis for axis in ("n", "k") if axis in missing), missing[0])
    argument = arguments.get(first, f"sizes={{'{first}': …}}")
    return f"write find_layout(params, {argument}) or Layout(…, sizes=(('{first}', …),))"


def _cut(name: str, item: Found, sizes: Mapping[str, int], shift: bool) -> dict[str, Any]:
    """The matrices in one leaf by role, on canonical axes."""
    rule = item.rule
    if missing := [axis for axis in rule.cuts if axis not in sizes and axis != "f"]:
        raise ValueError(
            f"layout {name!r}: {item.path} of shape {item.shape}, axes '{rule.left}', does not "
            f"tell the size of {', '.join(missing)}; {needed(missing)}"
        )
    axes = [read(token) for token in tokens(rule.left)]
    sums = [summands for product in axes for summands in product]
    known = {
        _letter(summands): sum(_size(rule, axis, sizes) for axis in summands)
        for product in axes
        if len(product) > 1
        for summands in product
        if summands != ("f",)
    }
    left = " ".join(f"({' '.join(map(_letter, product))})" for product in axes)
    apart = rearrange(item.leaf, f"{left} -> {' '.join(map(_letter, sums))}", **known)
    found = {}
    for i, role in enumerate(rule.roles):
        part = apart
        for axis, summands in enumerate(sums):
            if len(summands) > 1:
                kept = next(j for j, x in enumerate(summands) if x in rule.named)
                kept = i if summands == rule.end_to_end else kept
                lengths = [_size(rule, x, sizes) for x in summands]
                start = sum(lengths[:kept])
                part = part[(slice(None),) * axis + (slice(start, start + lengths[kept]),)]
        found[role] = _turned(rule, sums, part)
        if len(rule.roles) > 1 and not rule.end_to_end:
            found[role] = found[role][i]
        if shift and rule.plus:
            found[role] = jnp.asarray(found[role]).astype(jnp.float32) + jnp.float32(rule.plus)
    return found


def _size(rule: Rule, axis: str, sizes: Mapping[str, int]) -> int:
    """Size of one axis; n is K in rules of keys."""
    return int(axis) if axis.isdigit() else sizes["k" if axis == "n" and rule.of_keys else axis]


def _letter(summands: Sequence[str]) -> str:
    """A name for einops."""
    return f"x{'_'.join(summands)}"


def _turned(rule: Rule, sums: Sequence[tuple[str, ...]], part: Any) -> Any:
    """A leaf of which every axis is apart, on the axes of the right side."""
    whole = {axis: _letter(summands) for summands in sums for axis in summands}
    one = lambda token: " ".join(whole[x] for summands in read(token) for x in summands)
    right = " ".join(f"({one(token)})" for token in tokens(rule.right))
    return rearrange(part, f"{' '.join(map(_letter, sums))} -> {right}")


def _stack(name: str, role: str, arrays: Mapping[tuple[int, ...], Any]) -> Block:
    """Layers, and experts within them, in numerical order on leading axes."""
    shapes = {tuple(x.shape) for x in arrays.values()}
    if len(shapes) > 1 or len({len(place) for place in arrays}) > 1:
        raise ValueError(
            f"layout {name!r}: layers of role {role!r} differ in shape: {sorted(shapes)}"
        )
    layers = tuple(sorted({place[0] for place in arrays}))
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
    return layers, arrays[()]


def _join(name: str, role: str, blocks: Sequence[Block]) -> Array:
    """Several stacks of one role as one, in the order of the layers."""
    if len(blocks) == 1:
        return jnp.asarray(blocks[0][1])
    shapes = {tuple(x.shape[1:]) for _, x in blocks}
    if len(shapes) > 1:
        raise ValueError(
            f"layout {name!r}: stacks of role {role!r} differ in shape: {sorted(shapes)}"
        )
    order = np.concatenate([layers for layers, _ in blocks])
    stack = jnp.concatenate([jnp.asarray(x) for _, x in blocks])
    return stack if np.all(np.diff(order) > 0) else stack[np.argsort(order)]
