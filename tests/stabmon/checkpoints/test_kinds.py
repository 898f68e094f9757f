"""Checkpoints without weights as they are: refused, with what they are."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from stabmon.checkpoints.folders import open_checkpoints
from stabmon.checkpoints.kinds import refusal
from stabmon.checkpoints.source import Leaf

Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "holds no arrays"),
        ({f"{Q}.qweight": "I32", f"{Q}.g_idx": "I32", f"{Q}.scales": "F16"}, "with GPTQ"),
        ({f"{Q}.qweight": "I32", f"{Q}.qzeros": "I32", f"{Q}.scales": "F16"}, "with AWQ or GPTQ"),
        (
            {
                f"{Q}.weight": "U8",
                f"{Q}.weight.absmax": "U8",
                f"{Q}.weight.quant_state.bitsandbytes__nf4": "U8",
            },
            "4 bits by bitsandbytes",
        ),
        ({f"{Q}.weight": "I8", f"{Q}.SCB": "float32"}, "8 bits by bitsandbytes"),
        ({f"{Q}.weight": "F8_E4M3", f"{Q}.weight_scale_inv": "float32"}, "8-bit floats"),
        ({f"{Q}.weight": "float32", f"{Q}.weight_scale_inv": "float32"}, "8-bit floats"),
        ({f"{Q}.weight": "I8", "norm.weight": "float32"}, "quantised to I8"),
        ({f"{Q}.lora_A.weight": "float32", f"{Q}.lora_B.weight": "float32"}, "LoRA factors alone"),
        ({f"{Q}.weight": "float32", f"{Q}.lora_A.weight": "float32"}, "1 LoRA factors beside"),
        ({"experts.gate_up_proj_blocks": "U8", "experts.gate_up_proj_scales": "U8"}, "MXFP4"),
    ],
)
def test_each_kind_is_said(arrays, message):
    assert message in str(refusal({path: Leaf((4, 4), dtype) for path, dtype in arrays.items()}))


def test_weights_with_counters_and_buffers_beside_them_are_none_of_these():
    leaves = {f"{Q}.weight": Leaf((4, 4), "bfloat16"), "step": Leaf((), "I64")}
    assert refusal(leaves | {"h.0.attn.bias": Leaf((1, 1, 4, 4), "U8")}) is None
    assert refusal(leaves | {"h.0.scale": Leaf((4,), "float32")}) is None


def test_a_quantised_file_is_refused_with_its_path(tmp_path):
    weights = {f"{Q}.weight": np.ones((4, 4), ml_dtypes.float8_e4m3fn)}
    save_file(
        weights | {f"{Q}.weight_scale_inv": np.ones((1, 1), np.float32)}, tmp_path / "a.safetensors"
    )
    with pytest.raises(ValueError, match=r"a\.safetensors is quantised to 8-bit floats, 'model"):
        open_checkpoints([tmp_path / "a.safetensors"])


def test_moments_in_integers_beside_parameters_do_not_make_them_quantised(tmp_path):
    state = {"params/w": np.ones((4, 4), np.float32), "opt_state/w": np.ones((4, 4), np.int8)}
    save_file(state | {"opt_state/v": np.ones((4, 4), np.int8)}, tmp_path / "a.safetensors")
    assert list(open_checkpoints([tmp_path / "a.safetensors"])[0].leaves) == ["params/w"]


def test_shards_that_are_missing_without_an_index_are_counted(tmp_path):
    for i in (1, 4):
        save_file(
            {f"w{i}": np.ones(2, np.float32)}, tmp_path / f"model-0000{i}-of-00004.safetensors"
        )
    with pytest.raises(ValueError, match=r"lacks 2 of 4 shards, 'model-00002-of-00004"):
        open_checkpoints([tmp_path])


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        ({"n_head": 6, "multi_query": True}, (6, 1)),
        ({"num_attention_heads": 6, "num_kv_heads": 2, "new_decoder_architecture": True}, (6, 2)),
        ({"text_config": {"num_attention_heads": 6, "num_key_value_heads": 3}}, (6, 3)),
    ],
)
def test_heads_of_other_configs(config, heads, tmp_path):
    save_file({"w": np.ones((2, 2), np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    one = open_checkpoints([tmp_path])[0]
    assert (one.heads, one.kv_heads) == heads
