"""Logs as a trainer printed them: a step and named numbers on each line that counts.

What lives here: reading Megatron's, DeepSpeed's, MaxText's, llm.c's, nanoGPT's, torchtitan's and
like logs. What does not: tables (`tables`), what the names mean (`names`).

A line counts if it tells a step and a number; on a line about evaluation names get "eval/" in
front. A held-out loss on a line without a step belongs to the step before it.
"""

import re
from pathlib import Path

from stabmon.runs.foreign.log import Log, Row

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = r"[-+]?(?:\d[\d,]*(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)"
_STEP = re.compile(
    r"(?<![\w/])(?:(?:global|training|train|completed|current)[ _])?"
    r"(?:step|steps|iteration|iterations|iter)(?:\s*[:=#]\s*|\s+|\s*\[\s*)(\d[\d,]*)(?![\d.]*[a-zA-Z])"
    r"|(?<![\w/])s:(\d+)\b",
    re.I,
)
_PAIR = re.compile(rf"([A-Za-z][\w .\-/]*?)['\"]?\s*[:=]\s*[\[(]?\s*({_NUMBER})(?![\w.:%])", re.I)
_BARE = re.compile(
    rf"(?<![\w/])((?:(?:train|val|valid|validation|eval|test|lm)[ _])?loss|grad[ _]?norm|norm|lr"
    rf"|learning[ _]rate)\s+({_NUMBER})(?![\w.:%])",
    re.I,
)
_EVALUATION = re.compile(r"\b(?:eval|evaluation|validation|val)\b[^|:=]*$", re.I)
_TEST = re.compile(r"\btest set\b", re.I)
_HELD_OUT = re.compile(r"(?:val|valid|validation|eval)[ _]loss", re.I)
# What tells whose log it is, and whether its losses are means over the steps of a row.
_KINDS = (
    ("elapsed time per iteration", "Megatron log", True),
    ("log_dist", "DeepSpeed log", None),
    ("completed step:", "MaxText log", False),
)


def read_text(path: Path) -> Log:
    """Returns the rows of a log that a trainer printed.

    Args:
        path: The file.

    Raises:
        ValueError: Fewer than two lines tell both a step and a number.
    """
    rows: list[Row] = []
    kind, means = "text log", None
    known = False
    newest = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            line = _COLOR.sub("", line)
            if not known:
                for sign, name, mean in _KINDS:
                    if sign in line:
                        kind, means, known = name, mean, True
                        break
            step, values = _row(line)
            if step is None and any(map(_HELD_OUT.fullmatch, values)):
                step = newest
            if step is not None and values:
                rows.append((step, values))
                newest = step
    if len(rows) < 2:  # prose may name a step too
        raise ValueError(
            f"{path} is no log that is known: fewer than two lines have a step and a number, such "
            'as "step: 10 loss: 2.5"; known are run folders, trainer_state.json, TensorBoard and '
            "Weights & Biases files, CSV, JSON and JSON lines, and printed logs"
        )
    return Log(kind, rows, means)


def _row(line: str) -> tuple[int | None, dict[str, float]]:
    """Step and named numbers of a line."""
    found = _STEP.search(line)
    if found is None:
        return None, {name: _float(text) for name, text in _BARE.findall(line)}
    step = int((found[1] or found[2]).replace(",", ""))
    if step >= 2**63:
        return None, {}
    before, after = line[: found.start()], line[found.end() :]
    prefix = "test/" if _TEST.search(line) else "eval/" if _EVALUATION.search(before) else ""
    pairs = [*_BARE.findall(after), *_PAIR.findall(after), *_PAIR.findall(before)]
    return step, {prefix + name.strip(): _float(text) for name, text in pairs}


def _float(text: str) -> float:
    """A number with or without commas between thousands."""
    return float(text.replace(",", ""))
