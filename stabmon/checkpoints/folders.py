"""From what a person names to checkpoints: files, folders, runs, in the order of their steps.

What lives here: `open_checkpoints`, `checkpoint_steps`. What does not: the formats (`shards`,
`orbax`).
"""

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from stabmon.checkpoints import shards
from stabmon.checkpoints.kinds import refusal
from stabmon.checkpoints.orbax import find_item, open_orbax
from stabmon.checkpoints.source import NOT_PARAMETERS, Checkpoint, parameters

_WANTED = (
    "a .safetensors file, a folder with them (and model.safetensors.index.json), an Orbax "
    "checkpoint, a folder of checkpoints, or a run"
)


def open_checkpoints(paths: Sequence[str | Path]) -> list[Checkpoint]:
    """Returns the checkpoints at some paths, without reading any array.

    A run, or a folder of checkpoints, stands for all that are whole in it, by their steps.

    Args:
        paths: Files and folders.

    Raises:
        FileNotFoundError: A path does not exist.
        ValueError: There is no path, or what is there is no checkpoint, or not a whole one.
    """
    if not paths:
        raise ValueError(f"no checkpoint to look at: give {_WANTED}")
    return [_open(path) for start in paths for path in _expand(Path(start))]


def checkpoint_steps(folder: Path) -> dict[int, Path]:
    """Returns the checkpoints in a folder by step, ascending; those half written are left out.

    Args:
        folder: Such as `runs/NAME/checkpoints`, with folders `500`, `step_500` or `checkpoint-500`.
    """
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    whole = [x for x in inside if x.is_dir() and "orbax-checkpoint-tmp" not in x.name]
    steps = {step: x for x in whole if (step := _step(x)) is not None}
    return dict(sorted(steps.items()))


def _expand(path: Path) -> list[Path]:
    """The single checkpoints that a path stands for."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: give {_WANTED}")
    if path.is_dir() and (path / "config.json").is_file() and (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    if path.is_dir() and not _has_safetensors(path) and find_item(path) is None:
        found = [x for x in checkpoint_steps(path).values() if _has_safetensors(x) or find_item(x)]
        if not found:
            raise ValueError(f"{path} is no checkpoint and holds none: give {_WANTED}")
        return found
    return [path]


def _open(path: Path) -> Checkpoint:
    """One checkpoint."""
    if path.is_file() and not path.name.endswith((".safetensors", shards.INDEX)):
        raise ValueError(
            f"{path} is not read: give {_WANTED}; pickled files can run code, convert them first"
        )
    if path.is_file() or _has_safetensors(path):
        tensors = shards.open_safetensors(path)
        leaves = {name: tensor.leaf for name, tensor in tensors.items()}
        fetch = lambda name, *stretch: shards.fetch(tensors[name], *stretch)
    else:
        leaves, fetch = open_orbax(find_item(path) or path)
    chosen, skipped = parameters(leaves)
    mine = {x: leaf for x, leaf in leaves.items() if (x, NOT_PARAMETERS) not in skipped}
    if reason := refusal(mine):
        raise ValueError(f"{path} {reason}")
    config = _config(path if path.is_dir() else path.parent)
    number = partial(_number, config)
    return Checkpoint(
        name=path.resolve().name,
        path=path,
        step=_step(path),
        leaves=chosen,
        skipped=tuple(skipped),
        fetch=fetch,
        heads=number("num_attention_heads", "n_head", "num_heads", "n_heads"),
        kv_heads=1 if _is_multi_query(config) else number("num_key_value_heads", "num_kv_heads"),
        layers=number("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    )


def _has_safetensors(path: Path) -> bool:
    """Whether a folder holds safetensors files, or an index of them."""
    return any(path.glob("*.safetensors")) or any(path.glob(f"*{shards.INDEX}"))


def _step(path: Path) -> int | None:
    """The number at the end of a name."""
    found = re.search(r"(?<!\d)(\d{1,15})$", path.resolve().name.removesuffix(".safetensors"))
    return int(found[1]) if found else None


def _config(folder: Path) -> dict[str, Any]:
    """What a model's `config.json` says; nothing if it is not there or not JSON."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _is_multi_query(config: dict[str, Any]) -> bool:
    """Whether all heads share one key head, as the first Falcons and GPT-BigCode."""
    return config.get("multi_query") is True and config.get("new_decoder_architecture") is not True


def _number(config: dict[str, Any], *names: str) -> int | None:
    """The first of some entries that is a positive whole number; of a text model's where apart."""
    inner = config.get("text_config")
    values = [
        part.get(name) for part in (config, inner) if isinstance(part, dict) for name in names
    ]
    return next((x for x in values if type(x) is int and x > 0), None)
