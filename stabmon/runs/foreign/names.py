"""What other trainers call a loss, a gradient norm, a learning rate, a step.

What lives here: `step_name`, and `chosen`, which finds the column of each key. What does not:
reading files (`tables`, `text`, `tensorboard`, `wandb`).
"""

import re
from collections.abc import Iterable, Mapping

from stabmon.quantities import GRAD_NORM, HELD_OUT, LEARNING_RATE, LOSS, quantity_of, split_key
from stabmon.runs.run import EPOCH

STEP = "step"
# Short names for `--map`, besides whole keys.
SHORT = {
    "loss": LOSS,
    "held_out": HELD_OUT,
    "grad_norm": GRAD_NORM,
    "learning_rate": LEARNING_RATE,
    "epoch": EPOCH,
    "param_norm": "symptoms/global/param_norm/value",
    "update_norm": "symptoms/global/update_norm/value",
}
# A trainer's own count of updates comes before its logger's count of rows.
_STEPS = (
    r"(?:train|trainer)/global_step|global_step",
    r"(?:train|training|trainer|current)?[_/]?steps?",
    r"(?:train/)?(?:iteration|iter|num_updates|update|batch|tick)s?",
    r"_step",
)
_OTHER_TEXT = r"(?:eval|evaluation|val|valid|validation|dev|held_?out)"
_LOSS = r"(?:avg_|mean_|lm_)?loss(?:_value)?"
# In order of preference, of names in lower case with "_" between words.
_PATTERNS = {
    LOSS: (
        "loss",
        r"(?:.*/)?(?:train|training|learning|lm|tr|reduced_train|global_avg)[/_]?(?:lm_)?loss(?:_step)?",
        r"loss(?:es)?/(?:train|training|loss)",
        "trl",
        r"(?:.*/)?(?:train_?)?(?:cross_?entropy|ce|nll|total)_?loss",
    ),
    HELD_OUT: (
        rf"(?:.*/)?{_OTHER_TEXT}[/_]{_LOSS}",
        rf"loss(?:es)?/{_OTHER_TEXT}",
        rf"lm_loss_{_OTHER_TEXT}",
        "tel",
        rf"(?:.*/)?{_OTHER_TEXT}[/_].*loss",
        rf"(?:.*/)?test[/_]{_LOSS}",
    ),
    GRAD_NORM: (
        r"(?:.*/)?(?:raw|unclipped)_grad_?norm",
        r"(?:.*/)?(?:global_|total_)?(?:grad|gradient)s?[/_]?norm(?:/total|/global)?",
        r"(?:.*/)?(?:gnorm|total_norm)",
        "norm",
    ),
    LEARNING_RATE: (
        r"(?:.*/)?(?:current_)?(?:lr|learning_rate)",
        r"(?:.*/)?(?:lr|learning_rate)_(?!sched)\w+(?:/(?:pg|group_?)\d+)?",
        r"(?:.*/)?(?:lr|learning_rate)/(?:pg|group_?)?\d+",
    ),
    EPOCH: (r"(?:.*/)?epoch",),
    SHORT["param_norm"]: (r"(?:.*/)?(?:param|params|weight|weights)[/_]norm(?:/total)?",),
    SHORT["update_norm"]: (r"(?:.*/)?updates?[/_]norm(?:/total)?",),
}
_IS_OTHER = re.compile(rf"(?:.*[/_])?(?:{_OTHER_TEXT}|test)(?:[/_].*)?")


def as_map(told: Iterable[str]) -> dict[str, str]:
    """Returns name → column of `--map loss=train/nll step=updates`.

    Args:
        told: Such texts.

    Raises:
        ValueError: One lacks its "=".
    """
    told = list(told)
    if wrong := [x for x in told if "=" not in x]:
        raise ValueError(f"--map: expected NAME=COLUMN, such as loss=train/nll, got {wrong[0]}")
    return {name: column for name, column in (x.split("=", 1) for x in told)}


def step_name(columns: Iterable[str]) -> str | None:
    """Returns the column that counts steps, None without one.

    Args:
        columns: Names in the log.

    Example:
        >>> step_name(["_step", "train/global_step", "train/loss"]), step_name(["loss"])
        ('train/global_step', None)
    """
    plain = {column: _plain(column) for column in columns}
    for pattern in _STEPS:
        for column, name in plain.items():
            if re.fullmatch(pattern, name):
                return column
    return None


def chosen(columns: Iterable[str], told: Mapping[str, str]) -> dict[str, str]:
    """Returns key → column: as told, by name, and each column that is a key itself.

    Args:
        columns: Names in the log.
        told: Short name or key → column, as of `--map`; "step" is of no account here.

    Raises:
        ValueError: A name that is neither, or a column that the log lacks.

    Example:
        >>> chosen(["lm loss", "grad-norm", "loss-scale"], {})
        {'symptoms/global/loss/value': 'lm loss', 'symptoms/global/grad_norm/value': 'grad-norm'}
    """
    columns = list(columns)
    found = {}
    for name, column in told.items():
        if name == STEP:
            continue
        if name not in SHORT and split_key(name) is None:
            raise ValueError(
                f"--map {name}={column}: {name} is no quantity; write one of {', '.join(SHORT)}, "
                f"{STEP}, or a whole key such as {GRAD_NORM}"
            )
        if column not in columns:
            some = ", ".join(columns[:20])
            raise ValueError(f"--map {name}={column}: the log has no {column}, it has {some}")
        found[SHORT.get(name, name)] = column
    plain = {column: _plain(column) for column in columns}
    for key, patterns in _PATTERNS.items():
        named = (
            column
            for pattern in patterns
            for column, name in plain.items()
            if re.fullmatch(pattern, name) and (key != LOSS or not _IS_OTHER.fullmatch(name))
        )
        if key not in found and (column := next(named, None)) is not None:
            found[key] = column
    return found | {x: x for x in columns if quantity_of(x) is not None and x not in found}


def _plain(name: str) -> str:
    """A name in lower case with "_" between words."""
    return re.sub(r"[\s.\-]+", "_", name.strip().lower())
