"""A run's log has each sample once, through kills, resumes and rewinds."""

import ast
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from stabmon.quantities import LOSS
from stabmon.recovery.replay import has_qk_norm, replay_events
from stabmon.runs import runlog
from stabmon.runs.jsonl import read_jsonl
from stabmon.runs.run import load_run
from stabmon.runs.runlog import RunLog

CONFIG = {"seed": 0, "model": {"layers": 4, "norm": "rms"}, "betas": (0.9, 0.95)}
KEY = "delta50/layer_03/delta2/modes/p10"


def steps(folder):
    return [row["step"] for row in read_jsonl(folder / "metrics.jsonl")]


def test_what_is_written_is_read_back(tmp_path):
    with RunLog.open(tmp_path / "runs" / "a", CONFIG) as log:
        log.sample(50, {KEY: np.float32(3.5), "train/global/loss/mean": 2}, tokens=38400)
        log.sample(100, {KEY: math.nan, "qk/global/max_logit/mean": -math.inf})
        log.event("alarm", 100, rule="robust_z", key=KEY, value=math.nan, reference=3.5, layer=3)
        log.fault(kind="attention", onset=60, end=None, bits=6)
    run = load_run(tmp_path / "runs" / "a")
    assert run.name == "a"
    assert run.config == {**CONFIG, "betas": [0.9, 0.95]}
    np.testing.assert_array_equal(run.metrics[KEY], [[50, 100], [3.5, math.nan]])
    np.testing.assert_array_equal(run.metrics["qk/global/max_logit/mean"], [[100], [-math.inf]])
    assert [array.dtype for array in run.metrics[KEY]] == [np.int64, np.float64]
    assert (run.events[0]["kind"], run.events[0]["layer"]) == ("alarm", 3)
    assert math.isnan(run.events[0]["value"])
    assert run.faults == ({"kind": "attention", "onset": 60, "end": None, "bits": 6},)


def test_a_line_has_the_documented_form(tmp_path):
    with RunLog.open(tmp_path, CONFIG) as log:
        log.sample(7, {KEY: math.inf}, tokens=5)
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert list(row) == ["step", "tokens", "time", "values"]
    assert abs(row.pop("time") - time.time()) < 600
    assert row == {"step": 7, "tokens": 5, "values": {KEY: "Infinity"}}


def test_each_line_is_on_disk_at_once(tmp_path):
    log = RunLog.open(tmp_path, CONFIG)
    log.sample(1, {KEY: 1.0})
    assert steps(tmp_path) == [1]
    log.close()
    log.close()
    with pytest.raises(ValueError, match="is closed: open it with resume=True"):
        log.sample(2, {KEY: 1.0})


def test_another_configuration_is_refused_with_both_values(tmp_path):
    with RunLog.open(tmp_path, CONFIG) as log:
        log.sample(1, {KEY: 1.0})
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    other = {"seed": 0, "model": {"layers": 6, "norm": "rms"}, "betas": (0.9, 0.95), "qk_norm": 1}
    expected = "model.layers was 4, now 6; qk_norm was 'absent', now 1. Choose another name"
    with pytest.raises(FileExistsError, match=expected):
        RunLog.open(tmp_path, other, resume=True)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_same_configuration_needs_resume(tmp_path):
    with RunLog.open(tmp_path, CONFIG) as log:
        log.sample(1, {KEY: 1.0})
    with pytest.raises(FileExistsError, match="holds this run already: pass resume=True"):
        RunLog.open(tmp_path, CONFIG)


def test_a_run_that_ended_before_its_first_sample_may_be_begun_again(tmp_path):
    for _ in range(2):
        with RunLog.open(tmp_path, CONFIG) as log:
            log.event("started", 0)
    assert len(load_run(tmp_path).events) == 1
    with pytest.raises(FileExistsError, match=r"seed was 0, now 1"):
        RunLog.open(tmp_path, CONFIG | {"seed": 1})


@pytest.mark.parametrize(
    "config", [{"model": "llama"}, {"dtype": np.float32}, ["a", 1], "base.yaml", None, 7, print]
)
def test_a_configuration_of_any_shape_is_kept_and_read(tmp_path, config):
    for resume in (False, True):
        with RunLog.open(tmp_path, config, resume=resume) as log:
            log.sample(10, {LOSS: 2.0})
    run = load_run(tmp_path)
    assert isinstance(run.config, dict)
    assert not has_qk_norm(run)
    assert replay_events(run) == []
    (tmp_path / "config.json").write_text("[1, 2]")  # by another program
    assert load_run(tmp_path).config == {"config": [1, 2]}


