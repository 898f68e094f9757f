"""Where a run's samples go besides its own log: TensorBoard, Weights & Biases, Prometheus.

Each sink works in a thread of its own and can neither stop nor slow the run
(`stabmon.output.sinks.fanout`); `metrics.jsonl` is written by the log whatever they do.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from stabmon.hosts import leads
from stabmon.output.sinks.writers import PrometheusWriter, TensorBoardWriter, WandbWriter, Writer

Sink = Literal["tensorboard", "wandb", "prometheus"]


def open_sinks(sinks: Sequence[Sink], folder: Path, config: Mapping[str, Any]) -> list[Writer]:
    """The sinks by name, all under the run's folder; none but on the first process.

    TensorBoard: event files in `tensorboard/`. Weights & Biases: `wandb/`; `WANDB_MODE=offline` in
    the environment keeps it from the network. Prometheus: `metrics.prom`, for the node exporter's
    textfile collector.

    Args:
        sinks: Which.
        folder: The run's folder.
        config: What makes the run what it is.

    Raises:
        ImportError: A library is not installed; the message names the extra.
    """
    made: dict[Sink, Any] = {
        "tensorboard": lambda: TensorBoardWriter(folder / "tensorboard"),
        "wandb": lambda: WandbWriter(
            project="stabmon", name=folder.name, config=config, dir=folder
        ),
        "prometheus": lambda: PrometheusWriter(textfile=folder / "metrics.prom"),
    }
    return [made[name]() for name in dict.fromkeys(sinks if leads() else ())]
