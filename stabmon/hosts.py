"""Several processes as one run: who writes, and that all decide the same.

Every process runs the same program on the same samples, so gates, alarms and actions agree by
construction; `agree` makes sure. How processes find each other is the trainer's.
"""

import json
import zlib
from typing import Any

import jax
import numpy as np


def leads() -> bool:
    """Whether this process is the one that writes."""
    return jax.process_index() == 0


def agree(what: str, value: Any) -> None:
    """Make sure that `value` is the same on every process.

    All processes must call it at the same point of the program. With one process it does nothing.

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
