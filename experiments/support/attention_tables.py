"""Tables, headline and figure of `attention_doses.py`, from its rows alone.

What the numbers of a row are is `attention_judge.py`'s.
"""

from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import plotly.graph_objects as go

from experiments.support.figures import COLOURS, arms_of, colour, line, panels
from experiments.support.rows import Row
from experiments.support.verdicts import CLEAN

MAIN, MILD = "7/0", "6/0"
LOSSES = ("held-out loss", "training loss")
SPECTRUM = "Δ2 spectrum"
MILD_LEAD, RATE = 0.2, 1.0


def tables(rows: list[Row]) -> str:
    """Doses and models, first alarms by monitor, the sensitivity of Δ2, false alarms."""
    faulty, clean = _split(rows)
    parts = [
        f'{_count(rows)}. Steps after the onset, by seed; "never" is never before the run\'s end, '
        '">" a lead over what never alarmed:\n',
        *_arms_table(faulty),
        f"\nFirst alarm, median (range) over seeds, in steps of the run; onset {_onset(rows)}:\n",
        *_monitors_table(faulty),
        "\nThe Δ2 spectrum by lag, α and aggregate over heads: first alarm, median (range), and "
        "median z 200 to 600 steps after the onset; right, samples of the clean runs beyond "
        "|z| = 5, and runs with an alarm:\n",
        *_sensitivity_table(faulty, clean),
        "\nFalse alarms in the clean runs, each judged by those of the other seeds, or by itself "
        "(default alarms):\n",
        *_false_alarms_table(clean),
    ]
    return "\n".join(parts)


def headline(rows: list[Row]) -> str:
    """Leads in the main and the mild configuration, false alarms of the default settings."""
    faulty, clean = _split(rows)
    ahead: list[bool] = []
    shares: list[float] = []
    for arm in (MAIN, MILD):
        of = [row for row in faulty if row["arm"] == arm]
        if not of:
            return f"partly: {arm} was not run"
        ahead += [_lead(row, x)[0] > 0 for row in of for x in ("gradient norm", *LOSSES)]
        shares = [100 * _default_lead(row)[0] / row["steps"] for row in of]
    count, steps = _default_alarms(clean)
    rate = 10_000 * count / steps
    good = all(ahead) and min(shares) >= 100 * MILD_LEAD and rate <= RATE
    return (
        f"{'reproduces' if good else 'partly'}: default alarms lead the loss's by "
        f"{median(shares):.0f} % ({min(shares):.0f} to {max(shares):.0f}) of the run at a mild "
        f"dose, {count} false ones in {steps:,} clean steps; judged by clean runs Δ2 is ahead of "
        f"gradient norm and losses in {sum(ahead)} of {len(ahead)} comparisons"
    )


def figure(rows: list[Row]) -> go.Figure:
    """The Δ2 spectrum's distance from healthy over steps: doses beside models, a line a run."""
    drawn = panels(("doses", "models"), columns=2, shared_yaxes=True)
    faulty = arms_of(_split(rows)[0])
    shown: set[str] = set()
    for row in sorted(rows, key=lambda row: row["arm"] != row["clean"]):
        clean, other = row["arm"] == row["clean"], row["clean"] != CLEAN
        label = CLEAN if clean else row["arm"]
        style = {
            "color": colour(0 if clean else 1 + faulty.index(label) % (len(COLOURS) - 1)),
            "dash": "dash" if other and not clean else "solid",
        }
        curve = line(row["course"], label, f"{row['arm']}, seed {row['seed']}", shown, **style)
        drawn.add_trace(curve, row=1, col=2 if other else 1)
    drawn.add_vline(x=_onset(rows), line_dash="dot")
    drawn.update_xaxes(title="step")
    drawn.update_yaxes(range=[-30, 10])
    drawn.update_yaxes(title="z of Δ2, p10 over heads, lag 200", col=1)
    return drawn


