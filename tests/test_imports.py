"""Imports run one way: stabmon ← optax_ext ← experiments → models."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {
    "stabmon": {"optax_ext", "models", "experiments"},
    "optax_ext": {"models", "experiments"},
    "models": {"stabmon", "optax_ext", "experiments"},
    "stabmon/alarms": {"jax", "flax", "optax"},
    "stabmon/output": {"jax", "flax", "optax"},
    "stabmon/checkpoints": {"jax", "flax", "optax", "orbax"},
}


def imported(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_import_runs_the_other_way(package):
    files = list((ROOT / package).rglob("*.py"))
    assert files
    wrong = [(p.name, sorted(set(imported(p)) & FORBIDDEN[package])) for p in files]
    assert [entry for entry in wrong if entry[1]] == []
