"""What a run was started with: `config.json`, and how two of them differ.

What lives here: `as_config`, `read_config`, `differences`, `setting`. What does not: how values
become JSON (`jsonl.plain`).
"""

import json
from pathlib import Path
from typing import Any

from stabmon.runs.jsonl import floats, plain


def as_config(value: Any) -> dict[str, Any]:
    """Returns a configuration as `config.json` holds it; what is no object stands under "config".

    Args:
        value: A mapping, a dataclass, a namespace, or anything else.

    Example:
        >>> as_config({"seed": 0}), as_config("base.yaml")
        ({'seed': 0}, {'config': 'base.yaml'})
    """
    found = plain(value)
    return found if isinstance(found, dict) else {"config": found}


def read_config(path: Path) -> dict[str, Any]:
    """Returns what `config.json` holds, non-finite numbers as floats.

    Args:
        path: The file.

    Raises:
        ValueError: It cannot be read as JSON.
    """
    try:
        found = floats(json.loads(path.read_text(encoding="utf-8-sig")))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    return found if isinstance(found, dict) else {"config": found}


def setting(config: Any, *names: str) -> Any:
    """Returns what stands under nested names, None where there is nothing.

    Args:
        config: A configuration of any shape.
        *names: From the outside inwards.

    Example:
        >>> setting({"model": {"qk_norm": True}}, "model", "qk_norm")
        True
        >>> setting({"model": "llama"}, "model", "qk_norm") is None
        True
    """
    for name in names:
        config = config.get(name) if isinstance(config, dict) else None
    return config


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Returns where two configurations differ, with both values.

    Args:
        old: As `plain` gives it.
        new: Likewise.
        path: Where in the configuration they stand.

    Example:
        >>> differences({"model": {"layers": 4}}, {"model": {"layers": 6}})
        ['model.layers was 4, now 6']
    """
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in sorted(old.keys() | new.keys()):
            inner = f"{path}.{key}" if path else key
            found += differences(old.get(key, "absent"), new.get(key, "absent"), inner)
        return found
    return [] if old == new else [f"{path} was {old!r}, now {new!r}"]
