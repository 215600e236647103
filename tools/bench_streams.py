"""What the HTTP front end adds to a token: from the engine's emit to the client's receipt.

    python tools/bench_streams.py                 # 64 streams at 100 tokens/s, each API in turn
    python tools/bench_streams.py --prompts 5000  # resident memory over distinct prompts

No GPU, no model: a core that emits one token a row and tick drives the real engine thread, the real
application and real sockets, in a process of its own on one CPU; the clients are on another. Both
read CLOCK_MONOTONIC. A bare server, which writes one ready-made event a token with nothing in
between, takes its turn in each round: what it shows is the machine's and the loop's part.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import orjson

DEMO = Path(__file__).parents[1] / "ftd" / "demo"
BAR_MS = 20.0
CONTEXT_TOKENS = 16384
TEXT = (
    "The lights of the harbour went out one after another while the ferry turned, and nobody on "
    "the upper deck said a word until the engine had found its slow and even beat again. "
)
APIS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "bare": "/bare",
}


def body_of(api: str, prompt: str, tokens: int, *, stream: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {"model": "bench", "stream": stream}
    if api == "responses":
        return {**facts, "input": prompt, "max_output_tokens": tokens}
    return {**facts, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens}


# ---- the server's process


class TickingCore:
    """``ftd.engine.thread.Core``: every running request gets one token at each tick."""

    def __init__(self, script: list[int], tick_s: float) -> None:
        self.beat: Callable[[], None] = lambda: None
        self.emitted_s: dict[str, list[float]] = {}  # by request, when each token left
        self._script = script
        self._tick_s = tick_s
        self._next_s = 0.0
        self._running: dict[str, tuple[int, int]] = {}  # tokens sent, tokens wanted

    def add(self, request: Any) -> None:
        self._running[request.request_id] = (0, request.max_tokens)
        self.emitted_s[request.request_id] = []

    def end(self, request_id: str, finish: Any) -> bool:
        return self._running.pop(request_id, None) is not None

    def has_work(self) -> bool:
        return bool(self._running)

    def step(self) -> list[Any]:
        from ftd.engine.api import Finish, Output

        now_s = time.monotonic()
        self._next_s = max(self._next_s + self._tick_s, now_s)
        time.sleep(self._next_s - now_s)
        outputs = []
        for request_id, (sent, wanted) in list(self._running.items()):
            last = sent + 1 == wanted
            token = self._script[sent % len(self._script)]
            finish, reused = (Finish.LENGTH if last else None), (None if sent else 0)
            outputs.append(Output(request_id, (token,), reused_tokens=reused, finish=finish))
            self._running[request_id] = (sent + 1, wanted)
            if last:
                del self._running[request_id]
        now_s = time.monotonic()
        for output in outputs:
            self.emitted_s[output.request_id].append(now_s)
        return outputs

    def in_prefill(self, request_id: str) -> bool:
        return False

    def status(self) -> Any:
        from ftd.engine.api import EngineStatus

        return EngineStatus(running=len(self._running))

    def close(self) -> None:
        self._running.clear()


@dataclass(frozen=True)
class Served:
    """``ftd.http.ports.ServedModel`` and ``Lifecycle`` in one."""

    text: Any
    engine: Any
    name: str = "bench"
    aliases: tuple[str, ...] = ()
    created: float = field(default_factory=time.time)

    def current(self) -> Served:
        return self

    async def wait_ready(self, timeout_s: float) -> Served:
        return self

    def health(self) -> dict[str, Any]:
        return {"ready": True}


def serve(orders: Connection, cpu: int | None, streams: int, tick_s: float) -> None:
    """The server's process: it answers orders from the clients' process until told to end."""
    from ftd import log as logs
    from ftd.daemon import SWITCH_INTERVAL_S

    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    writer = logs.configure(open(os.devnull, "w"), level="info", terminal=False)  # noqa: SIM115
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(orders, streams, tick_s))
    writer.close()


async def _serve(orders: Connection, streams: int, tick_s: float) -> None:
    from aiohttp import web

    from ftd.config import Config
    from ftd.engine.api import EngineLimits
    from ftd.engine.thread import EngineThread
    from ftd.http.app import make_app, make_runner
    from ftd.text.textmodel import TextModel

    text = TextModel(DEMO)
    core = TickingCore(text.encode(TEXT), tick_s)
    limits = EngineLimits(
        context_tokens=CONTEXT_TOKENS,
        pool_tokens=CONTEXT_TOKENS * streams,
        max_running=streams,
        max_waiting=streams,
        vocab=4096,
    )
    engine = EngineThread(core, limits)
    app = make_app(Served(text, engine), Config())
    app.router.add_post("/bare", bare(engine))
    http = make_runner(app)
    await http.setup()
    await web.TCPSite(http, "127.0.0.1", 0).start()
    pieces = [len(text.decode([token])) for token in text.encode(TEXT)]
    orders.send((http.addresses[0][1], pieces))
    answers: dict[str, Callable[[], Any]] = {
        "cpu_s": time.process_time,
        "rss": lambda: (gc.collect(), resident_bytes())[1],
        "emitted_s": lambda: dict(core.emitted_s),
        "forget": core.emitted_s.clear,
    }
    while (order := await asyncio.to_thread(orders.recv)) != "end":
        orders.send(answers[order]())
    await engine.close()
    await http.cleanup()


def bare(engine: Any) -> Callable[[Any], Any]:
    """A handler that writes one event a token, made before: what any server would pay."""
    from aiohttp import web

    from ftd.engine.api import EngineRequest

    data = b"data: %s\n\n" % orjson.dumps({"choices": [{"index": 0, "delta": {"content": "x"}}]})

    async def handle(request: web.Request) -> web.StreamResponse:
        wanted = orjson.loads(await request.read())["max_tokens"]
        name = request.headers["X-Name"]
        headers = {"Content-Type": "text/event-stream", "X-Request-Id": name}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        async for _ in engine.submit(EngineRequest(name, (1,), wanted)):
            await response.write(data)
        return response

    return handle


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# ---- the clients' process


class Server:
    """The server's process, seen from the clients'."""

    def __init__(self, cpu: int | None, streams: int, tick_s: float) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._orders, far_end = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(far_end, cpu, streams, tick_s))
        self._process.start()
        far_end.close()  # or nothing here would notice that the server has ended
        self.port, self.piece_chars = self._hear()

    def tell(self, order: str) -> Any:
        self._orders.send(order)
        return self._hear()

    def _hear(self) -> Any:
        try:
            return self._orders.recv()
        except EOFError:
            raise SystemExit("the server ended: what it said is above") from None

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._orders.send("end")
        self._process.join(10)


@contextlib.contextmanager
def running_server(cpu: int | None, streams: int, tick_s: float) -> Iterator[Server]:
    server = Server(cpu, streams, tick_s)
    try:
        yield server
    finally:
        server.end()


class Reader(asyncio.Protocol):
    """One client. Only notes what came when; reading it waits until the clock has stopped."""

    def __init__(self, request: bytes) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.came: list[tuple[float, bytes]] = []
        self._request = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.came.append((time.monotonic(), data))

    def connection_lost(self, error: Exception | None) -> None:
        self.done.set_result(None)


def request_bytes(api: str, body: dict[str, Any], name: str) -> bytes:
    data = orjson.dumps(body)
    head = (
        f"POST {APIS[api]} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"X-Name: {name}\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def content_times(came: list[tuple[float, bytes]]) -> tuple[str, list[tuple[int, float]]]:
    """The request's id, and how many characters of the answer had come at which time."""
    head, _, _ = b"".join(data for _, data in came).partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0].endswith("200 OK"), lines[0]
    (request_id,) = (x[14:] for x in lines if x.lower().startswith("x-request-id: "))
    times, chars, rest = [], 0, b""
    for at_s, data in came:
        *lines_, rest = (rest + data).split(b"\n")
        found = sum(content_chars(line[6:]) for line in lines_ if line.startswith(b"data: {"))
        if found:
            chars += found
            times.append((chars, at_s))
    return request_id, times


