"""Logs made by the real writers are read as the run that they tell of; bad ones are refused."""

import csv
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from tensorboardX import SummaryWriter

from stabmon.output.provenance import provenance
from stabmon.quantities import GRAD_NORM, HELD_OUT, LEARNING_RATE, LOSS
from stabmon.recovery.replay import replay_events
from stabmon.runs.foreign.load import LogFollower, follow, import_log, load
from stabmon.runs.jsonl import plain
from stabmon.runs.run import EPOCH, load_run
from stabmon.runs.runlog import RunLog

DELTA = "delta50/layer_03/delta2/modes/p10"


def series(run):
    return {
        key: dict(zip(*map(np.ndarray.tolist, of), strict=True)) for key, of in run.metrics.items()
    }


def state(path, count=40, each=10):
    """A trainer's state as `TrainerState.save_to_json` writes it."""
    history = []
    for n in range(1, count + 1):
        loss = math.nan if n == 7 else 5 - n / 16
        row = {"epoch": n / 10, "grad_norm": 1.0, "learning_rate": 1e-3 / n, "loss": loss}
        history.append(row | {"step": n * each})
        if n % 10 == 0:
            history.append(
                {"epoch": n / 10, "eval_loss": 3.0, "eval_runtime": 2.0, "step": n * each}
            )
    history.append({"epoch": 4.0, "step": count * each, "train_loss": 9.9, "train_runtime": 1.0})
    found = {"best_metric": None, "global_step": count * each, "log_history": history}
    path.write_text(json.dumps(found | {"logging_steps": each}, indent=2, sort_keys=True) + "\n")
    return path


def test_a_trainer_state(tmp_path):
    run = load(state(tmp_path / "trainer_state.json"))
    assert (run.source.kind, run.source.means) == ("Hugging Face trainer state", True)
    assert (len(run.steps), run.spacing, run.steps[-1]) == (40, 10, 400)
    found = series(run)
    assert math.isnan(found[LOSS][70])
    assert (found[LOSS][400], found[HELD_OUT]) == (2.5, {100 * n: 3.0 for n in range(1, 5)})
    assert (found[GRAD_NORM][10], found[LEARNING_RATE][20]) == (1.0, 5e-4)
    assert run.epochs is not None
    assert found[EPOCH][400] == 4.0
    assert run.config == {"trainer": {"logging_steps": 10}}
    assert run.source.left_out == ("eval_runtime",)  # the last row is the mean of the whole run


