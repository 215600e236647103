"""A real ``ftd`` in a process of its own, seen from outside only."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import psutil

from ftd.control.client import Client
from ftd.control.protocol import Status

DATA = Path(__file__).parents[1] / "data"
SCRIPT_MODEL = DATA / "script-model"
ANSWERS: dict[str, dict[str, Any]] = orjson.loads((SCRIPT_MODEL / "answers.json").read_bytes())

# Overflow, eviction, chunking and queueing all happen within seconds.
SMALL = {
    "context": 2048,
    "kv_tokens": 4096,
    "prefill_chunk": 128,
    "max_running": 2,
    "max_waiting": 64,
    "dtype": "float32",
    "heartbeat": "200ms",
}
REST_S = 2.0


class RunningFtd:
    def __init__(self, process: subprocess.Popen[bytes], folder: Path, log: Path) -> None:
        self.process = process
        self.socket = folder / "ftd.sock"
        self.log = log
        self.base = ""

    def wait_up(self, timeout_s: float = 60.0) -> None:
        """Until the port is known: HTTP answers from here on, ready or not."""
        self._until(lambda: self.socket.exists() and bool(self.status().http), timeout_s)
        self.base = self.status().http

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        self.wait_up(timeout_s)
        self._until(lambda: self.health()[0] == 200, timeout_s)

    def _until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(OSError, Exception):
                if condition():
                    return
            if self.process.poll() is not None:
                raise AssertionError(f"ftd ended: {self.log.read_text()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {timeout_s} s: {self.log.read_text()}")
            time.sleep(0.02)

    def status(self) -> Any:
        with Client(self.socket) as ftd:
            return ftd.call(Status())

    def engine(self) -> Any:
        return self.status().engine

    def health(self, path: str = "/health") -> tuple[int, dict[str, Any]]:
        try:
            with urllib.request.urlopen(self.base + path, timeout=10) as reply:
                return reply.status, orjson.loads(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, orjson.loads(error.read())

    def rss_bytes(self) -> int:
        return psutil.Process(self.process.pid).memory_info().rss

    def wait_rest(self) -> Any:
        """The engine's figures once nothing runs or waits and every page is accounted for."""
        deadline = time.monotonic() + REST_S
        while True:
            engine = self.engine()
            if engine.running == engine.waiting == 0 and engine.pages_held == engine.pages_cached:
                assert engine.pages_free + engine.pages_held == engine.pages_total
                return engine
            assert time.monotonic() < deadline, engine
            time.sleep(0.02)


@contextlib.contextmanager
def running_ftd(
    model: Path = SCRIPT_MODEL,
    *,
    wait: bool = True,
    extra: tuple[str, ...] = (),
    **settings: object,
) -> Iterator[RunningFtd]:
    with tempfile.TemporaryDirectory(prefix="ftd-") as name:
        folder = Path(name)
        log = folder / "log"
        flags = [f"--{k.replace('_', '-')}={v}" for k, v in {**SMALL, **settings}.items()]
        command = [sys.executable, "-m", "ftd", f"--model={model}", "--http=127.0.0.1:0"]
        command += [f"--socket={folder / 'ftd.sock'}", *flags, *extra]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("FTD_")}
        with log.open("wb") as sink:
            process = subprocess.Popen(command, stdout=sink, stderr=sink, env=environ)
        ftd = RunningFtd(process, folder, log)
        try:
            if wait:
                ftd.wait_ready()
            yield ftd
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
