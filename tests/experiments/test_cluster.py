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

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from experiments.loop import cluster
from experiments.loop.optimizer import OptimizerConfig
from experiments.loop.placement import Placement
from experiments.loop.step import MonitorConfig
from experiments.train import Config, train
from models.config import GPTConfig
from stabmon import hosts
from stabmon.runs.run import load_run

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


@pytest.mark.slow
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


@pytest.fixture
def begun(monkeypatch):
    """What `jax.distributed` is begun with, beside the settings of JAX before that."""
    calls, told = [], {}
    monkeypatch.setattr(jax.config, "update", told.__setitem__)
    start = lambda **given: calls.append(told | given)
    monkeypatch.setattr(jax.distributed, "initialize", start)
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    return calls


def test_three_variables_tell_a_process_its_place(begun, monkeypatch):
    for name, value in by_variables(3)(2).items():
        monkeypatch.setenv(name, value)
    cluster.join()
    (given,) = begun
    assert (given["num_processes"], given["process_id"]) == (3, 2)
    assert given["coordinator_address"].startswith("127.0.0.1:")
    assert given["heartbeat_timeout_seconds"] == cluster.HEARTBEAT
    assert given["jax_cpu_collectives_implementation"] == "gloo"


def test_without_variables_jax_finds_the_others_if_asked(begun):
    cluster.join()
    assert begun == []
    cluster.join(distributed=True)
    (given,) = begun
    assert "process_id" not in given


@pytest.fixture
def pair(monkeypatch):
    """This process as the first of two, of which the other gathers a value of its own."""

    def other(changed):
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        gathered = lambda x: np.array([x, x + changed], np.uint32)
        monkeypatch.setattr(multihost_utils, "process_allgather", gathered)

    return other


def test_a_process_that_differs_is_named(pair):
    pair(changed=0)
    hosts.agree("the weather", "fair")
    pair(changed=1)
    with pytest.raises(RuntimeError, match=r"disagree on the weather: \[1\] of 2 .*'fair'"):
        hosts.agree("the weather", "fair")


@pytest.mark.parametrize("sign", ["Gloo: Connection closed by peer", "heartbeat timeout"])
def test_where_another_process_is_gone_this_one_ends_at_once(pair, monkeypatch, capsys, sign):
    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    pair(changed=0)
    with pytest.raises(SystemExit, match=str(cluster.LOST)), cluster.together():
        raise RuntimeError(sign)
    assert f"another process of this run is gone ({sign})" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="another matter"), cluster.together():
        raise RuntimeError("another matter")


def by_variables(count):
    """What tells each of `count` processes its place, through a free port."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    told = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(count)}
    return lambda i: told | {"JAX_PROCESS_ID": str(i)}


def by_slurm(count):
    """What `srun` sets on one node; JAX takes the port from the number of the job."""
    told = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost"}
    told |= {"SLURM_NTASKS": str(count), "SLURM_STEP_NUM_NODES": "1"}
    return lambda i: told | {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}


def by_tpu_slice(count):
    """What a slice of TPU hosts finds in its environment, all of them this host."""
    told = {"TPU_WORKER_HOSTNAMES": ",".join(["localhost"] * count), "TPU_SKIP_MDS_QUERY": "1"}
    told |= {"MEGASCALE_COORDINATOR_ADDRESS": "localhost", "JAX_FORCE_TPU_INIT": "1"}
    told |= {"MEGASCALE_NUM_SLICES": "1", "MEGASCALE_SLICE_ID": "0"}
    return lambda i: told | {"TPU_WORKER_ID": str(i)}


def start(program, count, told=by_variables):
    """`count` processes of a Python program, each told its place among them."""
    base = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    base |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    place = told(count)
    return [
        subprocess.Popen(
            [sys.executable, "-c", "import experiments\n" + program],
            env=base | place(i),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(count)
    ]


TRAINS = """
from experiments.loop.cluster import join, together
join()
from pathlib import Path
from tests.experiments.test_cluster import settings
from experiments.loop.placement import Placement
from experiments.train import train
with together():
    result = train(settings(Path({folder!r}), placement=Placement("fsdp"), {options}))
print("LOSS", result.loss)
"""


@pytest.mark.slow
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


@pytest.mark.slow
def test_processes_that_disagree_are_told_so():
    program = (
        "from experiments.loop.cluster import join\n"
        "from stabmon.hosts import agree\n"
        "join()\n"
        "import jax\n"
        "agree('the weather', 'fair')\n"
        "agree('the weather', 'fair' if jax.process_index() == 0 else 'foul')\n"
    )
    for process in start(program, 2):
        said, _ = process.communicate(timeout=60)
        assert "processes disagree on the weather: [1] of 2 differ from process 0" in said
        assert process.returncode != 0


@pytest.mark.slow
@pytest.mark.parametrize("told", [by_slurm, by_tpu_slice])
def test_processes_that_a_cluster_started_find_each_other(told):
    program = (
        "from experiments.loop.cluster import join\n"
        "from stabmon.hosts import agree, leads\n"
        "join(distributed=True)\n"
        "import jax\n"
        "agree('the number', jax.process_count())\n"
        "print('PLACE', jax.process_index(), jax.process_count(), leads())\n"
    )
    said = [p.communicate(timeout=60)[0] for p in start(program, 2, told)]
    places = [text.split("PLACE ")[-1].split() for text in said]
    assert places == [["0", "2", "True"], ["1", "2", "False"]], said