def test_the_newest_of_a_folder_of_checkpoints(tmp_path):
    for step, count in ((90, 9), (400, 40)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        state(tmp_path / f"checkpoint-{step}" / "trainer_state.json", count)
        (tmp_path / f"checkpoint-{step}" / "config.json").write_text("{}")
    assert load(tmp_path).steps[-1] == 400
    assert load(tmp_path / "checkpoint-90").steps[-1] == 90


@pytest.mark.slow
def test_a_trainer_state_written_by_transformers(tmp_path):
    callback = pytest.importorskip("transformers.trainer_callback", reason="needs transformers")
    history = [{"step": 10 * n, "loss": 2.0, "grad_norm": 1.0} for n in range(1, 5)]
    found = callback.TrainerState(global_step=40, log_history=history)
    found.save_to_json(str(tmp_path / "trainer_state.json"))
    assert load(tmp_path).metrics[LOSS][0].tolist() == [10, 20, 30, 40]


def test_tensorboard_with_every_kind_of_tag(tmp_path):
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(0, 50, 5):
            writer.add_scalar("learning/loss", 4 - step / 64, step)
            writer.add_scalar("learning/grad_norm", 0.5, step)
            writer.add_scalar("learning/raw_grad_norm", math.inf if step == 10 else 1.5, step)
            writer.add_scalar("learning/current_learning_rate", 0.25, step)
            writer.add_scalar(DELTA, 7.0, step)
            writer.add_text("note", "words", step)
            writer.add_histogram("weights", np.arange(4.0), step)
        writer.add_scalar("eval/avg_loss", 3.5, 45)
    run = load(tmp_path)
    assert run.source.kind == "TensorBoard log"
    found = series(run)
    assert found[LOSS] == {step: 4 - step / 64 for step in range(0, 50, 5)}
    assert (found[GRAD_NORM][10], found[GRAD_NORM][15]) == (math.inf, 1.5)  # before clipping
    assert (found[LEARNING_RATE][5], found[HELD_OUT], found[DELTA][45]) == (0.25, {45: 3.5}, 7.0)
    assert run.source.left_out == ("learning/grad_norm",)
    (file,) = tmp_path.iterdir()
    assert series(load(file)) == found
    file.write_bytes(file.read_bytes()[:-9])  # still being written
    assert len(load(file).metrics[LOSS][0]) == 10


@pytest.mark.parametrize("purge", [None, 30])
def test_tensorboard_of_a_run_that_went_back(tmp_path, purge):
    for first, value in ((0, 1.0), (30, 2.0)):
        with SummaryWriter(
            str(tmp_path), purge_step=purge if first else None, filename_suffix=f".{first}"
        ) as writer:
            for step in range(first, 60 - first // 2, 10):
                writer.add_scalar("train/loss", value, step)
                writer.add_scalar("eval/loss", value, step + 1)
    found = series(load(tmp_path))
    assert found[LOSS] == {0: 1, 10: 1, 20: 1, 30: 2, 40: 2}
    assert found[HELD_OUT] == {1: 1, 11: 1, 21: 1, 31: 2, 41: 2}


def test_what_tensorboard_is_told_to_purge_is_left_out(tmp_path):
    for purge, steps in ((None, (10, 20, 30)), (20, (40,))):
        with SummaryWriter(
            str(tmp_path), purge_step=purge, filename_suffix=f".{steps[0]}"
        ) as writer:
            for step in steps:
                writer.add_scalar("loss", 1.0, step)
    assert load(tmp_path).metrics[LOSS][0].tolist() == [10, 40]


def test_tensorboard_folders_are_texts_or_runs(tmp_path):
    for name in ("train", "validation"):
        with SummaryWriter(str(tmp_path / "one" / name)) as writer:
            writer.add_scalar("loss", 2.0 if name == "train" else 3.0, 10)
    found = series(load(tmp_path / "one"))
    assert (found[LOSS], found[HELD_OUT]) == ({10: 2.0}, {10: 3.0})
    for name in ("version_0", "version_1"):
        with SummaryWriter(str(tmp_path / "two" / name)) as writer:
            writer.add_scalar("train/loss", 2.0, 10)
    with pytest.raises(ValueError, match=r"several runs \(train/loss is in version_0, version_1\)"):
        load(tmp_path / "two")


WANDB = """
import math, sys, wandb
run = wandb.init(mode="offline", dir=sys.argv[1], config={"lr": 0.001, "model": {"layers": 4}})
for step in range(10, 3010, 10):
    loss = math.nan if step == 50 else step / 8
    run.log({"train/global_step": step, "train/loss": loss, "note": 80 * "x", "a": {"b": 1}})
    if step % 1000 == 0:
        run.log({"train/global_step": step, "eval/loss": 3.5})
run.finish()
"""


@pytest.mark.slow
def test_a_wandb_offline_run_written_by_wandb(tmp_path):
    pytest.importorskip("wandb", reason="needs stabmon[wandb]")
    env = {k: v for k, v in os.environ.items() if k != "WANDB_API_KEY"}
    env |= {"HOME": str(tmp_path), "WANDB_SILENT": "true"}
    command = [sys.executable, "-c", WANDB, str(tmp_path)]
    subprocess.run(command, env=env, timeout=120, check=True, capture_output=True)
    run = load(tmp_path)
    found = series(run)
    assert math.isnan(found[LOSS].pop(50))
    assert found[LOSS] == {step: step / 8 for step in range(10, 3010, 10) if step != 50}
    assert found[HELD_OUT] == {1000: 3.5, 2000: 3.5, 3000: 3.5}
    assert run.config["trainer"] == {"lr": 0.001, "model": {"layers": 4}}


def varint(value):
    rest = bytes([value & 127 | (128 if value > 127 else 0)])
    return rest + (varint(value >> 7) if value > 127 else b"")


def message(number, body):
    return varint(number << 3 | 2) + varint(len(body)) + body


def wandb_file(path, rows):
    """As LevelDB's log format says: 32 KiB blocks of records with checksum, length and kind."""
    data = b":W&B\x00\x00\x00"
    for row in rows:
        items = [
            message(1, message(2, k.encode()) + message(16, json.dumps(v).encode()))
            for k, v in row.items()
        ]
        body, first = message(2, b"".join(items)), True
        while body or first:
            left = 32768 - len(data) % 32768
            if left < 7:
                data += bytes(left)
                continue
            part, body = body[: left - 7], body[left - 7 :]
            kind = (1 if not body else 2) if first else (4 if not body else 3)
            data += bytes(4) + len(part).to_bytes(2, "little") + bytes([kind]) + part
            first = False
    path.write_bytes(data)


def test_records_of_a_wandb_run_span_blocks(tmp_path):
    for size in range(32_600, 32_760):  # every way to end near the end of a block
        rows = [{"_step": n, "loss": 5 - n / 4, "note": size * (n < 2) * "x"} for n in range(5)]
        wandb_file(tmp_path / "run-1.wandb", rows)
        run = load(tmp_path)
        assert series(run) == {LOSS: {n: 5 - n / 4 for n in range(5)}}
    assert run.source.kind == "Weights & Biases run"


def table(path, header, rows, **how):
    with path.open("w", newline="") as file:
        csv.writer(file, **how).writerows([header, *rows])
    return path


def test_a_csv_as_lightning_writes_it(tmp_path):
    rows = [[n // 4, n, 2.5, ""] for n in range(8)] + [[1, 7, "", 3.5]]
    path = table(tmp_path / "metrics.csv", ["epoch", "step", "train_loss_step", "val_loss"], rows)
    assert load(tmp_path).source.kind == "CSV table"
    found = series(load(path))
    assert (found[LOSS], found[HELD_OUT]) == ({n: 2.5 for n in range(8)}, {7: 3.5})


def test_a_chart_exported_from_wandb(tmp_path):
    header = ["Step", "calm-sun-1 - train/loss", "calm-sun-1 - train/loss__MIN"]
    path = table(tmp_path / "export.csv", header, [[10, 2.5, 0.0], [20, 2.25, 0.0]])
    run = load(path)
    assert run.source.kind == "Weights & Biases export"
    assert series(run) == {LOSS: {10: 2.5, 20: 2.25}}
    header = ["Step", "a - train/loss", "b - train/loss"]
    with pytest.raises(ValueError, match="holds 2 runs, a, b: export one of them"):
        load(table(tmp_path / "two.csv", header, [[10, 2.5, 0.0]]))


def test_a_table_newest_first_and_with_semicolons(tmp_path):
    rows = [[step, step / 8] for step in (40, 30, 20, 10)]
    path = table(tmp_path / "log.csv", ["iteration", "loss"], rows, delimiter=";")
    assert series(load(path)) == {LOSS: {10: 1.25, 20: 2.5, 30: 3.75, 40: 5.0}}


def test_json_lines_and_their_bad_ones(tmp_path):
    rows = [{"step": n, "metrics": {"train/loss": 2.5, "grad/norm/total": 1.0}} for n in range(5)]
    lines = [json.dumps(row) for row in rows]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join([*lines, '{"ste', "[1]", '{"step": 1e300, "loss": 1}', "{}"]))
    run = load(path)
    assert series(run) == {
        LOSS: dict.fromkeys(range(5), 2.5),
        GRAD_NORM: dict.fromkeys(range(5), 1.0),
    }
    assert run.skipped == 2


def test_reference_values_by_step_and_their_filler(tmp_path):
    path = tmp_path / "golden.json"
    values = {"1": 9.5, "5": 9.0, "10": "nan"}
    path.write_text(json.dumps({"lm loss": {"start_step": 1, "values": values}}))
    assert series(load(path)) == {LOSS: {1: 9.5, 5: 9.0}}


def test_a_log_that_a_run_started_again_went_on_with(tmp_path):
    path = tmp_path / "train.log"
    steps = [*range(10, 110, 10), *range(60, 90, 10)]
    lines = [f"step: {s} loss: {i}.0 val_loss: {i}.5" for i, s in enumerate(steps)]
    path.write_text("\n".join(lines))
    run = load(path)
    assert series(run)[LOSS] == {10: 0, 20: 1, 30: 2, 40: 3, 50: 4, 60: 10, 70: 11, 80: 12}
    assert (run.attempts, run.metrics[HELD_OUT][0][-1]) == (2, 80)
    assert any(x.startswith("Attempt 2") for x in provenance(run))


def test_a_row_that_came_late_abandons_nothing(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(json.dumps({"step": s, "loss": 1.0}) for s in (10, 30, 20, 40)))
    run = load(path)
    assert (run.metrics[LOSS][0].tolist(), run.attempts) == ([10, 20, 30, 40], 1)


def test_columns_are_told(tmp_path):
    path = table(tmp_path / "log.csv", ["t", "objective"], [[1, 2.5], [2, 2.25]])
    with pytest.raises(ValueError, match="no column that counts steps; it has t, objective: say"):
        load(path)
    with pytest.raises(ValueError, match="none of its columns is known: objective; say which"):
        load(path, {"step": "t"})
    told = {"step": "t", "loss": "objective"}
    assert series(load(path, told)) == {LOSS: {1: 2.5, 2: 2.25}}
    assert series(load(path, {"step": "t", DELTA: "objective"})) == {DELTA: {1: 2.5, 2: 2.25}}
    with pytest.raises(ValueError, match=r"--map lss=objective: lss is no quantity; write one of"):
        load(path, {"step": "t", "lss": "objective"})
    with pytest.raises(ValueError, match=r"--map loss=obj: the log has no obj, it has objective"):
        load(path, {"step": "t", "loss": "obj"})


BAD = {
    "empty.log": (b"", "is empty"),
    "bytes.bin": (b"\x00\x01\x02", "is binary, and no log that is known"),
    "broken.json": (b"{", "cannot be read as JSON"),
    "other.json": (b'{"a": 1}', r"is JSON, an object of a, and no log that is known: expected"),
    "none.jsonl": (b"a\nb\n", "none of its 2 lines is a JSON object"),
    "head.csv": (b"step,loss\n", "no rows under its header"),
    "events.tfevents": (b"x" * 100, "TensorBoard log, but no row has a step and a number"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_log_is_refused_with_what_it_is(tmp_path, name):
    content, expected = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=expected):
        load(tmp_path / name)


def test_a_folder_without_a_log_says_what_it_holds(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is not there: give a run's folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="is a folder with nothing: expected a run's folder"):
        load(tmp_path)
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("step,loss\n1,2\n")
    with pytest.raises(ValueError, match=r"with a.csv, b.csv: give one of these files"):
        load(tmp_path)


def test_a_run_folder_is_loaded_as_it_is(tmp_path):
    with RunLog.open(tmp_path, {"seed": 1}) as log:
        log.sample(10, {LOSS: 2.5})
    run = load(tmp_path)
    assert (run.config, run.source.foreign, run.spacing) == ({"seed": 1}, False, 0)
    assert provenance(run) == []
    with pytest.raises(ValueError, match="its keys need no --map"):
        load(tmp_path, {"loss": "x"})
    with pytest.raises(ValueError, match="is a run's folder already"):
        import_log(tmp_path, tmp_path / "new")


def test_an_imported_log_says_what_it_was(tmp_path):
    path = state(tmp_path / "trainer_state.json")
    direct, run = load(path), import_log(path, tmp_path / "run")
    assert series(run).keys() == series(direct).keys()
    for key, of in direct.metrics.items():
        np.testing.assert_array_equal(run.metrics[key], of)
    assert run.source == direct.source == load_run(tmp_path / "run").source
    assert plain(replay_events(run)) == plain(replay_events(direct)) != []
    with pytest.raises(FileExistsError, match="holds this run already"):
        import_log(path, tmp_path / "run")


def test_provenance_says_what_a_log_cannot_tell(tmp_path):
    path = table(
        tmp_path / "log.csv", ["step", "loss", "speed"], [[10 * n, 2, 3] for n in range(12)]
    )
    said = " ".join(provenance(load(path)))
    for words in ("12 rows, one each 10 steps", "Only 12 rows", "overfitting", "gradient norm"):
        assert words in said
    assert "no module can be named" in said
    assert "known quantity: speed." in said


def test_a_log_that_grows_is_followed(tmp_path):
    path = tmp_path / "train.log"
    path.write_text("step: 10 loss: 2.5\nstep: 20 loss: 2.25\n")
    follower = follow(path, {LOSS}.__contains__)
    assert isinstance(follower, LogFollower)
    follower.update()
    assert follower.step == 20
    path.write_text(path.read_text() + "step: 30 loss: 2.0\n")
    os.utime(path, (2e9, 2e9))
    follower.update()
    assert follower.columns.series()[LOSS][1].tolist() == [2.5, 2.25, 2.0]
