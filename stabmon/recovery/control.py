"""What an action does to a training state: learning rate, moments, attention matrices.

The transforms behind it are `optax_ext`'s. It stands on `stabmon`, so it is imported here only when
an action is carried out.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from stabmon.recovery.ladder import Kind


def change(kind: Kind, state: PyTree, amount: float) -> PyTree:
    """Returns a training state with an action done to it; other kinds change nothing.

    Args:
        kind: Sets the learning-rate factor to `amount`, renews the optimizer's moments, or replaces
            the attention matrices by their rescaled sign.
        state: Any tree that holds the optimizer state; for the sign with a field `params`.
        amount: The factor with respect to the run's own schedule; doing it twice does no harm.

    Raises:
        ValueError: The chain has no `scale_by_control`, no state with moments, or the state no
            `params`.
    """
    ours: Any = import_module("optax_ext")
    match kind:
        case Kind.SCALE_LEARNING_RATE:
            return ours.scale_learning_rate(state, amount)
        case Kind.RESET_OPTIMIZER:
            return ours.reset_moments(state, jax.tree.map(_zero, state))
        case Kind.MSIGN:
            params = _params(state)
            return _with_params(state, _signed(params))
    return state


def _zero(x: Any) -> Any:
    """What a moment or its count begins at; anything else but an array of numbers as it is."""
    numeric = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.number)
    return jnp.zeros_like(x) if numeric else x


@jax.jit
def _signed(params: PyTree) -> PyTree:
    """Parameters with every attention matrix replaced by its rescaled sign, as MSign does it."""
    ours: Any = import_module("optax_ext")
    once = ours.msign(1, "attention")
    still = jax.tree.map(jnp.zeros_like, params)
    updates, _ = once.update(still, once.init(params), params)
    return optax.apply_updates(params, updates)


def _params(state: PyTree) -> PyTree:
    """The parameters in a training state."""
    found = state.get("params") if isinstance(state, Mapping) else getattr(state, "params", None)
    if found is None:
        raise ValueError(
            f"MSign on demand needs a training state with a field or key 'params', got a "
            f"{type(state).__name__}; use a NamedTuple or a dict, or Policy(msign=False)"
        )
    return found


def _with_params(state: PyTree, params: PyTree) -> PyTree:
    """A training state with other parameters."""
    if isinstance(state, Mapping):
        return {**state, "params": params}
    renew = getattr(state, "_replace", None) or getattr(state, "replace", None)
    if renew is None:
        raise ValueError(f"a {type(state).__name__} has neither _replace nor replace for 'params'")
    return renew(params=params)
