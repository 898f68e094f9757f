"""The language-model loss, of one batch and of many."""

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
import optax

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
