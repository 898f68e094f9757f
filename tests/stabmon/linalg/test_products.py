"""Products in full float32, as a TPU forms them, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stabmon.linalg import products
from stabmon.linalg.products import in_passes, symmetric_product


def test_six_passes_are_as_exact_as_float32():
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((3, 20, 300), (300, 30)))
    a *= np.float32(10.0) ** rng.integers(-6, 6, size=(3, 20, 1))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    bound = np.abs(a).astype(np.float64) @ np.abs(b)
    assert np.all(np.abs(jax.jit(in_passes)(a, b) - exact) <= 2.0**-22 * bound)


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("n", [32, 33, 45])
def test_blocks_make_up_the_whole(monkeypatch, n):
    monkeypatch.setattr(products, "BLOCK", 8)
    x = np.random.default_rng(1).normal(size=(2, 50, n)).astype(np.float32)
    turned = np.swapaxes(x, 1, 2)
    found = jax.jit(lambda a, b: symmetric_product(a, b))(turned, x)
    np.testing.assert_allclose(found, turned @ x, atol=1e-4)
    np.testing.assert_allclose(found, np.swapaxes(found, 1, 2), atol=1e-6)


def test_other_dtypes_are_multiplied_as_they_are():
    x = jnp.ones((2, 2), jnp.bfloat16)
    assert products.large_product(x, x).dtype == jnp.bfloat16
