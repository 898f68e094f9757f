"""The study for a TPU, lowered for CPU devices: every program of a toy, and the table."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from experiments.support.tpu import tables
from experiments.tpu_study import PARTS, lower
from models.config import GPTConfig

TOY = GPTConfig(layers=2, model=64, heads=8, context=16, vocabulary=64, positions="rope")


@pytest.fixture(scope="module")
def mesh():
    devices = np.array(jax.devices()).reshape(4, 2)
    return Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize(
    "part", [pytest.param(x, marks=() if x == "msign" else pytest.mark.slow) for x in PARTS]
)
def test_every_program_is_lowered_from_shapes(mesh, part):
    assert "func.func public @main" in lower(TOY, part, mesh).as_text()


def row(part, seconds, code):
    return {
        "model": "toy",
        "topology": "v5e:2x4",
        "part": part,
        "seconds": seconds,
        "code_bytes": code * 2**20,
        "temp_bytes": 2**20,
        "collectives": {"all-to-all": {"count": 1, "bytes": 2**21, "largest": 2**21}},
    }


def test_what_is_added_is_judged_against_the_targets():
    text = tables([row("base", 10.0, 20), row("msign", 29.0, 45), row("polar", 31.0, 45)])
    assert "19.0, 25.0 (met)" in text
    assert "21.0, 25.0 (not met)" in text
