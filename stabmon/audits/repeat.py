"""`repeat` and `replicas`: whether what must be the same bits is.

`repeat` does a step twice, on another device too; `replicas` compares copies that several devices
hold. Copies on several hosts at every step are the contracts'.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from stabmon.audits.case import Case, Outcome, Verdict, acquitted, undecided, value_of
from stabmon.layout.paths import leaves_with_paths

_TIMES = 3


def repeat(case: Case) -> Verdict:
    """Whether the same step gives the same bits each time: loss and every gradient.

    It is done three times. Parameters that lie whole on one device are tried on a second one of
    its kind, where there is one. It convicts of silent corruption, of races, and of randomness
    without a key; how often the results agree with the majority is in the numbers.

    Args:
        case: Its loss, params and batch.
    """
    again = [_digests(case.loss, case.params, case.batch) for _ in range(_TIMES)]
    other = _other_device(case.params)
    if other is not None:
        moved = jax.device_put((case.params, case.batch), other)
        again.append(_digests(case.loss, *moved))
    rows = np.stack([np.asarray(jax.device_get(x)) for x in again])
    names = ["the loss", *(path for path, _ in leaves_with_paths(case.params))]
    differ = (rows != rows[:1]).any(axis=0)
    numbers = {"times": float(len(rows)), "differ": float(differ.sum())}
    if not differ.any():
        return acquitted("repeat", f"{len(rows)} times the same bits", **numbers)
    first = names[int(np.argmax(differ))]
    agree = int((rows == np.median(rows, axis=0).astype(rows.dtype)).all(axis=1).sum())
    alone = other is not None and not (rows[:_TIMES] != rows[0]).any()
    how = "on another device" if alone else "when it is done again"
    return Verdict(
        "repeat",
        Outcome.CONVICTED,
        f"the same step gives other bits {how}: {first}, {int(differ.sum())} of {len(names)}",
        "not repeatable",
        numbers | {"agree": float(agree)},
        None if first == "the loss" else first,
    )


@partial(jax.jit, static_argnames="loss")
def _digests(loss: Any, params: PyTree, batch: Any) -> Array:
    value, grads = jax.value_and_grad(lambda w: value_of(loss(w, batch)))(params)
    return jnp.stack([digest(value), *map(digest, jax.tree.leaves(grads))])


def digest(x: Array) -> Array:
    """Returns a uint32 of the bits of an array; the same for the same bits in the same places.

    >>> digest(jnp.array([1.0, 2.0])) == digest(jnp.array([2.0, 1.0]))
    Array(False, dtype=bool)
    """
    size = x.dtype.itemsize
    kind = {1: jnp.uint8, 2: jnp.uint16}.get(size, jnp.uint32)
    whole = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, kind)
    weights = 2 * jnp.arange(whole.size, dtype=jnp.uint32) + 1
    # A multiple of an odd number that mixes high bits down, so that no sign bit is lost.
    words = whole.astype(jnp.uint32).reshape(-1)
    words = (words ^ (words >> 15)) * jnp.uint32(0x9E3779B1)
    return jnp.sum((words ^ (words >> 13)) * weights, dtype=jnp.uint32)


def _other_device(params: PyTree) -> Any:
    """Another device of the kind that all parameters lie on; None without one."""
    leaves = [x for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
    used = {device for x in leaves for device in x.devices()}
    if len(used) != 1:
        return None
    mine = used.pop()
    return next((x for x in jax.local_devices() if x != mine and x.platform == mine.platform), None)


def replicas(case: Case) -> Verdict:
    """Whether all devices of this process hold the same copies of parameters and state.

    It convicts of copies that have drifted apart: a reduction that is missing, a device that
    corrupts. Without copies it can't tell.

    Args:
        case: Its params and opt_state.
    """
    compared, bad = 0, []
    for path, x in leaves_with_paths({"params": case.params, "opt_state": case.opt_state}):
        if not isinstance(x, jax.Array) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            continue
        copies: dict[str, list[Any]] = {}
        for shard in x.addressable_shards:
            copies.setdefault(str(shard.index), []).append(shard)
        for same in copies.values():
            if len(same) > 1:
                compared += 1
                seen = [int(digest(shard.data)) for shard in same]
                usual = max(set(seen), key=seen.count)
                odd = [s.device for s, y in zip(same, seen, strict=True) if y != usual]
                bad += [(path.split("/", 1)[1], device) for device in odd]
    if not compared:
        return undecided("replicas", "no device holds a copy of what another holds")
    if not bad:
        return acquitted(
            "replicas", f"{compared} copies are the same bits", compared=float(compared)
        )
    path, device = bad[0]
    return Verdict(
        "replicas",
        Outcome.CONVICTED,
        f"{path} on {device} is not what the other devices hold; {len(bad)} such copies",
        "replicas differ",
        {"compared": float(compared), "differ": float(len(bad))},
        path,
    )
