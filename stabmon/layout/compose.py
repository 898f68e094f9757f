"""Products of a role's factors, and how far a product moved.

What lives here: `compose`, `is_whole`. What does not: where the factors come from (`gather.py`).
"""

from collections.abc import Collection, Iterable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array

from stabmon.layout.rules import CANONICAL, FACTORS, SCALES


def compose(
    name: str,
    role: str,
    parts: Mapping[str, Array],
    moves: Mapping[str, Array] | None = None,
    centred: Collection[str] = (),
) -> Array | None:
    """The product of a role's factors; with `moves`, their change, how far the product moved.

    None where the role is not in the tree, or in `moves`.

    Args:
        name: Of the layout, for messages.
        role: A key of `CANONICAL`.
        parts: Factors now, each (L, …).
        moves: Factors now minus factors then.
        centred: Scales whose norms subtract the mean over h first.

    Raises:
        ValueError: A factor is missing.
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
    terms = [_axes(part, parts[part].ndim) for part in chain]
    equation = f"{','.join(terms)}->l{CANONICAL[role].replace(' ', '')}"
    multiply = lambda factors: jnp.einsum(equation, *factors, precision=jax.lax.Precision.HIGHEST)
    last = own if chain[-1] in centred else set()
    wide = lambda of: [_factor(of[part], centre=part in last) for part in chain]
    now = wide(parts)
    if moves is None:
        return multiply(now)
    change = wide(moves)
    then = [x - dx for x, dx in zip(now, change, strict=True)]
    swaps = [multiply([*then[:i], change[i], *now[i + 1 :]]) for i in range(len(chain))]
    return jnp.sum(jnp.stack(swaps), axis=0)


def is_whole(role: str, parts: Iterable[str]) -> bool:
    """Whether `parts` hold the role itself, or else all matrices that it is the product of."""
    factors = [part for part in FACTORS.get(role, (role,)) if part not in SCALES]
    here = [part for part in factors if part in set(parts)]
    return here in ([role], [part for part in factors if part != role])


def _factor(x: Array, *, centre: bool) -> Array:
    """A factor in float32; the last matrix as a LayerNorm sees it, without a head's mean."""
    x = x.astype(jnp.float32)
    return x - jnp.mean(x, axis=-1, keepdims=True) if centre else x


def _axes(part: str, rank: int) -> str:
    """Subscripts of a factor with its layer axis."""
    axes = SCALES[part][rank - 2] if part in SCALES else CANONICAL[part]
    return "l" + axes.replace(" ", "")
