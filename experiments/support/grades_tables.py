"""Tables, headline and figure of `grades.py`, from its rows alone."""

from statistics import mean

import plotly.graph_objects as go

from experiments.support.continuing import disputed, orders, rank_correlation
from experiments.support.figures import arms_of, curves
from experiments.support.markdown import head, line, numbers, steps
from experiments.support.rows import Row
from stabmon.alarms.detectors.grades import grade_of

FAULT, LADDER, QK_NORM = (
    "learning rate ×40",
    "learning rate ×40, ladder",
    "learning rate ×40, QK-norm",
)
CURVES = ("rank ratio of the worst layer", "attention entropy", "held-out loss")
# Claims of the headline, and how they are put there.
_SHORT = {
    "The grade falls by two or more": "the grade falls in",
    "Its alarm comes before the loss's": "its alarm before the loss's in",
    "The ladder brings the loss within 5 % of clean": "the ladder ends within 5 % of clean in",
    "Healthy beats collapsing in disputed pairs": "the healthier checkpoint wins",
}
# A rescued run's loss is within this of the clean run's.
NEAR = 0.05


def tables(rows: list[Row]) -> str:
    """The story, the segments, the data mixes, the ranking, and what they say to each claim."""
    parts = []
    if story := of_kind(rows, "story"):
        parts += ["*The story: rank ratio of the worst layer, and grade.*", story_markdown(story)]
        parts += ["*By segment of the context, front to back, at the end, on code.*"]
        parts += [segments_markdown(story)]
    if mixes := of_kind(rows, "mixes"):
        parts += ["*Grade by data: trained on a row, measured on a column.*", mixes_markdown(mixes)]
    if ranking := of_kind(rows, "ranking"):
        parts += ["*Checkpoints, best first by health, and their loss 500 steps later.*"]
        parts += [ranking_markdown(ranking), "*Rankings against the loss after continuing.*"]
        parts += [correlation_markdown(ranking)]
    claimed = head(["claim", "verdict", "runs for it"])
    parts += ["*Claims.*", "\n".join([*claimed, *(line(x) for x in claims(rows))])]
    return "\n\n".join(parts)


def headline(rows: list[Row]) -> str:
    """The verdict and the numbers that it rests on."""
    found = claims(rows)
    verdicts = {verdict for _, verdict, _ in found}
    word = min(verdicts) if len(verdicts) == 1 else "partly"
    short = [f"{_SHORT[claim]} {count}" for claim, _, count in found if claim in _SHORT]
    rho = [correlations(row) for row in of_kind(rows, "ranking")]
    if rho:
        health, loss = (mean(x[name] for x in rho) for name in ("health", "loss"))
        short.append(f"ρ with the loss 500 steps later {health:.2f} by health, {loss:.2f} by loss")
    return f"{word}: {'; '.join(short)}"


def claims(rows: list[Row]) -> list[tuple[str, str, str]]:
    """(claim, verdict, counts) for each claim that the rows can speak to."""
    story, ranking = of_kind(rows, "story"), of_kind(rows, "ranking")
    of = lambda arm: {row["seed"]: row for row in story if row["arm"] == arm}
    faulty, clean, rescued, normed = of(FAULT), of("clean"), of(LADDER), of(QK_NORM)
    clean_normed = of("clean, QK-norm")
    near = lambda row, other, by=NEAR: row["held_out"] <= other["held_out"] * (1 + by)
    found: list[tuple[str, str, str]] = []

    def claim(words: str, held: list[bool]) -> None:
        if held:
            count = sum(held)
            word = "partly" if count else "not at this size"
            word = "reproduces" if count == len(held) else word
            found.append((words, word, f"{count} of {len(held)}"))

    claim(
        "The grade falls by two or more",
        [grade_of(x["before"]) - grade_of(x["lowest"]) >= 2 for x in faulty.values()],
    )
    claim("Its alarm comes", [x["grade_alarm"] is not None for x in faulty.values()])
    claim(
        "Its alarm comes before the loss's",
        [
            x["grade_alarm"] is not None
            and (x["loss_alarm"] is None or x["grade_alarm"] < x["loss_alarm"])
            for x in faulty.values()
        ],
    )
    claim(
        "The ladder brings the loss within 5 % of clean",
        [near(rescued[s], clean[s]) for s in rescued if s in clean],
    )
    claim("The ladder brings the grade back to S5", [x["late"] > 0.5 for x in rescued.values()])
    claim(
        "With QK-norm the grade stays at S5 or above", [x["lowest"] > 0.5 for x in normed.values()]
    )
    claim(
        "With QK-norm the loss stays within 5 % of clean",
        [near(normed[s], clean_normed[s]) for s in normed if s in clean_normed],
    )
    large, healed = of("initialisation"), of("initialisation, QK-norm")
    claim(
        "A large initialisation has the lower grade in the end",
        [grade_of(large[s]["late"]) < grade_of(clean[s]["late"]) for s in large if s in clean],
    )
    claim(
        "QK-norm lowers the loss of a large initialisation by 5 %",
        [near(healed[s], large[s], -NEAR) for s in healed if s in large],
    )
    own = lambda name: {
        row["seed"]: row["texts"][name]["ratio"]
        for row in of_kind(rows, "mixes")
        if row["arm"] == name
    }
    prose, repeated = own("prose"), own("repeated prose")
    claim(
        "Prose over and over has the lower rank ratio",
        [repeated[s] < prose[s] for s in repeated if s in prose],
    )
    apart = lambda row: row["texts"]["code"]["segments"][-1] - row["texts"]["code"]["segments"][0]
    claim(
        "A fault lowers the back of the context more than the front",
        [apart(x[s]) < apart(clean[s]) for x in (faulty, of("attention")) for s in x if s in clean],
    )
    if ranking:
        wins = [wins_of(row) for row in ranking]
        claim("Healthy beats collapsing in disputed pairs", [x for won in wins for x in won])
        better = [
            correlations(row)["health"] > correlations(row)["loss"]
            for row in ranking
            if wins_of(row)
        ]
        claim("Health ranks better than loss, where they differ", better)
    return found


