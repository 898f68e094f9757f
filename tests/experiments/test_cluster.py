"""Several processes on loopback, and several meshes in one: the same run."""

import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from experiments import cluster
from experiments.placement import Placement
from experiments.step import MonitorConfig, OptimizerConfig
from experiments.train import Config, train
from models.config import GPTConfig
from stabmon.output.runlog import load_run

ROOT = Path(__file__).parents[2]
MODEL = GPTConfig(layers=1, model=32, heads=4, context=16)


def settings(folder, **changes):
    base = Config(
        name="run",
        runs=Path(folder),
        steps=20,
        batch=8,
        model=MODEL,
        optimizer=OptimizerConfig(warmup=5, every=5, keep=2),
        monitor=MonitorConfig(delta=10, activations=10, weights=10, symptoms=10),
        checkpoint_every=10,
        quiet=True,
    )
    return dataclasses.replace(base, **changes)


def metrics(folder):
    return load_run(folder / "run").metrics


def assert_same(got, expected, first=0):
    assert got.keys() == expected.keys()
    for key, (steps, values) in expected.items():
        chosen = steps >= first
        np.testing.assert_array_equal(got[key][0][got[key][0] >= first], steps[chosen])
        now = got[key][1][got[key][0] >= first]
        np.testing.assert_allclose(now, values[chosen], rtol=5e-3, atol=5e-4, err_msg=key)


def test_saved_on_one_mesh_and_resumed_on_others_it_is_the_same_run(tmp_path):
    split = Placement("mixed", 2)
    train(settings(tmp_path / "half", placement=split, steps=10))
    for name, placement in {
        "4x2": split,
        "8x1": Placement("fsdp", 1),
        "one": Placement(),
    }.items():
        shutil.copytree(tmp_path / "half", tmp_path / name)
        train(settings(tmp_path / name, placement=placement, resume=True))
    expected = metrics(tmp_path / "4x2")
    assert "delta10/global/delta2/entropy/mean" in expected
    assert_same(metrics(tmp_path / "8x1"), expected, first=10)
    assert_same(metrics(tmp_path / "one"), expected, first=10)


def test_a_batch_that_does_not_divide_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="a batch of 6 does not divide over 8 devices; write --batch"
    ):
        train(settings(tmp_path, batch=6, placement=Placement("data")))


def test_a_model_axis_that_does_not_divide_is_refused(tmp_path):
    with pytest.raises(ValueError, match="model_axis=3 does not divide 8 devices"):
        train(settings(tmp_path, placement=Placement("mixed", 3)))


def test_half_told_processes_are_refused(monkeypatch):
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    with pytest.raises(ValueError, match="JAX_PROCESS_ID are set, JAX_COORDINATOR_ADDRESS"):
        cluster.join()


def start(program, count):
    """`count` processes of a Python program, joined through a free port."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    told = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(count)}
    base = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    base |= told | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return [
        subprocess.Popen(
            [sys.executable, "-c", "import experiments\n" + program],
            env=base | {"JAX_PROCESS_ID": str(i)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(count)
    ]


TRAINS = """
from experiments.cluster import join, together
join()
from pathlib import Path
from tests.experiments.test_cluster import settings
from experiments.placement import Placement
from experiments.train import train
with together():
    result = train(settings(Path({folder!r}), placement=Placement("fsdp"), {options}))
print("LOSS", result.loss)
"""


def test_two_processes_are_one_run_and_a_lost_one_ends_the_other(tmp_path):
    program = TRAINS.format(folder=str(tmp_path / "two"), options="steps=100_000")
    pair = start(program, 2)
    log = tmp_path / "two" / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and log.read_text().count("\n") > 2) and time.monotonic() < deadline:
        time.sleep(0.2)
    pair[1].send_signal(signal.SIGKILL)
    begun = time.monotonic()
    said, _ = pair[0].communicate(timeout=60)
    pair[1].communicate()
    assert time.monotonic() - begun < 60
    assert "another process of this run is gone" in said, said
    assert pair[0].returncode == cluster.LOST
    shutil.rmtree(tmp_path / "two" / "run")

    finished = start(TRAINS.format(folder=str(tmp_path / "two"), options="steps=20"), 2)
    losses = {p.communicate(timeout=120)[0].split("LOSS")[-1].strip() for p in finished}
    assert len(losses) == 1
    alone = train(settings(tmp_path / "alone"))
    assert float(losses.pop()) == pytest.approx(alone.loss, rel=1e-4)
    assert_same(metrics(tmp_path / "two"), metrics(tmp_path / "alone"))


def test_processes_that_disagree_are_told_so():
    program = (
        "from experiments.cluster import agree, join\n"
        "join()\n"
        "import jax\n"
        "agree('the weather', 'fair')\n"
        "agree('the weather', 'fair' if jax.process_index() == 0 else 'foul')\n"
    )
    for process in start(program, 2):
        said, _ = process.communicate(timeout=60)
        assert "processes disagree on the weather: [1] of 2 differ from process 0" in said
        assert process.returncode != 0
