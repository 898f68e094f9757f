"""`weights`: entries that are out of line with their matrix, dead heads, broken ties."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from stabmon.audits.case import Case, Outcome, Verdict, acquitted
from stabmon.layout.paths import leaves_with_paths

NAME = "weights"
# A lone entry: so many times the next largest, and the root mean square, of its leaf.
_NEXT, _SIZE = 4.0, 12.0


def weights(case: Case) -> Verdict:
    """Whether no entry is out of line, no head is dead, and tied leaves are equal.

    An entry is out of line where it is 4 times the second largest of its leaf and 12 times the root
    mean square; with a `snapshot` the same is asked of the change since then. It convicts of that
    (a bit flip), of entries that are not finite, of a head or an expert that is all zero while
    others are not, and of `tied` leaves that differ.

    Args:
        case: Its params; snapshot, layout and tied where there are.
    """
    leaves = dict(leaves_with_paths(case.params))
    for first, second in case.tied:
        if first not in leaves or second not in leaves:
            known = ", ".join(list(leaves)[:12])
            raise ValueError(f"tied: no leaf {first!r} or {second!r}; some of {known}")
        a, b = leaves[first], leaves[second]
        same = a.shape == b.shape and bool(jnp.all(a == b))
        same |= a.shape == b.shape[::-1] and bool(jnp.all(a == b.T))
        if not same:
            return _convict(f"{first} and {second} are tied and differ", "broken tie", second)
    trees = {"weights": case.params}
    if case.snapshot is not None:
        trees["change"] = jax.tree.map(jnp.subtract, case.params, case.snapshot)
    numbers: dict[str, float] = {}
    for name, tree in trees.items():
        for path, row in jax.device_get(_extremes(tree)).items():
            first, second, size, place, finite = map(float, row)
            shape = leaves[path].shape
            index = tuple(map(int, np.unravel_index(int(place), shape))) if shape else ()
            if not finite:
                return _convict(f"{path}{list(index)} is not finite", "non-finite values", path)
            if np.prod(shape) < 16:
                continue
            lone = first / max(second, 1e-30) if first > _SIZE * size else 0.0
            numbers[f"lone {name}"] = max(numbers.get(f"lone {name}", 0.0), lone)
            if lone > _NEXT:
                text = f"{path}{list(index)}: {name} {first:.3g}, the next largest {second:.3g}"
                layer, head = _owner(case, path, index)
                return _convict(text, "bit flip", path, layer, head, lone=lone)
    return _dead(case) or acquitted(NAME, "no entry is out of line with its matrix", **numbers)


@partial(jax.jit)
def _extremes(tree: PyTree) -> dict[str, Array]:
    """Of each leaf: largest and second |entry|, rms without the largest, its place, finiteness."""
    found = {}
    for path, x in leaves_with_paths(tree):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            continue
        flat = jnp.abs(x.astype(jnp.float32)).reshape(-1)
        finite = jnp.all(jnp.isfinite(flat))
        place = jnp.where(finite, jnp.argmax(flat), jnp.argmin(jnp.isfinite(flat)))
        rest = jnp.where(jnp.arange(flat.size) == place, 0.0, flat)
        size = jnp.sqrt(jnp.mean(jnp.square(rest)))
        row = [
            flat[place],
            jnp.max(rest),
            size,
            place.astype(jnp.float32),
            finite.astype(jnp.float32),
        ]
        found[path] = jnp.stack(row)
    return found


def _owner(case: Case, path: str, index: tuple[int, ...]) -> tuple[int | None, int | None]:
    """Layer and head that an entry belongs to."""
    if case.layout is None:
        return None, None
    mark = lambda name, x: (
        jnp.zeros(x.shape).at[index].set(1.0) if name == path else jnp.zeros(x.shape)
    )
    flat, structure = jax.tree.flatten(case.params)
    names = [name for name, _ in leaves_with_paths(case.params)]
    tree = jax.tree.unflatten(structure, [mark(n, x) for n, x in zip(names, flat, strict=True)])
    layers = case.layout.layers(case.params)
    for role, x in case.layout.collect(tree, fold=False).items():
        hit = np.argwhere(np.asarray(x))
        if len(hit):
            return layers[role][hit[0][0]], int(hit[0][1]) if x.ndim == 4 else None
    return None, None


def _dead(case: Case) -> Verdict | None:
    """The first head or expert that is all zero while another is not."""
    if case.layout is None:
        return None
    layers = case.layout.layers(case.params)
    for role, x in case.layout.collect(case.params, fold=False).items():
        if x.ndim == 4:
            zero = np.asarray(jnp.all(x == 0, axis=(2, 3)))
            for i, row in enumerate(zero):
                if row.any() and not row.all():
                    head, layer = int(np.argmax(row)), layers[role][i]
                    text = f"layer {layer}, head or expert {head}: W_{role} is zero"
                    return _convict(text, "dead head", None, layer, head)
    return None


def _convict(
    sentence: str,
    cause: str,
    path: str | None = None,
    layer: int | None = None,
    head: int | None = None,
    **numbers: float,
) -> Verdict:
    return Verdict(NAME, Outcome.CONVICTED, sentence, cause, numbers, path, layer, head)
