"""Tables, verdict and figure of `msign_rescue.py`, from its rows alone.

Here: what the rows say. Not here: how they come about (`msign_rescue.py`), which there are to be
(`rescue_arms.py`).
"""

import re
from collections.abc import Callable, Iterable
from statistics import mean
from typing import Any

import plotly.graph_objects as go

from experiments.support import markdown
from experiments.support.figures import arms_of, colour, line, panels
from experiments.support.rescue_arms import ADAMW, ARMS, CLEAN, CONFIGURATIONS

Row = dict[str, Any]
MLP = "MLP P=50"
# Arms with a colour of their own in the figure, and that of all others.
DRAWN = {
    CLEAN: colour(0),
    ADAMW: colour(2),
    MLP: colour(5),
    "attention P=50": colour(1),
    "attention P=10": colour(6),
    "QK-norm": colour(3),
    "muon": colour(4),
}
OTHERS = "#dddddd"
HOLDS, LOST = 5.0, 20.0  # per cent above the clean run of the seed: at most, at least


def tables(rows: list[Row]) -> str:
    """Every configuration's arms, then what decides, then the seeds of development."""
    judged = [row for row in rows if _counts(row)]
    parts = []
    for name in _names(judged):
        chosen = _of(judged, name)
        steps = chosen[0]["settings"]["steps"]
        parts.append(f"**{name}**: {CONFIGURATIONS[name].says}; {steps:,} steps.")
        parts.append(_arms(chosen))
    if judged:
        parts += ["What decides:", _claim(judged), "By period:", _periods(judged)]
    if early := [row for row in rows if not _counts(row)]:
        parts += ["Development seeds, not in the verdict:", _development(early)]
    return "\n\n".join(parts)


def headline(rows: list[Row]) -> str:
    """The verdict in one line: a word, then the numbers that decide.

    "reproduces" wants two configurations or more that were tried, and all of them rescued.
    """
    names, judged = _names(rows), [row for row in rows if _counts(row)]
    met = [name for name in names if holds(judged, name)]
    near = [f"{x} {_range(over(judged, x))} (AdamW {_range(over(judged, x, ADAMW))})" for x in met]
    far = []
    for name in (name for name in names if name not in met):
        own = over(judged, name)
        said = _range(own or over(rows, name)) + ("" if own else " on a development seed")
        far.append(f"{name} {said}")
    parts = [f"within {HOLDS:g} % of clean in {len(met)} of {len(names)} configurations"]
    missed = [f"not {', '.join(far)}"] if far else []
    parts.append(f"% above it: {', '.join([*near, *missed])}")
    useless = all(_beyond(judged, name, MLP, HOLDS) for name in met)
    if met and useless:
        parts.append("MLP only fails")
    bounds = [f"{said} on {name}" for name in met if (said := bracket(judged, name))]
    parts.append(f"P breaks {', '.join(bounds) or 'not bracketed'}")
    whole = 2 <= len(met) == len(names) and bool(bounds) and useless
    word = "reproduces" if whole else "partly" if met else "not at this size"
    return f"{word}: {'; '.join(parts)}"


def over(
    rows: list[Row], configuration: str, arm: str | None = None, name: str = "loss"
) -> list[float]:
    """Per cent by which an arm (None: the judged one) is above clean, seed by seed."""
    arm = CONFIGURATIONS[configuration].judged if arm is None else arm
    chosen = _of(rows, configuration)
    clean = {row["seed"]: row[name] for row in chosen if row["arm"] == CLEAN}
    of = [row for row in chosen if row["arm"] == arm and row["seed"] in clean]
    return [100 * (row[name] / clean[row["seed"]] - 1) for row in of]


def holds(rows: list[Row], configuration: str) -> bool:
    """Whether the judged arm ends near clean and AdamW far above it, in each of all seeds."""
    near = over(rows, configuration)
    return _near(near, configuration) and _beyond(rows, configuration, ADAMW, LOST)


def bracket(rows: list[Row], configuration: str) -> str:
    """Between which periods the restoration of the attention stops holding; "" if unknown.

    Behind the longest that holds, even where a shorter one misses.
    """
    whole = len(CONFIGURATIONS[configuration].seeds)
    found = [
        (period, over(rows, configuration, arm)) for period, arm in _by_period(rows, configuration)
    ]
    held = {p: _near(ratios, configuration) for p, ratios in found if len(ratios) >= whole}
    last = max((p for p in held if held[p]), default=0)
    beyond = [p for p in held if p > last]
    if not beyond:
        return ""
    return f"at {last}–{beyond[0]}" if last else f"below {beyond[0]}"


