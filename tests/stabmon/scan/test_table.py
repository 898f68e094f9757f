"""Tables show names as they are, and nothing that steers the terminal."""

import io
from pathlib import Path

from rich.console import Console

from stabmon.checkpoints.source import Checkpoint
from stabmon.scan.health import Change, Health, Report
from stabmon.scan.table import show

NASTY = "layers.0.\x1b[2J<script>[bold]"


def row(**fields):
    values = {"norm": 2.0, "spectral_norm": 1.0, "stable_rank": 4.0, "relative_stable_rank": 0.5}
    base = {"layer": 0, "role": "q", "expert": None, "shape": (64, 64), "effective_rank": None}
    return base | values | fields


def shown(report, **options):
    console = Console(file=io.StringIO(), width=80)
    show(console, report, **options)
    return console.file.getvalue()


def made(name, matrices, problems=()):
    checkpoint = Checkpoint(name, Path(name), 1, {}, (), lambda *_: None)
    skipped = ((NASTY, "no rule"), ("layers.3.norm", "x"), ("layers.4.norm", "x"))
    return Health(checkpoint, "mine", matrices, skipped, list(problems))


def test_the_worst_layer_is_named_and_layers_are_folded():
    matrices = [row(), row(layer=1, relative_stable_rank=0.01)]
    text = shown(Report([made("5", matrices)], []))
    assert "0.01 (1)" in text
    assert "layers.*.norm ×2: x" in text
    assert "nothing wrong found" in text
    assert "layer 1 q" in shown(Report([made("5", matrices)], []), every=True)


def test_changes_name_layer_and_head():
    health = made("5", [row()])
    names = ("delta1", "delta2", "delta3", "query", "key")
    head = lambda n, rank: (
        {"layer": 3, "head": n}
        | {f"{x}/norm": 1.0 for x in names}
        | {f"{x}/effective_rank": rank for x in names}
    )
    change = Change(
        health.checkpoint,
        health.checkpoint,
        [row(relative_norm=0.25)],
        [head(0, 9.0), head(1, 2.5)],
    )
    text = shown(Report([health], [change]))
    assert "2.5 (3.1)" in text
    assert "0.25 (0)" in text


def test_names_with_markup_and_control_characters_are_shown_as_text():
    text = shown(Report([made(NASTY, [row()], [f"{NASTY} is zero"])], []))
    assert "\x1b" not in text
    assert r"layers.*.\x1b[2J<script>[bold]: no rule" in text
    assert r"wrong: layers.0.\x1b[2J<script>[bold] is zero" in text
