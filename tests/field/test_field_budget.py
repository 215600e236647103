"""Budgets halved, restored and refused under four streams, seen from outside."""

from __future__ import annotations

import asyncio

import pytest
from ask import ask, chat, post
from running_ftd import ANSWERS, running_ftd

from ftd.control.client import Client, Refused
from ftd.control.protocol import Budget, Reload

KEYS = ["S14", "S15", "S13", "S20"]
FILLER = "lorem ipsum dolor sit amet "


def budget(ftd, **change: object):
    with Client(ftd.socket, timeout_s=30) as client:
        return client.call(Budget(**change))


async def test_halved_restored_and_refused_under_four_streams():
    with running_ftd(fault="slow:5ms", max_running=4, expert_slots=16) as ftd:
        cached = await ask(ftd.base, [{"role": "system", "content": FILLER * 40}, *said("S10")])
        streams = [asyncio.create_task(ask(ftd.base, key, stream=True)) for key in KEYS * 3]
        seen = []
        for change in (
            {"kv_tokens": "2048", "expert_slots": "8"},
            {"kv_tokens": "16"},
            {"kv_tokens": "4096", "expert_slots": "16"},
            {"kv_tokens": "16K", "expert_slots": "0"},
            {"kv_tokens": "2048", "expert_slots": "8"},
            {"kv_tokens": "4096", "expert_slots": "16"},
        ):
            await asyncio.sleep(0.15)
            assert not all(stream.done() for stream in streams), "the test shows nothing"
            if change == {"kv_tokens": "16"}:
                with pytest.raises(Refused, match=r"--kv-tokens .* or more"):
                    await asyncio.to_thread(budget, ftd, **change)
            else:
                seen.append(await asyncio.to_thread(budget, ftd, **change))
            engine = ftd.engine()
            assert engine.pages_free + engine.pages_held == engine.pages_total
            assert (engine.pages_total * 16, engine.slots_total) == (
                seen[-1].kv_tokens,
                seen[-1].slots,
            )
        for stream, key in zip(streams, KEYS * 3, strict=True):
            assert (await stream).text == ANSWERS[key]["text"]
        assert [(r.kv_tokens, r.slots) for r in seen] == [
            (2048, 8), (4096, 16), (16384, 0), (2048, 8), (4096, 16),
        ]  # fmt: skip
        again = await ask(ftd.base, [{"role": "system", "content": FILLER * 40}, *said("S10")])
        assert again.cached >= cached.usage["prompt_tokens"] - 16, "the prefix cache was lost"
        assert ftd.wait_rest().failed == 0
        assert ftd.status().limits.pool_tokens == 4096


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def test_budgets_of_bytes_give_slots_and_hold_over_a_reload():
    with running_ftd(kv_tokens=2048, context=1024) as ftd:
        assert ftd.engine().slots_total == 0
        done = await asyncio.to_thread(budget, ftd, vram="5M")
        assert done.slots > 0
        with pytest.raises(Refused, match=r"--vram 4M or more"):
            await asyncio.to_thread(budget, ftd, vram="3M")
        shown = await asyncio.to_thread(budget, ftd)
        assert not shown.changed and shown.slots == done.slots
        assert any(line.startswith("expert slots") for line in shown.plan)
        with Client(ftd.socket, timeout_s=30) as client:
            await asyncio.to_thread(client.call, Reload())
        assert ftd.engine().slots_total == done.slots


async def test_a_request_too_long_for_the_new_pool_is_refused_at_once():
    with running_ftd(context="auto") as ftd:
        with pytest.raises(Refused, match="uses none"):
            await asyncio.to_thread(budget, ftd, vram="auto")
        await asyncio.to_thread(budget, ftd, kv_tokens="512")
        reply = await post(ftd.base, chat("S10 " + FILLER * 200))
        assert reply.status == 400 and reply.error["code"] == "context_length_exceeded"
        await asyncio.to_thread(budget, ftd, kv_tokens="4K")
        assert (await ask(ftd.base, "S10 " + FILLER * 200)).text == ANSWERS["S10"]["text"]
