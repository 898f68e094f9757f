"""The examples against the real packages: healthy, with a fault that is named, and resumed."""

from pathlib import Path

import numpy as np
import pytest

from stabmon.quantities import LOSS
from stabmon.runs.run import load_run
from tests.environments import ROOT, run_with

START = Path(__file__).parent / "start.py"
PACKAGES = {
    "linen": ("equinox", ("equinox==0.13.8", "flax")),
    "nnx": ("equinox", ("equinox==0.13.8", "flax")),
    "equinox": ("equinox", ("equinox==0.13.8", "flax")),
    "tunix": ("tunix", ("google-tunix==0.1.7",)),
}


def run(name, folder, *arguments):
    """Events and metrics of an example's run."""
    run_with(*PACKAGES[name], START, name, str(folder), *arguments)
    return load_run(folder)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda x: x.stem)
def test_an_example_is_short(path):
    assert len(path.read_text().splitlines()) <= 80


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_a_healthy_run_raises_no_alarm_also_when_it_is_interrupted(name, tmp_path):
    run(name, tmp_path / "run", "--steps", "140")
    found = run(name, tmp_path / "run")
    assert [event for event in found.events if event["kind"] != "resume"] == []
    steps, losses = found.metrics[LOSS]
    assert np.diff(steps).max() <= 10
    assert steps[-1] >= 290
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_a_learning_rate_that_is_wrong_is_named(name, tmp_path):
    found = run(name, tmp_path / "run", "--factor", "40")
    rows = [event for event in found.events if event["kind"] == "incident"]
    assert {row["number"] for row in rows} == {1}
    assert 150 <= rows[0]["opened"] <= 200
    assert rows[-1]["fault"] == "learning rate"
