"""`Checkpoint`: the arrays of one checkpoint by path, with shapes known and entries still on disk.

What lives here: the class, and `parameters`, which tells parameters from the rest of a training
state. What does not: file formats (`shards`, `orbax`), folders of checkpoints (`folders`), where
matrices lie in the tree (`stabmon.layout`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

NOT_PARAMETERS = "not under params/"
FLOATING = ("float64", "float32", "float16", "bfloat16")


class Leaf(NamedTuple):
    """What is known of an array before it is read.

    Attributes:
        shape: Its shape.
        dtype: NumPy's name of its dtype, one of `FLOATING`.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size in bytes, as stored."""
        return prod(self.shape) * numpy_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint, of which nothing but names and shapes has been read.

    Attributes:
        name: For people; the end of its path.
        path: Where it lies.
        step: The number at the end of its name, None without one.
        leaves: Path of every floating-point parameter → its shape and dtype.
        skipped: (path, reason) of every array that is not in `leaves`.
        fetch: (path, axis, start, stop) → that stretch of an array along one axis.
        heads: Query heads N as a `config.json` beside it says, None without one.
        kv_heads: Key-value heads K, likewise.
        layers: Number of layers, likewise.
    """

    name: str
    path: Path
    step: int | None
    leaves: Mapping[str, Leaf]
    skipped: tuple[tuple[str, str], ...]
    fetch: Callable[[str, int, int, int], np.ndarray]
    heads: int | None = None
    kv_heads: int | None = None
    layers: int | None = None

    def read(self, path: str, axis: int = 0, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Returns an array, or a stretch of it along one axis, without reading the rest.

        Args:
            path: A key of `leaves`.
            axis: The axis.
            start: First index.
            stop: Index after the last; None: to the end.

        Returns:
            The entries as stored; those of float64 in float32.

        Raises:
            ValueError: The file ends before the array does, or cannot be decoded.
        """
        shape = self.leaves[path].shape
        end = (shape[axis] if shape else 1) if stop is None else stop
        x = self.fetch(path, axis, start, end)
        return x.astype(np.float32) if x.dtype == np.float64 else x


def numpy_dtype(name: str) -> np.dtype:
    """Returns the dtype of a name in `FLOATING`.

    Args:
        name: Such as `bfloat16`.
    """
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def parameters(
    leaves: Mapping[str, Leaf],
) -> tuple[dict[str, Leaf], list[tuple[str, str]]]:
    """Returns the floating-point parameters among the arrays, and the others with the reason.

    Of a whole training state, with `params` beside an optimizer state, only what is in `params`.
    Quantised weights are no parameters: without their scales they have no norm.

    Args:
        leaves: Arrays by path, of any dtype.

    Example:
        >>> state = {"params/w": Leaf((2,), "float32"), "opt_state/mu/w": Leaf((2,), "float32")}
        >>> parameters(state)[1]
        [('opt_state/mu/w', 'not under params/')]
    """
    chosen, skipped = {}, []
    whole_state = any(path.startswith("params/") for path in leaves)
    for path, leaf in leaves.items():
        if whole_state and not path.startswith("params/"):
            skipped.append((path, NOT_PARAMETERS))
        elif leaf.dtype not in FLOATING:
            skipped.append((path, f"its dtype {leaf.dtype} is not read: quantised, or no weight"))
        elif 0 in leaf.shape:
            skipped.append((path, f"empty, of shape {leaf.shape}"))
        else:
            chosen[path] = leaf
    return chosen, skipped
