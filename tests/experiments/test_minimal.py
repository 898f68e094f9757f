"""The trainer that is to be copied: trains, is short, and goes on where it ended."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments import minimal
from models.config import GPTConfig
from stabmon.quantities import LOSS
from stabmon.runs.run import load_run

TOY = GPTConfig(layers=1, model=16, heads=2, context=16)


def test_it_trains_and_ends_with_a_report(tmp_path):
    watch = minimal.train(minimal.Config(runs=tmp_path, steps=12, batch=4, model=TOY))
    assert (watch.step, watch.exit_code) == (12, 0)
    assert "<html" in (watch.folder / "report.html").read_text()
    assert load_run(watch.folder).metrics[LOSS][0].tolist() == [0, 10]
    assert [path.name for path in (watch.folder / "checkpoints").iterdir()] == ["12"]


@pytest.mark.slow
def test_it_goes_on_where_it_ended_and_the_numbers_are_those_of_a_run_in_one(tmp_path):
    whole = minimal.Config(runs=tmp_path, steps=60, checkpoint_every=20, batch=4, model=TOY)
    minimal.train(whole)
    parts = replace(whole, name="parts")
    minimal.train(replace(parts, steps=30))
    minimal.train(parts)
    one, other = (load_run(tmp_path / name).metrics for name in ("minimal", "parts"))
    assert one.keys() == other.keys()
    for key, (steps, values) in one.items():
        np.testing.assert_array_equal(steps, other[key][0])
        np.testing.assert_array_equal(values, other[key][1])


def test_it_is_short_enough_to_be_copied():
    assert len(Path(minimal.__file__).read_text().splitlines()) <= 150
