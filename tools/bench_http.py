"""Measure any OpenAI-compatible server: time to first token, time between tokens, tokens a second.

    python tools/bench_http.py --url http://127.0.0.1:1919 --prompt-tokens 512 --output-tokens 256

The first token is the first event with content (or reasoning, or a tool call): role chunks and life
signs do not count. Prompts differ from their first word on, so that no prefix cache helps, unless
``--shared-prefix`` is given. How many words make a token is measured first, with one short request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

COMMON = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work number night "
    "point home water room mother area money story fact month lot right study book eye job word "
    "business issue side kind head house service friend father power hour game line end member law"
)
WORDS = COMMON.split()
CALIBRATION_WORDS = 200


class BenchFailed(Exception):
    """The server did not do what the measurement needs."""


@dataclass(slots=True)
class Reply:
    """One request as it was seen from outside; times in seconds."""

    sent_s: float
    token_times_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    finish: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.token_times_s, self.token_times_s[1:])]


@dataclass(frozen=True, slots=True)
class Target:
    url: str
    endpoint: str  # chat | completions
    model: str
    headers: dict[str, str]
    extra: dict[str, Any]

    @property
    def address(self) -> str:
        return f"{self.url}/v1/{'chat/completions' if self.endpoint == 'chat' else 'completions'}"

    def body(self, prompt: str, output_tokens: int) -> dict[str, Any]:
        if self.endpoint == "chat":
            content: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]}
        else:
            content = {"prompt": prompt}
        return {
            **content,
            "model": self.model,
            "max_tokens": output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }


async def measure(
    session: aiohttp.ClientSession, target: Target, prompt: str, output_tokens: int
) -> Reply:
    """Send one request and time what comes back."""
    reply = Reply(time.perf_counter())
    body = target.body(prompt, output_tokens)
    async with session.post(target.address, json=body, headers=target.headers) as response:
        if response.status != 200:
            text = (await response.text())[:500]
            raise BenchFailed(f"{target.address} answered {response.status}: {text}")
        async for event in events(response):
            read_event(reply, event, time.perf_counter())
    reply.ended_s = time.perf_counter()
    if not reply.token_times_s:
        raise BenchFailed("an answer had no token")
    if not reply.output_tokens:  # a server without usage: one event is taken for one token
        reply.output_tokens = len(reply.token_times_s)
    return reply


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        data = line.strip().removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield json.loads(data)


def read_event(reply: Reply, event: dict[str, Any], now_s: float) -> None:
    if error := event.get("error"):
        raise BenchFailed(f"an answer ended with an error: {error}")
    if usage := event.get("usage"):
        reply.prompt_tokens = usage["prompt_tokens"]
        reply.output_tokens = usage["completion_tokens"]
        reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    for choice in event.get("choices", ()):
        delta = choice.get("delta") or choice
        shown = ("content", "reasoning_content", "reasoning", "tool_calls", "text")
        if any(delta.get(name) for name in shown):
            reply.token_times_s.append(now_s)
        reply.finish = choice.get("finish_reason") or reply.finish


def make_prompt(rng: random.Random, words: int, shared: str) -> str:
    return " ".join([shared, *(rng.choice(WORDS) for _ in range(max(1, words)))]).strip()


async def words_for(
    session: aiohttp.ClientSession, target: Target, prompt_tokens: int, rng: random.Random
) -> int:
    """How many words make a prompt of about ``prompt_tokens``."""
    few = await measure(session, target, make_prompt(rng, 1, ""), 1)
    words = min(CALIBRATION_WORDS, max(2, prompt_tokens // 4))
    more = await measure(session, target, make_prompt(rng, words, ""), 1)
    per_word = (more.prompt_tokens - few.prompt_tokens) / (words - 1)
    if per_word <= 0:  # no usage in the stream
        return prompt_tokens
    return max(1, round(1 + (prompt_tokens - few.prompt_tokens) / per_word))


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Send every request, at most ``--concurrency`` at a time, and sum up."""
    rng = random.Random(options.seed)
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    extra: dict[str, Any] = {"temperature": options.temperature}
    if options.ignore_eos:
        extra["ignore_eos"] = True
    timeout = aiohttp.ClientTimeout(total=None, sock_read=options.timeout)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        url = options.url.rstrip("/").removesuffix("/v1")
        model = options.model or await first_model(session, url, headers)
        target = Target(url, options.endpoint, model, headers, extra)
        words = await words_for(session, target, options.prompt_tokens, rng)
        shared_words = round(words * options.shared_prefix)
        shared = make_prompt(rng, shared_words, "") if shared_words else ""
        prompts = [
            make_prompt(rng, words - shared_words, shared)
            for _ in range(options.warmup + options.requests)
        ]
        for prompt in prompts[: options.warmup]:
            await measure(session, target, prompt, options.output_tokens)
        begun_s = time.perf_counter()
        replies = await send_all(session, target, prompts[options.warmup :], options)
        took_s = time.perf_counter() - begun_s
    return {"url": url, "model": model, **vars_of(options), **summary(replies, took_s)}


