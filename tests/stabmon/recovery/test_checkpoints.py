"""Orbax checkpoints of any training state."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from stabmon.recovery.checkpoints import OrbaxCheckpoints


class State(NamedTuple):
    """A training state of a stranger."""

    step: jax.Array
    params: dict
    opt_state: object


def state_of(ring=True, value=1.0):
    params = {"q": jnp.full((2, 3), value), "k": jnp.full((2, 3), 2.0)}
    links = (optax_ext.track_delta(every=2, keep=2),) if ring else ()
    tx = optax.chain(optax.sgd(0.1, momentum=0.9), *links)
    return State(jnp.int32(3), params, tx.init(params))


WAYS = {
    "NamedTuple": lambda state: state,
    "dict": lambda state: state._asdict(),
    "tuple": tuple,
    "without optimizer state": lambda state: state._replace(opt_state=()),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_was_saved_comes_back(tmp_path, way):
    state = WAYS[way](state_of())
    saved = OrbaxCheckpoints(tmp_path / "checkpoints", like=jax.tree.map(jnp.zeros_like, state))
    saved.save(3, state)
    back = saved.restore(3)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, back, state)
    saved.close()


def test_monitors_may_be_switched_on_and_off(tmp_path):
    folder = tmp_path / "checkpoints"
    OrbaxCheckpoints(folder, like=state_of(ring=False)).save(3, state_of(ring=False, value=5.0))
    back = OrbaxCheckpoints(folder, like=state_of()).restore()
    assert jax.tree.structure(back) == jax.tree.structure(state_of())
    assert back.params["q"].tolist() == [[5.0] * 3] * 2
    OrbaxCheckpoints(folder, like=back).save(4, back)
    without = OrbaxCheckpoints(folder, like=state_of(ring=False)).restore(4)
    assert jax.tree.structure(without) == jax.tree.structure(state_of(ring=False))


def test_steps_are_listed_and_deleted(tmp_path):
    saved = OrbaxCheckpoints(tmp_path / "checkpoints", like=state_of())
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        saved.restore()
    for step in (2, 4):
        saved.save(step, state_of(value=float(step)))
    assert saved.steps() == [2, 4]
    saved.delete(4)
    assert saved.restore().params["q"][0, 0] == 2.0


def test_another_model_is_refused_with_the_remedy(tmp_path):
    folder = tmp_path / "checkpoints"
    for step in (2, 4):
        OrbaxCheckpoints(folder, like=state_of()).save(step, state_of())
    other = state_of()._replace(params={"q": jnp.zeros((5, 5)), "w": jnp.zeros(2)})
    with pytest.raises(ValueError, match=r"4 cannot be read.*go on from step 2"):
        OrbaxCheckpoints(folder, like=other).restore()
