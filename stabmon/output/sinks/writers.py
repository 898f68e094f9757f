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

    def rewind(self, step: int) -> None:
        """Training goes on from an earlier step: what was written of later ones is void.

        Args:
            step: Step of the checkpoint that was restored.
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
        self._library = _library("tensorboardX", "tensorboard")
        self._folder, self._files = str(folder), 0
        self._writer = self._open(purge_step)

    def _open(self, purge_step: int | None) -> Any:
        """A further event file; two of one second need names of their own."""
        self._files += 1
        return self._library.SummaryWriter(
            self._folder,
            purge_step=purge_step,
            flush_secs=10,
            filename_suffix=f".{self._files}" if self._files > 1 else "",
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Takes one sample.

        Args:
            step: Step at which it was measured.
            values: Metric key → value.
        """
        for key, value in values.items():
            self._writer.add_scalar(key, value, global_step=step)

    def rewind(self, step: int) -> None:
        """Begins another event file, for which TensorBoard hides the later steps of this one.

        Args:
            step: Step of the checkpoint that was restored.
        """
        self._writer.close()
        self._writer = self._open(step + 1)

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._writer.close()


class WandbWriter:
    """Logs to Weights & Biases; the run begins with the first sample, not before.

    Steps are a metric of their own, "step": wandb drops what comes with a lower count than before.
    A rewind begins another run of the same group, since a run of theirs cannot be cut; each is one
    timeline.
    """

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
        self._name, self._attempt = settings.get("name") or "run", 1
        self._run: Any = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Takes one sample.

        Args:
            step: Step at which it was measured.
            values: Metric key → value.
        """
        if self._run is None:
            self._run = self._library.init(**self._settings)
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        self._run.log({"step": step, **values})

    def rewind(self, step: int) -> None:
        """Ends the run; the next sample begins another one of its group.

        Args:
            step: Step of the checkpoint that was restored.
        """
        if self._run is None:
            return
        self.close()
        self._run, self._attempt = None, self._attempt + 1
        kept = {k: v for k, v in self._settings.items() if k not in ("id", "resume")}
        named = {"name": f"{self._name}, attempt {self._attempt} from {step}"}
        self._settings = {"group": self._name, **kept, **named}

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

    def rewind(self, step: int) -> None:
        """Forgets the values of later steps; each is shown again from its next sample on.

        Args:
            step: Step of the checkpoint that was restored.
        """
        self._value.clear()
        self._step.set(step)

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
