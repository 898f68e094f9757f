"""What the suite relies on holds in every process that runs it, a worker's too."""

import os
import warnings

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from stabmon.linalg.factor import product


def test_there_are_eight_devices():
    assert jax.device_count() == 8


def test_annotations_are_checked():
    with pytest.raises(jaxtyping.TypeCheckError, match="product"):
        product(jnp.ones((2, 3)), jnp.ones((4, 2)))


def test_ranks_are_not_promoted():
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones((2, 3)) + jnp.ones(3)


def test_a_warning_is_an_error():
    with pytest.raises(UserWarning, match="told"):
        warnings.warn("told", stacklevel=1)


def test_compiled_programs_are_kept():
    assert jax.config.jax_compilation_cache_dir == os.environ["JAX_COMPILATION_CACHE_DIR"]