def story_markdown(rows: list[Row]) -> str:
    """Before and after the onset, alarms, loss and actions, seed by seed."""
    names = ["rank ratio before", "lowest after", "at the end", "grade alarm", "first alarm"]
    names += ["what it was", "loss alarm", "attention entropy", "held-out loss", "actions"]
    lines = head(["arm", "seeds", *names])
    for arm in arms_of(rows):
        of = [row for row in rows if row["arm"] == arm]
        cells = [
            arm,
            ", ".join(str(row["seed"]) for row in of),
            *(", ".join(_graded(row[name]) for row in of) for name in ("before", "lowest", "late")),
            steps(row["grade_alarm"] for row in of),
            steps(row["first_alarm"] for row in of),
            ", ".join(map(_what, of)),
            steps(row["loss_alarm"] for row in of),
            numbers(row["attention_entropy"] for row in of),
            numbers(row["held_out"] for row in of),
            "; ".join(_actions(row) for row in of) if any(map(_actions, of)) else "",
        ]
        lines.append(line(cells))
    return "\n".join(lines)


def segments_markdown(rows: list[Row]) -> str:
    """Rank ratios of the worst layer's segments, means over seeds."""
    count = len(rows[0]["texts"]["code"]["segments"])
    names = [f"{i + 1} of {count}" for i in range(count)]
    lines = head(["arm", *names, "last less first, by seed"])
    for arm in arms_of(rows):
        segments = [row["texts"]["code"]["segments"] for row in rows if row["arm"] == arm]
        columns = [mean(x[i] for x in segments) for i in range(count)]
        apart = numbers((x[-1] - x[0] for x in segments), sign="+")
        lines.append(line([arm, *(f"{x:.2f}" for x in columns), apart]))
    return "\n".join(lines)


def mixes_markdown(rows: list[Row]) -> str:
    """Rank ratio on each text, seed by seed, and the loss on the run's own held-out text."""
    texts = list(rows[0]["texts"])
    lines = head(["trained on", "seeds", *texts, "own held-out loss"])
    for arm in arms_of(rows):
        of = [row for row in rows if row["arm"] == arm]
        cells = [arm, ", ".join(str(row["seed"]) for row in of)]
        for text in texts:
            cells.append(", ".join(_graded(row["texts"][text]["ratio"]) for row in of))
        lines.append(line([*cells, numbers(row["held_out"] for row in of)]))
    return "\n".join(lines)


def ranking_markdown(rows: list[Row]) -> str:
    """A line for each run: its checkpoints as step, state, loss → loss after continuing."""
    lines = head(["arm", "seed", "checkpoints, best first by health"])
    for row in rows:
        cells = [
            f"{x['step']} {x['state']} {x['loss']:.2f} → {x['continued']:.2f}"
            for x in row["checkpoints"]
        ]
        lines.append(line([row["arm"], row["seed"], "; ".join(cells)]))
    return "\n".join(lines)


def correlation_markdown(rows: list[Row]) -> str:
    """ρ of both rankings with the loss after continuing, and the disputed pairs."""
    names = ["ρ of the health ranking", "ρ of the loss ranking", "disputed pairs won by health"]
    lines = head(["arm", *names, "first by health, first by loss: continued"])
    for arm in arms_of(rows):
        of = [row for row in rows if row["arm"] == arm]
        rho = [correlations(row) for row in of]
        won = [wins_of(row) for row in of]
        cells = [
            arm,
            numbers([x["health"] for x in rho], sign="+"),
            numbers([x["loss"] for x in rho], sign="+"),
            ", ".join(f"{sum(x)} of {len(x)}" for x in won),
            "; ".join(f"{a:.2f}, {b:.2f}" for a, b in map(firsts, of)),
        ]
        lines.append(line(cells))
    return "\n".join(lines)


def correlations(row: Row) -> dict[str, float]:
    """ρ of the health and of the loss ranking with the order after continuing."""
    found = orders(row["checkpoints"])
    return {name: rank_correlation(found[name], found["continued"]) for name in ("health", "loss")}


def wins_of(row: Row) -> list[bool]:
    """For each disputed pair whether the healthier one has the lower loss after continuing."""
    return [
        better["continued"] < worse["continued"] for better, worse in disputed(row["checkpoints"])
    ]


def firsts(row: Row) -> tuple[float, float]:
    """Loss after continuing the checkpoint that is first by health, and the one first by loss."""
    after = {x["step"]: float(x["continued"]) for x in row["checkpoints"]}
    found = orders(row["checkpoints"])
    return after[found["health"][0]], after[found["loss"][0]]


def figure(rows: list[Row]) -> go.Figure:
    """The curves of the story's runs."""
    return curves(of_kind(rows, "story"), CURVES)


def of_kind(rows: list[Row], kind: str) -> list[Row]:
    """The rows of one part."""
    return [row for row in rows if row["kind"] == kind]


def _graded(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f} S{grade_of(ratio)}"


def _actions(row: Row) -> str:
    """How often the ladder rolled back, and how it ended."""
    back = sum(x.startswith("roll back") for x in row["actions"])
    ends = ["stopped"] if row["stopped"] else [x for x in row["actions"] if "resume" in x][-1:]
    return ", ".join([f"{back} rollbacks", *ends]) if row["actions"] else ""


def _what(row: Row) -> str:
    return "–" if row["first_key"] is None else row["first_key"].replace("/global", "")
