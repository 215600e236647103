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
    front = await start_front(Config(hold=0.5, max_waiting=2, heartbeat=0.1))
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


STREAMS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
}


def is_sign_of_life(path: str, event: dict) -> bool:
    match path:
        case "/v1/messages":
            return event == {"type": "ping"}
        case "/v1/responses":
            return event["type"] in ("response.created", "response.in_progress")
    (choice,) = event["choices"]
    return not choice.get("delta") and not choice.get("text") and choice["finish_reason"] is None


def written(event: dict) -> str:
    if event.get("choices"):
        choice = event["choices"][0]
        return choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
    delta = event.get("delta", "")
    return delta if isinstance(delta, str) else delta.get("text", "")


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_hears_signs_of_life_until_the_model_is_there(loading, path):
    """Far longer than a plain request would wait: it is the silence that clients give up on."""
    streaming = asyncio.create_task(loading.stream(path, STREAMS[path]))
    await asyncio.sleep(1.0)
    assert not streaming.done()
    loading.ready.set()
    events = await streaming
    assert all(is_sign_of_life(path, event) for event in events[:4])
    events = [event for event in events if event != "[DONE]"]
    assert "".join(written(event) for event in events) == "unscripted"
    assert len({event["id"] for event in events if "id" in event}) <= 1
    if path == "/v1/responses":
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [event["type"] for event in events].count("response.created") == 1
        assert events[-1]["type"] == "response.completed"


@pytest.mark.parametrize("path", STREAMS)
async def test_what_fails_after_the_headers_ends_the_stream_with_an_error_event(loading, path):
    def refuse(*_):
        raise NotReady("the model cannot be loaded", retry_after_s=3)

    async def wait_ready(timeout_s):
        await loading.ready.wait()
        refuse()

    loading.lifecycle.wait_ready = wait_ready
    streaming = asyncio.create_task(loading.stream(path, STREAMS[path]))
    await asyncio.sleep(0.5)
    loading.ready.set()
    *before, last = await streaming
    assert all(is_sign_of_life(path, event) for event in before)
    assert "the model cannot be loaded" in str(last)
    assert {"error", "response"} & last.keys()


async def test_what_is_refused_within_a_heartbeat_keeps_its_status(loading):
    loading.ready.set()
    body = {**STREAMS["/v1/chat/completions"], "stream": True, "temperature": -1}
    status, body = await loading.post("/v1/chat/completions", body)
    assert (status, body["error"]["param"]) == (400, "temperature")


@pytest.mark.parametrize("path", STREAMS)
async def test_headers_come_with_admission_not_with_the_first_token(front, path):
    front.script("hi", "done", first_delay_s=30)
    options = {"json": {**STREAMS[path], "stream": True}}
    async with asyncio.timeout(10), front.client.post(front.url + path, **options) as response:
        assert response.status == 200


async def test_all_bodies_together_are_bounded(start_front):
    front = await start_front(Config(body_limit=1000))
    front.script("", "done", first_delay_s=30)
    body = {"messages": [{"role": "user", "content": "x" * 800}]}
    asking = [asyncio.create_task(front.post("/v1/chat/completions", body)) for _ in range(9)]
    await front.until(lambda: len(front.engine.active) == 9)
    status, refusal = await front.post("/v1/chat/completions", body)
    assert (status, refusal["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "8,000 bytes is the most" in refusal["error"]["message"]
    for one in asking:
        one.cancel()
    await front.until(lambda: not front.engine.active)
    front.script("hello", "done")
    front.scripts.pop("")
    assert (await front.chat("hello"))[0] == 200
