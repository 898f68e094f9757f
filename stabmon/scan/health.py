"""The health of checkpoints, and what changed from each to the next, a layer at a time.

What lives here: `scan` and its `Report`, and what counts as wrong. What does not: the rows
(`measure`), reading (`layers`), showing (`table`).

At any time one layer of a checkpoint is in memory, and the same layer of the one before.
"""

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from stabmon.checkpoints.source import Checkpoint
from stabmon.layout import LIBRARIES, Layout
from stabmon.metrics.spectrum import gaussian_stable_rank
from stabmon.scan.complete import missing
from stabmon.scan.layers import Plan, make_plan
from stabmon.scan.measure import (
    Row,
    change_rows,
    matrix_rows,
    outer_row,
    place,
    vector_row,
)

Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class Limits:
    """What counts as wrong, besides entries that are not finite and matrices that are zero.

    Attributes:
        stable_rank: Stable rank below which a matrix counts as collapsed, where a Gaussian of its
            shape has at least twice as much.
        relative: The same as a fraction of a Gaussian's stable rank; 0 is off.
        exact: Largest min(m, n) for which the effective rank is measured, by a full SVD.
    """

    stable_rank: float | int = 1.5
    relative: float | int = 0.0
    exact: int = 1024


DEFAULT = Limits()


@dataclass(frozen=True)
class Health:
    """One checkpoint.

    Attributes:
        checkpoint: Which.
        layout: Name of the layout that was found.
        matrices: A row for each matrix: layer (None: outside of them, as the embedding), role,
            expert (None without), shape, norm, spectral_norm, stable_rank, relative_stable_rank,
            effective_rank (None: not measured).
        skipped: (path, reason) of what is in no matrix.
        problems: What is wrong, in words.
        vectors: A row for each other array, such as norm scales: path, shape, norm, least and
            greatest entry, not_finite (how many entries are not).
    """

    checkpoint: Checkpoint
    layout: str
    matrices: list[Row]
    skipped: tuple[tuple[str, str], ...]
    problems: list[str]
    vectors: list[Row] = field(default_factory=list)

    def of_layer(self, layer: int) -> list[Row]:
        """Returns the rows of one layer.

        Args:
            layer: Its number.
        """
        return [row for row in self.matrices if row["layer"] == layer]


@dataclass(frozen=True)
class Change:
    """From one checkpoint to the next.

    Attributes:
        before: The earlier one.
        after: The later one.
        matrices: Rows as in `Health`, of ΔW; and `relative_norm`, ‖ΔW‖/‖W‖ with W before.
        heads: A row for each layer and query head: layer, head, and the delta tier's metrics, such
            as `delta2/effective_rank`.
    """

    before: Checkpoint
    after: Checkpoint
    matrices: list[Row] = field(default_factory=list)
    heads: list[Row] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """All that a scan found.

    Attributes:
        checkpoints: Health of each.
        changes: From each to the next.
    """

    checkpoints: list[Health]
    changes: list[Change]

    @property
    def problems(self) -> list[str]:
        """All that is wrong."""
        return [text for part in self.checkpoints for text in part.problems]


def scan(
    checkpoints: Sequence[Checkpoint],
    limits: Limits = DEFAULT,
    layouts: Sequence[Layout] = LIBRARIES,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    progress: Progress = lambda what, count: None,
) -> Report:
    """Measures checkpoints and what changed from each to the next.

    Differences of checkpoints stored in bfloat16 do not see changes below 2⁻⁹ of an entry.

    Args:
        checkpoints: In the order of training.
        limits: What counts as wrong.
        layouts: Layouts to choose from.
        heads: Query heads N, where shapes do not tell.
        kv_heads: Key-value heads K, likewise.
        progress: Called with what was read and how many bytes that were.

    Raises:
        ValueError: A layout is not found, checkpoints are of different models, or a file is cut
            short.
    """
    plans = [make_plan(x, heads=heads, kv_heads=kv_heads, layouts=layouts) for x in checkpoints]
    for before, after in pairwise(plans):
        _check_same(before, after)
    report = Report([], [])
    for i, plan in enumerate(plans):
        before, known = (plans[i - 1], report.checkpoints[-1]) if i else (None, None)
        health, change = _one(plan, before, known, limits, progress)
        report.checkpoints.append(health)
        report.changes.extend([change] if change else [])
    return report


