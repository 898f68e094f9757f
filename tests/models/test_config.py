"""`GPTConfig`: derived sizes, hashing, and an error for every field that cannot be."""

import dataclasses

import pytest

from models.config import GPTConfig


def test_sizes_that_follow_from_others():
    config = GPTConfig(model=48, heads=6)
    assert (config.kv_heads_K, config.head_dim_H, config.feedforward_F) == (6, 8, 192)
    config = GPTConfig(model=48, heads=5, kv_heads=1, head_dim=16, feedforward=7)
    assert (config.kv_heads_K, config.head_dim_H, config.feedforward_F) == (1, 16, 7)


def test_sizes_of_latents():
    config = GPTConfig(model=48, heads=6, attention="mla")
    assert (config.query_rank_R, config.kv_rank_R, config.rope_dim_P) == (24, 12, 4)
    config = GPTConfig(model=48, heads=6, attention="mla", query_rank=9, kv_rank=1, rope_dim=2)
    assert (config.query_rank_R, config.kv_rank_R, config.rope_dim_P) == (9, 1, 2)


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
        ({"experts": -1}, "experts=-1 is not a size; write an integer of at least 0"),
        ({"shared_experts": 1.0}, "shared_experts=1.0 is not a size"),
        ({"shared_experts": 2}, "stand beside routed ones, but experts=0"),
        ({"top_k": 0}, "top_k=0 is not a size"),
        ({"experts": 3, "top_k": 4}, "top_k=4 experts cannot be chosen of 3"),
        ({"experts": 3, "top_k": 1}, "never reaches the router; write norm_top_k=False"),
        ({"experts": 3, "capacity_factor": 0.0}, "capacity_factor=0.0 is no capacity"),
        ({"experts": 3, "capacity_factor": float("nan")}, "capacity_factor=nan is no capacity"),
        ({"auxiliary_weight": -1.0}, "auxiliary_weight=-1.0 is no weight of a loss"),
        ({"z_weight": float("inf")}, "z_weight=inf is no weight of a loss"),
        ({"attention": "mqa"}, "attention='mqa' is not offered; write one of 'mha', 'mla'"),
        ({"query_rank": 0}, "query_rank=0 is not a size"),
        ({"kv_rank": 0}, "kv_rank=0 is not a size"),
        ({"rope_dim": 0}, "rope_dim=0 is not a size"),
        ({"attention": "mla", "kv_heads": 2}, "each of heads=4, not kv_heads=2"),
        ({"attention": "mla", "qk_norm": True}, "normalises its latents.*write qk_norm=False"),
        (
            {"attention": "mla", "positions": "rope", "rope_dim": 3},
            "the rope dimension is 3; write an even rope_dim",
        ),
        ({"pv_dtype": "int8"}, "pv_dtype='int8'.*'float32', 'bfloat16'"),
        ({"pv_dtype": "bfloat16"}, "pv_dtype='bfloat16', .*write backend='flash'"),
        ({"softmax_beta": 2.0}, "softmax_beta=2.0 are choices of the flash path"),
        ({"backend": "flash", "softmax_beta": 1.0}, "write a number above 1, such as 2.0"),
    ],
)
def test_says_what_came_and_what_to_write(fields, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**fields)
