"""Which way to compute something a platform takes: what suits a CPU is not what suits a TPU.

Decided where a program is lowered, not by the devices at hand, so that a program for a TPU may be
lowered on a laptop. The ways themselves are in `decompositions.py` and `products.py`.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.typing import ArrayLike

# Within `with as_on_accelerator(True):` every platform takes the accelerator's way, to see on a CPU
# what a TPU would compute. Functions jitted before are traced anew.
as_on_accelerator = jax.make_user_context(False)


def by_platform(*arrays: ArrayLike, accelerator: Callable[..., Any], **others: Any) -> Any:
    """`accelerator(*arrays)`, or the function given for the platform by name: cpu, cuda, rocm.

    >>> import jax.numpy as jnp
    >>> double = lambda x: by_platform(x, accelerator=jnp.negative, cpu=lambda x: 2 * x)
    >>> with as_on_accelerator(True):
    ...     print(jax.jit(double)(jnp.ones(())))
    -1.0
    """
    if as_on_accelerator.value:
        return accelerator(*arrays)
    return jax.lax.platform_dependent(*arrays, default=accelerator, **others)