def _one(
    plan: Plan, before: Plan | None, known: Health | None, limits: Limits, progress: Progress
) -> tuple[Health, Change | None]:
    """A checkpoint, and how it differs from the one before."""
    name = plan.checkpoint.name
    skipped = (*plan.layout.left_out, *plan.checkpoint.skipped)
    health = Health(plan.checkpoint, plan.layout.name, [], skipped, [])
    health.problems.extend(f"{name}: {text}" for text in missing(plan))
    change = Change(before.checkpoint, plan.checkpoint) if before else None
    for layer in plan.layers:
        _one_layer(plan, before, known, layer, limits, health, change)
        gc.collect()  # or JAX keeps what it was given until its next call, with the next layer read
        progress(f"{name}, layer {layer}", plan.size(layer))
    for piece in plan.outer:
        health.matrices.append(outer_row(plan.layout, piece, plan.read(piece)))
        progress(f"{name}, {piece.path}", plan.checkpoint.leaves[piece.path].nbytes)
    for row in health.matrices:
        health.problems.extend(f"{name}: {place(row)} {text}" for text in _wrong(row, limits))
    for path in plan.vectors:
        health.vectors.append(vector_row(plan.checkpoint, path))
        if count := health.vectors[-1]["not_finite"]:
            health.problems.append(f"{name}: {path} has {count:,} entries that are not finite")
        progress(f"{name}, {path}", plan.checkpoint.leaves[path].nbytes)
    return health, change


def _one_layer(
    plan: Plan,
    before: Plan | None,
    known: Health | None,
    layer: int,
    limits: Limits,
    health: Health,
    change: Change | None,
) -> None:
    """Adds the rows of one layer to the health of a checkpoint and to its change."""
    now = plan.load(layer)
    rows = matrix_rows(plan.layout, now, limits.exact)
    health.matrices.extend({"layer": layer, **row} for row in rows)
    if before and known and change:
        norms = {(x["role"], x["expert"]): x["norm"] for x in known.of_layer(layer)}
        moved, by_head = change_rows(plan.layout, before.load(layer), now, norms)
        change.matrices.extend({"layer": layer, **row} for row in moved)
        change.heads.extend({"layer": layer, **row} for row in by_head)


def _wrong(row: Row, limits: Limits) -> Iterator[str]:
    """What is wrong with a matrix."""
    gaussian = gaussian_stable_rank(*row["shape"])
    rank, relative = row["stable_rank"], row["relative_stable_rank"]
    if not math.isfinite(row["norm"]):
        yield "is not finite"
    elif row["norm"] == 0:
        yield "is zero"
    elif row["layer"] is None:
        return  # a common direction, their mean, is usual in embeddings
    elif rank < limits.stable_rank and gaussian >= 2 * limits.stable_rank:
        yield f"has a stable rank of {rank:.3g}, below {limits.stable_rank:g}: collapsed"
    elif relative < limits.relative:
        yield f"has {relative:.3g} of a Gaussian's stable rank, below {limits.relative:g}"


def _check_same(before: Plan, after: Plan) -> None:
    """Two checkpoints are of one model."""
    old, new = before.checkpoint, after.checkpoint
    shapes = [{path: leaf.shape for path, leaf in x.leaves.items()} for x in (old, new)]
    differing = sorted({path for path, _ in shapes[0].items() ^ shapes[1].items()})
    if differing or before.layout != after.layout:
        where = f": {differing[0]!r} differs" if differing else ""
        raise ValueError(
            f"{old.path} and {new.path} are not checkpoints of one model{where}; scan them one by "
            "one"
        )
