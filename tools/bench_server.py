"""A server under measurement, seen over HTTP alone, and how an ftd of our own is started."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import aiohttp
from bench_http import BenchFailed, Reply, Target, events, first_model, read_event

ROOT = Path(__file__).resolve().parents[1]
READY_TIMEOUT_S = 300.0
_FIGURE = re.compile(r"^ftd_(\w+) ([\d.e+-]+)$", re.M)


class Prompts:
    """Random token ids that no earlier prompt began with."""

    def __init__(self, vocab: int, seed: int) -> None:
        self._rng, self._vocab = random.Random(seed), vocab

    def new(self, tokens: int) -> list[int]:
        return [self._rng.randrange(self._vocab) for _ in range(tokens)]


@dataclass
class Running:
    """A request whose tokens are still coming."""

    reply: Reply
    task: asyncio.Task[None]
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    async def tokens(self, count: int) -> None:
        """Wait until that many have come, or the answer has ended."""
        while len(self.reply.token_times_s) < count and not self.task.done():
            self._more.clear()
            waiting = asyncio.ensure_future(self._more.wait())
            await asyncio.wait({waiting, self.task}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        if self.task.done():
            self.task.result()

    def arrived(self) -> None:
        self._more.set()

    async def leave(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


class Server:
    """Prompts are token ids; answers are drawn at temperature 1 and run to their full length."""

    def __init__(self, url: str, session: aiohttp.ClientSession, model: str) -> None:
        self.url, self._session = url, session
        self._target = Target(
            url, "completions", model, {}, {"temperature": 1.0, "ignore_eos": True}
        )

    def start(self, prompt: Sequence[int], output_tokens: int) -> Running:
        reply = Reply(time.perf_counter())
        running = Running(reply, asyncio.ensure_future(asyncio.sleep(0)))

        async def read() -> None:
            body = self._target.body(list(prompt), output_tokens)  # type: ignore[arg-type]
            async with self._session.post(self._target.address, json=body) as response:
                await _refuse(response)
                async for event in events(response):
                    read_event(reply, event, time.perf_counter())
                    running.arrived()
            reply.ended_s = time.perf_counter()
            reply.output_tokens = reply.output_tokens or len(reply.token_times_s)
            if not reply.token_times_s:
                raise BenchFailed("an answer had no token")

        running.task = asyncio.ensure_future(read())
        return running

    async def ask(self, prompt: Sequence[int], output_tokens: int) -> Reply:
        running = self.start(prompt, output_tokens)
        await running.task
        return running.reply

    async def together(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[Reply]:
        return list(await asyncio.gather(*(self.ask(p, output_tokens) for p in prompts)))

    async def prompt_logprobs(self, prompt: Sequence[int]) -> list[float]:
        """Of each token of the prompt but the first: what prefill computes."""
        return (await self._logprobs(prompt, 1, echo=True, temperature=0.0))[1][1:-1]

    async def greedy_logprobs(
        self, prompt: Sequence[int], tokens: int
    ) -> tuple[list[str], list[float]]:
        """The likeliest tokens, and their log-probabilities: what decoding computes.

        Drawn ones would not do: where 150,000 tokens are about as likely, the smallest difference
        of one logit moves the draw to a neighbour.
        """
        return await self._logprobs(prompt, tokens, temperature=0.0, ignore_eos=True)

    async def _logprobs(
        self, prompt: Sequence[int], tokens: int, **fields: Any
    ) -> tuple[list[str], list[float]]:
        body = {"model": self._target.model, "prompt": list(prompt), "max_tokens": tokens}
        body |= {"logprobs": 1, **fields}
        async with self._session.post(self._target.address, json=body) as response:
            await _refuse(response)
            found = (await response.json())["choices"][0]["logprobs"]
        return found["tokens"], [p if p is None else float(p) for p in found["token_logprobs"]]

    async def counters(self) -> dict[str, float]:
        """ftd's counters (``x_total``) and gauges by name; empty of another server."""
        async with self._session.get(f"{self.url}/metrics") as response:
            text = await response.text() if response.status == 200 else ""
        return {name: float(value) for name, value in _FIGURE.findall(text)}


async def _refuse(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise BenchFailed(
            f"{response.url} answered {response.status}: {await response.text():.300}"
        )


def end_like_a_key() -> None:
    """Let SIGTERM, as ``timeout`` sends it, end a bench as Ctrl-C does: with what it has."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


async def with_server(url: str, work: Any) -> Any:
    timeout = aiohttp.ClientTimeout(total=None, sock_read=300)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        return await work(Server(url, session, await first_model(session, url, {})))


Event = Mapping[str, Any]


@dataclass(frozen=True)
class Started:
    url: str
    ready_s: float
    log: Path
    socket: Path


@contextlib.contextmanager
def running_ftd(
    model: Path,
    flags: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    keep_log: Path | None = None,
    program: Sequence[str] = ("-m", "ftd"),
    told: Callable[[Event], None] = lambda event: None,
    within_s: float = READY_TIMEOUT_S,
) -> Iterator[Started]:
    """An ftd of our own, from its start to its end; raises BenchFailed if it does not get ready.

    Args:
        keep_log: where its log is written; a run that is cut has left it there.
        told: called with each event of the log until it is ready.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="ftd-bench-"))
    started = Started(
        f"http://127.0.0.1:{port}", 0.0, (keep_log or folder / "log").resolve(), folder / "ftd.sock"
    )
    command = [
        sys.executable, *program, "--model", str(model), "--http", f"127.0.0.1:{port}",
        "--socket", str(started.socket), "--log-format", "json", *flags,
    ]  # fmt: skip
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    started.log.parent.mkdir(parents=True, exist_ok=True)
    begun_s = time.perf_counter()
    with started.log.open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": paths, **(env or {})},
            stdout=log,
            stderr=log,
        )
    try:
        _wait_ready(process, started, told, within_s)
        yield replace(started, ready_s=time.perf_counter() - begun_s)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(folder)


class _Lines:
    """Whole lines of a file that grows."""

    def __init__(self, file: IO[str]) -> None:
        self._file, self._part = file, ""

    def new(self) -> list[str]:
        *lines, self._part = (self._part + self._file.read()).split("\n")
        return lines


def events_of(lines: Iterable[str]) -> Iterator[Event]:
    """The events of lines of an ftd's log."""
    for line in lines:
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict):
                yield event


def _wait_ready(
    process: subprocess.Popen[bytes],
    started: Started,
    told: Callable[[Event], None],
    within_s: float,
) -> None:
    deadline = time.perf_counter() + within_s
    with started.log.open() as log:
        lines = _Lines(log)
        while time.perf_counter() < deadline:
            ended = process.poll()
            for event in events_of(lines.new()):
                told(event)
            if ended is not None:
                said = started.log.read_text()[-3000:]
                raise BenchFailed(f"ftd ended with {ended}:\n{said}")
            with (
                contextlib.suppress(urllib.error.URLError, OSError),
                urllib.request.urlopen(f"{started.url}/health", timeout=2) as answer,
            ):
                if answer.status == 200:
                    for event in events_of(lines.new()):
                        told(event)
                    return
            time.sleep(0.05)
    raise BenchFailed(
        f"ftd was not ready after {within_s:.0f} s:\n{started.log.read_text()[-3000:]}"
    )
