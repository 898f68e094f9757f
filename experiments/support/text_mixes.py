"""Texts of different kinds without a download: code, prose, prose over and over, and half of each.

Here: `write_mixes`, all from the Python standard library. Not here: batches (`data.py`), nor what a
model makes of them (`grades.py`).
"""

import ast
import sysconfig
from pathlib import Path

import numpy as np

from experiments.data import load_corpus

MIXES = ("code", "prose", "repeated prose", "half code, half repeated prose")
REPEATED = 4_000
_BLOCK = 2_000


def write_mixes(folder: Path, size: int = 1_000_000) -> dict[str, Path]:
    """Text files by name of `MIXES`, of `size` bytes at most; those that are there stay.

    code: the standard library's sources, comments and docstrings included. prose: its modules'
    docstrings, of modules, classes and functions, all indentation taken off. repeated prose: the
    first 4,000 bytes of these, over and over. The last takes turns of 2,000 bytes with the code.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"{name.replace(',', '').replace(' ', '-')}.txt" for name in MIXES}
    if not all(path.exists() for path in paths.values()):
        code = load_corpus(limit=size).tokens.tobytes()
        prose = docstrings(Path(sysconfig.get_path("stdlib")), size)
        first = prose[:REPEATED]
        repeated = (first * (size // len(first) + 1))[:size]
        texts = (code, prose, repeated, alternating(code, repeated, _BLOCK)[:size])
        for path, text in zip(paths.values(), texts, strict=True):
            # A cut may have gone through a character.
            path.write_text(text.decode(errors="ignore"), encoding="utf-8")
    return paths


def docstrings(root: Path, size: int) -> bytes:
    """The docstrings of the modules right under `root`, a blank line between two of them."""
    parts, length = [], 0
    for path in sorted(root.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            text = ast.get_docstring(node)
            if text and len(text) > 80:
                parts.append((text + "\n\n").encode())
                length += len(parts[-1])
        if length >= size:
            break
    return b"".join(parts)[:size]


def alternating(first: bytes, second: bytes, block: int) -> bytes:
    """Blocks of the two texts in turn, as long as both last.

    >>> alternating(b"aaaa", b"bbbb", 2)
    b'aabbaabb'
    """
    count = min(len(first), len(second)) // block
    cut = lambda text: np.frombuffer(text[: count * block], np.uint8).reshape(count, 1, block)
    return np.concatenate([cut(first), cut(second)], axis=1).tobytes()
