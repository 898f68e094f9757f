"""Where samples go besides the run's own log: TensorBoard, Weights & Biases, Prometheus.

What lives here: the `Writer` protocol and one class for each sink; each imports its library when it
is made. What does not: the log on disk (`runlog`), threads that keep a slow sink away from training
(`fanout`). Make writers on one process only, the one that logs.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from stabmon.quantities import Key, split_key
from stabmon.runs.runlog import RunLog

JsonlWriter = RunLog


@runtime_checkable
class Writer(Protocol):
    """Something that takes samples: `RunLog`, the classes here, or your own."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Takes one sample.

        Args:
            step: Step at which it was measured.
            values: Metric key → value, on the host.
        """
        ...

    def close(self) -> None:
        """Brings everything to its place and lets go of it."""
        ...


class TensorBoardWriter:
    """Writes scalars for TensorBoard, one for each metric key."""

    def __init__(self, folder: str | Path, *, purge_step: int | None = None) -> None:
        """Opens an event file.

        Args:
            folder: Folder of the event files, such as `runs/NAME/tensorboard`.
            purge_step: When resuming or rolled back: TensorBoard hides what was written before for
                this step and later ones.

        Raises:
            ImportError: If tensorboardX is not installed.
        """
        library = _library("tensorboardX", "tensorboard")
        self._writer = library.SummaryWriter(str(folder), purge_step=purge_step, flush_secs=10)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Takes one sample.

        Args:
            step: Step at which it was measured.
            values: Metric key → value.
        """
        for key, value in values.items():
            self._writer.add_scalar(key, value, global_step=step)

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._writer.close()


class WandbWriter:
    """Logs to Weights & Biases; the run begins with the first sample, not before."""

    def __init__(self, **settings: Any) -> None:
        """Keeps what the run is to be begun with.

        Args:
            **settings: For `wandb.init`: `project`, `name`, `config`, `dir`, and `mode`, which is
                "offline" where there is no network.

        Raises:
            ImportError: If wandb is not installed.
        """
        self._library = _library("wandb", "wandb")
        self._settings = settings
        self._run: Any = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Takes one sample.

        Args:
            step: Step at which it was measured; wandb drops steps below an earlier one.
            values: Metric key → value.
        """
        if self._run is None:
            self._run = self._library.init(**self._settings)
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Ends the run, if it was begun."""
        if self._run is not None:
            self._run.finish()


class PrometheusWriter:
    """Shows the newest sample to Prometheus, as a file or on a port of this machine alone.

    Gauges: `stabmon_value{monitor, scope, metric, aggregate}`, the parts of the metric key, and
    `stabmon_step`.

    Attributes:
        port: The port that is listened on, None without one.
    """

    def __init__(self, *, textfile: str | Path | None = None, port: int | None = None) -> None:
        """Opens the port or chooses the file.

        Args:
            textfile: A `.prom` file for the node exporter's textfile collector, replaced whole at
                each sample.
            port: Port on 127.0.0.1; 0 takes a free one.

        Raises:
            ImportError: If prometheus_client is not installed.
            ValueError: If there is neither file nor port, or the file has another ending.
        """
        if textfile is None and port is None:
            raise ValueError('give PrometheusWriter textfile="….prom", port=9100, or both')
        if textfile is not None and Path(textfile).suffix != ".prom":
            raise ValueError(f"the textfile collector reads *.prom files only, got {textfile}")
        self._library = _library("prometheus_client", "prometheus")
        self._registry = self._library.CollectorRegistry()
        self._value = self._library.Gauge(
            "stabmon_value", "Newest sample of a metric", Key._fields, registry=self._registry
        )
        self._step = self._library.Gauge(
            "stabmon_step", "Step of the newest sample", registry=self._registry
        )
        self._textfile = None if textfile is None else Path(textfile)
        self._server: Any = None
        self.port: int | None = None
        if port is not None:
            self._server, self._thread = self._library.start_http_server(
                port, addr="127.0.0.1", registry=self._registry
            )
            self.port = self._server.server_port

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Takes one sample.

        Args:
            step: Step at which it was measured.
            values: Metric key → value.
        """
        for key, value in values.items():
            self._value.labels(*(split_key(key) or Key("", "", key, ""))).set(value)
        self._step.set(step)
        if self._textfile is not None:
            self._textfile.parent.mkdir(parents=True, exist_ok=True)
            self._library.write_to_textfile(str(self._textfile), self._registry)

    def close(self) -> None:
        """Closes the port; the file stays."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None


def _library(module: str, extra: str) -> ModuleType:
    """An optional library, or how to get it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f'{module} is not installed: pip install "stabmon[{extra}]"') from error
