"""Several processes as one run: joining them, who writes, and that all decide the same.

`join` starts `jax.distributed` where the environment says that there are others: on Cloud TPU,
SLURM and Open MPI, JAX finds them itself (`--distributed`); elsewhere three variables tell:

    JAX_COORDINATOR_ADDRESS=127.0.0.1:9911 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0

Every process runs the same program on the same samples and values, so that gates, alarms and
actions agree by construction; `agree` makes sure. A process that dies ends the others: the one that
waits for it is told by its sockets at once, or by missing heartbeats within `HEARTBEAT` seconds.
"""

import json
import os
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np

from stabmon.runs.runlog import RunLog

HEARTBEAT = 30
LOST = 3


def join(distributed: bool = False) -> None:
    """Join the other processes, if there are any; to be called before anything touches a device.

    Args:
        distributed: Whether to have JAX find them, where the three variables are not set.

    Raises:
        ValueError: Some of the three variables are missing, or not numbers.
    """
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    told = {name: os.environ[name] for name in names if os.environ.get(name)}
    if not told and not distributed:
        return
    arguments: dict[str, Any] = {}
    if told:
        if missing := [name for name in names if name not in told]:
            raise ValueError(f"{', '.join(told)} are set, {', '.join(missing)} are not; set all")
        try:
            count, number = int(told[names[1]]), int(told[names[2]])
        except ValueError as error:
            raise ValueError(f"{names[1]} and {names[2]} are numbers: {error}") from error
        arguments = {
            "coordinator_address": told[names[0]],
            "num_processes": count,
            "process_id": number,
        }
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        **arguments, heartbeat_timeout_seconds=HEARTBEAT, shutdown_timeout_seconds=HEARTBEAT
    )


@contextmanager
def together() -> Iterator[None]:
    """Says in one line that another process is gone, where collectives fail for that reason.

    The process then ends with exit code `LOST`, at once: a shutdown would wait for the others.
    """
    try:
        yield
    except Exception as error:
        signs = ("Gloo", "heartbeat", "UNAVAILABLE", "Connection closed", "Socket closed")
        if jax.process_count() == 1 or not any(sign in str(error) for sign in signs):
            raise
        lines = [line for line in str(error).splitlines() if line.strip()]
        print(
            f"process {jax.process_index()}: another process of this run is gone ({lines[0]}). "
            "Start all of them again with --resume: they go on from the newest checkpoint.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(LOST)


def leads() -> bool:
    """Whether this process is the one that writes."""
    return jax.process_index() == 0


@contextmanager
def shared_log(folder: Path, config: Mapping[str, Any], resume: bool) -> Iterator[RunLog]:
    """The log of a run that several processes share; all but the first write to one of no account.

    Raises:
        FileExistsError: As `RunLog.open`.
        RuntimeError: The processes were started with different configurations.
    """
    if leads():
        with RunLog.open(folder, config, resume=resume) as log:
            agree("the configuration", config)
            yield log
        return
    agree("the configuration", config)
    with TemporaryDirectory() as away, RunLog.open(Path(away) / folder.name, config) as log:
        yield log


def agree(what: str, value: Any) -> None:
    """Make sure that `value` is the same on every process.

    Args:
        what: What is compared, for the message.
        value: Anything that JSON can hold; compared by its checksum.

    Raises:
        RuntimeError: On every process, if it is not; the message names the processes that differ
            from the first.
    """
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    digest = zlib.crc32(json.dumps(value, sort_keys=True, default=str).encode())
    seen = multihost_utils.process_allgather(np.uint32(digest)).ravel()
    if differing := np.flatnonzero(seen != seen[0]).tolist():
        raise RuntimeError(
            f"processes disagree on {what}: {differing} of {jax.process_count()} differ from "
            f"process 0; here it is {value!r}. Start all with the same options, code and data"
        )