def content_chars(data: bytes) -> int:
    event = orjson.loads(data)
    if event.get("choices"):
        return len(event["choices"][0]["delta"].get("content") or "")
    delta = event.get("delta")
    if event.get("type") == "response.output_text.delta":
        return len(delta)
    return len(delta.get("text", "")) if isinstance(delta, dict) else 0


def added_ms(
    emitted_s: list[float], times: list[tuple[int, float]], piece_chars: list[int]
) -> list[float]:
    """For each token: from its emit until the last of its characters was there."""
    added, chars, at = [], 0, 0
    for number, left_s in enumerate(emitted_s):
        chars += piece_chars[number % len(piece_chars)]
        while at < len(times) and times[at][0] < chars:
            at += 1
        if at == len(times):
            raise SystemExit(f"only {number} of {len(emitted_s)} tokens came")
        added.append((times[at][1] - left_s) * 1e3)
    return added


@dataclass(slots=True)
class Round:
    added_ms: list[float]
    cpu_us_per_token: float


async def one_round(server: Server, api: str, streams: int, tokens: int) -> Round:
    loop = asyncio.get_running_loop()
    server.tell("forget")
    cpu_s = server.tell("cpu_s")
    readers = []
    for i in range(streams):
        body = body_of(api, f"client {i} {random.random()}", tokens, stream=True)
        request = request_bytes(api, body, f"{api}-{i}")
        address = ("127.0.0.1", server.port)
        _, reader = await loop.create_connection(partial(Reader, request), *address)
        readers.append(reader)
    await asyncio.gather(*(reader.done for reader in readers))
    cpu_s = server.tell("cpu_s") - cpu_s
    emitted_s = server.tell("emitted_s")
    piece_chars = [1] if api == "bare" else server.piece_chars
    added: list[float] = []
    for reader in readers:
        request_id, times = content_times(reader.came)
        added += added_ms(emitted_s[request_id], times, piece_chars)
    return Round(added, cpu_s / (streams * tokens) * 1e6)


