"""`MatrixView`: how the matrices of one leaf lie in it, and how to take them out and put them back.

Pure data from paths and shapes. Which leaves are meant is decided in `_selection.py`.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Order = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True)
class MatrixView:
    """The matrices in one leaf.

    Attributes:
        path: Path of the leaf.
        index: Its place among the leaves of the tree.
        axes: Names of the leaf's axes, composed axes taken apart, in the order of the leaf.
        sizes: Their sizes.
        order: The same names as stack, row and column axes.
        leaf_shape: Shape of the leaf.
    """

    path: str
    index: int
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    order: Order
    leaf_shape: tuple[int, ...]

    @property
    def stack(self) -> tuple[int, ...]:
        """Sizes of the stack axes."""
        return tuple(self.sizes[self.axes.index(axis)] for axis in self.order[0])

    @property
    def count(self) -> int:
        """Number of matrices."""
        return math.prod(self.stack)

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of one matrix."""
        size = dict(zip(self.axes, self.sizes, strict=True))
        rows, columns = (math.prod(size[axis] for axis in axes) for axes in self.order[1:])
        return rows, columns

    @property
    def tall(self) -> tuple[int, int]:
        """Longer and shorter side of one matrix."""
        return max(self.matrix), min(self.matrix)

    @property
    def turned(self) -> bool:
        """Whether `split` transposes: wide matrices, and square ones whose columns are axis d.

        So a stack of square matrices has the model axis first in all of them, those that read the
        stream and those that write into it, and on a mesh one sharding fits the whole stack.
        """
        rows, columns = self.matrix
        return rows < columns or (rows == columns and "d" in self.order[2])

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each matrix, such as `layers/attn/q/kernel[2]` or, per head, `…[2, 0]`."""
        if not self.stack:
            return (self.path,)
        places = [list(map(int, np.unravel_index(i, self.stack))) for i in range(self.count)]
        return tuple(f"{self.path}{place}" for place in places)

    def split(self, leaf: Float[Array, "..."]) -> Float[Array, "count tall short"]:
        """The matrices of the leaf, transposed where `turned`."""
        x = leaf.reshape(self.sizes).transpose(self._forward)
        return self._tall(x.reshape(self.count, *self.matrix))

    def join(self, matrices: Float[Array, "count tall short"]) -> Float[Array, "..."]:
        """The inverse of `split`."""
        x = self._tall(matrices).reshape(tuple(self.sizes[i] for i in self._forward))
        return x.transpose(self._backward).reshape(self.leaf_shape)

    def take(self, leaf: Float[Array, "..."], place: Int[Array, ""]) -> Float[Array, "tall short"]:
        """One matrix of `split`, without touching the others."""
        start, size = self._slice(place)
        x = jax.lax.dynamic_slice(leaf.reshape(self.sizes), start, size).transpose(self._forward)
        return self._tall(x.reshape(self.matrix))

    def put(
        self,
        leaf: Float[Array, "..."],
        place: Int[Array, ""],
        matrix: Float[Array, "tall short"],
    ) -> Float[Array, "..."]:
        """The leaf with one matrix of `split` replaced."""
        start, size = self._slice(place)
        x = self._tall(matrix).reshape(tuple(size[i] for i in self._forward))
        x = x.transpose(self._backward).astype(leaf.dtype)
        full = jax.lax.dynamic_update_slice(leaf.reshape(self.sizes), x, start)
        return full.reshape(self.leaf_shape)

    @property
    def _forward(self) -> tuple[int, ...]:
        return tuple(self.axes.index(axis) for group in self.order for axis in group)

    @property
    def _backward(self) -> tuple[int, ...]:
        forward = self._forward
        return tuple(forward.index(i) for i in range(len(forward)))

    def _tall(self, x: Array) -> Array:
        return jnp.swapaxes(x, -1, -2) if self.turned else x

    def _slice(self, place: Int[Array, ""]) -> tuple[list[Array | int], list[int]]:
        where = dict(zip(self.order[0], jnp.unravel_index(place, self.stack), strict=True))
        start = [where.get(axis, 0) for axis in self.axes]
        size = [1 if axis in where else n for axis, n in zip(self.axes, self.sizes, strict=True)]
        return start, size
