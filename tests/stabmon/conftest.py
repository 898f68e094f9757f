"""Strict dtype promotion for the metrics; globally it breaks `optax.adamw`."""

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def _strict_dtypes():
    with jax.numpy_dtype_promotion("strict"):
        yield
