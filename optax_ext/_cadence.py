"""When which matrices are restored: all together at the period, or spread over it.

`together` and `staggered` rewrite the updates of whole groups under one scalar conditional. How a
stack is restored is `_restore.py`, how stacks are cut from leaves `_grouping.py`, what the user
sees `_msign.py`.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from optax_ext._grouping import Group, Leaves, pieces, slots
from optax_ext._restore import Record, Rule, restore


def together(
    groups: Sequence[Group],
    rule: Rule,
    period: int,
    step: Int[Array, ""],
    counted: Bool[Array, ""],
    updates: Leaves,
    params: Leaves,
    record: Record,
) -> tuple[Leaves, Record]:
    """All matrices at each multiple of the period."""

    def treat(updates, params, record):
        for each in groups:
            rows = each.rows
            u, p = each.split(updates), each.split(params)
            new, part = _restored(u, p, _rows(record, rows), step, rule)
            updates = each.join(updates, new)
            record = _set_rows(record, rows, part)
        return updates, record

    keep = lambda updates, params, record: (updates, record)
    return jax.lax.cond(counted & (step % period == 0), treat, keep, updates, params, record)


def staggered(
    groups: Sequence[Group],
    rule: Rule,
    period: int,
    step: Int[Array, ""],
    counted: Bool[Array, ""],
    updates: Leaves,
    params: Leaves,
    record: Record,
) -> tuple[Leaves, Record]:
    """One piece of one group at a time, as `slots` spreads them over the period."""
    cut = pieces([each.count for each in groups], period)
    table = slots(len(cut), period)
    columns = [jnp.asarray(column, jnp.int32) for column in zip(*cut, strict=True)]
    group_of, start_of, _, stale_of = columns

    def treat(each: Group, size: int):
        rows = jnp.asarray(each.rows, jnp.int32)

        def branch(start, stale, updates, params, record):
            positions = start + jnp.arange(size, dtype=jnp.int32)
            u, p = each.take(updates, positions), each.take(params, positions)
            old = _rows(record, rows[positions])
            fresh = jnp.arange(size) >= stale
            new, part = _restored(u, p, old, step, rule, fresh)
            part = jax.tree.map(lambda a, b: jnp.where(fresh, a, b), part, old)
            return each.put(updates, positions, new), _set_rows(record, rows[positions], part)

        return branch

    sizes = {piece.group: piece.size for piece in cut}
    branches = [lambda start, stale, updates, params, record: (updates, record)]
    branches += [treat(each, sizes[i]) for i, each in enumerate(groups)]
    for slot in jnp.asarray(table):
        due = slot[step % period]
        which = jnp.where(counted & (due >= 0), group_of[due] + 1, 0)
        updates, record = jax.lax.switch(
            which, branches, start_of[due], stale_of[due], updates, params, record
        )
    return updates, record


def _restored(
    u: Float[Array, "count m n"],
    p: Float[Array, "count m n"],
    record: Record,
    step: Int[Array, ""],
    rule: Rule,
    wanted: Bool[Array, " count"] | bool = True,
) -> tuple[Float[Array, "count m n"], Record]:
    """Updates that lead to the restored matrices, unchanged where there is none."""
    w = p.astype(jnp.float32) + u.astype(jnp.float32)
    if rule.sharding is not None:
        w, record = _divided(w, record, rule.sharding)
    target, chosen, record = restore(w, record, step, rule)
    target, chosen, record = jax.tree.map(lambda x: x[: len(u)], (target, chosen, record))
    exact = jnp.promote_types(p.dtype, jnp.float32)
    new = (target.astype(exact) - p.astype(exact)).astype(u.dtype)
    return jnp.where((chosen & wanted)[:, None, None], new, u), record


def _rows(record: Record, rows: ArrayLike) -> Record:
    return jax.tree.map(lambda x: x[rows], record)


def _set_rows(record: Record, rows: ArrayLike, part: Record) -> Record:
    return jax.tree.map(lambda x, new: x.at[rows].set(new), record, part)


def _divided(
    w: Float[Array, "count m n"], record: Record, sharding: jax.sharding.NamedSharding
) -> tuple[Float[Array, "filled m n"], Record]:
    """The stack with zeros at its end, so that it divides among shards, and sharded."""
    axes = sharding.spec[0] if sharding.spec else ()
    names = axes if isinstance(axes, tuple) else (axes,)
    missing = -len(w) % math.prod(sharding.mesh.shape[name] for name in names if name is not None)
    fill = lambda x: jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))
    # On a mesh with explicit axes this runs in auto mode, where only the spec is accepted.
    where = sharding if jax.sharding.get_abstract_mesh().empty else sharding.spec
    return jax.lax.with_sharding_constraint(fill(w), where), jax.tree.map(fill, record)
