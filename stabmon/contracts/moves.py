"""Contracts of parameters: what is trained moves, what is frozen does not, gradients arrive."""

import numpy as np

from stabmon.contracts.contract import Finding, Known, Sample, contract


@contract(patience=2)
def moves(now: Sample, before: Sample | None, known: Known) -> Finding:
    """A leaf that had an update, or a gradient, is not bit by bit what it was a sample ago.

    Low-precision leaves that swallow their updates are named by `precision`. Where no leaf moved
    and none had an update (a rate of 0, accumulation) nothing is said.

    References:
        OPT-175B, positions that never train (arXiv 2205.01068); a LoRA on a projection that is not
        used (github.com/huggingface/diffusers/issues/11903).
    """
    if before is None:
        return None
    moved = {leaf.path: _moved(now, before, leaf.path) for leaf in known.owned(now)}
    some = any(x is not None and x.any() for x in moved.values())
    if not some and not before.any("update"):
        return None
    broken = {}
    for leaf in known.owned(now):
        change = moved[leaf.path]
        if change is None or known.has_master(now, leaf.path):
            continue
        asked = _flowed(before, leaf.path)
        swallowed = before.get("changed", leaf.path)
        if swallowed is not None:
            asked = asked & (swallowed > 0)
        for name in leaf.named(~change & asked) if (~change & asked).any() else ():
            broken[name] = "it does not move, though it has gradients"
    return broken


@contract()
def frozen(now: Sample, before: Sample | None, known: Known) -> Finding:
    """A leaf that is declared frozen, or that the optimizer leaves alone from the first, stays.

    Leaves that have no moments where others do, or whose updates a mask sets to zero, count as left
    alone if their first update is zero.

    References:
        LoRA asked for, all weights trained (github.com/AI-Hypercomputer/maxtext/issues/5092);
        freezing undone (github.com/open-mmlab/mmpretrain/issues/702).
    """
    leaves = [leaf for leaf in now.form.leaves if leaf not in known.owned(now)]
    if before is None or not leaves:
        return None
    broken = {}
    for leaf in leaves:
        change = _moved(now, before, leaf.path)
        if change is not None and change.any():
            for name in leaf.named(change):
                broken[name] = "it is frozen, but it moved"
    return broken


@contract(patience=3)
def gradients(now: Sample, before: Sample | None, known: Known) -> Finding:
    """No gradient of a trained leaf is exactly zero, sample after sample.

    A single expert may be without tokens: only a layer all of whose experts have none is named. A
    leaf that moves without an update is somebody else's, such as the biases of a balanced router.

    References:
        Routed experts without gradients (github.com/KellerJordan/Muon/issues/65); norm gains left
        out of the backward pass (entrenar#257).
    """
    if not now.any("gradient") or not now.finite:
        return None
    broken = {}
    flows = lambda leaf: _any(now.get("gradient", leaf.path))
    alive = {leaf.group for leaf in now.form.leaves if leaf.group and flows(leaf)}
    for leaf in known.owned(now):
        gradient = now.get("gradient", leaf.path)
        if gradient is None or leaf.group in alive or _is_moved_by_others(now, before, leaf.path):
            continue
        zero = (gradient == 0).reshape(leaf.sizes)
        if "expert" in leaf.names:
            axis = leaf.names.index("expert")
            zero = np.broadcast_to(zero.all(axis=axis, keepdims=True), zero.shape)
        if zero.any():
            for name in leaf.named(zero.reshape(-1)):
                broken[name] = "its gradient is exactly zero"
    return broken


@contract(patience=2)
def backward(now: Sample, before: Sample | None, known: Known) -> Finding:
    """The loss that is reported reaches the parameters: not every gradient is exactly zero.

    References:
        A fused cross-entropy without a backward pass (github.com/NVIDIA/Megatron-LM/pull/1750).
    """
    flows = now.any("gradient")
    if flows is None or not now.finite:
        return None
    return {} if flows else {"all leaves": "the gradient of every leaf is exactly zero"}


@contract()
def zeroed(now: Sample, before: Sample | None, known: Known) -> Finding:
    """The gradient does not grow in proportion to the step, as one that is never zeroed does.

    Asked of eight samples, in which it has to grow fourfold along a straight line, each sample
    above the one before.

    References:
        Accumulators that are not cleared, among the faults of entrenar#257.
    """
    rows = known.past[-8:]
    if len(rows) < 8:
        return None
    steps = np.array([row[0] for row in rows], float)
    sizes = np.array([row[1] for row in rows], float)
    if not np.isfinite(sizes).all() or sizes[0] <= 0:
        return None
    slope, level = np.polyfit(steps, sizes, 1)
    line = np.abs(sizes - (slope * steps + level)).max() < 0.03 * np.ptp(sizes)
    grows = bool((np.diff(sizes) > 0).all()) and sizes[-1] > 4 * sizes[0]
    sentence = "they grow in proportion to the step: accumulated ones are not cleared"
    return {"all gradients": sentence} if line and grows else {}


def _moved(now: Sample, before: Sample, path: str) -> np.ndarray | None:
    """Which parts of a leaf have other bits than a sample ago."""
    new, old = now.get("bits", path), before.get("bits", path)
    return None if new is None or old is None or new.shape != old.shape else new != old


def _flowed(before: Sample, path: str) -> np.ndarray:
    """Which parts of a leaf had an update, or a gradient where no leaf has an update."""
    update, gradient = before.get("update", path), before.get("gradient", path)
    if update is not None and (before.any("update") or gradient is None):
        return update != 0
    return np.ones(1, bool) if gradient is None else gradient != 0


def _is_moved_by_others(now: Sample, before: Sample | None, path: str) -> bool:
    """Whether a leaf moved though its update was zero."""
    update = None if before is None else before.get("update", path)
    if before is None or update is None or (update != 0).any():
        return False
    return _any(_moved(now, before, path))


def _any(x: np.ndarray | None) -> bool:
    return x is not None and bool((x != 0).any())