def figure(rows: list[Row]) -> go.Figure:
    """Held-out loss over steps, a panel for each configuration, a line for each run."""
    judged = [row for row in rows if _counts(row)]
    names, arms = _names(judged), sorted(arms_of(judged), key=lambda arm: arm in DRAWN)
    drawn = panels(names, columns=2, shared_yaxes=True)
    place = lambda row: names.index(row["configuration"])
    shown: set[str] = set()
    for arm in arms:
        label = arm if arm in DRAWN else "others"
        for row in (row for row in judged if row["arm"] == arm):
            steps = [row["settings"]["evaluate_every"] * n for n in range(len(row["curve"]))]
            text, style = f"{arm}, seed {row['seed']}", {"color": DRAWN.get(arm, OTHERS)}
            curve, i = line((steps, row["curve"]), label, text, shown, **style), place(row)
            drawn.add_trace(curve, row=i // 2 + 1, col=i % 2 + 1)
    drawn.update_xaxes(title="step")
    drawn.update_yaxes(title="held-out loss", range=[1.6, 3.4], col=1)
    return drawn


def _arms(rows: list[Row]) -> str:
    """One configuration's table."""
    name = rows[0]["configuration"]
    columns: dict[str, Callable[[str, list[Row]], str]] = {
        "arm": lambda arm, of: arm,
        "seeds": lambda arm, of: ", ".join(str(row["seed"]) for row in of),
        "held-out loss": lambda arm, of: _list(_all(of, "loss"), ".2f"),
        "over clean": lambda arm, of: _list(over(rows, name, arm), "+.1f", " %"),
        "at the last step": lambda arm, of: _list(over(rows, name, arm, "end"), "+.1f", " %"),
        "perplexity": lambda arm, of: f"{mean(_all(of, 'perplexity')):.1f}",
        "grad max": lambda arm, of: f"{max(_all(of, 'grad_max')):.2g}",
        "max logit": lambda arm, of: f"{max(_all(of, 'max_logit')):.2g}",
        "stable rank of W_q, W_k": lambda arm, of: f"{mean(_all(of, 'stable_rank')):.1f}",
        "a": lambda arm, of: f"{_jacobian(of, 'a'):.2g}",
        "M": lambda arm, of: f"{_jacobian(of, 'M'):.2g}",
        "a·M": lambda arm, of: f"{_jacobian(of, 'aM'):.2g}",
    }
    cells = []
    for arm in (arm for arm in ARMS if any(row["arm"] == arm for row in rows)):
        of = [row for row in rows if row["arm"] == arm]
        cells.append([write(arm, of) for write in columns.values()])
    return _markdown(list(columns), cells)


def _claim(rows: list[Row]) -> str:
    """Each configuration against the claim."""
    cells = []
    for name in _names(rows):
        near, judged = over(rows, name), CONFIGURATIONS[name].judged
        cells.append(
            [
                name,
                f"{judged}: {_list(near, '+.1f', ' %')}",
                _list(over(rows, name, ADAMW), "+.1f", " %"),
                _list(over(rows, name, MLP), "+.1f", " %"),
                "yes" if holds(rows, name) else "no",
            ]
        )
    head = [
        "configuration",
        f"judged arm over clean [≤ {HOLDS:.0f} %]",
        f"AdamW [≥ {LOST:.0f} %]",
        f"MLP only [> {HOLDS:.0f} %]",
        "rescued",
    ]
    return _markdown(head, cells)


def _periods(rows: list[Row]) -> str:
    """Loss over clean against P, attention restored."""
    names = _names(rows)
    found = {name: dict(_by_period(rows, name)) for name in names}
    periods = sorted({period for arms in found.values() for period in arms})
    cells = []
    for period in periods:
        arms = {name: found[name].get(period) for name in names}
        ratios = {n: over(rows, n, arm) if arm else [] for n, arm in arms.items()}
        cells.append([str(period), *(_list(ratios[name], "+.1f", " %") for name in names)])
    return _markdown(["P", *names], cells)


def _development(rows: list[Row]) -> str:
    """Runs that served to choose a configuration."""
    cells = []
    for row in rows:
        same = [other for other in rows if other["seed"] == row["seed"]]
        ratio = over(same, row["configuration"], row["arm"])
        cells.append(
            [
                row["configuration"],
                row["arm"],
                str(row["seed"]),
                f"{row['settings']['steps']:,}",
                f"{row['loss']:.2f}",
                _list(ratio, "+.1f", " %"),
            ]
        )
    return _markdown(
        ["configuration", "arm", "seed", "steps", "held-out loss", "over clean"], cells
    )


def _by_period(rows: list[Row], configuration: str) -> list[tuple[int, str]]:
    """(P, arm) of the arms that restore the attention, by P."""
    arms = {row["arm"] for row in _of(rows, configuration)}
    matches = [re.fullmatch(r"attention P=(\d+)", arm) for arm in arms]
    return sorted((int(match[1]), match[0]) for match in matches if match)


def _counts(row: Row) -> bool:
    """Whether a row's seed is one of the verdict."""
    return row["seed"] in CONFIGURATIONS[row["configuration"]].seeds


def _near(ratios: list[float], configuration: str) -> bool:
    whole = len(ratios) >= len(CONFIGURATIONS[configuration].seeds)
    return whole and all(x <= HOLDS for x in ratios)


def _beyond(rows: list[Row], configuration: str, arm: str, bound: float) -> bool:
    """Whether an arm ends at least that far above clean in each of all seeds, NaN included."""
    ratios = over(rows, configuration, arm)
    whole = len(ratios) >= len(CONFIGURATIONS[configuration].seeds)
    return whole and not any(x < bound for x in ratios)


def _jacobian(rows: list[Row], name: str) -> float:
    """The mean over seeds at the last checkpoint before the end; NaN without one."""
    last = [row["jacobian"][-1][name] for row in rows if row["jacobian"]]
    return mean(map(float, last)) if last else float("nan")


def _names(rows: list[Row]) -> list[str]:
    """Configurations that have rows, in order."""
    there = {row["configuration"] for row in rows}
    return [name for name in CONFIGURATIONS if name in there]


def _of(rows: list[Row], configuration: str) -> list[Row]:
    return [row for row in rows if row["configuration"] == configuration]


def _all(rows: Iterable[Row], name: str) -> list[float]:
    return [float(row[name]) for row in rows]


def _list(values: list[float], form: str, unit: str = "") -> str:
    return ", ".join(f"{x:{form}}{unit}" for x in values) or "–"


def _range(values: list[float]) -> str:
    ends = dict.fromkeys(f"{x:.1f}" for x in (min(values), max(values))) if values else {}
    return "…".join(ends) if ends else "not run"


def _markdown(cells: list[str], rows: list[list[str]]) -> str:
    return "\n".join([*markdown.head(cells), *map(markdown.line, rows)])