async def send_all(
    session: aiohttp.ClientSession,
    target: Target,
    prompts: Sequence[str],
    options: argparse.Namespace,
) -> list[Reply]:
    waiting = iter(prompts)
    replies: list[Reply] = []

    async def client() -> None:
        for prompt in waiting:
            replies.append(await measure(session, target, prompt, options.output_tokens))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(options.concurrency):
                group.create_task(client())
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return replies


async def first_model(session: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> str:
    async with session.get(f"{url}/v1/models", headers=headers) as response:
        if response.status != 200:
            raise BenchFailed(f"{url}/v1/models answered {response.status}: name one with --model")
        return str((await response.json())["data"][0]["id"])


def vars_of(options: argparse.Namespace) -> dict[str, Any]:
    names = ("endpoint", "concurrency", "requests", "shared_prefix", "ignore_eos", "temperature")
    return {name: getattr(options, name) for name in names}


def summary(replies: Sequence[Reply], took_s: float) -> dict[str, Any]:
    """All figures; rates count what the server says it computed and sampled."""
    ttft_ms = [reply.ttft_s * 1e3 for reply in replies]
    gaps_ms = [gap * 1e3 for reply in replies for gap in reply.gaps_s]
    decode = [
        (reply.output_tokens - 1) / (reply.token_times_s[-1] - reply.token_times_s[0])
        for reply in replies
        if reply.output_tokens > 1 and len(reply.token_times_s) > 1
    ]
    output_tokens = sum(reply.output_tokens for reply in replies)
    return {
        "prompt_tokens": statistics.median(reply.prompt_tokens for reply in replies),
        "output_tokens": statistics.median(reply.output_tokens for reply in replies),
        "cached_tokens": statistics.median(reply.cached_tokens for reply in replies),
        "ttft_ms_p50": percentile(ttft_ms, 50),
        "ttft_ms_p99": percentile(ttft_ms, 99),
        "itl_ms_p50": percentile(gaps_ms, 50),
        "itl_ms_p99": percentile(gaps_ms, 99),
        "decode_tokens_per_s": round(statistics.median(decode), 2) if decode else None,
        "output_tokens_per_s": round(output_tokens / took_s, 2),
        "total_tokens_per_s": round(
            (output_tokens + sum(reply.prompt_tokens for reply in replies)) / took_s, 2
        ),
        "took_s": round(took_s, 3),
    }


def percentile(values: Sequence[float], percent: int) -> float | None:
    """By nearest rank."""
    if not values:
        return None
    rank = max(0, -(-len(values) * percent // 100) - 1)
    return round(sorted(values)[rank], 3)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:1919", help="server root")
    parser.add_argument("--endpoint", choices=("chat", "completions"), default="chat")
    parser.add_argument("--model", help="default: the first one the server lists")
    parser.add_argument("--api-key")
    parser.add_argument("--prompt-tokens", type=positive, default=512)
    parser.add_argument("--output-tokens", type=positive, default=128)
    parser.add_argument("--concurrency", type=positive, default=1)
    parser.add_argument("--requests", type=positive, default=8)
    parser.add_argument("--warmup", type=int, default=1, help="requests before the clock starts")
    parser.add_argument(
        "--shared-prefix",
        type=share,
        default=0.0,
        help="part of each prompt that is the same, 0..1",
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of silence allowed")
    parser.add_argument(
        "--ignore-eos", action="store_true", help="ask for full length; servers may not know it"
    )
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{value} is not in 0..1")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        result = asyncio.run(run(options))
    except (BenchFailed, aiohttp.ClientError, TimeoutError) as error:
        print(f"bench_http: {str(error) or type(error).__name__}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(result))
    else:
        width = max(map(len, result))
        print("\n".join(f"{name:<{width}}  {value}" for name, value in result.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