def _split(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """Faulty and clean rows."""
    rows = list(rows)
    return [r for r in rows if r["arm"] != r["clean"]], [r for r in rows if r["arm"] == r["clean"]]


def _count(rows: list[Row]) -> str:
    faulty, clean = _split(rows)
    return f"{len(faulty)} faulty and {len(clean)} clean runs"


def _onset(rows: list[Row]) -> int:
    return rows[0]["settings"]["onset"]


def _by_arm(rows: list[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["arm"], []).append(row)
    return found


def _lead(row: Row, over: str) -> tuple[int, str]:
    """Steps by which Δ2 is ahead of a monitor, and how to write them; a bound if that never is."""
    return _ahead(row, row["firsts"][SPECTRUM], row["firsts"][over])


def _default_lead(row: Row) -> tuple[int, str]:
    """The same for the first of the default alarms against the first of the loss."""
    return _ahead(row, row["default"]["first"], row["default"]["loss"])


def _ahead(row: Row, first: int | None, later: int | None) -> tuple[int, str]:
    lead = (later or row["steps"]) - (first or row["steps"])
    if first is None:
        return lead, "never" if later is None else str(lead)
    return lead, str(lead) if later is not None else f"> {lead}"


def _after(row: Row, step: int | None) -> str:
    return "never" if step is None else str(step - _onset([row]))


def _cells(rows: list[Row], show: Callable[[Row], Any]) -> str:
    return ", ".join(str(show(row)) for row in rows)


def _arms_table(faulty: list[Row]) -> list[str]:
    lines = [
        "| arm | seeds | steps | loss above clean at the end | .05 above after | Δ2 alarms after "
        "| ahead of gradient norm | of held-out loss | of training loss | default alarms after "
        "| ahead of the loss's | of the held-out loss | samples that name the last layer |",
        "|---" * 13 + "|",
    ]
    for arm, of in _by_arm(faulty).items():
        named = [x for row in of for x in row["worst_layers"]]
        last = of[0]["settings"]["layers"] - 1
        cells = [
            arm,
            _cells(of, lambda r: r["seed"]),
            str(of[0]["steps"]),
            _cells(of, lambda r: f"{r['gap']:+.2f}"),
            _cells(of, lambda r: _after(r, r["apart"])),
            _cells(of, lambda r: _after(r, r["firsts"][SPECTRUM])),
            *(_cells(of, lambda r, x=x: _lead(r, x)[1]) for x in ("gradient norm", *LOSSES)),
            _cells(of, lambda r: _after(r, r["default"]["first"])),
            _cells(of, lambda r: _default_lead(r)[1]),
            _cells(of, lambda r: _ahead(r, r["default"]["first"], r["firsts"][LOSSES[0]])[1]),
            f"{100 * sum(x == last for x in named) / len(named):.0f} %" if named else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _spread(values: list[int | None]) -> str:
    """Median and range; how many never, where some did not."""
    there = [x for x in values if x is not None]
    if not there:
        return "never"
    text = f"{median(there):g}"
    if len(there) > 1:
        text += f" ({min(there)}–{max(there)})"
    missing = len(values) - len(there)
    return text + (f", {missing} never" if missing else "")


def _monitors_table(faulty: list[Row]) -> list[str]:
    arms = _by_arm(faulty)
    lines = ["| monitor | " + " | ".join(arms) + " |", "|---" * (len(arms) + 1) + "|"]
    for name in faulty[0]["firsts"]:
        cells = [_spread([row["firsts"][name] for row in of]) for of in arms.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    for name, part in (("default alarms: any", "first"), ("default alarms: loss", "loss")):
        cells = [_spread([row["default"][part] for row in of]) for of in arms.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _sensitivity_table(faulty: list[Row], clean: list[Row]) -> list[str]:
    arms = [(arm, of) for arm, of in _by_arm(faulty).items() if arm in (MAIN, MILD)]
    heads = [x for arm, _ in arms for x in (f"{arm}: first alarm", "z")]
    lines = [
        "| lag | α | aggregate | " + " | ".join(heads) + " | clean samples beyond | clean runs |",
        "|---" * (5 + len(heads)) + "|",
    ]
    for name in clean[0]["spectra"]:
        cells = [*name.split(", ")]
        for _, of in arms:
            found = [row["spectra"][name] for row in of]
            cells += [_spread([x[0] for x in found]), f"{median(x[1] for x in found):.1f}"]
        found = [row["spectra"][name] for row in clean]
        beyond = 100 * sum(x[2] for x in found) / sum(x[3] for x in found)
        cells += [f"{beyond:.2f} %", f"{sum(x[0] is not None for x in found)} of {len(found)}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _default_alarms(clean: list[Row]) -> tuple[int, int]:
    """Default alarms in clean runs, and the steps in which they were possible."""
    alarms = sum(len(row["default"]["alarms"]) for row in clean)
    return alarms, sum(row["default"]["judged"] for row in clean)


def _false_alarms_table(clean: list[Row]) -> list[str]:
    names = list(clean[0]["firsts"])
    by = {name: sum(row["firsts"][name] is not None for row in clean) for name in names}
    count, steps = _default_alarms(clean)
    told = [f"{x} ({row['arm']}, seed {row['seed']})" for row in clean for x in _alarms(row)]
    which = ", ".join(f"{name} {n}" for name, n in by.items() if n)
    rows = [
        (f"bands, all {len(names)} monitors", sum(by.values()), which or "none"),
        ("bands, Δ2 spectrum", by[SPECTRUM], ""),
        ("default alarms", count, ", ".join(told) or "none"),
    ]
    lines = [
        "| judge | clean runs | clean steps | false alarms | per 10,000 | which |",
        "|---" * 6 + "|",
    ]
    for name, n, what in rows:
        lines.append(
            f"| {name} | {len(clean)} | {steps:,} | {n} | {10_000 * n / steps:.2f} | {what} |"
        )
    return lines


def _alarms(row: Row) -> list[str]:
    return [f"`{x}`" for x in row["default"]["alarms"]]
