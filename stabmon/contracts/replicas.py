"""Contracts of copies: replicas are equal, shards of the batch are not, tied leaves stay tied."""

import numpy as np

from stabmon.contracts.contract import Finding, Known, Sample, contract


@contract()
def replicas(now: Sample, before: Sample | None, known: Known) -> Finding:
    """Digests of parameters, moments, counters and loss are the same on each device that has them.

    Each device digests its own copy, so copies that have drifted apart show without a word sent.

    References:
        Replicas that drift while all logs look normal (BLOOM, arXiv 2211.05100;
        github.com/microsoft/DeepSpeed/issues/1801); losses that differ by rank
        (NVIDIA/Megatron-LM#7452).
    """
    if now.unequal is None:
        return None
    return {name: "its copies on the devices differ" for name in now.unequal}


@contract(patience=2)
def batch(now: Sample, before: Sample | None, known: Known) -> Finding:
    """No two sequences of a batch are equal, as they are where processes draw the same data.

    Asked of batches of two and more; half of them equal is a fault, single repeats are not.

    References:
        Every process draws the same batch (github.com/AI-Hypercomputer/torchprime/issues/267).
    """
    rows = now.get("rows", "batch")
    if rows is None or len(rows) < 2:
        return None
    different = len(np.unique(rows))
    if 2 * different > len(rows):
        return {}
    return {"batch": f"of {len(rows):,} sequences only {different:,} are different"}


@contract()
def ties(now: Sample, before: Sample | None, known: Known) -> Finding:
    """Leaves that were equal and moved together are equal.

    References:
        A tied embedding whose gradient is wrong under a sharded optimizer
        (github.com/NVIDIA/Megatron-LM/issues/844); parts of shared biases
        (bigcode-project/Megatron-LM#11).
    """
    tied = [pair for pair, together in (known.ties or {}).items() if together]
    if not tied:
        return None
    broken = {}
    for first, second in tied:
        a, b = now.get("bits", first), now.get("bits", second)
        if a is not None and b is not None and not np.array_equal(a, b):
            broken[second] = f"it was tied to {first} and is no longer equal"
    return broken
