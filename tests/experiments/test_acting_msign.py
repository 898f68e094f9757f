"""MSign on demand: asked for by the ladder, done to the state two steps later."""

from types import SimpleNamespace

import jax
import numpy as np

from experiments.loop.acting import Acting
from experiments.loop.checkpoints import TrainState
from models.config import GPTConfig
from models.gpt import init_params
from stabmon.recovery.ladder import Action, Kind
from stabmon.recovery.watcher import Seen


def acting(dry):
    """An `Acting` whose ladder asks for MSign at step 10."""
    wanted = (Action(Kind.MSIGN, 10, "attention", dry),)
    observe = lambda step, values: Seen(step, actions=wanted if step == 10 else ())
    log = SimpleNamespace(event=lambda *_, **__: None)
    return Acting(None, log, None, SimpleNamespace(observe=observe))


def test_attention_matrices_get_their_sign_and_nothing_else_changes():
    params = init_params(GPTConfig(layers=2, model=16, heads=2, context=8), 0)
    state, asked = TrainState(np.int32(12), params, ()), acting(dry=False)
    for step in (9, 10):
        asked.observe(step, {})
    assert asked.before(11, state) is state
    after = asked.before(12, state).params["layers"]
    assert asked.before(13, state) is state
    q = np.asarray(after["attn"]["q"]["kernel"], np.float64)[1].reshape(16, 16)
    sigma = np.linalg.svd(q, compute_uv=False)
    np.testing.assert_allclose(sigma, sigma[0], rtol=1e-4)
    before = np.asarray(params["layers"]["attn"]["q"]["kernel"])[1]
    np.testing.assert_allclose(np.linalg.norm(q), np.linalg.norm(before), rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, after["mlp"], params["layers"]["mlp"])


def test_advice_does_nothing():
    asked, state = acting(dry=True), object()
    asked.observe(10, {})
    assert asked.before(20, state) is state
