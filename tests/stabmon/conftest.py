"""Strict dtype promotion for the metrics; globally it breaks `optax.adamw`."""

import jax
import pytest

from stabmon.linalg.platforms import as_on_accelerator


@pytest.fixture(scope="module", autouse=True)
def _strict_dtypes():
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(params=[False, True], ids=["cpu", "accelerator"])
def route(request):
    """Both ways to decompose: LAPACK's, and that of a TPU."""
    with as_on_accelerator(request.param):
        yield
