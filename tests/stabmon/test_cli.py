"""The commands: what they print, and their exit codes."""

import json
import os
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from stabmon.cli import main
from stabmon.runs.runlog import RunLog
from tests.stabmon.layout.state_dicts import torch_llama
from tests.stabmon.output.conftest import write_run
from tests.stabmon.trees import H


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A clean run, another with its noise scaled, and a faulty one with checkpoints."""
    root = tmp_path_factory.mktemp("runs")
    folders = [write_run(root / name, faulty=name == "faulty") for name in ("clean", "faulty")]
    text = (folders[0] / "metrics.jsonl").read_text().splitlines()
    (root / "other").mkdir()
    (root / "other" / "config.json").write_text("{}")
    with (root / "other" / "metrics.jsonl").open("w") as file:
        for i, line in enumerate(text):
            row = json.loads(line)
            row["values"] = {k: v * (1 + 0.02 * np.sin(i)) for k, v in row["values"].items()}
            file.write(json.dumps(row) + "\n")
    for step in (500, 2400):
        (folders[1] / "checkpoints" / str(step)).mkdir(parents=True)
    return root


def test_compare_prints_the_lead_time_table(runs, capsys, tmp_path):
    clean = [str(runs / "clean"), str(runs / "other")]
    saved = str(tmp_path / "reference.json")
    command = ["compare", str(runs / "faulty"), "--reference"]
    assert main([*command, *clean, "--save", saved]) == 0
    assert "First alarms of faulty, fault from step 300" in capsys.readouterr().out
    assert main([*command, saved, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["onset"] == 300
    assert found["table"][0]["monitor"].startswith("Δ2")


def test_rank_prints_checkpoints_best_first(runs, capsys):
    assert main(["rank", str(runs / "faulty")]) == 0
    assert "Checkpoints of faulty by training loss" in capsys.readouterr().out
    assert main(["rank", str(runs / "faulty"), "--json"]) == 0
    ranked = json.loads(capsys.readouterr().out)
    assert [x["step"] for x in ranked] == [500, 2400]
    assert [x["against"] for x in ranked] == ["", "alarms"]


def test_replay_says_what_the_standard_alarms_say(runs, capsys):
    folders = [str(runs / "clean"), str(runs / "faulty")]
    assert main(["replay", *folders]) == 0
    text = capsys.readouterr().out
    assert "No alarm in " + folders[0] in text.replace("\n", "")
    # What would decide, the spectra of v and o, was not measured in these runs.
    assert "1 opened: unknown, since step" in text
    assert main(["replay", *folders, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found[folders[0]] == []
    assert found[folders[1]][0]["kind"] == "alarm"
    assert min(x["step"] for x in found[folders[1]]) >= 300
    assert main(["replay", *folders, "--window", "0"]) == 2


def test_report_is_written_where_it_is_asked_for(runs, capsys, tmp_path):
    out = tmp_path / "page.html"
    assert main(["report", str(runs / "clean"), str(runs / "faulty"), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert out.read_text().startswith("<!doctype html>")


def test_watch_prints_one_frame_of_a_run_being_written(runs, capsys):
    with (runs / "faulty" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 24')
    assert main(["watch", str(runs / "faulty"), "--once"]) == 0
    assert "step 2,400" in capsys.readouterr().out


def test_a_torn_line_is_a_warning_on_stderr(tmp_path, capsys):
    with RunLog.open(tmp_path / "run", {}) as log:
        log.sample(0, {"symptoms/global/loss/value": 1.0})
    (tmp_path / "run" / "checkpoints" / "0").mkdir(parents=True)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1')
    assert main(["rank", str(tmp_path / "run")]) == 0
    assert "metrics.jsonl: 1 line skipped, not JSON objects (torn" in capsys.readouterr().err


@pytest.fixture
def logs(tmp_path):
    """A loss that becomes no number at step 2,000, as other trainers log it."""
    course = lambda step: "nan" if step >= 2000 else f"{3 - step / 2000:.4f}"
    rows = [(step, course(step)) for step in range(0, 2500, 10)]
    history = [{"step": step, "loss": float(loss)} for step, loss in rows]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    printed = [f"step: {step} train_loss: {loss} grad_norm: 1.0\n" for step, loss in rows]
    (tmp_path / "train.log").write_text("".join(printed))
    (tmp_path / "odd.csv").write_text("t,nll\n" + "".join(f"{s},{x}\n" for s, x in rows))
    return tmp_path


def test_the_logs_of_other_trainers_are_taken_as_they_are(logs, capsys):
    paths = [str(logs / name) for name in ("trainer_state.json", "train.log")]
    assert main(["replay", *paths, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(found[path][0]["step"] == 2000 for path in paths)
    assert main(["watch", paths[1], "--once"]) == 0
    assert "step 2,490" in capsys.readouterr().out
    assert main(["report", paths[0]]) == 0
    page = (logs / "trainer_state.html").read_text()
    assert "no module can be named" in page
    assert "non-finite" in page
    assert "No alarm." not in page


def test_a_log_is_imported_with_its_columns_told(logs, capsys):
    command = ["import", str(logs / "odd.csv"), str(logs / "run")]
    assert main(command) == 2
    assert "no column that counts steps; it has t, nll: say which" in capsys.readouterr().err
    assert main([*command, "--map", "step=t", "loss=nll"]) == 0
    assert "CSV table, 250 rows, one each 10 steps: loss is nll." in capsys.readouterr().out
    assert main(["replay", str(logs / "run"), "--json"]) == 0
    (rows,) = json.loads(capsys.readouterr().out).values()
    assert rows[0]["step"] == 2000
    assert main([*command, "--map", "loss"]) == 2
    assert "expected NAME=COLUMN" in capsys.readouterr().err


def test_an_abandoned_attempt_is_shown_on_request(tmp_path, capsys):
    with RunLog.open(tmp_path / "run", {}) as log:
        for step in range(0, 1000, 10):
            loss = np.nan if step >= 950 else 2.0 + 1e-3 * (step % 7)
            log.sample(step, {"symptoms/global/loss/value": loss})
        log.rewind(600)
        for step in range(610, 710, 10):
            log.sample(step, {"symptoms/global/loss/value": 2.0 + 1e-3 * (step % 7)})
    found = {}
    for attempt in ([], ["--attempt", "1"]):
        assert main(["replay", str(tmp_path / "run"), "--json", *attempt]) == 0
        (found[bool(attempt)],) = json.loads(capsys.readouterr().out).values()
    assert found[False] == []
    assert found[True][0]["step"] == 950
    assert main(["watch", str(tmp_path / "run"), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "step 700" in shown
    assert "nan" not in shown


def test_scan_tells_health_by_its_exit_code(tmp_path, capsys):
    tree = torch_llama(norm=(H, H))
    save_file(tree, tmp_path / "model.safetensors")
    assert main(["scan", str(tmp_path), "--json"]) == 0
    seen = capsys.readouterr()
    assert json.loads(seen.out)["healthy"] is True
    assert "100 % " in seen.err
    tree["lm_head.weight"][3, 3] = np.nan
    save_file(tree, tmp_path / "model.safetensors")
    assert main(["scan", str(tmp_path)]) == 1
    assert "head is not finite" in capsys.readouterr().out


def test_what_cannot_be_read_is_code_2_and_one_line(tmp_path, capsys):
    path = tmp_path / "model\x1b[2J.safetensors"
    path.write_bytes(b"\xff" * 64)
    assert main(["scan", str(path)]) == 2
    error = capsys.readouterr().err
    assert r"model\x1b[2J.safetensors is no whole safetensors file" in error
    assert "\x1b" not in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["watch", "nix"], "nix is not there"),
        (["rank", "nix"], "nix is not a run"),
        (["report", "nix"], "nix is not there: give a run's folder"),
        (["compare", "nix"], "no --reference: clean runs or a .json file given"),
        (["scan", "nix"], "nix does not exist"),
    ],
)
def test_what_is_missing_is_code_2(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_without_the_extra_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert main(["rank", "nix"]) == 2
    assert 'pip install "stabmon[cli]"' in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_error(runs, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert main(["rank", str(runs / "faulty"), "--json"]) == 0
