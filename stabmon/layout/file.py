"""A layout written down in a file, for `stabmon scan --layout`.

    name = "mine"
    ignores = ["layers/*/attn/temperature"]

    [[rules]]
    role = "q"                        # or ["q", "k", "v"]
    path = "layers/*/attn/wq/weight"
    pattern = "(n h) d -> n d h"

Keys of a rule are the attributes of `Rule`. What they mean is `rules.py`.
"""

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from stabmon.layout.layout import Layout
from stabmon.layout.libraries import LIBRARIES
from stabmon.layout.rules import Rule

_KEYS = {"name", "rules", "ignores", "requires"}


def read_layout(path: Path) -> Layout:
    """Returns the layout that a TOML file describes.

    Args:
        path: The file.

    Raises:
        ValueError: The file is no TOML, has unknown or missing keys, or a rule is none.
    """
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no TOML: {error}") from error
    if unknown := sorted(data.keys() - _KEYS):
        raise ValueError(f"{path}: unknown keys {unknown}; known are {', '.join(sorted(_KEYS))}")
    tables = data.get("rules")
    if not isinstance(tables, list) or not tables:
        raise ValueError(f"{path} has no rules: write [[rules]] with role, path and pattern")
    rules = tuple(_rule(path, i, table) for i, table in enumerate(tables, 1))
    ignores = data.get("ignores", [])
    if not isinstance(ignores, list) or not all(isinstance(x, str) for x in ignores):
        raise ValueError(f"{path}: ignores is a list of paths, got {ignores!r}")
    name, requires = (str(data.get(key, "")) for key in ("name", "requires"))
    return Layout(name or path.name, rules, ignores=tuple(ignores), requires=requires)


def layouts(path: Path | None) -> tuple[Layout, ...]:
    """Returns the layouts to choose from: that of a file, or else those of known libraries.

    Args:
        path: The file.
    """
    return LIBRARIES if path is None else (read_layout(path),)


def _rule(path: Path, number: int, table: Any) -> Rule:
    """One table of the file as a rule."""
    known = [field.name for field in fields(Rule)]
    if not isinstance(table, dict) or not {"role", "path", "pattern"} <= table.keys() <= {*known}:
        raise ValueError(
            f"{path}: rule {number} needs role, path and pattern, and may have "
            f"{', '.join(known[3:])}; got {table!r}"
        )
    whole: dict[str, Any] = {}
    whole |= {key: tuple(x) if isinstance(x, list) else x for key, x in table.items()}
    try:
        return Rule(**whole)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: rule {number}: {error}") from error
