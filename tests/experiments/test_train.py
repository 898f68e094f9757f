"""The training loop: interrupted or not, a run is the same run."""

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.faults import AttentionFault
from experiments.loop.checkpoints import checkpoints
from experiments.loop.measuring import divided
from experiments.loop.optimizer import MsignConfig, OptimizerConfig
from experiments.loop.step import MonitorConfig, make_step
from experiments.train import Config, train
from models.config import GPTConfig
from stabmon.alarms.reference import Band, Reference
from stabmon.runs.jsonl import read_jsonl
from stabmon.runs.run import load_run
from stabmon.runs.runlog import RunLog

ROOT = Path(__file__).parents[2]
MODEL = GPTConfig(layers=1, model=16, heads=2, context=16, backend="flash")


def tiny(folder, **changes):
    settings = Config(
        name="tiny",
        runs=Path(folder),
        steps=40,
        batch=4,
        model=MODEL,
        optimizer=OptimizerConfig(warmup=5, every=5, keep=2),
        monitor=MonitorConfig(delta=5, activations=10, weights=10, symptoms=5),
        fault=AttentionFault(onset=20),
        checkpoint_every=15,
        quiet=True,
    )
    return dataclasses.replace(settings, **changes)


def final_state(config):
    init, _, _ = make_step(config.model, config.optimizer, config.monitor, config.fault)
    return checkpoints(config.runs / config.name, init(config.seed)).restore()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    config = tiny(tmp_path_factory.mktemp("whole"))
    result = train(config)
    return config, result


def test_a_run_leaves_its_folder(whole):
    _, result = whole
    run = load_run(result.folder)
    assert result.step == 40
    assert run.metrics["symptoms/global/loss/value"][0].tolist() == list(range(5, 40, 5))
    assert run.metrics["delta10/global/delta2/entropy/mean"][0].tolist() == list(range(10, 40, 5))
    assert [row["onset"] for row in run.faults] == [20]
    assert run.events[-1]["kind"] == "finished"
    assert {"config.json", "metrics.jsonl", "faults.jsonl", "checkpoints"} <= {
        path.name for path in result.folder.iterdir()
    }
    losses = run.metrics["symptoms/global/loss/value"][1]
    assert losses[-1] < losses[0] - 0.5


def test_interrupted_and_resumed_is_bit_for_bit_the_same(whole, tmp_path):
    config, result = whole
    broken = tiny(tmp_path)
    train(dataclasses.replace(broken, steps=22))
    again = train(dataclasses.replace(broken, resume=True))
    assert again.loss == result.loss
    jax.tree.map(np.testing.assert_array_equal, final_state(broken), final_state(config))
    values = [
        [(row["step"], row["values"]) for row in read_jsonl(r.folder / "metrics.jsonl")]
        for r in (result, again)
    ]
    assert values[0] == values[1]


def test_alarms_are_the_same_with_an_interruption(tmp_path):
    flat = lambda mean, sd: (np.array([0, 40]), np.full(2, mean), np.full(2, sd))
    bands = {
        "symptoms/global/loss/value": Band(*flat(5.0, 1e-3), "reference"),
        # Judged by its own steps 5 to 15, so its two samples lie on both sides of step 22.
        "symptoms/global/grad_norm/value": Band(*flat(0.0, 1e-4), "own"),
    }
    path = tmp_path / "reference.json"
    Reference(bands, (5, 15), {}).save(path)
    whole = train(tiny(tmp_path / "whole", reference=path))
    broken = tiny(tmp_path / "broken", reference=path)
    train(dataclasses.replace(broken, steps=22, checkpoint_every=0))
    again = train(dataclasses.replace(broken, resume=True))
    alarms = [
        [(row["step"], row["key"]) for row in load_run(r.folder).events if row["kind"] == "alarm"]
        for r in (whole, again)
    ]
    assert alarms[0] == alarms[1]
    assert [step for step, key in alarms[0] if "grad_norm" in key] == [25]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_killed_at_a_random_step_and_resumed_is_bit_for_bit_the_same(whole, tmp_path, number):
    config, _ = whole
    broken = tiny(tmp_path)
    script = (
        "import sys; sys.path.insert(0, 'tests/experiments'); "
        "from experiments.train import train; from test_train import tiny; "
        f"train(tiny({str(tmp_path)!r}))"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=one_device())
    metrics = tmp_path / "tiny" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and len(metrics.read_bytes().splitlines()) > 3):
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(number)
    code = process.wait(60)
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 0)
    train(dataclasses.replace(broken, resume=True))
    steps = [row["step"] for row in read_jsonl(metrics)]
    assert steps == list(range(5, 40, 5))
    jax.tree.map(np.testing.assert_array_equal, final_state(broken), final_state(config))


def one_device():
    return {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}


