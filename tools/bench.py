"""Measure ftd on this machine: one command makes a checkpoint, starts ftd, measures over HTTP.

    python tools/bench.py                          # Qwen3-30B-A3B widths, 16 layers, 37 % in slots
    python tools/bench.py --model PATH --resident-share 0.25
    python tools/bench.py --url http://127.0.0.1:8080 --vocab 151936   # any OpenAI-like server

Prompts are random token ids, different each time, so that no cache helps unless the row says so.
Answers are drawn at temperature 1: greedy decoding of random weights runs into loops. With its own
ftd it also checks the answers: the log-probabilities of the same tokens, all experts resident and
offloaded, differ by rounding only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from bench_http import BenchFailed, Reply, Target, first_model, measure, send_all  # noqa: E402
from make_synthetic import make  # noqa: E402

READY_TIMEOUT_S = 300.0
PREFIX_TOKENS = 2048
LOGPROB_TOLERANCE = 0.15  # bf16, 16 layers of random weights: a wrong expert moves it by far more


@dataclass
class Row:
    """One line of the table: all values measured, and what they are."""

    work: str
    unit: str
    values: list[float] = field(default_factory=list)

    def markdown(self) -> str:
        v = sorted(self.values)
        middle = statistics.median(v)
        return f"| {self.work} | {middle:.4g} {self.unit} | {v[0]:.4g} to {v[-1]:.4g} | {len(v)} |"


class Prompts:
    """Random token ids that no earlier prompt began with."""

    def __init__(self, vocab: int, seed: int) -> None:
        self._rng, self._vocab = random.Random(seed), vocab

    def new(self, tokens: int) -> list[int]:
        return [self._rng.randrange(self._vocab) for _ in range(tokens)]


class Server:
    def __init__(self, url: str, session: aiohttp.ClientSession, model: str) -> None:
        self.url, self._session = url, session
        self._target = Target(
            url, "completions", model, {}, {"temperature": 1.0, "ignore_eos": True}
        )

    async def ask(self, prompt: Sequence[int], output_tokens: int) -> Reply:
        return await measure(self._session, self._target, prompt, output_tokens)  # type: ignore[arg-type]

    async def together(
        self, prompts: Sequence[Sequence[int]], output_tokens: int
    ) -> tuple[list[Reply], float]:
        options = argparse.Namespace(concurrency=len(prompts), output_tokens=output_tokens)
        begun_s = time.perf_counter()
        replies = await send_all(self._session, self._target, prompts, options)  # type: ignore[arg-type]
        return replies, time.perf_counter() - begun_s

    async def logprobs(self, prompt: Sequence[int]) -> list[float]:
        """Log-probability of each token of the prompt but the first."""
        body = {
            "model": self._target.model, "prompt": list(prompt), "max_tokens": 1,
            "temperature": 0.0, "logprobs": 1, "echo": True,
        }  # fmt: skip
        async with self._session.post(f"{self.url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise BenchFailed(f"scoring: {response.status}: {(await response.text())[:300]}")
            answer = await response.json()
        return [float(p) for p in answer["choices"][0]["logprobs"]["token_logprobs"][1:-1]]


async def measure_decode(server: Server, prompts: Prompts, o: argparse.Namespace) -> list[Row]:
    one = Row(f"decode, 1 stream, {o.prompt_tokens} in, {o.output_tokens} out", "tok/s")
    four = Row("decode, 4 streams together", "tok/s")
    await server.ask(prompts.new(o.prompt_tokens), o.output_tokens)
    for _ in range(o.repeats):
        reply = await server.ask(prompts.new(o.prompt_tokens), o.output_tokens)
        seconds = reply.token_times_s[-1] - reply.token_times_s[0]
        one.values.append((reply.output_tokens - 1) / seconds)
    for _ in range(max(2, o.repeats // 2)):
        replies, _ = await server.together(
            [prompts.new(o.prompt_tokens) for _ in range(4)], o.output_tokens
        )
        begun = max(r.token_times_s[0] for r in replies)  # while all four decode
        ended = min(r.token_times_s[-1] for r in replies)
        tokens = sum(
            (r.output_tokens - 1) * (ended - begun) / (r.token_times_s[-1] - r.token_times_s[0])
            for r in replies
        )
        four.values.append(tokens / (ended - begun))
    return [one, four]


async def measure_prompts(server: Server, prompts: Prompts, o: argparse.Namespace) -> list[Row]:
    cold = Row(f"prompt of {PREFIX_TOKENS} tokens, cold", "ms to first token")
    appends = {n: Row(f"{n} tokens behind a cached prefix", "ms to first token") for n in (64, 20)}
    await server.ask(prompts.new(PREFIX_TOKENS), 2)
    for _ in range(o.repeats):
        prefix = prompts.new(PREFIX_TOKENS)
        cold.values.append(1e3 * (await server.ask(prefix, 2)).ttft_s)
        for tokens, row in appends.items():
            reply = await server.ask(prefix + prompts.new(tokens), 2)
            row.values.append(1e3 * reply.ttft_s)
    return [cold, *appends.values()]


@contextlib.contextmanager
def running_ftd(model: Path, o: argparse.Namespace, *flags: str) -> Iterator[tuple[str, float]]:
    """An ftd of our own: its URL, and how long it took to get ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="ftd-bench-"))
    command = [
        sys.executable, "-m", "ftd", "--model", str(model), "--http", f"127.0.0.1:{port}",
        "--socket", str(folder / "ftd.sock"), "--kv-tokens", "32768", "--log-format", "json",
        *flags, *o.ftd,
    ]  # fmt: skip
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    begun_s = time.perf_counter()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_ready(process, url, folder / "log")
        yield url, time.perf_counter() - begun_s
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
        if o.logs:
            o.logs.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / "log", o.logs / f"ftd-{'-'.join(f.strip('-') for f in flags)}.log")
        shutil.rmtree(folder)


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    import urllib.error
    import urllib.request

    deadline = time.perf_counter() + READY_TIMEOUT_S
    while time.perf_counter() < deadline:
        if process.poll() is not None:
            raise BenchFailed(f"ftd ended with {process.returncode}:\n{log.read_text()[-3000:]}")
        with (
            contextlib.suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(f"{url}/health", timeout=2) as answer,
        ):
            if answer.status == 200:
                return
        time.sleep(0.05)
    raise BenchFailed(f"ftd was not ready after {READY_TIMEOUT_S} s:\n{log.read_text()[-3000:]}")


