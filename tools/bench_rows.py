"""What is measured of a server: each function does its requests and returns the values it saw."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from bench_http import BenchFailed, Reply
from bench_server import Prompts, Server

PREFIX_TOKENS = 2048
LONG_TOKENS = 8000
STREAM_TOKENS = 64  # of a steady stream, seen before anything is sent beside it


def rate(reply: Reply) -> float:
    return (reply.output_tokens - 1) / (reply.token_times_s[-1] - reply.token_times_s[0])


async def warm_up(
    server: Server, prompts: Prompts, tokens: int, output_tokens: int, long_tokens: int
) -> None:
    """Slots as the policy has them after some work, and every path taken once."""
    await server.ask(prompts.new(tokens), output_tokens)
    await server.ask(prompts.new(long_tokens), 2)


async def decode(
    server: Server, prompts: Prompts, tokens: int, output_tokens: int, repeats: int
) -> list[float]:
    """Tokens a second of one stream."""
    return [rate(await server.ask(prompts.new(tokens), output_tokens)) for _ in range(repeats)]


async def streams(
    server: Server, prompts: Prompts, tokens: int, output_tokens: int, repeats: int, count: int = 4
) -> list[float]:
    """Tokens a second of several streams together, while all of them decode."""
    values = []
    for _ in range(repeats):
        asked = [prompts.new(tokens) for _ in range(count)]
        replies = await server.together(asked, output_tokens)
        begun = max(r.token_times_s[0] for r in replies)
        ended = min(r.token_times_s[-1] for r in replies)
        within = (rate(r) * (ended - begun) for r in replies)
        values.append(sum(within) / (ended - begun))
    return values


async def cold(server: Server, prompts: Prompts, tokens: int, repeats: int) -> list[float]:
    """Milliseconds to the first token of a prompt that begins like none before."""
    replies = [await server.ask(prompts.new(tokens), 2) for _ in range(repeats)]
    return [1e3 * reply.ttft_s for reply in replies]


async def append(
    server: Server, prompts: Prompts, tokens: int, repeats: int, prefix_tokens: int = PREFIX_TOKENS
) -> list[float]:
    """Milliseconds to the first token when all but the last ``tokens`` are known."""
    values = []
    for _ in range(repeats):
        prefix = prompts.new(prefix_tokens)
        await server.ask(prefix, 2)
        values.append(1e3 * (await server.ask(prefix + prompts.new(tokens), 2)).ttft_s)
    return values


class Beside(NamedTuple):
    alone_ms: float  # the long prompt's time to the first token, alone
    kept: float  # percent of its speed that a stream beside it has
    slower: float  # that prompt's time, as a multiple of the one alone


async def beside(
    server: Server, prompts: Prompts, tokens: int, long_tokens: int, repeats: int
) -> list[Beside]:
    """A steady stream of ``tokens`` in, beside a long prompt; each turn after one alone."""
    found = []
    for _ in range(repeats):
        alone_s = (await server.ask(prompts.new(long_tokens), 2)).ttft_s
        stream = server.start(prompts.new(tokens), 100 * STREAM_TOKENS)
        await stream.tokens(2 * STREAM_TOKENS)
        long = await server.ask(prompts.new(long_tokens), 2)
        await stream.leave()
        times = stream.reply.token_times_s
        before = [t for t in times if t < long.sent_s][-STREAM_TOKENS:]
        if len(before) < STREAM_TOKENS:
            raise BenchFailed(f"the stream ended after {len(times)} tokens, before the prompt came")
        alone_rate = (len(before) - 1) / (before[-1] - before[0])
        during = sum(long.sent_s <= t < long.token_times_s[0] for t in times)
        kept = during / long.ttft_s / alone_rate
        found.append(Beside(1e3 * alone_s, 100 * kept, long.ttft_s / alone_s))
    return found


async def counted(
    server: Server, prompts: Prompts, tokens: int, output_tokens: int, repeats: int = 1
) -> list[dict[str, float]]:
    """What each step of a stream did on average, by ftd's counters; empty of other servers."""
    found = [await _counted(server, prompts, tokens, output_tokens) for _ in range(repeats)]
    return [step for step in found if step]


def middle(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(step[name] for step in steps) for name in steps[0]}


async def _counted(
    server: Server, prompts: Prompts, tokens: int, output_tokens: int
) -> dict[str, float]:
    stream = server.start(prompts.new(tokens), output_tokens)
    await stream.tokens(2)
    first, begun_s = await server.counters(), stream.reply.token_times_s[-1]
    await stream.task
    last, ended_s = await server.counters(), stream.reply.token_times_s[-1]
    steps = last.get("steps_total", 0) - first.get("steps_total", 0)
    if steps <= 0:
        return {}
    names = ("hits", "misses", "fetched", "on_cpu", "evicted", "fill_bytes")
    per_step = {
        name: (last.get(f"expert_{name}_total", 0) - first.get(f"expert_{name}_total", 0)) / steps
        for name in names
    }
    slots = last.get("slots_total", 0)
    return {**per_step, "steps": steps, "step_s": (ended_s - begun_s) / steps, "slots": slots}


Answers = dict[str, list]


async def answers(server: Server, scored: Sequence[Sequence[int]]) -> Answers:
    """Log-probabilities of the same tokens by prefill, and of the likeliest ones by decoding."""
    greedy = [await server.greedy_logprobs(p[:32], 48) for p in scored]
    return {
        "prompts": [await server.prompt_logprobs(p) for p in scored],
        "tokens": [tokens for tokens, _ in greedy],
        "greedy": [logprobs for _, logprobs in greedy],
    }


def agreement(one: Answers, other: Answers, far: float) -> dict[str, float]:
    """How far two servers of one model are apart, in nat; decoded tokens as long as they are equal.

    Args:
        far: gaps beyond it are counted.
    """
    gaps = [
        abs(a - b)
        for p, q in zip(one["prompts"], other["prompts"], strict=True)
        for a, b in zip(p, q, strict=True)
    ]
    equal = parted = 0
    pairs = zip(one["tokens"], other["tokens"], one["greedy"], other["greedy"], strict=True)
    for mine, theirs, p, q in pairs:
        same = next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), len(mine))
        gaps += [abs(a - b) for a, b in zip(p[:same], q[:same], strict=True)]
        equal += same
        parted += same < len(mine)
    gaps.sort()
    return {
        "compared": len(gaps),
        "bitwise": sum(gap == 0 for gap in gaps),
        "median": gaps[len(gaps) // 2],
        "mean": statistics.fmean(gaps),
        "p99": gaps[int(0.99 * (len(gaps) - 1))],
        "largest": gaps[-1],
        "far": sum(gap > far for gap in gaps) / len(gaps),
        "decoded_equal": equal,
        "answers_parted": parted,
    }
