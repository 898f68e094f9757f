"""The source as text: which way imports run, how long a file is, and that nothing is suppressed."""

import ast
import re
import tokenize
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("stabmon", "optax_ext", "models", "experiments")
# Packages run one way: stabmon ← optax_ext ← experiments → models.
FORBIDDEN = {
    "stabmon": {"optax_ext", "models", "experiments"},
    "optax_ext": {"models", "experiments"},
    "models": {"stabmon", "optax_ext", "experiments"},
    "stabmon/alarms": {"jax", "flax", "optax"},
    "stabmon/output": {"jax", "flax", "optax"},
    "stabmon/checkpoints": {"jax", "flax", "optax", "orbax"},
}
SUPPRESSION = re.compile(r"noqa|(type|pyright|pyrefly|ty|mypy|ruff)\s*:\s*ignore|fmt:\s*(off|skip)")


def files(package):
    found = sorted((ROOT / package).rglob("*.py"))
    assert found
    return found


def imported(path):
    """Dotted names that a file imports: `a.b.c` for `from a.b import c`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import; write it in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(parts):
    """The folder of `stabmon` that a path leads into; a file beside the folders is its own."""
    inside = parts[1].removesuffix(".py") if len(parts) > 1 else "__init__"
    known = (ROOT / "stabmon" / inside).is_dir() or (ROOT / "stabmon" / f"{inside}.py").exists()
    return inside if known else "__init__"


def rooms():
    """Room of `stabmon` -> the rooms that it imports from."""
    graph = {}
    for path in files("stabmon"):
        here = room(path.relative_to(ROOT).parts)
        names = (name.split(".") for name in imported(path))
        there = {room(parts) for parts in names if parts[0] == "stabmon"}
        graph.setdefault(here, set()).update(there - {here})
    return graph


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_import_runs_the_other_way(package):
    used = {path: {name.split(".")[0] for name in imported(path)} for path in files(package)}
    wrong = {path.name: names & FORBIDDEN[package] for path, names in used.items()}
    assert {name: names for name, names in wrong.items() if names} == {}


def test_no_cycle_of_imports_between_folders():
    graph = rooms()
    for name in TopologicalSorter(graph).static_order():  # raises CycleError, with the cycle
        print(f"{name} -> {', '.join(sorted(graph[name])) or 'nothing'}")
    assert {"linalg", "metrics", "monitor", "runs", "alarms"} <= graph.keys()


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_is_past_300_lines(package):
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files(package)}
    assert {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > 300} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_is_suppressed(package):
    def comments(path):
        with path.open("rb") as f:
            yield from (t for t in tokenize.tokenize(f.readline) if t.type == tokenize.COMMENT)

    found = [
        f"{path.relative_to(ROOT)}:{comment.start[0]} {comment.string}"
        for path in files(package)
        for comment in comments(path)
        if SUPPRESSION.search(comment.string)
    ]
    assert found == []
