"""Sinks by name: each gets the samples of a run, under the run's folder."""

import pytest

from experiments.loop.sinks import open_sinks
from stabmon.output.sinks.fanout import Fanout


def test_tensorboard_and_prometheus_get_the_samples(tmp_path):
    opened = open_sinks(("tensorboard", "prometheus"), tmp_path, {"seed": 0})
    with Fanout(opened) as sinks:
        sinks.write(10, {"symptoms/global/loss/value": 2.5})
    assert "stabmon_step 10.0" in (tmp_path / "metrics.prom").read_text()
    assert list((tmp_path / "tensorboard").iterdir())


def test_without_names_nothing_is_opened(tmp_path):
    assert open_sinks((), tmp_path, {}) == []
    assert list(tmp_path.iterdir()) == []


def test_a_missing_library_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ImportError, match="wandb"):
        open_sinks(("wandb",), tmp_path, {})
