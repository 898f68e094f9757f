"""The attention fault damages what it says, when it says, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.faults import AttentionFault, low_precision
from models.config import GPTConfig
from models.gpt import apply, init_params


def bits_of(x):
    """The bfloat16 pattern of each entry, by NumPy alone: the upper half of float32, rounded."""
    pattern = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16).astype(np.uint16)


def from_bits(pattern):
    return (pattern.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("bits", range(9))
def test_truncation_clears_the_low_bits_of_the_bfloat16_pattern(bits):
    x = np.random.default_rng(0).normal(size=200).astype(np.float32)
    expected = from_bits(bits_of(x) & np.uint16(0x10000 - (1 << bits)))
    np.testing.assert_array_equal(low_precision(jnp.asarray(x), bits), expected)


def test_truncation_is_biased_towards_zero_and_nearest_is_not():
    x = np.random.default_rng(1).uniform(1, 2, size=4000).astype(np.float32)
    truncated = low_precision(jnp.asarray(x), 5)
    nearest = low_precision(jnp.asarray(x), 5, "nearest")
    assert np.mean(truncated / x - 1) < -0.05
    assert abs(np.mean(nearest / x - 1)) < 0.01


def test_the_known_rounding_example():
    # arXiv 2510.04212: −4.70399046 becomes −4.71875 in bfloat16.
    assert float(low_precision(jnp.float32(-4.70399046), 0)) == -4.71875


def test_the_gate_follows_the_step_and_the_layers():
    fault = AttentionFault(onset=5, end=8, layers=(1,))
    gates = [np.asarray(jax.jit(fault.gate, static_argnums=1)(s, 3)).tolist() for s in (4, 5, 7, 8)]
    assert gates == [[0, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 0]]


@pytest.fixture(scope="module")
def gradients():
    config = GPTConfig(layers=2, model=16, heads=2, context=8, backend="flash")
    params = init_params(config, 0)
    # At initialisation O is near zero; a trained scale makes the damage visible.
    params["layers"]["attn"]["v"]["kernel"] *= 4.0
    tokens = jax.random.randint(jax.random.key(0), (2, 8), 0, 256)

    @jax.jit
    def compute(gate):
        def loss(params, fault):
            logits = apply(config, params, tokens, gate_L=gate, backward=fault)
            return jnp.mean(logits**2)

        return [jax.grad(loss)(params, f) for f in (AttentionFault(), None)]

    return compute


def test_with_the_gate_shut_gradients_are_the_healthy_ones(gradients):
    faulty, healthy = gradients(jnp.zeros(2))
    jax.tree.map(np.testing.assert_array_equal, faulty, healthy)


def test_the_fault_reaches_queries_and_keys_of_its_layer_but_no_values(gradients):
    faulty, healthy = gradients(jnp.array([0.0, 1.0]))
    for name, touched in (("q", True), ("k", True), ("v", False), ("o", False)):
        a, b = (g["layers"]["attn"][name]["kernel"][1] for g in (faulty, healthy))
        assert np.any(a != b) == touched, name


def test_bits_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"bits_o: expected 0 … 8 bits, got 9"):
        AttentionFault(bits_o=9)


def test_an_end_before_the_onset_is_refused():
    with pytest.raises(ValueError, match="fault ends at 10, before its onset 300"):
        AttentionFault(end=10)
