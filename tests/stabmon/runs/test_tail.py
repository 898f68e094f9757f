"""Files that are being written are read on, whole lines only, each once."""

import json

from stabmon.runs.runlog import RunLog
from stabmon.runs.tail import Follower, Tail


def test_a_torn_last_line_waits_until_it_is_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert list(tail.rows()) == []
    path.write_text('{"step": 1}\n{"step": 2, "va')
    assert list(tail.rows()) == [{"step": 1}]
    with path.open("a") as file:
        file.write('lue": 3}\n[4]\nnonsense\n{"x": "NaN"}\n')
    (second, third) = list(tail.rows())
    assert second == {"step": 2, "value": 3}
    assert third["x"] != third["x"]
    assert list(tail.rows()) == []


def test_a_shorter_file_is_read_on_and_another_one_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    path.write_text('{"a": 1}\nnonsense\n')
    assert list(tail.rows()) == [{"a": 1}]
    path.write_text('{"a": 1}\n')  # cut, as a resumed run does
    assert list(tail.rows()) == []
    with path.open("a") as file:
        file.write('{"a": 2}\n')
    assert list(tail.rows()) == [{"a": 2}]
    (tmp_path / "other").write_text('{"b": 1}\n')
    (tmp_path / "other").replace(path)
    assert list(tail.rows()) == [{"b": 1}]


def test_a_run_is_followed_past_a_rewind(tmp_path):
    follower = Follower(tmp_path / "run", lambda key: key == "a")
    follower.update()
    assert follower.step == -1
    with RunLog.open(tmp_path / "run", {}) as log:
        log.sample(1, {"a": 1.0, "b": 2.0}, tokens=10)
        log.sample(2, {"a": 3.0})
        log.rewind(1)
        log.sample(2, {"a": 4.0}, tokens=20)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": "x", "values": {"a": 1}}) + "\n{}\n")
    follower.update()
    assert follower.series == {"a": {1: 1.0, 2: 4.0}}
    assert (follower.step, follower.tokens) == (2, 20)
    assert [event["kind"] for event in follower.events] == ["rewind"]
