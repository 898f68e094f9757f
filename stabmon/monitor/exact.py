"""The tier of contracts: the numbers that `stabmon.contracts` judges, packed beside the others.

What they are is `stabmon.contracts.digest`'s.
"""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from stabmon.contracts import Form, digest
from stabmon.monitor.snapshots import TrackDeltaState

if TYPE_CHECKING:
    from stabmon.monitor.monitor import Monitor
    from stabmon.monitor.sampling import Inputs


def sample_contracts(
    monitor: "Monitor", inputs: "Inputs", get: Callable[[], Any], due: Collection[str] | None
) -> tuple[Bool[Array, ""], Array, Form] | None:
    """Returns whether contracts are sampled now, their numbers, and what these are; None if off.

    Args:
        monitor: Its settings.
        inputs: Its arguments.
        get: Computes the intermediates; only their dtypes are read.
        due: Tiers that are due, None where the step tells.
    """
    if not monitor.contracts or (due is not None and "contracts" not in due):
        return None
    forms = []

    def taken() -> Array:
        row, form = digest(
            *(monitor.layout, inputs.params, inputs.opt_state, inputs.grads, inputs.updates),
            *(inputs.loss, inputs.batch, jax.eval_shape(get), (TrackDeltaState,)),
        )
        forms.append(form)
        return row

    if due is not None:
        return jnp.ones((), bool), taken(), forms[0]
    now, size = inputs.step % monitor.contracts == 0, jax.eval_shape(taken).shape
    row = jax.lax.cond(now, taken, lambda: jnp.zeros(size, jnp.float32))
    return now, row, forms[0]
