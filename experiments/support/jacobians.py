"""Jacobians of a model's blocks: alignment a, least norm M and growth a·M, of given parameters.

Here: the blocks as functions of the residual stream, and their statistics on some tokens, also at
a run's checkpoints. Not here:
the products themselves (`stabmon.metrics.jacobian`), nor when they are taken.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.loop.checkpoints import checkpoints
from experiments.support.recorded import Row
from experiments.support.states import compiled, held_out_inputs
from experiments.train import Config as TrainConfig
from models.config import GPTConfig
from models.gpt import GPT
from stabmon.metrics.jacobian import JacobianStats, jacobian_alignment


@partial(jax.jit, static_argnums=0)
def block_jacobians(config: GPTConfig, params: dict[str, Any], tokens_BT: jax.Array) -> Any:
    """`JacobianStats` of the blocks, first to last, at the stream that the tokens give.

    Args:
        config: The model; the attention is differentiated along its plain path, which computes the
            same and has forward derivatives.
        params: Its parameters.
        tokens_BT: Integer token ids; few, since all positions together are one vector.
    """
    plain = replace(config, backend="plain", pv_dtype="float32", softmax_beta=None)
    model = nnx.merge(nnx.split(nnx.eval_shape(lambda: GPT(plain)))[0], params)
    x_BTD = model.embed.embedding[...][tokens_BT]
    if model.positions is not None:
        x_BTD = x_BTD + model.positions.embedding[...][None, : tokens_BT.shape[1]]
    graphdef, stacked = nnx.split(model.layers)

    def block(index: int, x_BTD: jax.Array) -> jax.Array:
        own = jax.tree.map(lambda leaf: leaf[index], stacked)
        return nnx.merge(graphdef, own)(x_BTD)[0]

    blocks = [partial(block, index) for index in range(plain.layers)]
    stats: JacobianStats = jacobian_alignment(blocks, x_BTD, tolerance=5e-3, cycles=8)
    return stats


def least(stats: JacobianStats) -> dict[str, float]:
    """The least alignment a of neighbours, the least norm M, their product, and convergence."""
    return {
        "a": float(jnp.min(stats.forward, initial=1.0)),
        "M": float(jnp.min(stats.norms)),
        "aM": float(stats.growth),
        "converged": bool(stats.converged),
    }


def jacobians(settings: TrainConfig) -> list[Row]:
    """a, M and a·M at the kept checkpoints before the last step, on one held-out sequence."""
    tokens = held_out_inputs(settings.data, settings.model.context, 1)
    like = compiled(settings)[0](settings.seed)
    saved, found = checkpoints(settings.runs / settings.name, like), []
    for step in saved.steps():
        if step < settings.steps:
            params = saved.restore(step).params
            found.append({"step": step} | least(block_jacobians(settings.model, params, tokens)))
    saved.close()
    return found