def test_a_second_writer_is_refused_until_the_first_is_gone(tmp_path):
    log = RunLog.open(tmp_path, CONFIG)
    log.sample(1, {KEY: 1.0})
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(BlockingIOError, match="another run writes to this folder"):
        RunLog.open(tmp_path, CONFIG, resume=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    log.sample(2, {KEY: 1.0})
    log.close()
    RunLog.open(tmp_path, CONFIG, resume=True).close()


def test_a_folder_removed_under_the_run_is_an_error(tmp_path):
    with RunLog.open(tmp_path / "run", CONFIG) as log:
        log.sample(1, {KEY: 1.0})
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(FileNotFoundError, match=r"removed, renamed or replaced under the run"):
            log.sample(2, {KEY: 1.0})
        with pytest.raises(FileNotFoundError, match=r"events.jsonl"):
            log.event("alarm", 2)


def test_a_resumed_run_that_differs_replaces_what_was_written(tmp_path):
    with RunLog.open(tmp_path, CONFIG) as log:
        for step in range(990, 1050, 10):
            log.sample(step, {KEY: math.nan if step > 1000 else 1.0, "loss": math.nan})
    with RunLog.open(tmp_path, CONFIG, resume=True) as log:
        log.sample(1000, {KEY: 1.0, "loss": math.nan})  # as it was
        assert log.last_step == 1040
        for step in (1010, 1020, 1030):
            log.sample(step, {KEY: 2.0, "loss": 3.0})
    run = load_run(tmp_path)
    np.testing.assert_array_equal(
        run.metrics[KEY], [[990, 1000, 1010, 1020, 1030], [1, 1, 2, 2, 2]]
    )
    assert [(x["kind"], x["step"], x["newest"]) for x in run.events] == [("resume", 1009, 1040)]
    assert load_run(tmp_path, attempt=1).metrics[KEY][0][-1] == 1040


def test_a_resumed_run_at_another_cadence_replaces_too(tmp_path):
    with RunLog.open(tmp_path, CONFIG) as log:
        for step in (10, 20, 30):
            log.sample(step, {KEY: 1.0})
    with RunLog.open(tmp_path, CONFIG, resume=True) as log:
        for step in (15, 25):
            log.sample(step, {KEY: 1.0})
    assert load_run(tmp_path).metrics[KEY][0].tolist() == [10, 15, 25]


def test_more_keys_of_the_newest_step_are_added_to_it(tmp_path):
    with RunLog.open(tmp_path, CONFIG) as log:
        log.sample(10, {KEY: 1.0})
        log.sample(10, {"loss": 2.0})
        log.sample(10, {"loss": 2.0})
    run = load_run(tmp_path)
    assert {key: of[1].tolist() for key, of in run.metrics.items()} == {KEY: [1.0], "loss": [2.0]}
    assert (run.attempts, steps(tmp_path)) == (1, [10, 10])


def test_samples_without_a_configuration_are_left_alone(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(FileExistsError, match=r"samples but no config.json"):
        RunLog.open(tmp_path, CONFIG, resume=True)


def test_a_configuration_that_is_no_json_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json cannot be read as JSON"):
        RunLog.open(tmp_path, CONFIG)


def test_non_finite_configurations_resume_too(tmp_path):
    for resume in (False, True):
        RunLog.open(tmp_path, {"clip": math.inf, "floor": math.nan}, resume=resume).close()
    assert load_run(tmp_path).config["clip"] == math.inf


def test_resume_without_a_run_begins_one(tmp_path):
    with RunLog.open(tmp_path / "new", CONFIG, resume=True) as log:
        assert log.last_step == -1
        log.sample(0, {KEY: 1.0})
    assert steps(tmp_path / "new") == [0]


def test_resuming_cuts_a_torn_line_and_writes_it_again(tmp_path):
    with RunLog.open(tmp_path, CONFIG) as log:
        for step in (10, 20, 30):
            log.sample(step, {KEY: step})
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-7])
    with RunLog.open(tmp_path, CONFIG, resume=True) as log:
        assert log.last_step == 20
        for step in (20, 30, 40):
            log.sample(step, {KEY: step})
    assert steps(tmp_path) == [10, 20, 30, 40]


def test_events_and_faults_are_written_once_through_a_resume(tmp_path):
    for resume in (False, True):
        with RunLog.open(tmp_path, CONFIG, resume=resume) as log:
            log.fault(kind="attention", onset=5, end=None)
            log.event("alarm", 20, key=KEY, value=math.nan)
            log.event("alarm", 20 + resume, key="other")
    assert [row["step"] for row in read_jsonl(tmp_path / "events.jsonl")] == [20, 20, 21]
    assert len(read_jsonl(tmp_path / "faults.jsonl")) == 1


def test_after_a_rewind_the_later_sample_counts(tmp_path):
    with RunLog.open(tmp_path, CONFIG) as log:
        log.fault(kind="attention", onset=5, end=None)
        for step in (10, 20, 30):
            log.sample(step, {KEY: step})
        log.event("alarm", 30, key=KEY)
        log.rewind(15)
        assert log.last_step == 15
        log.fault(kind="attention", onset=5, end=None)
        for step in (10, 20, 30):
            log.sample(step, {KEY: -step})
        log.event("alarm", 30, key=KEY)
    assert steps(tmp_path) == [10, 20, 30, 20, 30]
    run = load_run(tmp_path)
    np.testing.assert_array_equal(run.metrics[KEY], [[10, 20, 30], [10, -20, -30]])
    assert [(row["kind"], row["step"]) for row in run.events] == [("rewind", 15), ("alarm", 30)]
    assert len(run.faults) == 1


