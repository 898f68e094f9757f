"""The first step does not wait for the monitors; a sampled one finds its programs compiled."""

import jax
import numpy as np
import pytest

from experiments.loop.measuring import divided
from experiments.loop.optimizer import OptimizerConfig
from experiments.loop.placement import ALONE, Placement, make_mesh, mesh_in_force, place_batch
from experiments.loop.step import MonitorConfig, Step, make_step
from experiments.train import Config, train
from models.config import GPTConfig
from stabmon.runs.run import load_run
from stabmon.watch.ahead import compiling_ahead

MODEL = GPTConfig(layers=1, model=24, heads=2, context=12)
OPTIMIZER = OptimizerConfig(warmup=2, every=2, keep=2)
MONITOR = MonitorConfig(router=0, delta=4, activations=4, weights=4, symptoms=2)
DUE = ("delta", "activations", "weights", "symptoms")


def compiled_at_the_step(caplog, placement, begin):
    """Names of the programs compiled when a sampled step is called, after `begin`."""
    make_step.cache_clear()
    mesh = make_mesh(placement)
    with mesh_in_force(mesh):
        init, step, _ = make_step(MODEL, OPTIMIZER, MONITOR, None, placement)
        tokens = place_batch(np.zeros((8, MODEL.context + 1), np.int32), placement, mesh)
        given = (init(0), tokens, np.float32(0), None)
        with compiling_ahead(lambda: mesh_in_force(mesh)) as ahead:
            begin(ahead, step, given)
            step.wait(ahead, DUE)
        with jax.log_compiles(), caplog.at_level("WARNING"):
            _, readings, _ = step(*given[:3], due=DUE)
    assert readings is not None
    messages = [r.getMessage() for r in caplog.records]
    return {name for name in ("train", "measure") if any(f"jit({name})" in m for m in messages)}


@pytest.mark.parametrize(
    "placement", [ALONE, pytest.param(Placement("mixed", 2), marks=pytest.mark.slow)]
)
def test_what_is_compiled_ahead_is_not_compiled_again(caplog, placement):
    start = lambda ahead, step, given: step.compile_ahead(ahead, given, [(), DUE])
    assert compiled_at_the_step(caplog, placement, start) == set()


def test_what_is_not_compiled_ahead_is_compiled_when_needed(caplog):
    nothing = lambda ahead, step, given: None
    assert compiled_at_the_step(caplog, ALONE, nothing) == {"train", "measure"}


def test_a_failure_in_the_background_is_left_to_the_step(caplog):
    unfit = lambda ahead, step, given: step.compile_ahead(
        ahead, (given[0], given[2], *given[2:]), [DUE]
    )
    assert compiled_at_the_step(caplog, ALONE, unfit) == {"train", "measure"}


def test_the_first_step_of_a_run_is_not_sampled_and_waits_for_nothing(tmp_path, monkeypatch):
    begun, start = [], Step.compile_ahead

    def noted(self, ahead, given, dues):
        begun.append(int(given[0].step))
        start(self, ahead, given, dues)

    monkeypatch.setattr(Step, "compile_ahead", noted)
    settings = Config(
        runs=tmp_path,
        steps=9,
        batch=2,
        model=MODEL,
        optimizer=OPTIMIZER,
        monitor=MONITOR,
        quiet=True,
    )
    metrics = load_run(train(settings).folder).metrics
    assert begun == [1]
    assert metrics["symptoms/global/loss/value"][0].tolist() == [2, 4, 6, 8]
    assert metrics["weights/global/q/norm/mean"][0].tolist() == [4, 8]


def test_symptoms_are_measured_within_the_step():
    assert divided(DUE) == (("symptoms",), ("delta", "activations", "weights"))
    assert divided(()) == ((), ())
    assert divided(None) == (None, ())
