"""The full chain on the GPT: bfloat16 parameters, accumulation, scan, one compilation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.config import GPTConfig
from models.gpt import apply, init_params
from optax_ext._clip import qk_clip
from optax_ext._delta import track_delta
from optax_ext._msign import msign

STEPS, MICRO = 8, 2
MODEL = GPTConfig(layers=2, model=16, heads=2, context=8, vocabulary=16, param_dtype="bfloat16")


def test_the_gpt_trains_through_the_full_chain():
    chain = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(3e-2, weight_decay=0.01),
        qk_clip(1000.0),
        msign(period=3, select="attention", stagger=True),
        track_delta(every=2, keep=2, select="attn/[qk]/"),
    )
    tx = optax.MultiSteps(chain, MICRO)
    tokens = jax.random.randint(jax.random.key(0), (STEPS * MICRO, 4, 9), 0, 4)

    def loss(params, tokens):
        logits, seen = apply(MODEL, params, tokens[:, :-1], capture=True)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.mean(losses), seen["max_attention_logit"]

    def step(carry, tokens):
        params, state = carry
        (value, logits), grads = jax.value_and_grad(loss, has_aux=True)(params, tokens)
        updates, state = tx.update(grads, state, params, max_attention_logits=logits)
        return (optax.apply_updates(params, updates), state), value

    params = init_params(MODEL, 0)
    train = jax.jit(functools.partial(jax.lax.scan, step), donate_argnums=0)
    (params, state), losses = train((params, tx.init(params)), tokens)
    (params, state), more = train((params, state), tokens)
    assert train._cache_size() == 1
    assert float(jnp.mean(more)) < float(losses[0]) - 0.2
    inner = state.inner_opt_state
    assert int(inner[3].msign_step) == 2 * STEPS
    assert np.all(np.asarray(inner[3].msign_last) > 2 * STEPS - 3)
    assert not np.any(inner[3].msign_skipped)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(params))