async def with_server(url: str, work: Any) -> Any:
    timeout = aiohttp.ClientTimeout(total=None, sock_read=300)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        model = await first_model(session, url, {})
        return await work(Server(url, session, model))


def agreement(resident: list[list[float]], offloaded: list[list[float]]) -> str:
    gaps = sorted(
        abs(a - b) for r, o in zip(resident, offloaded, strict=True) for a, b in zip(r, o)
    )
    verdict = "agree" if gaps[-1] <= LOGPROB_TOLERANCE else "DISAGREE"
    return (
        f"Answers {verdict}: {len(gaps)} log-probabilities, resident against offloaded: "
        f"median gap {statistics.median(gaps):.4f}, largest {gaps[-1]:.4f} nat."
    )


def bench_own(o: argparse.Namespace) -> int:
    model, config = prepare_model(o)
    experts = config["num_hidden_layers"] * config["num_experts"]
    slots = int(experts * o.resident_share)
    prompts = Prompts(config["vocab_size"] - 3, o.seed)
    scored = [prompts.new(160) for _ in range(3)]

    async def score(server: Server) -> list[list[float]]:
        return [await server.logprobs(p) for p in scored]

    lines: list[str] = []

    def table(title: str, ready_s: float, rows: Sequence[Row]) -> None:
        lines.extend(
            ["", f"{title}; ready after {ready_s:.1f} s", "", "| work | median | range | runs |"]
        )
        lines.extend(["| --- | --- | --- | --- |", *(row.markdown() for row in rows)])

    answers = {}
    for name, count in (
        ("all experts resident", experts),
        (f"{slots} of {experts} experts", slots),
    ):
        if name.startswith("all") and o.no_resident:
            continue
        with running_ftd(model, o, "--expert-slots", str(count)) as (url, ready_s):

            async def work(server: Server) -> list[Row]:
                rows = await measure_decode(server, prompts, o)
                rows += await measure_prompts(server, prompts, o)
                answers[name] = await score(server)  # noqa: B023
                return rows

            table(name, ready_s, asyncio.run(with_server(url, work)))
    if len(answers) == 2:
        lines += ["", agreement(*answers.values())]
    print("\n".join(lines))
    return 1 if "DISAGREE" in lines[-1] else 0


def prepare_model(o: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    model = o.model
    if model is None:
        model = Path(o.folder) / f"ftd-synthetic-{o.layers}"
        if not (model / "generation_config.json").exists():
            make(model, layers=o.layers)
    return model, json.loads((model / "config.json").read_text())


def bench_url(o: argparse.Namespace) -> int:
    prompts = Prompts(o.vocab, o.seed)

    async def work(server: Server) -> list[Row]:
        return [
            *await measure_decode(server, prompts, o),
            *await measure_prompts(server, prompts, o),
        ]

    rows = asyncio.run(with_server(o.url.rstrip("/").removesuffix("/v1"), work))
    print("| work | median | range | runs |\n| --- | --- | --- | --- |")
    print("\n".join(row.markdown() for row in rows))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="default: a synthetic one is made")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--folder", default="/dev/shm", help="for the synthetic model")
    parser.add_argument("--resident-share", type=float, default=0.37)
    parser.add_argument("--no-resident", action="store_true", help="skip the all-resident run")
    parser.add_argument("--url", help="measure this server instead of an ftd of our own")
    parser.add_argument("--vocab", type=int, default=30000, help="with --url: token ids below it")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", type=Path, help="keep ftd's logs here")
    parser.add_argument("ftd", nargs="*", help="after --: further flags for ftd")
    options = parser.parse_args()
    try:
        return bench_url(options) if options.url else bench_own(options)
    except (BenchFailed, aiohttp.ClientError, TimeoutError) as error:
        print(f"bench: {str(error) or type(error).__name__}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
