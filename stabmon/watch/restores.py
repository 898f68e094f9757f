"""Restore audit around any trainer: a digest with each checkpoint, compared after each load.

What is compared is `stabmon.contracts.restore`'s.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtyping import PyTree

from stabmon.contracts import Contracts
from stabmon.contracts.restore import SOURCE, Digest, compared, state_digest
from stabmon.hosts import leads
from stabmon.recovery.carrying_out import Restore, write_json

_LOGGER = logging.getLogger("stabmon")
_SAID = 20


class Restores:
    """Digests of a run's checkpoints, in a folder of its own."""

    def __init__(self, folder: Path, contracts: Contracts, event: Callable[..., None]) -> None:
        """Nothing is written before the first checkpoint.

        Args:
            folder: Where digests go.
            contracts: Hears what is not as it was saved.
            event: Writes an event: (kind, step, **fields).
        """
        self._folder, self._contracts, self._event = folder, contracts, event

    def keep(self, step: int, state: PyTree) -> None:
        """Writes the digest of a state that was saved; waits for the device.

        Args:
            step: Its step.
            state: The state.
        """
        digest = state_digest(state)
        if leads():
            write_json(self._path(step), digest)

    def audited(self, restore: Restore | None) -> Restore | None:
        """Returns `restore`, with what it loads compared with what was saved.

        What is not equal is an event each, and a contract that is broken; training goes on.

        Args:
            restore: Returns the state that was saved at a step.
        """
        if restore is None:
            return None

        def load(step: int) -> Any:
            state = restore(step)
            saved = self._read(step)
            if saved is not None:
                older = {other: self._read(other) for other in self._steps() if other < step}
                known = {other: digest for other, digest in older.items() if digest is not None}
                self._say(step, compared(saved, state_digest(state), known))
            return state

        return load

    def _say(self, step: int, broken: dict[str, str]) -> None:
        """Write what is not as it was saved."""
        self._contracts.restored(step, broken)
        for leaf, sentence in [*broken.items()][:_SAID]:
            where = {"contract": "restore", "leaf": leaf, "since": step}
            self._event("contract", step, **where, sentence=sentence, source=SOURCE)
        if broken:
            first = next(iter(broken))
            _LOGGER.warning(
                "step %d: %d leaves are not what was saved: %s: %s",
                *(step, len(broken), first, broken[first]),
            )

    def _read(self, step: int) -> Digest | None:
        path = self._path(step)
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def _steps(self) -> list[int]:
        return sorted(int(path.stem) for path in self._folder.glob("*.json"))

    def _path(self, step: int) -> Path:
        return self._folder / f"{step:08d}.json"
