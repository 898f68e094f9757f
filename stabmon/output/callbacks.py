"""Tells people of an incident: a shell command, a webhook, an alert of Weights & Biases.

What lives here: functions for `Watch(on_incident=[…])`. What does not: incidents (`alarms`), where
samples go (`sinks`).

A message is sent by a thread of its own, in the order of the incidents; training never waits for
it. One that fails is logged and not sent again.
"""

import atexit
import json
import logging
import os
import queue
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from stabmon.alarms.incidents import Change, Incident
from stabmon.runs.jsonl import plain

TIMEOUT = 10.0
_WAITING = 100
_LOGGER = logging.getLogger("stabmon")
Message = dict[str, Any]


def notify_command(command: str | Sequence[str], *, run: str, timeout: float = TIMEOUT) -> "Sender":
    """Returns a callback that runs a command for each change of an incident.

    The message is its standard input, as JSON; see `message_of` for what it holds.

    Args:
        command: A line for the shell, or a program and its arguments.
        run: Name of the run.
        timeout: Seconds after which the command is killed.

    Example:
        >>> tell = notify_command("cat >> incidents.jsonl", run="a")
    """

    def send(message: Message) -> None:
        shell, text = isinstance(command, str), json.dumps(message) + "\n"
        with subprocess.Popen(
            command, shell=shell, stdin=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            try:
                process.communicate(text, timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        if process.returncode:
            raise OSError(f"exit code {process.returncode}")

    name = command if isinstance(command, str) else " ".join(command)
    return Sender(f"command {name!r}", run, send, timeout)


def notify_webhook(url: str, *, run: str, timeout: float = TIMEOUT) -> "Sender":
    """Returns a callback that posts each change of an incident to a URL, as JSON.

    See `message_of` for what is posted. Chat services that read "text" show it as it is.

    Args:
        url: Begins with http:// or https://. It is not logged: only its host is.
        run: Name of the run.
        timeout: Seconds to wait for the server.

    Raises:
        ValueError: The URL is of another kind.

    Example:
        >>> tell = notify_webhook("https://chat.example/hooks/1", run="a")
    """
    host = urlsplit(url).netloc
    if urlsplit(url).scheme not in ("http", "https") or not host:
        raise ValueError("url: expected http://HOST/… or https://HOST/…, got another kind of URL")

    def send(message: Message) -> None:
        body = json.dumps(message).encode()
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=timeout):
            pass

    return Sender(f"webhook of {host}", run, send, timeout)


def notify_wandb(*, run: str) -> "Sender":
    """Returns a callback that sends each change of an incident as an alert of Weights & Biases.

    The alert belongs to the run that `wandb.init` began in this process.

    Args:
        run: Name of the run, the alert's title.

    Raises:
        ImportError: wandb is not installed.
    """
    try:
        wandb: Any = import_module("wandb")
    except ImportError as error:
        raise ImportError('alerts need wandb: pip install "stabmon[wandb]"') from error

    def send(message: Message) -> None:
        wandb.alert(title=f"{run}: incident {message['change']}", text=message["text"])

    return Sender("wandb alert", run, send, TIMEOUT)


def message_of(run: str, change: Change, incident: Incident) -> Message:
    """Returns what is told of an incident: its row in `events.jsonl`, and more.

    Args:
        run: Name of the run.
        change: What has become of the incident.
        incident: The incident.

    Example:
        >>> message = message_of("a", Change.OPENED, Incident(1, 600, 620, alarms=1))
        >>> message["change"], message["text"]
        ('opened', 'a: something unknown, since step 600: 1 alarm')
    """
    told = {"run": run, "change": change.value, "text": f"{run}: {incident.sentence()}"}
    return told | plain(incident.event())


class Sender:
    """Sends messages one after the other, on a thread of its own.

    Attributes:
        name: What sends, for the log.
        run: Name of the run.
    """

    def __init__(
        self, name: str, run: str, send: Callable[[Message], None], timeout: float
    ) -> None:
        """Starts no thread before the first message.

        Args:
            name: What sends.
            run: Name of the run.
            send: Sends one message; may raise, and may take `timeout` seconds.
            timeout: Seconds to wait for what is not sent yet at the end of the program.
        """
        self.name, self.run = name, run
        self._send, self._timeout = send, timeout
        self._waiting: queue.Queue[Message] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = None

    def __call__(self, change: Change, incident: Incident) -> None:
        """Takes a change of an incident; returns at once."""
        try:
            self._waiting.put_nowait(message_of(self.run, change, incident))
        except queue.Full:
            _LOGGER.warning("%s is too slow: a message was dropped", self.name)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
            self._thread.start()
            atexit.register(self.wait)

    def wait(self) -> bool:
        """Waits until all is sent, `timeout` seconds at most; returns whether it is."""
        sent = lambda: not self._waiting.unfinished_tasks
        with self._waiting.all_tasks_done:
            return self._waiting.all_tasks_done.wait_for(sent, self._timeout)

    def _work(self) -> None:
        while True:
            message = self._waiting.get()
            try:
                self._send(message)
            except Exception as error:
                _LOGGER.warning("%s failed: %s: %s", self.name, type(error).__name__, error)
            self._waiting.task_done()
