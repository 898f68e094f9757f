"""The board fits the terminal, shows the four, and cannot be steered by what a run says."""

import io
import os
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from stabmon.output.board import Board, watch
from stabmon.output.terminal import table
from stabmon.runs.runlog import RunLog

RATIO, ENTROPY = "activations/global/rank_ratio", "attention/global/entropy"


def sample(step):
    ratio = 0.75 - step / 4000
    return {
        f"{RATIO}/mean": ratio,
        f"{RATIO}/min": ratio - 0.1,
        f"{RATIO}/worst_layer": 3.0,
        "activations/global/grade/min": float(int(10 * ratio) - 2),
        f"{ENTROPY}/mean": 3.0,
        f"{ENTROPY}/min": 1.0,
        f"{ENTROPY}/worst_layer": 2.0,
        f"{ENTROPY}/worst_head": 5.0,
        "symptoms/global/loss/value": 2.25,
        "symptoms/global/grad_norm/value": 0.5,
    }


@pytest.fixture
def folder(tmp_path):
    with RunLog.open(tmp_path / "run", {}) as log:
        for step in range(0, 1001, 50):
            log.sample(step, sample(step), tokens=100 * step)
        log.event("alarm", 900, rule="band", key=f"{RATIO}/min", value=0.41, z=-6.0)
        log.event("action", 950, what="\x1b[2J[bold]halved <the> rate")
    return tmp_path / "run"


def shown(folder, width=80, height=24, **options):
    console = Console(
        file=io.StringIO(), width=width, height=height, force_terminal=True, **options
    )
    watch(folder, console, once=True)
    return console.file.getvalue()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 24), (160, 60), (40, 12)])
def test_a_frame_fits_the_terminal(folder, width, height):
    lines = shown(folder, width, height, color_system=None).splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_the_four_are_shown_with_where_it_is_worst(folder):
    text = shown(folder, color_system=None)
    for words in (
        "mean 0.5  min 0.4  layer 3",
        "S3 caution",
        "mean 3  min 1  layer 2 head 5",
        "loss 2.25",
        "grad norm 0.5",
        "step 1,000  100,000 tokens",
        f"alarm 900: {RATIO}/min  value 0.41  z -6",
    ):
        assert words in text


def test_what_was_found_and_done_stays_however_many_alarms_follow(folder):
    with RunLog.open(folder, {}, resume=True) as log:
        log.event("diagnosis", 910, fault="learning rate", confidence=0.6)
        log.event("action", 910, action="scale learning rate", scale=0.5, dry=True)
        for step in range(911, 930):
            log.event("alarm", step, rule="z", key=f"{RATIO}/min", value=0.4, z=-6.0)
    lines = shown(folder, color_system=None).splitlines()
    assert lines[-6] == "diagnosis 910: learning rate  confidence 0.6"
    assert lines[-5] == "action 910: scale learning rate  scale 0.5  dry 1"
    assert [line.split(":")[0] for line in lines[-4:]] == [
        f"alarm {x}" for x in range(929, 925, -1)
    ]


def test_text_of_a_run_is_shown_and_not_obeyed(folder):
    with RunLog.open(folder, {}, resume=True) as log:
        log.event("\x1b[3J", 960, key="\x1b[4J")
    text = shown(folder, width=120, color_system=None)
    assert r"\x1b[3J 960: \x1b[4J" in text
    assert r"action 950: what \x1b[2J[bold]halved <the> rate" in text
    assert "\x1b[" not in text


def test_a_run_without_samples_says_so(tmp_path):
    text = shown(tmp_path, color_system=None)
    assert "no samples yet" in text
    assert "no alarms, no actions" in text


def test_the_next_frame_shows_what_came_since(folder):
    board, console = Board(folder), Console(width=80, height=24, file=io.StringIO())
    console.print(board.frame(80, 24))
    with RunLog.open(folder, {}, resume=True) as log:
        log.sample(1050, {"symptoms/global/loss/value": 7.5})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1100, "values": {"symptoms/gl')
    console.print(board.frame(80, 24))
    assert "loss 7.5" in console.file.getvalue()
    assert "step 1,050" in console.file.getvalue()


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nix is not there: give a run's folder"):
        Board(tmp_path / "nix")


def test_a_narrow_terminal_keeps_words_whole(tmp_path):
    with RunLog.open(tmp_path / "run", {}) as log:
        log.sample(10, {"symptoms/global/loss/value": 2.0})
    console = Console(width=40, height=30, file=io.StringIO())
    watch(tmp_path / "run", console, once=True)
    text = console.file.getvalue()
    assert "attention entropy, nats" in text
    assert "no activations/global/rank_ratio yet" in text
    rows = [("non-finite", 610, "symptoms/global/loss/value")]
    console.print(table("Alarms", rows, ("what", "step", "key"), words=1))
    assert "non-finite  step 610" in console.file.getvalue()


WATCH = """
import sys
from rich.console import Console
from stabmon.output.board import watch
watch(sys.argv[1], Console(force_terminal=True, width=80, height=24), every=0.05)
"""


@pytest.mark.slow
@pytest.mark.parametrize("terminal", ["xterm", "dumb"])
def test_a_terminal_is_restored_when_watching_is_ended(folder, terminal):
    env = {**os.environ, "TERM": terminal}
    command = [sys.executable, "-c", WATCH, str(folder)]
    child = subprocess.Popen(command, env=env, stdout=subprocess.PIPE)
    shown = b""
    while b"rank ratio" not in shown:
        shown += child.stdout.read1()
    child.terminate()
    rest, _ = child.communicate(timeout=20)
    assert child.returncode == 128 + signal.SIGTERM
    text = (shown + rest).decode()
    if terminal == "dumb":
        assert "\x1b[" not in text
    else:
        assert text.count("\x1b[?1049h") == text.count("\x1b[?1049l") == 1
