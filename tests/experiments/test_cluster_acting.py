"""The ladder at work in several processes: one story, one state, also after all were killed."""

import re

import pytest

from experiments.loop import alarms
from experiments.train import train
from stabmon.runs.run import load_run
from tests.experiments.test_acting import limited, story, tiny
from tests.experiments.test_cluster import assert_same, start

pytestmark = pytest.mark.slow

ACTS = """
from experiments.loop.cluster import join, together
join()
import os
from pathlib import Path
import jax
from experiments.loop import alarms
from stabmon.recovery.carrying_out import CarryingOut
from experiments.loop.placement import Placement
from experiments.train import train
from tests.experiments.test_acting import limited, tiny
alarms.standard_detectors = limited()
if {dies}:
    # All processes end in the midst of the rollback: journalled, nothing undone yet.
    CarryingOut._undo = lambda self, journal: os._exit(9)
with together():
    result = train(tiny(Path({folder!r}), placement=Placement("data"), batch=4, resume={resume}))
print("LOSS", result.loss, "STEP", result.step)
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    config = tiny(tmp_path_factory.mktemp("alone"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alarms, "standard_detectors", limited())
        result = train(config)
    assert ("rewind", 10, "") in story(config)
    return config, result.loss


def acts(folder, count, dies=False, resume=False):
    """What each of `count` processes said, and their exit codes."""
    program = ACTS.format(folder=str(folder), dies=dies, resume=resume)
    processes = start(program, count)
    said = [p.communicate(timeout=240)[0] for p in processes]
    return said, [p.returncode for p in processes]


@pytest.mark.parametrize("count", [2, 4])
def test_several_processes_alarm_act_and_roll_back_as_one(alone, tmp_path, count):
    config, expected = alone
    said, codes = acts(tmp_path, count)
    assert codes == [0] * count, said
    ends = {re.search(r"LOSS (\S+) STEP (\d+)", text).groups() for text in said}
    assert len(ends) == 1
    loss, step = ends.pop()
    assert (float(loss), int(step)) == (pytest.approx(expected, rel=1e-4), 40)
    mine = tiny(tmp_path)
    assert story(mine) == story(config)
    assert_same(load_run(tmp_path / "tiny").metrics, load_run(config.runs / "tiny").metrics)


def test_killed_in_the_midst_of_a_rollback_they_finish_it_together(alone, tmp_path):
    config, expected = alone
    _, codes = acts(tmp_path, 2, dies=True)
    assert codes == [9, 9]
    assert ("rewind", 10, "") not in story(tiny(tmp_path))
    said, codes = acts(tmp_path, 2, resume=True)
    assert codes == [0, 0], said
    assert story(tiny(tmp_path)) == story(config)
    loss = float(re.search(r"LOSS (\S+)", said[1])[1])
    assert loss == pytest.approx(expected, rel=1e-4)
