"""A sink that raises or blocks does not stop training, loses no line of the log, says so once."""

import threading

import pytest

from stabmon.output.sinks.fanout import LIMIT, Fanout, guarded
from stabmon.runs.jsonl import read_jsonl
from stabmon.runs.run import load_run
from stabmon.runs.runlog import RunLog


class Sink:
    """Keeps samples; raises at steps in `bad`; waits for `gate`."""

    def __init__(self, bad=(), gate=None, bad_close=False):
        self.samples, self.closed, self.threads = [], 0, set()
        self.bad, self.gate, self.bad_close = bad, gate, bad_close

    def write(self, step, values):
        self.threads.add(threading.current_thread())
        if self.gate is not None:
            self.gate.wait(20)
        if step in self.bad:
            raise ConnectionError("no route")
        self.samples.append((step, values))

    def rewind(self, step):
        self.samples.append((step, "rewind"))

    def close(self):
        self.threads.add(threading.current_thread())
        self.closed += 1
        if self.bad_close:
            raise OSError("disk full")


def test_samples_arrive_in_order_in_one_other_thread_and_are_copies():
    sink, values = Sink(), {"a": 1.0}
    out = guarded(sink)
    for step in range(50):
        out.write(step, values)
    values["a"] = 2.0
    out.close()
    out.close()
    out.write(99, values)
    assert sink.samples == [(step, {"a": 1.0}) for step in range(50)]
    assert sink.closed == 1
    assert len(sink.threads) == 1
    assert threading.current_thread() not in sink.threads
    assert out.lost == 0


def test_a_sink_that_raises_is_reported_once_and_tried_again():
    said, sink = [], Sink(bad=(2, 3, 5))
    out = guarded(sink, report=said.append)
    for step in range(7):
        out.write(step, {})
    out.close()
    out.close()
    assert [step for step, _ in sink.samples] == [0, 1, 4, 6]
    assert said == [
        "Sink failed at step 2 (ConnectionError: no route); training and metrics.jsonl go on",
        "Sink lost 3 samples in all",
    ]


def test_a_sink_that_blocks_drops_samples_and_is_reported_once():
    said, gate = [], threading.Event()
    sink = Sink(gate=gate)
    out = guarded(sink, capacity=4, report=said.append)
    for step in range(100):
        out.write(step, {})
    (message,) = said
    assert "Sink does not keep up: samples from step" in message
    gate.set()
    out.close()
    assert len(sink.samples) + out.lost == 100
    assert 95 <= out.lost <= 96
    assert said[1:] == [f"Sink lost {out.lost} samples in all"]


@pytest.mark.parametrize("count", [2, 50])
def test_a_sink_that_hangs_is_left_behind_on_close(count):
    said, gate = [], threading.Event()
    out = guarded(Sink(gate=gate), capacity=2, patience=0.05, report=said.append)
    for step in range(count):
        out.write(step, {})
    out.close()
    gate.set()
    assert any("Sink hangs and was left behind" in message for message in said)


def test_a_sink_that_cannot_close_is_reported():
    said = []
    guarded(Sink(bad_close=True), report=said.append).close()
    assert said == ["Sink failed to close (OSError: disk full)"]


def test_by_default_trouble_is_a_warning_in_the_log(caplog):
    out = guarded(Sink(bad=(0,)))
    out.write(0, {})
    out.close()
    assert [record.name for record in caplog.records] == ["stabmon", "stabmon"]
    assert "Sink failed at step 0" in caplog.text


def test_the_log_loses_no_line_while_other_sinks_fail_and_block(tmp_path):
    said, gate = [], threading.Event()
    sinks = [Sink(bad=range(1000)), Sink(gate=gate), Sink()]
    log = RunLog.open(tmp_path, {})
    with Fanout([*sinks, log], report=said.append) as out:
        for step in range(600):
            out.write(step, {"a/global/b/mean": float(step)})
        gate.set()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(600))
    assert sum("failed at step 0" in message for message in said) == 1
    assert sum("does not keep up" in message for message in said) >= 1
    assert [sink.closed for sink in sinks] == [1, 1, 1]
    with pytest.raises(ValueError, match="is closed"):
        log.sample(600, {})


def test_the_log_is_written_at_once_and_its_errors_are_raised(tmp_path, monkeypatch):
    def full(descriptor, data):
        raise OSError(28, "No space left on device")

    with Fanout([RunLog.open(tmp_path, {})]) as out:
        out.write(1, {"a/global/b/mean": 1.0})
        assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 1
        monkeypatch.setattr("os.write", full)
        with pytest.raises(OSError, match="No space left"):
            out.write(2, {"a/global/b/mean": 1.0})


def test_what_is_guarded_is_not_guarded_twice():
    sink = Sink()
    with Fanout([guarded(sink)]) as out:
        out.write(1, {})
        assert "Guarded" not in {thread.name for thread in threading.enumerate()}
    assert sink.samples == [(1, {})]


def test_a_queue_without_room_is_refused():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        guarded(Sink(), capacity=0)


def test_a_rewind_reaches_every_sink_in_its_place(tmp_path):
    sink = Sink()
    with Fanout([sink, RunLog.open(tmp_path, {})]) as out:
        for step in (10, 20, 30):
            out.write(step, {"a": 1.0})
        out.rewind(10)
        out.write(20, {"a": 2.0})
    assert [step for step, _ in sink.samples] == [10, 20, 30, 10, 20]
    assert sink.samples[3] == (10, "rewind")
    assert load_run(tmp_path).metrics["a"][1].tolist() == [1.0, 2.0]


def test_a_rewind_is_not_dropped_where_samples_are():
    gate = threading.Event()
    sink = Sink(gate=gate)
    out = guarded(sink, capacity=2, report=lambda text: None)
    for step in range(10, 60, 10):
        out.write(step, {})
    out.rewind(20)
    out.rewind(30)
    gate.set()
    while out._queue.qsize():
        pass
    out.write(25, {})
    out.close()
    assert sink.samples[-2:] == [(20, "rewind"), (25, {})]


def test_a_sink_that_hangs_is_named_before_its_queue_is_full_and_its_loss_counted():
    said, gate, told = [], threading.Event(), threading.Event()
    report = lambda text: (said.append(text), told.set())
    out = guarded(Sink(gate=gate), capacity=100, patience=0.01, limit=0.05, report=report)
    for step in range(20):
        out.write(step, {})
    assert told.wait(10)
    assert said == ["Sink hangs since step 0, for 0.05 s; training and metrics.jsonl go on"]
    for step in range(20, 200):
        out.write(step, {})
    out.close()
    gate.set()
    assert said[2:] == ["Sink hangs and was left behind", "Sink lost 200 samples in all"]


def test_by_default_a_hang_is_named_within_a_minute():
    assert LIMIT * 1.25 < 60


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_sink_that_exits_is_named_and_goes_on(error):
    class Exits(Sink):
        def write(self, step, values):
            if step == 1:
                raise error
            super().write(step, values)

    said, sink = [], Exits()
    out = guarded(sink, report=said.append)
    for step in range(4):
        out.write(step, {})
    out.close()
    assert [step for step, _ in sink.samples] == [0, 2, 3]
    assert said[0].startswith(f"Exits failed at step 1 ({type(error).__name__}: ")
    assert said[1:] == ["Exits lost 1 samples in all"]