@pytest.mark.parametrize("part", ["params", "meta"])
def test_a_checkpoint_that_was_cut_short_is_named_and_an_earlier_one_serves(whole, tmp_path, part):
    config = tiny(tmp_path)
    train(config)
    folder = tmp_path / "tiny" / "checkpoints"
    for path in (folder / "40" / part).rglob("*"):
        if path.is_file():
            os.truncate(path, path.stat().st_size // 2)
    longer = dataclasses.replace(config, resume=True)
    with pytest.raises(ValueError, match=r"40 cannot be read.*move it away to go on from step 30"):
        train(longer)
    (folder / "40").rename(tmp_path / "aside")
    assert train(longer).loss == whole[1].loss
    jax.tree.map(np.testing.assert_array_equal, final_state(config), final_state(whole[0]))


def test_a_disk_that_is_full_for_a_while_costs_no_sample(whole, tmp_path, monkeypatch):
    config, tries = tiny(tmp_path), []
    append = RunLog.sample

    def full(log, step, values, **more):
        if step == 25 and len(tries) < 3:
            tries.append(step)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "metrics.jsonl")
        append(log, step, values, **more)

    monkeypatch.setattr(RunLog, "sample", full)
    assert train(config).code == 0
    assert tries == [25, 25, 25]
    runs = [load_run(c.runs / "tiny").metrics for c in (config, whole[0])]
    jax.tree.map(np.testing.assert_array_equal, *runs)


def test_another_configuration_in_the_folder_is_refused_and_nothing_overwritten(whole):
    config, result = whole
    before = (result.folder / "config.json").read_bytes()
    with pytest.raises(FileExistsError, match="seed"):
        train(dataclasses.replace(config, seed=1, resume=True))
    assert (result.folder / "config.json").read_bytes() == before


def test_a_finished_run_is_not_begun_again(whole):
    config, _ = whole
    with pytest.raises(FileExistsError, match="pass resume=True"):
        train(config)


def test_the_matched_clean_run_is_a_run_without_the_fault(whole, tmp_path):
    _, result = whole
    clean = train(tiny(tmp_path / "a", armed=False))
    healthy = train(tiny(tmp_path / "b", fault=None))
    assert clean.loss == healthy.loss != result.loss
    assert read_jsonl(clean.folder / "faults.jsonl") == []


def test_a_mixture_of_experts_is_watched(tmp_path):
    model = GPTConfig(layers=1, model=16, heads=2, context=16, experts=4)
    watch = MonitorConfig(router=10, delta=10, activations=0, weights=0, symptoms=0, detail="full")
    result = train(tiny(tmp_path, model=model, fault=None, monitor=watch, steps=11))
    (*_, last) = (sample["values"] for sample in read_jsonl(result.folder / "metrics.jsonl"))
    assert 0 < last["router/layer_00/entropy/value"] <= np.log(4) + 1e-6
    assert last["router/layer_00/balance_ratio/value"] > 0
    assert "delta10/global/router/modes/mean" in last


def test_a_mixture_of_experts_trains_with_its_auxiliary_loss():
    def router_after_one_step(weight):
        model = GPTConfig(layers=1, model=16, heads=2, context=8, experts=4)
        model = dataclasses.replace(model, auxiliary_weight=weight)
        optimizer = OptimizerConfig(warmup=1, every=1, keep=1)
        init, step, _ = make_step(model, optimizer, MonitorConfig(), None)
        state, _, loss = step(init(0), np.zeros((2, 9), np.int32), np.float32(0), due=())
        state, _, _ = step(state, np.zeros((2, 9), np.int32), np.float32(0), due=())
        return float(loss), np.asarray(state.params["layers"]["moe"]["router"]["kernel"])

    (loss, balanced), (same, free) = router_after_one_step(10.0), router_after_one_step(0.0)
    assert loss == same  # the loss reported is the language model's alone
    assert np.max(np.abs(balanced - free)) > 1e-5


def test_msign_in_the_chain_restores_the_attention_matrices(tmp_path):
    msign = MsignConfig(period=5)
    config = tiny(tmp_path, fault=None, steps=11)
    optimizer = dataclasses.replace(config.optimizer, msign=msign, control=True)
    watch = MonitorConfig(router=0, delta=0, activations=0, weights=3, symptoms=0)
    config = dataclasses.replace(config, optimizer=optimizer, monitor=watch)
    result = train(config)
    _, ranks = load_run(result.folder).metrics["weights/global/q/stable_rank/mean"]
    full = config.model.model
    assert ranks[0] < 0.6 * full < 0.95 * full < ranks[1]


def test_missing_data_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        train(tiny(tmp_path, data=tmp_path / "nowhere.txt"))


def test_the_step_compiles_twice_whatever_is_due(tmp_path):
    config = tiny(tmp_path)
    init, step, watch = make_step(config.model, config.optimizer, config.monitor, config.fault)
    state, tokens = init(0), np.zeros((4, 17), np.int32)
    programs: Any = step
    before = programs.train._cache_size(), programs.measure._cache_size()
    for i in range(7):
        state, readings, _ = step(state, tokens, np.float32(1), due=watch.due(i))
        assert (readings is None) == (watch.due(i) == ())
    assert programs.train._cache_size() - before[0] == 2
    beside = {divided(watch.due(i))[1] for i in range(7)} - {()}
    assert programs.measure._cache_size() - before[1] == len(beside) > 0


def test_configuration_on_disk_tells_the_run(whole):
    _, result = whole
    content = json.loads((result.folder / "config.json").read_text())
    assert content["model"]["layers"] == 1
    assert content["fault"]["onset"] == 20
