"""Programs of sampled steps, compiled in the background while the run goes on without them.

The first step needs the training step alone; compilation of the others begins once that is under
way. A step that is sampled waits for its programs only as far as they are not there yet, so where
to sample stays a matter of the step counter. JAX keeps one cache for programs compiled ahead and on
demand: what is compiled here is found there.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
from jax.sharding import NamedSharding


class Ahead:
    """The programs of one run that are being compiled; from `compiling_ahead`."""

    def __init__(self, pool: ThreadPoolExecutor, mesh: Callable[[], AbstractContextManager[Any]]):
        """Compiles on one thread of `pool`, with the context `mesh()` in force."""
        self._pool, self._mesh = pool, mesh
        self._futures: dict[Hashable, Future] = {}

    def start(self, key: Hashable, jitted: Any, args: tuple, options: Mapping[str, Any]) -> None:
        """Compiles a program, after those that were started before; one of the same key once.

        Args:
            key: Its name, for `wait`.
            jitted: The function, from `jax.jit`.
            args: What it will be called with; only shapes, dtypes and shardings are kept.
            options: Keyword arguments, static ones included.
        """
        if key in self._futures:
            return
        shapes, named = jax.tree.map(_shape, (args, dict(options)))

        def compile_it() -> None:
            with self._mesh():
                jitted.lower(*shapes, **named).compile()

        self._futures[key] = self._pool.submit(compile_it)

    def wait(self, key: Hashable) -> None:
        """Returns once a program is compiled or has failed to; at once if it was not started.

        A failure is not raised here: the step itself meets it.
        """
        if key in self._futures:
            self._futures[key].exception()


@contextmanager
def compiling_ahead(
    mesh: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[Ahead]:
    """Gives an `Ahead`; leaving it drops what has not been begun.

    Args:
        mesh: Makes the context that puts the mesh in force, such as `lambda: jax.set_mesh(mesh)`.

    >>> import jax.numpy as jnp
    >>> double = jax.jit(lambda x: 2 * x)
    >>> with compiling_ahead() as ahead:
    ...     ahead.start("double", double, (jnp.ones(3),), {})
    ...     ahead.wait("double")
    """
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compiling")
    try:
        yield Ahead(pool, mesh)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _shape(x: Any) -> Any:
    """An array as a shape; where it lies counts on a mesh only."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        return x
    placed = getattr(x, "sharding", None)
    return jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=placed if isinstance(placed, NamedSharding) else None
    )
