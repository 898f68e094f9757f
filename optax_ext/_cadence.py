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
        w, record = _divided(w, record, rule.sharding, rule.undivided)
    target, chosen, record = restore(w, record, step, rule)
    if rule.sharding is not None:
        target = _moved(target, rule.sharding, rule.undivided, back=True)
    target, chosen, record = jax.tree.map(lambda x: x[: len(u)], (target, chosen, record))
    exact = jnp.promote_types(p.dtype, jnp.float32)
    new = (target.astype(exact) - p.astype(exact)).astype(u.dtype)
    return jnp.where((chosen & wanted)[:, None, None], new, u), record


def _rows(record: Record, rows: ArrayLike) -> Record:
    return jax.tree.map(lambda x: x[rows], record)


def _set_rows(record: Record, rows: ArrayLike, part: Record) -> Record:
    return jax.tree.map(lambda x, new: x.at[rows].set(new), record, part)


def _divided(
    w: Float[Array, "count m n"],
    record: Record,
    sharding: jax.sharding.NamedSharding,
    undivided: bool,
) -> tuple[Float[Array, "filled m n"], Record]:
    """The stack with zeros at its end, so that it divides among shards, and sharded."""
    sizes = [sharding.mesh.shape[name] for name in _stack_axes(sharding)]
    missing = -len(w) % math.prod(sizes)
    fill = lambda x: jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))
    return _moved(fill(w), sharding, undivided), jax.tree.map(fill, record)


def _moved(
    w: Float[Array, "filled m n"],
    sharding: jax.sharding.NamedSharding,
    undivided: bool,
    back: bool = False,
) -> Float[Array, "filled m n"]:
    """The stack brought to its sharding, or away from it, a mesh axis at a time.

    A mesh axis that leaves the matrices for the stack axis is one all-to-all, in which a device
    sends each number once. Asked for several at once, XLA's partitioner gathers the whole stack on
    every device instead ("involuntary full rematerialization"); so it does where it carries the
    division back through the merging of layers and leaves, hence the fixed start of leaves that
    are `undivided` along the stack.
    """
    free, names = jax.P.UNCONSTRAINED, _stack_axes(sharding)
    stages = [jax.P(names[:i] or None, free, free) for i in range(len(names))] + [sharding.spec]
    stages = stages if undivided else stages[1:]
    for spec in reversed(stages) if back else stages:
        # On a mesh with explicit axes this runs in auto mode, where only the spec is accepted.
        bare = not jax.sharding.get_abstract_mesh().empty
        where = spec if bare else jax.sharding.NamedSharding(sharding.mesh, spec)
        w = jax.lax.with_sharding_constraint(w, where)
    return w


def _stack_axes(sharding: jax.sharding.NamedSharding) -> tuple[str, ...]:
    """The mesh axes that divide the stack."""
    first = sharding.spec[0] if sharding.spec else None
    names = first if isinstance(first, tuple) else (first,)
    return tuple(name for name in names if name is not None)
