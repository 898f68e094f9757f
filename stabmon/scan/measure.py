"""What is measured on one layer of a checkpoint, and on its change: rows of named numbers.

What lives here: `matrix_rows`, `outer_row`, `vector_row`, `change_rows`. What does not: the
measures, which are those of the monitor's `weights` and `delta` tiers (`stabmon.monitor.tiers`),
what counts as wrong (`health`), reading (`layers`).
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from stabmon.checkpoints.source import Checkpoint
from stabmon.layout import CANONICAL, Layout
from stabmon.layout.compose import is_whole
from stabmon.layout.match import match
from stabmon.linalg.power import power_norms
from stabmon.metrics.spectrum import gaussian_stable_rank, singular_values, spectrum_stats
from stabmon.metrics.symptoms import norm as frobenius
from stabmon.monitor.tiers import delta_metrics, flat_matrices, weight_metrics
from stabmon.scan.layers import Piece, Tree

Row = dict[str, Any]
_BLOCK = 64 << 20
NAMES = ("norm", "spectral_norm", "stable_rank", "relative_stable_rank")


def matrix_rows(layout: Layout, tree: Tree, exact: int = 0) -> list[Row]:
    """Returns a row for each matrix in the tree of one layer; see `health.Health`.

    Args:
        layout: Where matrices lie.
        tree: From `Plan.load`.
        exact: Largest min(m, n) of which the effective rank is measured; 0: of none.
    """
    values = jax.device_get(_weights(layout, tree))
    values |= jax.device_get(_effective_ranks(layout, exact, tree)) if exact else {}
    shapes = jax.eval_shape(partial(_flat, layout), tree)
    rows = []
    for role in filter(shapes.__contains__, CANONICAL):
        shape = shapes[role].shape
        columns = {x: values[f"{role}/{x}"].ravel() for x in NAMES}
        ranks = values.get(f"{role}/effective_rank")
        for i in range(math.prod(shape[1:-2])):
            row: Row = {"role": role, "expert": i if len(shape) > 3 else None, "shape": shape[-2:]}
            row |= {name: float(column[i]) for name, column in columns.items()}
            row["effective_rank"] = None if ranks is None else float(ranks.ravel()[i])
            rows.append(row)
    return rows


def outer_row(layout: Layout, piece: Piece, w: np.ndarray) -> Row:
    """Returns the row of a matrix outside of the layers, with `layer` None.

    Args:
        layout: Where matrices lie.
        piece: Which.
        w: Its entries.
    """
    (role,) = [rule.roles[0] for rule in layout.rules if rule.place(piece.name) is not None]
    values = jax.device_get(_outer(jax.numpy.asarray(w)))
    row: Row = {"layer": None, "role": role, "expert": None, "shape": w.shape}
    return row | {x: float(values[x]) for x in NAMES} | {"effective_rank": None}


def vector_row(checkpoint: Checkpoint, path: str) -> Row:
    """Returns the row of an array that is in no matrix, read a block at a time.

    Args:
        checkpoint: Where it lies.
        path: Its path.
    """
    leaf = checkpoint.leaves[path]
    rows = leaf.shape[0] if leaf.shape else 1
    step = max(1, _BLOCK * rows // leaf.nbytes)
    squares, least, greatest, broken = 0.0, math.inf, -math.inf, 0
    for i in range(0, rows, step):
        x = checkpoint.read(path, 0, i, min(i + step, rows)).astype(np.float64)
        finite = x[np.isfinite(x)]
        broken += x.size - finite.size
        if finite.size:
            squares += float(np.sum(finite**2))
            least, greatest = min(least, float(finite.min())), max(greatest, float(finite.max()))
    norm = math.nan if broken else math.sqrt(squares)
    row: Row = {"path": path, "shape": leaf.shape, "norm": norm, "not_finite": broken}
    return row | {"least": least, "greatest": greatest}


def change_rows(
    layout: Layout, before: Tree, after: Tree, norms: Mapping[tuple[str, int | None], float]
) -> tuple[list[Row], list[Row]]:
    """Returns rows of ΔW for each matrix, and of the increments for each head; see `health.Change`.

    Args:
        layout: Where matrices lie.
        before: One layer.
        after: The same layer later.
        norms: (role, expert) → ‖W‖ before.
    """
    wide = lambda x: x.astype(np.float32)
    delta = {name: wide(x) - wide(before[name]) for name, x in after.items()}
    rows = matrix_rows(layout, delta)
    for row in rows:
        base = norms[row["role"], row["expert"]]
        row["relative_norm"] = row["norm"] / base if base else math.nan
        del row["effective_rank"]  # that of each head is in the increments
    found, _ = match(layout.rules, after.items())
    roles = {role for item in found for role in item.rule.roles}
    if not (is_whole("q", roles) and is_whole("k", roles)):
        return rows, []
    values = jax.device_get(_increments(layout, after, delta))
    values = {key: x.ravel() for key, x in values.items() if x.ndim == 2}
    count = len(values["delta2/norm"])
    # What is measured of each key head stands beside every query head that shares it.
    of_head = lambda x, n: float(x[n * len(x) // count])
    return rows, [
        {"head": n, **{key: of_head(x, n) for key, x in values.items()}} for n in range(count)
    ]


def place(row: Row) -> str:
    """Returns where a matrix is, for people.

    Args:
        row: A row of `Health` or `Change`.

    Example:
        >>> place({"layer": 3, "role": "expert_up", "expert": 7})
        'layer 3 expert_up, expert 7'
    """
    expert = "" if row["expert"] is None else f", expert {row['expert']}"
    layer = "" if row["layer"] is None else f"layer {row['layer']} "
    return f"{layer}{row['role']}{expert}"


def _flat(layout: Layout, tree: Mapping[str, Array]) -> dict[str, Array]:
    """Matrices by role as the monitor's `weights` tier takes them, (1, m, n) or (1, E, m, n)."""
    stored = layout.collect(tree, fold=False)
    return {role: flat_matrices(role, w) for role, w in stored.items()}


@jax.jit
def _outer(w: Array) -> dict[str, Array]:
    """The `weights` tier on one matrix."""
    wide = w.astype(np.float32)
    length, sigma = frobenius(wide), power_norms(wide[None]).value[0]
    rank = (length / jax.numpy.where(sigma > 0, sigma, jax.numpy.ones_like(sigma))) ** 2
    return dict(
        zip(NAMES, (length, sigma, rank, rank / gaussian_stable_rank(*w.shape)), strict=True)
    )


@partial(jax.jit, static_argnums=0)
def _weights(layout: Layout, tree: Mapping[str, Array]) -> dict[str, Array]:
    """The `weights` tier on one layer."""
    return weight_metrics(layout, tree)


@partial(jax.jit, static_argnums=(0, 1))
def _effective_ranks(layout: Layout, exact: int, tree: Mapping[str, Array]) -> dict[str, Array]:
    """Effective ranks by full SVD, of matrices that are small enough."""
    rank = lambda w: spectrum_stats(singular_values(w)).effective_rank
    small = {role: w for role, w in _flat(layout, tree).items() if min(w.shape[-2:]) <= exact}
    return {
        f"{role}/effective_rank": jax.vmap(rank)(w.reshape(-1, *w.shape[-2:]))
        for role, w in small.items()
    }


@partial(jax.jit, static_argnums=0)
def _increments(
    layout: Layout, after: Mapping[str, Array], delta: Mapping[str, Array]
) -> dict[str, Array]:
    """The `delta` tier on one layer."""
    return delta_metrics(layout, after, {1: delta})[1]
