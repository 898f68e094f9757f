"""Each sink gets what was written; a missing library is named with the extra that brings it."""

import math
import os
import struct
import subprocess
import sys
import types
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboardX.proto.event_pb2 import Event

from stabmon.output.sinks.writers import PrometheusWriter, TensorBoardWriter, WandbWriter, Writer
from stabmon.runs.foreign.load import load
from stabmon.runs.runlog import RunLog

KEY = "delta50/layer_03/delta2/modes/p10"
LOSS = "symptoms/global/loss/value"
AXIS = [("step", None), ("*", "step")]


def events(folder):
    """The events in TensorBoard's record files: length, its checksum, data, its checksum."""
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            yield Event.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length


def labelled(text):
    """{labels or name: value} of a Prometheus text."""
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    order = ("monitor", "scope", "metric", "aggregate")
    return {tuple(s.labels[x] for x in order if s.labels) or s.name: s.value for s in samples}


def test_tensorboard_gets_a_scalar_for_each_key(tmp_path):
    writer = TensorBoardWriter(tmp_path / "tb")
    writer.write(10, {KEY: 3.5, LOSS: math.nan})
    writer.write(20, {KEY: 3.25})
    writer.close()
    found = {
        (value.tag, event.step): value.simple_value
        for event in events(tmp_path / "tb")
        for value in event.summary.value
    }
    assert math.isnan(found.pop((LOSS, 10)))
    assert found == {(KEY, 10): 3.5, (KEY, 20): 3.25}


def test_tensorboard_is_told_what_a_resumed_run_writes_again(tmp_path):
    TensorBoardWriter(tmp_path / "tb", purge_step=70).close()
    starts = [event.step for event in events(tmp_path / "tb") if event.HasField("session_log")]
    assert starts == [70]


def test_prometheus_serves_the_newest_sample_on_this_machine_alone():
    writer = PrometheusWriter(port=0)
    assert writer._server.server_address == ("127.0.0.1", writer.port)
    writer.write(10, {KEY: 3.5, LOSS: 2.0})
    writer.write(20, {KEY: math.inf, "odd": 1.0})
    with urllib.request.urlopen(f"http://127.0.0.1:{writer.port}/metrics", timeout=10) as answer:
        found = labelled(answer.read().decode())
    writer.close()
    writer.close()
    assert found == {
        ("delta50", "layer_03", "delta2/modes", "p10"): math.inf,
        ("symptoms", "global", "loss", "value"): 2.0,
        ("", "", "odd", ""): 1.0,
        "stabmon_step": 20,
    }
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{writer.port}/metrics", timeout=10)


def test_prometheus_replaces_its_file_whole(tmp_path):
    path = tmp_path / "collector" / "run.prom"
    writer = PrometheusWriter(textfile=path)
    for step in (10, 20):
        writer.write(step, {LOSS: step / 10})
    writer.close()
    assert labelled(path.read_text()) == {
        ("symptoms", "global", "loss", "value"): 2.0,
        "stabmon_step": 20,
    }
    assert list(path.parent.iterdir()) == [path]


def test_prometheus_needs_a_file_or_a_port():
    with pytest.raises(ValueError, match="give PrometheusWriter textfile="):
        PrometheusWriter()


def test_prometheus_needs_a_file_that_the_collector_reads():
    with pytest.raises(ValueError, match=r"reads \*.prom files only, got metrics.txt"):
        PrometheusWriter(textfile="metrics.txt")


@pytest.fixture
def wandb_calls(monkeypatch):
    """What a stand-in for wandb was asked to do."""
    calls = []
    run = types.SimpleNamespace(
        log=calls.append,
        finish=lambda: calls.append("end"),
        define_metric=lambda name, step_metric=None: calls.append((name, step_metric)),
    )
    module = types.ModuleType("wandb")
    module.init = lambda **settings: calls.append(settings) or run
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def test_wandb_begins_with_the_first_sample_and_ends_with_close(wandb_calls):
    writer = WandbWriter(project="p", mode="offline")
    assert wandb_calls == []
    writer.write(10, {LOSS: 2.0})
    writer.write(20, {LOSS: 1.5})
    writer.close()
    settings = {"project": "p", "mode": "offline"}
    rows = [{"step": 10, LOSS: 2.0}, {"step": 20, LOSS: 1.5}]
    assert wandb_calls == [settings, *AXIS, *rows, "end"]


