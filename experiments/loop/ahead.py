"""Programs of sampled steps, compiled in the background while the run goes on without them.

The first step needs the training step alone, and compilation begins once that is under way. A step
that is sampled waits for its programs only as far as they are not there yet, so where to sample
stays a matter of the step counter. JAX keeps one cache for programs compiled ahead and on demand:
what is compiled here is found there.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from experiments.loop.measuring import Due, divided
from experiments.loop.placement import mesh_in_force
from experiments.loop.step import Step


class Ahead:
    """The programs of one run that are being compiled; from `compiling_ahead`."""

    def __init__(self, pool: ThreadPoolExecutor, mesh: Mesh | None):
        self._pool, self._mesh = pool, mesh
        self._futures: dict[tuple[str, Due], Future] = {}

    def start(self, step: Step, arguments: tuple[Any, Any, Any, Any], dues: Iterable[Due]) -> None:
        """Compile what the sampled steps need, in the order in which they come.

        Args:
            step: The training step.
            arguments: State, tokens, armed and scales, as it will be called with.
            dues: What is due at the sampled steps, as from `Monitor.due`.
        """
        state, tokens, armed, scales = jax.tree.map(_shape, arguments)
        for due in dues:
            inside, beside = divided(due)
            if beside:
                self._compile(("measure", beside), step.measure, (state, tokens), {"due": beside})
            if inside:
                options = {"due": inside, "scales": scales}
                self._compile(("train", inside), step.train, (state, tokens, armed), options)

    def wait(self, due: Due) -> None:
        """Return once the programs of a step are compiled, or have failed to.

        A failure is not raised here: the step itself meets it.
        """
        inside, beside = divided(due)
        for key in (("measure", beside), ("train", inside)):
            if key in self._futures:
                self._futures[key].exception()

    def _compile(self, key: tuple[str, Due], jitted: Any, args: tuple, options: dict) -> None:
        def compile_it() -> None:
            with mesh_in_force(self._mesh):
                jitted.lower(*args, **options).compile()

        if key not in self._futures:
            self._futures[key] = self._pool.submit(compile_it)


@contextmanager
def compiling_ahead(mesh: Mesh | None) -> Iterator[Ahead]:
    """An `Ahead` for the mesh in force; leaving it drops what has not been begun."""
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compiling")
    try:
        yield Ahead(pool, mesh)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    """The array as a shape; where it lies counts on a mesh only."""
    placed = getattr(x, "sharding", None)
    return jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=placed if isinstance(placed, NamedSharding) else None
    )
