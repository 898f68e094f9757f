"""Contracts of the optimizer: it answers gradients, its moments live, precision keeps its steps."""

import numpy as np

from stabmon.contracts.contract import Finding, Known, Sample, contract

# Of the entries with an update, the share that a low-precision leaf has to take.
_TAKEN = 1e-3
# Samples in a row in which moments must have moved before their standing still means something.
_OFTEN = 3


@contract(patience=2)
def answers(now: Sample, before: Sample | None, known: Known) -> Finding:
    """A leaf with a gradient has an update that is not exactly zero.

    Not asked where no leaf has one: while gradients are accumulated, or at a rate of 0.

    References:
        A leaf that the optimizer was never given (github.com/AI-Hypercomputer/maxtext/issues/5092);
        TrainCheck (OSDI 2025), parameters outside of the optimizer.
    """
    if not now.any("update") or now.any("gradient") is None or not now.finite:
        return None
    broken = {}
    for leaf in known.owned(now):
        gradient, update = now.get("gradient", leaf.path), now.get("update", leaf.path)
        if gradient is None or update is None or known.has_master(now, leaf.path):
            continue
        silent = (gradient != 0) & (update == 0)
        if silent.any():
            for name in leaf.named(silent):
                broken[name] = "it has a gradient, but its update is exactly zero"
    return broken


@contract(patience=2)
def moments(now: Sample, before: Sample | None, known: Known) -> Finding:
    """No tree of moments stands still, and none does in a single leaf.

    A leaf's moment is asked where most other leaves' moments of the same tree moved, a whole tree
    where it moved in three samples running. A leaf without a gradient is not asked.

    References:
        Stale moments and counters after a resume (entrenar#257).
    """
    if before is None or not before.any("gradient") or not now.kinds:
        return None
    broken = {}
    leaves = {leaf.path: leaf for leaf in known.owned(now)}
    for kind, paths in now.kinds.items():
        moved = {}
        for path in paths & leaves.keys():
            new, old = now.get(f"bits of {kind}", path), before.get(f"bits of {kind}", path)
            if new is not None and old is not None:
                moved[path] = new != old
        asked = [path for path in moved if _any(before.get("gradient", path))]
        live = [path for path in asked if moved[path].any()]
        if asked and not live and known.moved.get(kind, 0) >= _OFTEN:
            broken[kind] = "it stands still, though there are gradients"
        if 2 * len(live) <= len(asked):
            continue
        for path in asked:
            gradient = before.get("gradient", path)
            still = ~moved[path] & (gradient != 0)
            for name in leaves[path].named(still) if still.any() else ():
                broken[f"{kind}/{name}"] = "it stands still, though there are gradients"
    return broken


@contract(patience=2)
def precision(now: Sample, before: Sample | None, known: Known) -> Finding:
    """Adding its update changes a low-precision leaf in more than one entry in a thousand.

    A bfloat16 has steps of 2⁻⁸ of its value: what is smaller than half of that is lost, unless the
    optimizer keeps a float32 copy.

    References:
        arXiv 2010.06192, updates that bfloat16 weights round away; norm scales in low precision
        (github.com/huggingface/transformers/pull/29402).
    """
    low = [leaf for leaf in known.owned(now) if leaf.low]
    if not low or not now.any("update"):
        return None
    broken = {}
    for leaf in low:
        taken = now.get("changed", leaf.path)
        if taken is None or known.has_master(now, leaf.path):
            continue
        if (taken < _TAKEN).any():
            for name in leaf.named(taken < _TAKEN):
                broken[name] = f"its updates are smaller than {leaf.dtype} can take"
    return broken


@contract()
def masters(now: Sample, before: Sample | None, known: Known) -> Finding:
    """Each leaf of which the optimizer keeps a float32 copy is that copy, rounded.

    References:
        A low-precision copy that parts from its master (NVIDIA/Megatron-LM#2789).
    """
    if not known.masters:
        return None
    broken = {}
    for leaf in known.owned(now):
        for kind in known.masters:
            same = now.get(f"copy of {kind}", leaf.path)
            if same is not None and (same < 1).any():
                for name in leaf.named(same < 1):
                    broken[name] = f"it is not its float32 copy in {kind}, rounded"
    return broken


def _any(x: np.ndarray | None) -> bool:
    return x is not None and bool((x != 0).any())
