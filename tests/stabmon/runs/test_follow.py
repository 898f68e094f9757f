"""Every reader sees one timeline, and the same lines of it."""

import json
import math

import numpy as np
import pytest

from stabmon.runs.follow import Follower
from stabmon.runs.run import load_run
from stabmon.runs.runlog import RunLog
from stabmon.runs.samples import samples


def series(found):
    return {key: dict(zip(*map(np.ndarray.tolist, of), strict=True)) for key, of in found.items()}


def both(folder):
    """A run as it is read in one go, and as one that follows it sees it."""
    follower = Follower(folder)
    follower.update()
    run = load_run(folder)
    assert series(run.metrics) == series(follower.columns.series())
    assert list(run.events) == follower.events
    assert run.skipped == follower.skipped
    return run, follower


def test_a_run_is_followed_past_a_rewind(tmp_path):
    follower = Follower(tmp_path / "run", lambda key: key == "a")
    follower.update()
    assert follower.step == -1
    with RunLog.open(tmp_path / "run", {}) as log:
        log.sample(1, {"a": 1.0, "b": 2.0}, tokens=10)
        log.sample(2, {"a": 3.0})
        log.sample(3, {"a": 5.0})
        follower.update()
        assert (follower.step, follower.tokens) == (3, None)
        log.event("alarm", 3, key="a")
        log.event("action", 3, action="roll back")
        log.rewind(1)
        follower.update()
        assert series(follower.columns.series()) == {"a": {1: 1.0}}
        log.sample(2, {"a": 4.0}, tokens=20)
    follower.update()
    assert series(follower.columns.series()) == {"a": {1: 1.0, 2: 4.0}}
    assert (follower.step, follower.tokens, follower.attempts) == (2, 20, 2)
    assert [event["kind"] for event in follower.events] == ["action", "rewind"]


def test_what_a_rollback_abandoned_is_gone_from_every_reader(tmp_path):
    with RunLog.open(tmp_path, {}) as log:
        for step in range(10, 1000, 10):
            log.sample(step, {"loss": math.nan if step >= 950 else 2.0, "seen": 1.0 + step})
        log.event("alarm", 960, key="loss")
        log.rewind(600)
        for step in range(610, 710, 10):
            log.sample(step, {"loss": 1.5})
    run, follower = both(tmp_path)
    assert follower.step == run.metrics["loss"][0][-1] == 700
    assert np.isfinite(run.metrics["loss"][1]).all()
    assert run.metrics["seen"][0][-1] == 600
    assert [x["kind"] for x in run.events] == ["rewind"]
    assert [step for step, _ in samples(run)] == list(range(10, 710, 10))
    before = load_run(tmp_path, attempt=1)
    assert (before.metrics["loss"][0][-1], before.attempts) == (990, 1)
    assert [x["kind"] for x in before.events] == ["alarm"]
    with pytest.raises(ValueError, match="has 2 attempts, from 1; got attempt 3"):
        load_run(tmp_path, attempt=3)


def test_rewinds_of_rewinds_leave_the_last_of_each_step(tmp_path):
    with RunLog.open(tmp_path, {}) as log:
        for back, value in ((0, 1.0), (20, 2.0), (10, 3.0), (30, 4.0)):
            if back:
                log.rewind(back)
            for step in range(back + 10, 50, 10):
                log.sample(step, {"a": value})
    run, _ = both(tmp_path)
    assert series(run.metrics) == {"a": {10: 1.0, 20: 3.0, 30: 3.0, 40: 4.0}}
    found = [series(load_run(tmp_path, attempt=k).metrics)["a"] for k in (1, 2, 3)]
    assert [list(x.values()) for x in found] == [[1] * 4, [1, 1, 2, 2], [1, 3, 3, 3]]


MISTYPED = (
    '{"step": 9223372036854775808, "values": {"a": 1}}',
    '{"step": 1%s, "values": {"a": 1}}' % ("0" * 400),
    '{"step": 7, "values": {"a": 1%s}}' % ("0" * 400),
    '{"step": "7", "values": {"a": 1}}',
    '{"step": 7, "values": {"a": "1.5"}}',
    '{"step": 7, "values": {"a": {"b": 1}}}',
    '{"step": 7, "values": [1]}',
    '{"step": null, "values": {"a": 1}}',
    '{"step": true, "values": {"a": 1}}',
    '{"step": 7}',
    "{}",
)


@pytest.mark.parametrize("line", MISTYPED)
def test_a_mistyped_line_costs_that_line_in_all_readers(tmp_path, line):
    with RunLog.open(tmp_path, {}) as log:
        log.sample(5, {"a": 1.0})
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + line + "\n" + '{"step": 8, "values": {"a": 2}}\n')
    with pytest.warns(UserWarning, match=r"metrics.jsonl: 1 line skipped, not samples .*: line 2"):
        run, _ = both(tmp_path)
    assert series(run.metrics) == {"a": {5: 1.0, 8: 2.0}}
    assert run.skipped == 1
    with RunLog.open(tmp_path, {}, resume=True) as log:
        assert log.last_step == 8


def test_reordered_lines_and_null_lose_nothing(tmp_path):
    RunLog.open(tmp_path, {}).close()
    rows = [(30, 3), (10, None), (20, 2), (30, 4), (15, "-Infinity")]
    lines = [json.dumps({"step": s, "values": {"a": v, "b": 1}}) + "\n" for s, v in rows]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    run, follower = both(tmp_path)
    assert series(run.metrics)["a"] == {15: -math.inf, 20: 2, 30: 4}
    assert run.metrics["b"][0].tolist() == [10, 15, 20, 30]
    assert follower.step == 30


def test_a_folder_that_vanishes_while_it_is_followed_is_said(tmp_path):
    with RunLog.open(tmp_path / "run", {}) as log:
        log.sample(1, {"a": 1.0})
    follower = Follower(tmp_path / "run")
    follower.update()
    (tmp_path / "run").rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl is gone"):
        follower.update()


def test_another_run_of_the_same_name_is_followed_from_its_beginning(tmp_path):
    folder = tmp_path / "run"
    with RunLog.open(folder, {}) as log:
        log.sample(100, {"a": 1.0})
    follower = Follower(folder)
    follower.update()
    folder.rename(tmp_path / "away")
    with RunLog.open(folder, {}) as log:
        log.sample(1, {"b": 1.0})
    follower.update()
    assert series(follower.columns.series()) == {"b": {1: 1.0}}
