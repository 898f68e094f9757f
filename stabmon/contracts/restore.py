"""Restore audit: whether a state that was loaded is the one that was saved, and if not, how not.

With each checkpoint a digest of every leaf is kept, which does not depend on the mesh. What lives
here: the digest and the comparison. Where digests are written is `watch`'s.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from stabmon.contracts.bits import bits
from stabmon.layout import leaves_with_paths

SOURCE = (
    "A checkpoint that is bad on one replica (github.com/NVIDIA/Megatron-LM/issues/5281); zeros "
    "written, a shard not written (github.com/microsoft/DeepSpeed/issues/6791, 7546); random "
    "streams that are wrong after a restore."
)
Digest = dict[str, list[Any]]


class Entry(NamedTuple):
    """What is kept of a leaf.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
        exact: Digest of its bits.
        unordered: The same without regard to order.
        rounded: Digest of its bits in bfloat16; of other than floats `exact`.
        zeros: Fraction of its entries that are zero.
        value: Of a whole number its value, else None.
    """

    dtype: str
    shape: list[int]
    exact: int
    unordered: int
    rounded: int
    zeros: float
    value: int | None


def state_digest(state: PyTree) -> Digest:
    """Returns what is kept of every array of a training state, by path; waits for the device.

    Args:
        state: Parameters, optimizer state, counters, keys; on any mesh.

    Example:
        >>> saved = state_digest({"w": jnp.arange(4.0), "step": jnp.int32(7)})
        >>> compared(saved, state_digest({"w": jnp.arange(4.0)[::-1], "step": jnp.int32(0)}))
        {'step': 'it was 7 and is 0', 'w': 'its entries are in another order'}
    """
    # A fresh state may count in Python's own numbers, which a jitted step makes arrays of.
    number = lambda x: jnp.asarray(x) if isinstance(x, int | float) else x
    leaves = {path: number(x) for path, x in leaves_with_paths(state)}
    arrays = {path: x for path, x in leaves.items() if hasattr(x, "dtype")}
    numbers = jax.device_get(_numbers(arrays))
    whole = lambda x: x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.integer)
    values = jax.device_get({path: x for path, x in arrays.items() if whole(x)})
    return {
        path: [
            *(str(x.dtype), list(x.shape), *(int(n) for n in numbers[path][:3])),
            *(float(numbers[path][3]), int(values[path]) if path in values else None),
        ]
        for path, x in arrays.items()
    }


@jax.jit
def _numbers(arrays: dict[str, jax.Array]) -> dict[str, tuple[jax.Array, ...]]:
    """Digests of every array, and the fraction of its entries that are zero."""

    def of(x):
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        exact = bits(x)
        rounded = bits(x.astype(jnp.bfloat16)) if floating else exact
        countable = x.size and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        zeros = jnp.mean((x == 0).astype(jnp.float32)) if countable else jnp.zeros(())
        return exact, bits(x, ordered=False), rounded, zeros

    return {path: of(x) for path, x in arrays.items()}


def compared(
    saved: Mapping[str, Any], loaded: Mapping[str, Any], older: Mapping[int, Digest] | None = None
) -> dict[str, str]:
    """Returns the leaves that are not what was saved, each with what has become of it.

    Args:
        saved: Digest of what was saved.
        loaded: Digest of what was loaded.
        older: Digests of earlier checkpoints by step: a leaf may be theirs.
    """
    was = {path: Entry(*row) for path, row in saved.items()}
    now = {path: Entry(*row) for path, row in loaded.items()}
    broken = {path: "it is missing" for path in was.keys() - now.keys()}
    broken |= {path: "it was not saved" for path in now.keys() - was.keys()}
    owners: dict[int, str] = {}
    for path, entry in was.items():
        owners.setdefault(entry.exact, path)
    for path in was.keys() & now.keys():
        if (change := _changed(path, was[path], now[path], owners, older or {})) is not None:
            broken[path] = change
    return dict(sorted(broken.items()))


def _changed(
    path: str, was: Entry, now: Entry, owners: Mapping[int, str], older: Mapping[int, Digest]
) -> str | None:
    """What has become of one leaf, None where it is as it was."""
    if was.dtype != now.dtype:
        kept = "" if was.rounded == now.rounded else ", and its values are others"
        return f"it was {was.dtype} and is {now.dtype}{kept}"
    if was.shape != now.shape:
        return f"it had shape {was.shape} and has {now.shape}"
    if was.exact == now.exact:
        return None
    if was.value is not None:
        return f"it was {was.value:,} and is {now.value or 0:,}"
    if now.zeros == 1:
        return "it is all zeros"
    if was.unordered == now.unordered:
        return "its entries are in another order"
    if now.exact in owners:
        return f"it is what was saved as {owners[now.exact]}"
    for step, digest in sorted(older.items(), reverse=True):
        if path in digest and Entry(*digest[path]).exact == now.exact:
            return f"it is that of step {step:,}"
    if was.rounded == now.rounded:
        return "it was rounded to a lower precision"
    if "key" in was.dtype or was.dtype.startswith("uint"):
        return "its random stream is another"
    if now.zeros - was.zeros > 1e-3:
        return f"{now.zeros - was.zeros:.0%} of it have become zeros"
    return "its values are others"
