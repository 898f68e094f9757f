"""What an action does to a training state."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from models.config import GPTConfig
from models.gpt import init_params
from stabmon.recovery.control import change
from stabmon.recovery.ladder import Kind


class State(NamedTuple):
    """A training state of a stranger."""

    params: dict
    opt_state: object


@pytest.fixture(scope="module")
def params():
    return init_params(GPTConfig(layers=2, model=16, heads=2, context=8), 0)


@pytest.mark.parametrize("wrap", [lambda p: State(p, ()), lambda p: {"params": p, "opt_state": ()}])
def test_attention_matrices_get_their_sign_and_nothing_else_changes(params, wrap):
    after = change(Kind.MSIGN, wrap(params), 1.0)
    after = (after["params"] if isinstance(after, dict) else after.params)["layers"]
    q = np.asarray(after["attn"]["q"]["kernel"], np.float64)[1].reshape(16, 16)
    sigma = np.linalg.svd(q, compute_uv=False)
    np.testing.assert_allclose(sigma, sigma[0], rtol=1e-4)
    before = np.asarray(params["layers"]["attn"]["q"]["kernel"])[1]
    np.testing.assert_allclose(np.linalg.norm(q), np.linalg.norm(before), rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, after["mlp"], params["layers"]["mlp"])


def test_msign_needs_to_find_the_parameters(params):
    with pytest.raises(ValueError, match="field or key 'params', got a tuple"):
        change(Kind.MSIGN, (params, ()), 1.0)


def test_the_learning_rate_factor_is_set_and_not_multiplied():
    tx = optax.chain(optax.sgd(0.1, momentum=0.9), optax_ext.scale_by_control())
    state = State({}, tx.init(jnp.zeros(2)))
    for scale in (0.5, 0.2):
        state = change(Kind.SCALE_LEARNING_RATE, state, scale)
    assert float(optax.tree.get(state.opt_state, "control_scale")) == pytest.approx(0.2)


def test_moments_begin_anew():
    tx = optax.sgd(0.1, momentum=0.9)
    _, used = tx.update(jnp.ones(2), tx.init(jnp.zeros(2)))
    renewed = change(Kind.RESET_OPTIMIZER, State({}, used), 1.0)
    assert optax.tree.get(renewed.opt_state, "trace").tolist() == [0.0, 0.0]


def test_what_is_no_change_of_the_state_leaves_it_as_it_is():
    state = object()
    assert change(Kind.KEEP_BATCHES, state, 1.0) is state
