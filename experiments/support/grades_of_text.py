"""Rank ratios of a trained model's residual stream on several texts, by segment of the context.

Here: `grades_of_texts`. Not here: the texts (`text_mixes.py`), nor what is concluded (`grades.py`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import stabmon
from experiments.loop.data import batches, load_corpus
from experiments.support.moe_judging import final_state
from experiments.train import Config as TrainConfig
from models.gpt import apply
from stabmon.metrics.activations import sample_tokens, segment_rank_ratio

SEGMENTS = 4
SEQUENCES = 64
TOKENS = 512


def grades_of_texts(settings: TrainConfig, texts: Mapping[str, Path]) -> dict[str, Any]:
    """{text: rank ratio of the worst layer, and of that layer's segments front to back}.

    At the end of a recorded run, on the held-out part of each text.
    """
    params, model = final_state(settings).params, settings.model
    found = {}
    for name, path in texts.items():
        data = batches(
            load_corpus(path),
            seed=0,
            batch=SEQUENCES,
            context=model.context,
            split="held_out",
        )
        inputs = jnp.asarray(np.asarray(data[0])[:, :-1])
        residual = apply(model, params, inputs, capture=True)[1]["residual"]
        ratios = [float(stabmon.rank_ratio(sample_tokens(x, TOKENS))) for x in residual]
        worst = int(np.argmin(np.nan_to_num(np.asarray(ratios))))
        segments = segment_rank_ratio(residual[worst], SEGMENTS)
        found[name] = {
            "ratio": ratios[worst],
            "layer": worst,
            "segments": [float(x) for x in segments],
        }
    return found
