"""What a saved model does on text that is always the same: its router, its activations' rank.

Not here: what a run recorded while it went on, and what is concluded from either.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import stabmon
from experiments.data import batches, load_corpus
from experiments.loop.checkpoints import TrainState, checkpoints
from experiments.loop.placement import ALONE
from experiments.loop.step import make_step
from experiments.train import Config as TrainConfig
from models.gpt import apply
from stabmon.metrics.activations import sample_tokens, segment_rank_ratio
from stabmon.monitor.forward import router_metrics

SEGMENTS = 4
TOKENS = 512


def compiled(settings: TrainConfig) -> tuple[Any, Any]:
    """A run's `init` and `step`."""
    scaled = settings.disturbances is not None
    return make_step(
        settings.model, settings.optimizer, settings.monitor, settings.fault, ALONE, scaled
    )[:2]


def final_state(settings: TrainConfig) -> TrainState:
    """The last checkpoint of a run."""
    saved = checkpoints(settings.runs / settings.name, compiled(settings)[0](settings.seed))
    state = saved.restore()
    saved.close()
    return state


def held_out_inputs(data: Path | None, context: int, sequences: int) -> jax.Array:
    """Token ids (sequences, context) of the held-out part of a text."""
    found = batches(load_corpus(data), seed=0, batch=sequences, context=context, split="held_out")
    return jnp.asarray(np.asarray(found[0])[:, :-1])


def router_on_text(settings: TrainConfig) -> dict[str, float]:
    """The router at the end of a run; means over layers."""
    params, model = final_state(settings).params, settings.model
    inputs = held_out_inputs(settings.data, model.context, 32)
    logits = apply(model, params, inputs, capture=True)[1]["router_logits"]
    layout, few = stabmon.find_layout(params), {"router_logits": logits}
    found = router_metrics(layout, params, few, model.top_k, model.auxiliary_weight)
    return {name: float(np.mean(np.asarray(x))) for name, x in found.items()}


def grades_of_texts(settings: TrainConfig, texts: Mapping[str, Path]) -> dict[str, Any]:
    """{text: rank ratio of the worst layer, and of that layer's segments front to back}.

    At the end of a run, on the held-out part of each text.
    """
    params, model = final_state(settings).params, settings.model
    found = {}
    for name, path in texts.items():
        inputs = held_out_inputs(path, model.context, 64)
        residual = apply(model, params, inputs, capture=True)[1]["residual"]
        ratios = [float(stabmon.rank_ratio(sample_tokens(x, TOKENS))) for x in residual]
        worst = int(np.argmin(np.nan_to_num(np.asarray(ratios))))
        segments = [float(x) for x in segment_rank_ratio(residual[worst], SEGMENTS)]
        found[name] = {"ratio": ratios[worst], "layer": worst, "segments": segments}
    return found
