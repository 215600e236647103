"""One client over one API: both turns, in folders of its own, against a real ftd.

Clients are started through ``ftctl launch``, with an empty HOME and keys of clouds that must not
reach them. What ftd logged of the requests tells what happened.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from agent_clients import CLIENTS, Client

from ftd.control.client import Client as Control
from ftd.control.client import ControlError
from ftd.control.protocol import Health, Stop

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "tests" / "data" / "agents-model"
SERVED_NAME = "scripts/Script-MoE"  # with a slash, as hub ids have one
FIRST, SECOND = "Create hello.txt that holds the word hello.", "And once more, please."
TURN_S, END_S = 300, 20
# none of these may reach a client
CLOUD = {
    "ANTHROPIC_API_KEY": "sk-of-a-cloud",
    "OPENAI_API_KEY": "sk-of-a-cloud",
    "OPENAI_BASE_URL": "http://127.0.0.1:9/v1",
    "ANTHROPIC_BASE_URL": "http://127.0.0.1:9",
}


@dataclass
class Ftd:
    socket: Path
    log: Path

    def requests(self, since: int) -> list[dict[str, Any]]:
        """What was logged of the requests that ended after so many bytes of the log."""
        lines = self.log.read_bytes()[since:].splitlines()
        facts = (json.loads(line) for line in lines if line.startswith(b"{"))
        return [fact for fact in facts if fact["event"] == "request.finished"]


@contextlib.contextmanager
def running_ftd(folder: Path) -> Iterator[Ftd]:
    ftd = Ftd(folder / "ftd.sock", folder / "ftd.log")
    words = [sys.executable, "-m", "ftd", f"--model={MODEL}", f"--served-name={SERVED_NAME}"]
    words += ["--http=127.0.0.1:0", f"--socket={ftd.socket}", "--dtype=float32", "--log-prompts"]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("FTD_")}
    with ftd.log.open("wb") as sink:
        process = subprocess.Popen(words, stdout=sink, stderr=sink, env=environ)
    try:
        deadline = time.monotonic() + 120
        while not _ready(ftd.socket):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"ftd did not get ready:\n{ftd.log.read_text()}")
            time.sleep(0.2)
        yield ftd
    finally:
        with contextlib.suppress(ControlError), Control(ftd.socket) as control:
            control.call(Stop())
        process.wait(END_S)


def _ready(socket: Path) -> bool:
    with contextlib.suppress(ControlError), Control(socket) as control:
        return control.call(Health()).ready
    return False


@dataclass
class Run:
    """One client over one API, in folders of its own."""

    name: str
    api: str
    ftd: Ftd
    folder: Path
    path: str

    @property
    def client(self) -> Client:
        return CLIENTS[self.name]

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def work(self) -> Path:
        return self.folder / "work"

    def prompts(self) -> tuple[str, str]:
        return f"{self.client.key} {FIRST}", f"{self.client.second_key} {SECOND}"

    def drive(self) -> list[dict[str, Any]]:
        """Both turns; returns what ftd logged of the requests."""
        first, second = self.prompts()
        since = self.ftd.log.stat().st_size
        self._prepare()
        if self.client.lines:
            text = "".join(f"{line}\n" for line in self.client.lines(first, second))
            self._start(self.client.first(first), text)
        else:
            assert self.client.again
            self._start(self.client.first(first))
            words = self.client.again(second, self._session())
            if self.client.terminal:
                self._start_on_terminal(words, since)
            else:
                self._start(words)
        if self.client.after:
            words = (self.name, *self.client.after)
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    words, check=False, env=self._env(), capture_output=True, timeout=END_S
                )
        return self.ftd.requests(since)

    def _prepare(self) -> None:
        self.work.mkdir(parents=True)
        for name, content in self.client.files.items():
            file = self.home / name
            file.parent.mkdir(parents=True, exist_ok=True)
            text = content if isinstance(content, str) else json.dumps(content)
            file.write_text(text.replace("{work}", str(self.work)))

    def _command(self, args: Sequence[str]) -> list[str]:
        words = [sys.executable, "-m", "ftctl.cli", "--socket", str(self.ftd.socket)]
        return [*words, "launch", self.name, "--api", self.api, "--", *args]

    def _env(self) -> dict[str, str]:
        self.home.mkdir(parents=True, exist_ok=True)
        mine = {"HOME": str(self.home), "PATH": self.path, "LANG": "C.UTF-8", "NO_COLOR": "1"}
        return {**CLOUD, "TERM": "dumb", **mine, **self.client.env}

    def _start(self, args: Sequence[str], text: str = "") -> None:
        with (self.folder / "output").open("ab") as output:
            process = subprocess.Popen(
                self._command(args),
                cwd=self.work,
                env=self._env(),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(text.encode(), TURN_S)
            _end(process)

    def _start_on_terminal(self, args: Sequence[str], since: int) -> None:
        """Type the second prompt once the screen rests, and leave when it is answered."""
        _, second = self.prompts()
        deadline = time.monotonic() + TURN_S
        with Terminal(self.folder / "output") as terminal:
            process = subprocess.Popen(
                self._command(args),
                cwd=self.work,
                env={**self._env(), "TERM": "xterm-256color"},
                stdin=terminal.theirs,
                stdout=terminal.theirs,
                stderr=terminal.theirs,
                start_new_session=True,
            )
            terminal.wait_rest(deadline)
            terminal.type(second)
            while process.poll() is None and time.monotonic() < deadline:
                if any(says(request, second) for request in self.ftd.requests(since)):
                    break
                time.sleep(0.2)
            _end(process)

    def _session(self) -> str:
        if not self.client.sessions:
            return ""
        entries = (self.home / self.client.sessions).glob("*")
        newest = max(entries, key=lambda entry: entry.stat().st_mtime, default=None)
        return newest.name if newest else ""


class Terminal:
    """As much of a terminal as a client needs to draw its screen and be typed to."""

    SIZE = struct.pack("HHHH", 40, 120, 0, 0)
    REPLIES: ClassVar = {b"\x1b[c": b"\x1b[?62;22c", b"\x1b[?u": b"\x1b[?0u"}  # what are you?
    REST_S = 4.0

    def __init__(self, transcript: Path) -> None:
        self._ours, self.theirs = pty.openpty()
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, self.SIZE)
        self._transcript = transcript
        self._last_s = math.inf  # when something was drawn
        self._reader = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Terminal:
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.theirs)
        self._reader.join(END_S)
        os.close(self._ours)

    def wait_rest(self, deadline: float) -> None:
        while time.monotonic() < min(deadline, self._last_s + self.REST_S):
            time.sleep(0.2)

    def type(self, line: str) -> None:
        os.write(self._ours, line.encode())
        time.sleep(1.0)  # in one piece it would be taken for pasted text
        os.write(self._ours, b"\r")

    def _read(self) -> None:
        with self._transcript.open("ab") as output, contextlib.suppress(OSError):
            while data := os.read(self._ours, 65536):
                self._last_s = time.monotonic()
                output.write(data)
                for question, reply in self.REPLIES.items():
                    if question in data:
                        os.write(self._ours, reply)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The client and what it left in its session; daemons have left it."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
            return


def says(request: dict[str, Any], prompt: str) -> bool:
    return any(prompt in str(text) for text in request.get("prompts", ()))
