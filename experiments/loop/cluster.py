"""Several processes as one run: joining them, and what happens when one is gone.

`join` starts `jax.distributed` where the environment says that there are others: on Cloud TPU,
SLURM and Open MPI, JAX finds them itself (`--distributed`); elsewhere three variables tell:

    JAX_COORDINATOR_ADDRESS=127.0.0.1:9911 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0

That all decide the same is `stabmon.hosts`'. A process that dies ends the others: the one that
waits for it is told by its sockets at once, or by missing heartbeats within `HEARTBEAT` seconds.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

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
