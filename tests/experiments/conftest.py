"""One small mixture of experts for all tests that judge a recorded run or read its checkpoints.

Its runs are trained when a test asks for the first of them, once a session, by one program.
"""

from dataclasses import replace

import pytest

from experiments.loop.optimizer import OptimizerConfig
from experiments.loop.step import MonitorConfig
from experiments.support.moe import BASE, MoEConfig
from models.config import GPTConfig


@pytest.fixture(scope="session")
def moe(tmp_path_factory):
    """What the toy runs share; `train_config(moe, arm, seed)` is one of them."""
    return MoEConfig(
        replace(
            BASE,
            runs=tmp_path_factory.mktemp("moe"),
            steps=60,
            batch=8,
            model=GPTConfig(
                layers=1, model=16, heads=2, context=16, backend="flash", experts=4, feedforward=16
            ),
            optimizer=OptimizerConfig(warmup=5, every=5, keep=2),
            monitor=MonitorConfig(
                lags=(5,), router=5, delta=5, activations=5, weights=0, symptoms=5
            ),
        ),
        onset=40,
        window=10,
        reference_seeds=(6, 7),
    )
