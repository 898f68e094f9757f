"""The language-model loss: of one batch, of many, and of the held-out text."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.data import Corpus, batches
from models.config import GPTConfig
from models.gpt import apply


def next_token_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats per token; logits (B, T, V), targets (B, T)."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))


@lru_cache(maxsize=8)
def loss_of_batches(model: GPTConfig) -> Callable:
    """Jitted function of (parameters, batches): mean loss over batches (count, B, T + 1)."""

    def loss(params, tokens):
        return next_token_loss(apply(model, params, tokens[:, :-1]), tokens[:, 1:])

    return jax.jit(lambda params, fixed: jnp.mean(jax.lax.map(lambda x: loss(params, x), fixed)))


def make_evaluation(
    model: GPTConfig, corpus: Corpus, batch: int, read: int = 8
) -> Callable[[Any], jax.Array]:
    """A function of parameters: the mean held-out loss of the first `read` batches, nats per token.

    Always the same batches: differences between evaluations are the parameters' alone.
    """
    data = batches(corpus, seed=0, batch=batch, context=model.context, split="held_out")
    fixed = np.stack([np.asarray(data[i]) for i in range(read)])
    loss = loss_of_batches(model)
    return lambda params: loss(params, fixed)
