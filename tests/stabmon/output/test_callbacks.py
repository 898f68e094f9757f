"""What tells people of an incident: what is sent, in which order, and that nothing waits for it."""

import json
import logging
import subprocess
import sys
import threading
import time
import types
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from stabmon.alarms.incidents import Change, Incident
from stabmon.alarms.signatures import Fault
from stabmon.output.callbacks import notify_command, notify_wandb, notify_webhook


def incident():
    return Incident(1, 600, 620, Fault.ATTENTION, 0.65, layer=3, alarms=2)


@pytest.fixture
def server():
    """(URL, messages that came in, an event that lets the server answer, codes it answers)."""
    got, go, codes = [], threading.Event(), []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            go.wait(20)
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((self.headers["Content-Type"], json.loads(body)))
            self.send_response(codes.pop(0) if codes else 200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}/hook/secret", got, go, codes
        go.set()
        http.shutdown()
        thread.join()


def test_a_webhook_gets_the_incident_as_json(server):
    url, got, go, _ = server
    go.set()
    tell = notify_webhook(url, run="a")
    tell(Change.OPENED, incident())
    assert tell.wait()
    kind, message = got[0]
    assert kind == "application/json"
    assert message["text"].startswith("a: attention numerics (confidence 0.65), layer 3")
    assert message.items() >= {"run": "a", "change": "opened", "number": 1, "layer": 3}.items()


def test_messages_keep_their_order_and_say_how_it_was_when_they_were_sent(server):
    url, got, go, _ = server
    tell, found = notify_webhook(url, run="a"), incident()
    for alarms, change in enumerate(Change):
        found.alarms = alarms
        tell(change, found)
    go.set()
    assert tell.wait()
    assert [row["change"] for _, row in got] == ["opened", "named", "closed"]
    assert [row["alarms"] for _, row in got] == [0, 1, 2]


def test_a_server_that_hangs_holds_nothing_up(server):
    url, got, _, _ = server
    tell = notify_webhook(url, run="a", timeout=0.3)
    start = time.perf_counter()
    for _ in range(200):  # more than may wait
        tell(Change.OPENED, incident())
    assert time.perf_counter() - start < 0.2
    assert not tell.wait()
    assert got == []


def test_a_failure_is_told_without_the_secret_part_of_the_url(server, caplog):
    url, got, go, codes = server
    go.set()
    codes.append(500)
    tell = notify_webhook(url, run="a")
    with caplog.at_level(logging.WARNING, logger="stabmon"):
        tell(Change.OPENED, incident())
        assert tell.wait()
    assert "500" in caplog.text
    assert "secret" not in caplog.text
    tell(Change.CLOSED, incident())
    assert tell.wait()
    assert len(got) == 2


def test_another_kind_of_url_is_refused():
    with pytest.raises(ValueError, match="https://HOST"):
        notify_webhook("file:///etc/hosts", run="a")


@pytest.mark.parametrize("shell", [True, False])
def test_a_command_gets_the_message_on_its_input(tmp_path, shell):
    path = tmp_path / "told.jsonl"
    command = f"cat >> {path}" if shell else ["tee", "-a", str(path)]
    tell = notify_command(command, run="a")
    tell(Change.OPENED, incident())
    tell(Change.CLOSED, incident())
    assert tell.wait()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["change"] for row in rows] == ["opened", "closed"]


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path, caplog):
    mark = tmp_path / "late"
    tell = notify_command(f"(sleep 1.2; touch {mark}) & wait", run="a", timeout=0.3)
    with caplog.at_level(logging.WARNING, logger="stabmon"):
        tell(Change.OPENED, incident())
        time.sleep(2)
    assert "TimeoutExpired" in caplog.text
    assert not mark.exists()


def test_a_command_that_fails_is_told(caplog):
    tell = notify_command("exit 3", run="a")
    with caplog.at_level(logging.WARNING, logger="stabmon"):
        tell(Change.OPENED, incident())
        assert tell.wait()
    assert "exit code 3" in caplog.text


def test_wandb_gets_an_alert(monkeypatch):
    alerts = []
    wandb = types.SimpleNamespace(alert=lambda **alert: alerts.append(alert))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    tell = notify_wandb(run="a")
    tell(Change.OPENED, incident())
    assert tell.wait()
    assert alerts[0]["title"] == "a: incident opened"
    assert "layer 3" in alerts[0]["text"]


def test_without_wandb_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"stabmon\[wandb\]"):
        notify_wandb(run="a")


@pytest.mark.slow
def test_the_last_message_is_sent_before_the_program_ends(tmp_path):
    script = (
        "from stabmon.alarms.incidents import Change, Incident\n"
        "from stabmon.output.callbacks import notify_command\n"
        f"notify_command('sleep 0.5; cat > {tmp_path}/told', run='a')"
        "(Change.OPENED, Incident(1, 2, 3))"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert json.loads((tmp_path / "told").read_text())["number"] == 1