def test_a_rewind_begins_another_wandb_run_of_the_group(wandb_calls):
    writer = WandbWriter(name="a", id="x", resume="allow")
    writer.rewind(0)
    writer.write(20, {LOSS: 2.0})
    writer.rewind(10)
    writer.write(20, {LOSS: 1.5})
    writer.close()
    first = [{"name": "a", "id": "x", "resume": "allow"}, *AXIS, {"step": 20, LOSS: 2.0}, "end"]
    second = [{"group": "a", "name": "a, attempt 2 from 10"}, *AXIS, {"step": 20, LOSS: 1.5}, "end"]
    assert wandb_calls == first + second


def test_tensorboard_shows_one_timeline_after_rewinds(tmp_path):
    writer = TensorBoardWriter(tmp_path / "tb")
    for back, value in ((None, 1.0), (20, 2.0), (10, 3.0)):
        if back is not None:
            writer.rewind(back)
        for step in range((back or 0) + 10, 60 - 10 * int(value), 10):
            writer.write(step, {LOSS: value})
    writer.close()
    assert len(list((tmp_path / "tb").iterdir())) == 3
    shown = {}
    for event in events(tmp_path / "tb"):  # as TensorBoard reads them
        if event.HasField("session_log"):
            shown = {step: value for step, value in shown.items() if step < event.step}
        for value in event.summary.value:
            shown[event.step] = value.simple_value
    assert shown == {10: 1.0, 20: 3.0}
    assert load(tmp_path / "tb").metrics[LOSS][1].tolist() == [1.0, 3.0]


def test_prometheus_forgets_what_a_rewind_abandoned(tmp_path):
    path = tmp_path / "run.prom"
    writer = PrometheusWriter(textfile=path)
    writer.write(30, {LOSS: math.nan, KEY: 1.0})
    writer.rewind(10)
    writer.write(20, {KEY: 2.0})
    writer.close()
    found = labelled(path.read_text())
    assert found == {("delta50", "layer_03", "delta2/modes", "p10"): 2.0, "stabmon_step": 20}


def test_the_real_wandb_writes_offline_and_asks_for_no_account(tmp_path):
    pytest.importorskip("wandb", reason="needs stabmon[wandb]")
    # It writes to the end only when its process does.
    script = (
        "from stabmon.output.sinks.fanout import guarded\n"
        "from stabmon.output.sinks.writers import WandbWriter\n"
        f"sink = guarded(WandbWriter(mode='offline', dir={str(tmp_path)!r}), patience=60.0)\n"
        f"for step in (10, 20): sink.write(step, {{{LOSS!r}: step / 8}})\n"
        "sink.close()\n"
        "print(sink.lost)"
    )
    settings = {"HOME": str(tmp_path), "WANDB_SILENT": "true"}
    env = {k: v for k, v in os.environ.items() if k != "WANDB_API_KEY"} | settings
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "0"
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = written.read_bytes()
    assert LOSS.encode() in content
    assert b"1.25" in content
    assert b"2.5" in content


def test_wandb_that_never_began_does_not_end(wandb_calls):
    WandbWriter().close()
    assert wandb_calls == []


@pytest.mark.parametrize(
    ("module", "extra", "make"),
    [
        ("tensorboardX", "tensorboard", lambda: TensorBoardWriter("nowhere")),
        ("wandb", "wandb", WandbWriter),
        ("prometheus_client", "prometheus", lambda: PrometheusWriter(port=0)),
    ],
)
def test_a_missing_library_is_named_with_its_extra(monkeypatch, module, extra, make):
    monkeypatch.setitem(sys.modules, module, None)
    expected = rf'{module} is not installed: pip install "stabmon\[{extra}\]"'
    with pytest.raises(ImportError, match=expected):
        make()


def test_the_log_of_a_run_is_a_writer(tmp_path):
    with RunLog.open(tmp_path, {}) as log:
        assert isinstance(log, Writer)