def test_an_alarm_of_the_new_branch_is_written_after_a_resume(tmp_path):
    with RunLog.open(tmp_path, CONFIG) as log:
        log.event("alarm", 30, key=KEY)
        log.rewind(15)
    for _ in range(2):
        with RunLog.open(tmp_path, CONFIG, resume=True) as log:
            log.event("alarm", 30, key=KEY)
    kinds = [row["kind"] for row in read_jsonl(tmp_path / "events.jsonl")]
    assert kinds == ["alarm", "rewind", "alarm"]


@pytest.mark.parametrize(("again", "last"), [((), 10), ((20,), 20), ((20, 30, 40), 40)])
def test_a_run_killed_after_a_rewind_resumes_on_the_new_branch(tmp_path, again, last):
    with RunLog.open(tmp_path, CONFIG) as log:
        for step in (10, 20, 30):
            log.sample(step, {KEY: step})
        log.rewind(15)
        for step in again:
            log.sample(step, {KEY: -step})
    with RunLog.open(tmp_path, CONFIG, resume=True) as log:
        assert log.last_step == last
        for step in (20, 30, 40):
            log.sample(step, {KEY: -step})
    assert steps(tmp_path) == [10, 20, 30, 20, 30, 40]


def test_a_rewind_ahead_of_the_samples_skips_none(tmp_path):
    with RunLog.open(tmp_path, CONFIG) as log:
        log.sample(10, {KEY: 1})
        log.rewind(15)
        log.sample(12, {KEY: 1})
    assert steps(tmp_path) == [10, 12]


@pytest.mark.slow
def test_a_killed_process_leaves_a_log_that_resumes_without_a_gap_or_a_double(tmp_path):
    program = f"""
from stabmon.runs import runlog
from stabmon.runs.jsonl import read_jsonl
from stabmon.runs.runlog import RunLog
with RunLog.open({str(tmp_path)!r}, {{"seed": 0}}, resume=True) as log:
    for step in range(10_000):
        log.sample(step, {{f"a/global/{{i}}/mean": step / 3 for i in range(50)}})
"""
    path = tmp_path / "metrics.jsonl"
    for size in (100_000, 200_000):
        child = subprocess.Popen([sys.executable, "-c", program])
        while child.poll() is None and not (path.exists() and path.stat().st_size > size):
            time.sleep(0.005)
        child.kill()
        assert child.wait() == -signal.SIGKILL
    RunLog.open(tmp_path, {"seed": 0}, resume=True).close()
    assert steps(tmp_path) == list(range(len(steps(tmp_path))))


@pytest.mark.slow
def test_the_lock_of_a_killed_process_dies_with_it(tmp_path):
    program = (
        "import sys, time\nfrom stabmon.runs.runlog import RunLog\n"
        "log = RunLog.open(sys.argv[1], {})\nprint('open', flush=True)\ntime.sleep(60)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "open\n"
    with pytest.raises(BlockingIOError, match="another run writes to this folder"):
        RunLog.open(tmp_path, {}, resume=True)
    child.kill()
    child.communicate()
    RunLog.open(tmp_path, {}, resume=True).close()


def test_a_write_error_names_the_file(tmp_path, monkeypatch):
    def full(descriptor, data):
        raise OSError(28, "No space left on device")

    with RunLog.open(tmp_path, CONFIG) as log:
        monkeypatch.setattr("os.write", full)
        with pytest.raises(OSError, match=r"No space left.*not written.*metrics.jsonl"):
            log.sample(1, {KEY: 1.0})
        assert log.last_step == -1


@pytest.fixture
def read_only():
    """A folder in which this process may not write; root may write anywhere, hence not as root."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with RunLog.open(folder / "old", CONFIG) as log:
            log.sample(1, {KEY: 1.0})
        root = os.geteuid() == 0
        for path in (folder, folder / "old"):
            path.chmod(0o555)
        if root:
            os.seteuid(65534)
        yield folder
        if root:
            os.seteuid(0)
        for path in (folder, folder / "old"):
            path.chmod(0o755)


def test_a_read_only_folder_is_named_and_can_be_read(read_only):
    with pytest.raises(PermissionError, match="new"):
        RunLog.open(read_only / "new", CONFIG)
    with pytest.raises(PermissionError, match=r"old/(metrics|events|faults|config)"):
        RunLog.open(read_only / "old", CONFIG, resume=True)
    assert load_run(read_only / "old").metrics[KEY][1].tolist() == [1.0]


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is not a run, it has no config.json: give"):
        load_run(tmp_path)


def test_no_file_of_this_room_imports_jax():
    room = Path(runlog.__file__).parent
    files = sorted(room.glob("*.py"))
    assert room / "runlog.py" in files
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in getattr(node, "names", []) if hasattr(alias, "name")]
            assert "jax" not in {name.split(".")[0] for name in [*names, _module(node)]}, file


def _module(node):
    return getattr(node, "module", None) or ""
