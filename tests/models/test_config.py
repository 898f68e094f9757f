"""`GPTConfig`: derived sizes, hashing, and an error for every field that cannot be."""

import dataclasses

import pytest

from models.config import GPTConfig


def test_sizes_that_follow_from_others():
    config = GPTConfig(model=48, heads=6)
    assert (config.kv_heads_K, config.head_dim_H, config.feedforward_F) == (6, 8, 192)
    config = GPTConfig(model=48, heads=5, kv_heads=1, head_dim=16, feedforward=7)
    assert (config.kv_heads_K, config.head_dim_H, config.feedforward_F) == (1, 16, 7)


def test_standard_deviations():
    config = GPTConfig(model=64, layers=8)
    assert config.block_std == 0.125
    assert config.residual_std == 0.125 / 4
    assert GPTConfig(std=0.08, layers=8).residual_std == 0.02


def test_is_a_key_and_cannot_be_changed():
    assert hash(GPTConfig(layers=3)) == hash(GPTConfig(layers=3))
    assert GPTConfig(layers=3) != GPTConfig()
    config, field = GPTConfig(), "layers"
    with pytest.raises(dataclasses.FrozenInstanceError, match=field):
        setattr(config, field, 5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": 0}, "layers=0 is not a size; write an integer of at least 1"),
        ({"vocabulary": 2.5}, "vocabulary=2.5 is not a size"),
        ({"heads": True}, "heads=True is not a size"),
        ({"context": -1}, "context=-1 is not a size"),
        ({"model": None}, "model=None is not a size"),
        ({"kv_heads": 0}, "kv_heads=0 is not a size"),
        ({"head_dim": 0}, "head_dim=0 is not a size"),
        ({"feedforward": 0}, "feedforward=0 is not a size"),
        ({"unroll": 0}, "unroll=0 is not a size"),
        ({"norm": "batchnorm"}, "norm='batchnorm' is not offered; write one of 'rmsnorm'"),
        ({"positions": "alibi"}, "positions='alibi'.*'learned', 'rope', 'none'"),
        ({"activation": "relu"}, "activation='relu'.*'gelu', 'swiglu'"),
        ({"backend": "cudnn"}, "backend='cudnn'.*'plain', 'flash'"),
        ({"dtype": "int8"}, "dtype='int8'.*'float32', 'bfloat16'"),
        ({"param_dtype": "int8"}, "param_dtype='int8'"),
        ({"std": -1.0}, "std=-1.0 is no standard deviation"),
        ({"embedding_std": float("nan")}, "embedding_std=nan is no standard deviation"),
        ({"model": 65}, "model=65 does not divide into heads=4.*give head_dim"),
        ({"kv_heads": 3}, "heads=4 do not divide among kv_heads=3; write a divisor"),
        ({"positions": "rope", "head_dim": 5}, "head dimension is 5; write an even head_dim"),
    ],
)
def test_says_what_came_and_what_to_write(fields, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**fields)
