"""Clients that leave, many at once, growing conversations: pages, counters, answers stay right."""

from __future__ import annotations

import asyncio
import contextlib
import random

import aiohttp
import pytest
from ask import ask, chat, post
from running_ftd import ANSWERS, RunningFtd, running_ftd

FILLER = "lorem ipsum dolor sit amet "


async def leave(base: str, body: dict, after_events: int | None, after_s: float) -> None:
    """Send a request and close the socket: after some events, or after a while."""
    async with aiohttp.ClientSession() as session:
        with contextlib.suppress(TimeoutError, aiohttp.ClientError):
            async with asyncio.timeout(after_s):
                async with session.post(base + "/v1/chat/completions", json=body) as answer:
                    seen = 0
                    async for line in answer.content:
                        seen += line.startswith(b"data: ")
                        if after_events is not None and seen >= after_events:
                            return


@pytest.fixture(scope="module")
def slow():
    """Steps of 20 ms: a window to leave in."""
    with running_ftd(fault="slow:20ms", prefill_chunk=32) as ftd:
        yield ftd


LEAVING = {
    "after five deltas": (chat("S14", stream=True), 6, 30.0),
    "in prefill": (chat("S14 " + FILLER * 100, stream=True), None, 0.15),
    "waiting for a plain reply": (chat("S14"), None, 0.2),
}


@pytest.mark.parametrize("way", LEAVING)
async def test_a_client_that_leaves_frees_everything(slow, way):
    body, events, seconds = LEAVING[way]
    before = slow.engine()
    await leave(slow.base, body, events, seconds)
    after = slow.wait_rest()
    assert after.cancelled == before.cancelled + 1
    assert (await ask(slow.base, "S10")).text == ANSWERS["S10"]["text"]


async def test_a_client_that_leaves_the_queue_is_never_computed(slow):
    before = slow.engine()
    running = [asyncio.create_task(ask(slow.base, "S14")) for _ in range(2)]
    await asyncio.sleep(0.1)
    await leave(slow.base, chat("S13"), None, 0.2)
    for task in running:
        assert (await task).text == ANSWERS["S14"]["text"]
    after = slow.wait_rest()
    assert after.cancelled == before.cancelled + 1
    assert after.finished == before.finished + 2


@pytest.mark.slow
async def test_a_hundred_clients_that_leave(ftd):
    rng = random.Random(1)
    for _ in range(10):
        await asyncio.gather(
            *(
                leave(
                    ftd.base,
                    chat("S14 " + FILLER * rng.randrange(100), stream=rng.random() < 0.7),
                    rng.choice([None, 1, 3]),
                    rng.uniform(0.01, 0.3),
                )
                for _ in range(10)
            )
        )
    ftd.wait_rest()


async def client(ftd: RunningFtd, seed: int, rounds: int) -> int:
    """One agent: a shared beginning, several turns, now and then it leaves. Returns answers."""
    rng = random.Random(seed)
    keys = ["S10", "S13", "S14", "S15", "S20", "S21", "S22", "S33"]
    shared = [{"role": "system", "content": FILLER * 12 + str(seed % 3)}]
    answered = 0
    for _ in range(rounds):
        messages = list(shared)
        for _ in range(rng.randrange(1, 4)):
            key = rng.choice(keys)
            messages.append({"role": "user", "content": f"{key} {FILLER * rng.randrange(8)}"})
            body = chat(messages, stream=rng.random() < 0.5)
            if rng.random() < 0.25:
                await leave(ftd.base, body, rng.choice([None, 2]), rng.uniform(0.01, 0.5))
                break
            reply = await post(ftd.base, body)
            assert reply.status == 200, reply.body
            assert reply.text == ANSWERS[key]["text"], (seed, key)
            messages.append({"role": "assistant", "content": reply.text})
            answered += 1
    return answered


@pytest.mark.slow
async def test_eight_agents_with_random_cancels_get_right_answers():
    """A pool small enough for eviction and preemption, slots too; every sample adds up."""
    with running_ftd(kv_tokens=2304, max_running=4, expert_slots=9) as ftd:
        agents = [asyncio.create_task(client(ftd, seed, rounds=6)) for seed in range(8)]
        while not all(agent.done() for agent in agents):
            engine = ftd.engine()
            assert engine.pages_free + engine.pages_held == engine.pages_total, engine
            await asyncio.sleep(0.05)
        assert sum([await agent for agent in agents]) > 40
        engine = ftd.wait_rest()
        assert engine.failed == 0


async def test_a_stream_goes_on_while_long_prompts_are_computed(slow):
    """It gets tokens all the time: far more steps for it than the prompts have chunks."""
    stream = asyncio.create_task(ask(slow.base, "S70", stream=True, max_tokens=400))
    await asyncio.sleep(0.3)
    before = slow.engine()
    replies = [await ask(slow.base, f"S17 {i} {FILLER * 100}") for i in range(2)]
    after = slow.engine()
    assert [reply.text for reply in replies] == ["a", "a"]
    long_tokens = sum(reply.usage["prompt_tokens"] for reply in replies)
    chunks = -(-long_tokens // 32)
    streamed = after.output_tokens - before.output_tokens - 2 * 2
    assert not stream.done(), "the stream ended first: the test shows nothing"
    assert streamed >= chunks / 2, (streamed, chunks)
    assert ANSWERS["S70"]["text"].startswith((await stream).text)


PAGE = 16


async def test_a_growing_conversation_pays_only_for_what_is_new(ftd):
    messages = [{"role": "system", "content": FILLER * 40}]
    total = 0
    for turn, key in enumerate(["S13", "S14", "S15", "S20", "S21", "S22"]):
        messages.append({"role": "user", "content": f"turn {turn}: {key}"})
        reply = await ask(ftd.base, messages)
        assert reply.text == ANSWERS[key]["text"]
        if turn:
            # all of the last turn, its answer included, up to the page it ended in
            assert reply.cached >= total - PAGE, (turn, reply.usage)
        total = reply.usage["prompt_tokens"] + reply.usage["completion_tokens"]
        messages.append({"role": "assistant", "content": reply.text})
    again = await ask(ftd.base, messages[:-1])
    assert again.usage["prompt_tokens"] - again.cached <= PAGE
    edited = [*messages[:7], {"role": "user", "content": "another question: S10"}]
    reply = await ask(ftd.base, edited)
    assert reply.text == ANSWERS["S10"]["text"]
    kept = await ask(ftd.base, messages[:7])
    assert reply.cached >= kept.usage["prompt_tokens"] - 2 * PAGE


async def test_text_after_a_changed_line_is_not_reused():
    def said(day: int) -> list[dict[str, str]]:
        system = f"day {day}\n{FILLER * 60}"
        return [{"role": "system", "content": system}, {"role": "user", "content": "S10"}]

    with running_ftd() as ftd:  # of its own: nothing that others asked is worth more
        first = await ask(ftd.base, said(1))
        changed = await ask(ftd.base, said(2))
        same = await ask(ftd.base, said(1))
    assert changed.cached < 2 * PAGE
    assert same.cached >= first.usage["prompt_tokens"] - PAGE - 1


@pytest.mark.slow
async def test_memory_does_not_grow_with_distinct_prompts(ftd):
    async def some(first: int, count: int) -> None:
        for i in range(first, first + count, 8):
            await asyncio.gather(
                *(ask(ftd.base, f"S17 {i + j} {FILLER * 3}", max_tokens=2) for j in range(8))
            )

    await some(0, 240)
    before = ftd.rss_bytes()
    await some(1000, 400)
    assert ftd.rss_bytes() - before < 12 * 2**20