async def latency(args: argparse.Namespace, server: Server) -> None:
    apis = [*args.apis, "bare"]
    rounds: dict[str, list[Round]] = {api: [] for api in apis}
    for api in apis:
        await one_round(server, api, 1, 20)  # the first of each imports and compiles
    for _ in range(args.rounds):
        for api in apis:
            rounds[api].append(await one_round(server, api, args.streams, args.tokens))
    print(f"{args.streams} streams, {args.rate:g} tokens/s each, {args.tokens} tokens, in turns")
    print("api        added p50  p99 (of each round)            CPU us/token")
    for api, done in rounds.items():
        added = sorted(ms for one in done for ms in one.added_ms)
        tails = " ".join(f"{p99(one.added_ms):.1f}" for one in done)
        cpu_us = statistics.median(one.cpu_us_per_token for one in done)
        over = "" if p99(added) < BAR_MS else f"  over the bar of {BAR_MS:g} ms"
        print(
            f"{api:10} {statistics.median(added):6.2f} ms {p99(added):6.2f} ms ({tails})"
            f"   {cpu_us:6.1f}{over}"
        )


def p99(values: list[float]) -> float:
    return sorted(values)[len(values) * 99 // 100]


async def memory(args: argparse.Namespace, server: Server) -> None:
    """Distinct prompts with distinct tools, a quarter of them streamed; resident memory between."""
    rng = random.Random(1)
    samples = []
    for first in range(0, args.prompts, args.prompts // 10):
        for number in range(first, first + args.prompts // 10, 8):
            await asyncio.gather(*(ask(server, rng, number + i) for i in range(8)))
            server.tell("forget")
        samples.append(server.tell("rss") / 2**20)
    print(f"{args.prompts} distinct prompts; resident MiB after each tenth:")
    print(" ".join(f"{mib:.1f}" for mib in samples))
    print(f"second half: {samples[-1] - samples[len(samples) // 2 - 1]:+.1f} MiB")


async def ask(server: Server, rng: random.Random, number: int) -> None:
    api = ("chat", "messages", "responses")[number % 3]
    words = " ".join(f"{rng.getrandbits(32):x}" for _ in range(200))
    body = body_of(api, f"{number} {words}", 4, stream=number % 4 == 0)
    schema = {"type": "object", "properties": {f"field_{number}": {"type": "string"}}}
    name, about = f"tool_{number}", words[:300]
    body["tools"] = [
        {"name": name, "description": about, "input_schema": schema}
        if api == "messages"
        else {"type": "function", "name": name, "description": about, "parameters": schema}
        if api == "responses"
        else {
            "type": "function",
            "function": {"name": name, "description": about, "parameters": schema},
        }
    ]
    address = ("127.0.0.1", server.port)
    make = partial(Reader, request_bytes(api, body, "memory"))
    _, reader = await asyncio.get_running_loop().create_connection(make, *address)
    await reader.done
    assert reader.came[0][1].startswith(b"HTTP/1.1 200"), reader.came[0][1][:500]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=100.0, help="tokens/s of each stream")
    parser.add_argument("--tokens", type=int, default=500, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--apis", nargs="+", choices=["chat", "messages", "responses"], default=list(APIS)[:3]
    )
    parser.add_argument("--prompts", type=int, default=0, help="measure memory over so many")
    args = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) > 1:
        os.sched_setaffinity(0, {cpus[-1]})
    tick_s = 1 / args.rate if not args.prompts else 0.001
    with running_server(cpus[0] if len(cpus) > 1 else None, args.streams, tick_s) as server:
        asyncio.run(memory(args, server) if args.prompts else latency(args, server))


if __name__ == "__main__":
    main()
