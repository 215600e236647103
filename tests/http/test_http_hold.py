"""Requests that come while a model is loaded wait for it, up to a time and a number."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from ftd.config import Config
from ftd.errors import NotReady


@pytest.fixture
async def loading(start_front):
    """A front end whose model appears when ``ready`` is set."""
    front = await start_front(Config(hold=0.5, max_waiting=2))
    front.ready = asyncio.Event()
    served, front.lifecycle.served = front.lifecycle.served, None

    async def wait_ready(timeout_s: float):
        try:
            async with asyncio.timeout(timeout_s):
                await front.ready.wait()
        except TimeoutError:
            raise NotReady("the model is loading, 40%", retry_after_s=3) from None
        front.lifecycle.served = served
        return served

    front.lifecycle.wait_ready = wait_ready
    return front


@pytest.mark.parametrize("ask", ["chat", "message", "respond"])
async def test_a_request_waits_for_the_model(loading, ask):
    waiting = asyncio.create_task(getattr(loading, ask)("hi"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    loading.ready.set()
    status, _ = await waiting
    assert status == 200


async def test_it_is_refused_when_that_takes_too_long(loading):
    assert (await loading.chat("hi"))[0] == 503
    assert (await loading.message("hi"))[0] == 529


async def test_only_so_many_wait(loading):
    waiting = [asyncio.create_task(loading.chat("hi")) for _ in range(2)]
    await asyncio.sleep(0.1)
    status, body = await loading.chat("hi")
    assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
    loading.ready.set()
    assert [status for status, _ in await asyncio.gather(*waiting)] == [200, 200]


async def test_where_none_may_wait_the_ready_model_still_answers(start_front):
    front = await start_front(Config(max_waiting=0))
    assert (await front.chat("hi"))[0] == 200


async def test_one_that_leaves_while_waiting_waits_no_longer(loading):
    loading.config = replace(loading.config, hold=30)
    body = {"messages": [{"role": "user", "content": "hi"}]}
    asking = asyncio.create_task(loading.post("/v1/chat/completions", body))
    await asyncio.sleep(0.05)
    asking.cancel()
    await asyncio.sleep(0.05)
    loading.ready.set()
    assert (await loading.chat("hi"))[0] == 200
    assert len(loading.engine.requests) == 1
