"""Text for the experiments, without a download, and batches that depend on (seed, step) alone.

What lives here: `load_corpus`, which turns the Python standard library's own sources (the default),
a UTF-8 file, a folder of text files or a file of tokens into a `Corpus`; and `batches`, a grain
`MapDataset` whose element at `step` is the batch of that step. A run that is resumed or rolled back
sees the data it would have seen. What does not: tokenizers, host sharding, and the loop.

    corpus = load_corpus(None)
    data = batches(corpus, seed=0, batch=16, context=48)
    inputs, targets = data[step][:, :-1], data[step][:, 1:]
"""

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import grain
import numpy as np

Split = Literal["train", "held_out"]

HELD_OUT = 0.1
STANDARD_LIBRARY_LIMIT = 5_000_000
_TOKEN_SUFFIXES = (".bin", ".u16", ".npy")
# Third-party code, test suites, code tables that are hardly text, and what a build wrote about its
# own machine: none of it is the same, or worth learning, on every computer.
_LEFT_OUT_FOLDERS = frozenset(
    "__pycache__ dist-packages encodings ensurepip idlelib idle_test lib2to3 pydoc_data "
    "site-packages test tests".split()
)
_LEFT_OUT_PREFIXES = ("_sysconfigdata", "config-", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class Corpus:
    """A text as one long row of tokens.

    Attributes:
        name: What it was read from.
        tokens: All tokens in order, shape (tokens,), an unsigned integer type for bytes and for raw
            token files; perhaps a memory map.
        vocabulary: One more than the largest token that can occur: 256 for bytes, one more than
            the largest token that does occur for token files.
    """

    name: str
    tokens: np.ndarray
    vocabulary: int

    def split(self, name: Split = "train") -> np.ndarray:
        """Returns the first 90 % of the tokens (`train`) or the last 10 % (`held_out`).

        Args:
            name: Which part.

        Raises:
            ValueError: If the part is not one of the two.

        Example:
            >>> corpus = Corpus("digits", np.arange(10, dtype=np.uint8), 256)
            >>> corpus.split("held_out")
            array([9], dtype=uint8)
        """
        if name not in get_args(Split):
            raise ValueError(f'unknown split {name!r}: write "train" or "held_out"')
        border = len(self.tokens) - int(HELD_OUT * len(self.tokens))
        return self.tokens[:border] if name == "train" else self.tokens[border:]


def load_corpus(path: str | Path | None = None, *, limit: int | None = None) -> Corpus:
    """Returns the corpus at `path`, or the Python standard library's sources for None.

    Text is read as bytes: the vocabulary is 256 and nothing is decoded, but it has to be UTF-8 so
    that a picture or an archive is not learned by mistake. Files of a folder are joined in the
    order of their paths; hidden ones are left out. `.bin` and `.u16` files are raw little-endian
    uint16 tokens, `.npy` files are one-dimensional integer arrays; both are memory-mapped. The
    standard library differs a little between versions of Python, and so do runs trained on it.

    Args:
        path: A text file, a folder of text files, a token file, or None.
        limit: Keep the first so many tokens; None keeps 5,000,000 of the standard library and all
            of anything else.

    Raises:
        FileNotFoundError: If there is nothing at `path`.
        ValueError: If nothing can be read as tokens there; says what was found.

    Example:
        >>> corpus = load_corpus(limit=1000)
        >>> corpus.tokens.shape, corpus.tokens.dtype, corpus.vocabulary
        ((1000,), dtype('uint8'), 256)
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is a number of tokens to keep, at least 1, got {limit}")
    if path is None:
        root, limit = Path(sysconfig.get_path("stdlib")), limit or STANDARD_LIBRARY_LIMIT
        return _text("standard library", _standard_library(root), limit)
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"no data at {path}: 0 tokens found. Give a UTF-8 text file, a folder of them, a "
            f"token file ({', '.join(_TOKEN_SUFFIXES)}), or no path for the standard library"
        )
    if path.is_dir():
        files = _visible_files(path)
        if shards := [file for file in files if file.suffix in _TOKEN_SUFFIXES]:
            raise ValueError(
                f"{shards[0]} is a token file in a folder of text: join the token files into one "
                f"and give its own path"
            )
        return _text(str(path), files, limit)
    if path.suffix in _TOKEN_SUFFIXES:
        return _tokens(path, limit)
    return _text(str(path), [path], limit)


def windows(
    corpus: Corpus, *, seed: int, batch: int, context: int, split: Split = "train"
) -> grain.MapDataset:
    """Returns which windows of `split` each step reads: element `step` is int64, shape (batch,).

    Window i holds the tokens i·context … i·context + context of the split (neighbours share one
    token, the last target of one being the first input of the next). Every epoch visits each
    window once in an order of its own, without end.

    Args:
        corpus: Where the tokens come from.
        seed: Chooses the order; runs of one seed see the same data.
        batch: Windows a step.
        context: Inputs a window.
        split: `train` or `held_out`.

    Raises:
        ValueError: If the split holds fewer than `batch` windows, or a size is below 1.

    Example:
        >>> corpus = Corpus("digits", np.arange(200, dtype=np.uint8), 256)
        >>> order = windows(corpus, seed=0, batch=4, context=20)  # 8 windows: two steps an epoch
        >>> sorted(int(i) for step in (0, 1) for i in order[step])
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    if min(batch, context) < 1 or seed < 0:
        raise ValueError(
            f"batch and context are at least 1 and seed at least 0, got {batch=}, {context=}, "
            f"{seed=}"
        )
    found, needed = len(corpus.split(split)), batch * context + 1
    if found < needed:
        share = HELD_OUT if split == "held_out" else 1 - HELD_OUT
        raise ValueError(
            f"{corpus.name}: {found} tokens found in the {split} split, {needed} are needed for "
            f"one batch of {batch} windows of {context} + 1 tokens: give about "
            f"{int(np.ceil(needed / share))} tokens of data, or a smaller batch or context"
        )
    # grain seeds epoch e with seed + e, so neighbouring seeds would read each other's epochs:
    # they are spread over 32 bits first.
    spread = int(np.random.SeedSequence(seed).generate_state(1, np.uint32)[0])
    order = grain.MapDataset.range((found - 1) // context).shuffle(seed=spread).repeat()
    return order.batch(batch, drop_remainder=True, batch_fn=np.asarray)


def batches(
    corpus: Corpus, *, seed: int, batch: int, context: int, split: Split = "train"
) -> grain.MapDataset:
    """Returns the batches of a run: element `step` is int32, shape (batch, context + 1).

    A pure function of (seed, step): any step can be asked for, in any order, in any process. The
    inputs are `[:, :-1]` and the targets `[:, 1:]`. The batch is gathered at once from the indices
    of `windows`, which costs 0.3 ms at 16 × 48 instead of grain's one element after another.

    Args:
        corpus: Where the tokens come from.
        seed: Chooses the order of the windows.
        batch: Windows a step, B.
        context: Inputs a window, T.
        split: `train` or `held_out`.

    Raises:
        ValueError: If the split is too short for one batch, or a size is below 1.

    Example:
        >>> data = batches(load_corpus(limit=10_000), seed=0, batch=4, context=16)
        >>> data[100_000].shape, data[3].dtype, bool((data[7] == data[7]).all())
        ((4, 17), dtype('int32'), True)
    """
    tokens, within = corpus.split(split), np.arange(context + 1)
    order = windows(corpus, seed=seed, batch=batch, context=context, split=split)
    return order.map(
        lambda index: tokens[index[:, None] * context + within[None, :]].astype(np.int32)
    )


def _visible_files(root: Path) -> list[Path]:
    """All files under `root` but hidden ones, in an order that is the same on every system."""
    found = [
        path
        for path in root.rglob("*")
        if path.is_file() and not any(part[0] == "." for part in path.relative_to(root).parts)
    ]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _standard_library(root: Path) -> list[Path]:
    """The modules of the standard library that are prose and code, not tables or tests."""

    def kept(parts: tuple[str, ...]) -> bool:
        left_out = _LEFT_OUT_FOLDERS.intersection(parts)
        return not left_out and not any(part.startswith(_LEFT_OUT_PREFIXES) for part in parts)

    files = [path for path in root.rglob("*.py") if kept(path.relative_to(root).parts)]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def _text(name: str, files: list[Path], limit: int | None) -> Corpus:
    """The bytes of `files`, one after another, until `limit`."""
    parts: list[bytes] = []
    missing = limit
    for file in files:
        data = file.read_bytes()
        try:
            data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{file} is not UTF-8 text (byte {error.start} is 0x{data[error.start]:02x}): "
                f"re-encode it, take it out of the folder, or name a token file "
                f"{', '.join(_TOKEN_SUFFIXES)}"
            ) from error
        parts.append(data[:missing])
        if missing is not None:
            missing -= len(parts[-1])
            if missing == 0:
                break
    tokens = np.frombuffer(b"".join(parts), np.uint8)
    if not tokens.size:
        raise ValueError(
            f"{name}: 0 tokens found in {len(files)} files, at least one batch is needed: give a "
            f"UTF-8 text file, a folder of them, or a token file ({', '.join(_TOKEN_SUFFIXES)})"
        )
    return Corpus(name, tokens, 256)


def _tokens(path: Path, limit: int | None) -> Corpus:
    """A memory map of the tokens at `path`, with the vocabulary they need."""
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"{path}: 0 tokens found, the file is empty; at least one batch is needed")
    if path.suffix == ".npy":
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            raise ValueError(f"{path} is not a NumPy array file: {error}") from error
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(
                f"{path} holds {tokens.dtype} of shape {tokens.shape}: save a one-dimensional "
                f"integer array, e.g. np.save(path, tokens.ravel().astype(np.uint16))"
            )
        if not tokens.size:
            raise ValueError(f"{path}: 0 tokens found, at least one batch is needed")
    elif size % 2:
        raise ValueError(f"{path} holds {size} bytes, an odd number: uint16 tokens take two each")
    else:
        tokens = np.memmap(path, dtype="<u2", mode="r")
    tokens = tokens[:limit]
    if tokens.min() < 0:
        raise ValueError(f"{path} holds a token below 0 ({tokens.min()}): tokens count from 0")
    return Corpus(str(path), tokens, int(tokens.max()) + 1)
