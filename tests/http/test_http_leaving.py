"""Clients that leave, wherever they are, leave nothing behind; slow readers are cut off."""

from __future__ import annotations

import asyncio
import random

import orjson
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from ftd.config import Config
from ftd.engine.api import Finish
from ftd.http import stream as stream_module


def request_bytes(content: str, *, path: str = "/v1/chat/completions", **fields) -> bytes:
    body = orjson.dumps({"messages": [{"role": "user", "content": content}], **fields})
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def open_socket(front) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    port = int(front.url.rpartition(":")[2])
    return await asyncio.open_connection("127.0.0.1", port, limit=2**16)


@pytest.fixture
async def slow(front):
    front.script("stream", "word " * 200, delay_s=0.01)
    front.script("prefill", "done", first_delay_s=60)
    return front


async def test_leaving_after_five_deltas_ends_the_work(slow):
    reader, writer = await open_socket(slow)
    writer.write(request_bytes("stream", stream=True))
    for _ in range(5):
        await reader.readuntil(b"data: ")
    assert slow.engine.active
    writer.close()
    await slow.until(lambda: not slow.engine.active)
    assert slow.engine.counts == {Finish.CANCELLED: 1}


@pytest.mark.parametrize("streamed", [True, False])
async def test_leaving_while_the_prompt_is_computed_ends_the_work(slow, streamed):
    _, writer = await open_socket(slow)
    writer.write(request_bytes("prefill", stream=streamed))
    await slow.until(lambda: slow.engine.active)
    writer.close()
    await slow.until(lambda: not slow.engine.active)


async def test_a_half_closed_socket_counts_as_left(slow):
    _, writer = await open_socket(slow)
    writer.write(request_bytes("prefill"))
    await slow.until(lambda: slow.engine.active)
    writer.write_eof()
    await slow.until(lambda: not slow.engine.active)


async def test_leaving_with_several_answers_ends_all(slow):
    _, writer = await open_socket(slow)
    writer.write(request_bytes("prefill", n=4))
    await slow.until(lambda: len(slow.engine.active) == 4)
    writer.close()
    await slow.until(lambda: not slow.engine.active)
    assert slow.engine.counts == {Finish.CANCELLED: 4}


async def test_leaving_before_the_body_is_complete(slow):
    _, writer = await open_socket(slow)
    writer.write(request_bytes("stream")[:-10])
    await writer.drain()
    writer.close()
    assert (await slow.chat("hi"))[0] == 200
    assert not slow.engine.active


async def test_a_hundred_clients_that_leave_anywhere_leave_nothing(slow):
    rng = random.Random(5)

    async def one() -> None:
        _, writer = await open_socket(slow)
        fields = {"stream": rng.random() < 0.5, "n": rng.choice([1, 2])}
        writer.write(request_bytes(rng.choice(["stream", "prefill"]), **fields))
        await asyncio.sleep(rng.random() * 0.08)
        writer.close()

    for _ in range(25):
        await asyncio.gather(*(one() for _ in range(4)))
    await slow.until(lambda: not slow.engine.active)
    submitted = len(slow.engine.requests)
    assert sum(slow.engine.counts.values()) == submitted > 0
    status, body = await slow.chat("hi")
    assert (status, body["choices"][0]["message"]["content"]) == (200, "unscripted")
    assert len(asyncio.all_tasks()) < 20


async def test_a_client_that_leaves_with_the_last_event_has_its_answer(front, monkeypatch, caplog):
    async def gone(self, data=b""):
        raise ConnectionResetError("Cannot write to closing transport")

    front.script("short", "one two")
    monkeypatch.setattr(web.StreamResponse, "write_eof", gone)
    reader, writer = await open_socket(front)
    with capture_logs() as lines:
        writer.write(request_bytes("short", stream=True))
        await reader.readuntil(b"[DONE]")
        writer.close()
        await front.until(lambda: any(line["event"] == "request.finished" for line in lines))
    (told,) = [line for line in lines if line["event"] == "request.finished"]
    assert (told["status"], told["outcome"]) == (200, "stop")
    assert not caplog.records


async def test_a_reader_that_stops_reading_is_cut_off(start_front, monkeypatch, caplog):
    monkeypatch.setattr(stream_module, "SLOW_READER_S", 0.2)
    front = await start_front(Config())
    front.script("flood", "word " * 1500, per_output=1)
    reader, writer = await open_socket(front)
    # logprobs make the chunks large enough to fill every buffer on the way
    writer.write(request_bytes("flood", stream=True, logprobs=True, top_logprobs=20, n=8))
    await front.until(lambda: front.engine.active)
    with capture_logs() as lines:
        writer.transport.pause_reading()
        await front.until(lambda: not front.engine.active)
    assert [line["took_nothing_s"] for line in lines if "cut_off" in line["event"]] == [0.2]
    assert not caplog.records
    assert front.engine.counts.get(Finish.CANCELLED)
    writer.transport.resume_reading()
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        while True:
            await reader.readexactly(2**16)
    writer.close()


async def test_a_slow_body_is_given_up(start_front, monkeypatch):
    from ftd.http import body as arriving

    monkeypatch.setattr(arriving, "BODY_TIMEOUT_S", 0.1)
    front = await start_front()
    reader, writer = await open_socket(front)
    writer.write(request_bytes("hi")[:-5])
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    writer.close()


async def test_shutting_down_answers_whoever_is_there(slow):
    plain = asyncio.create_task(slow.chat("prefill"))
    streamed = asyncio.create_task(slow.stream_chat("stream"))
    await slow.until(lambda: len(slow.engine.active) == 2)
    await slow.engine.close()
    status, body = await plain
    assert (status, body["error"]["code"]) == (503, "model_not_ready")
    assert (await streamed)[-1]["error"]["code"] == "model_not_ready"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("streamed", [True, False])
async def test_leaving_ends_the_work_on_every_api(slow, path, streamed):
    _, writer = await open_socket(slow)
    writer.write(request_bytes("prefill", path=path, stream=streamed, input="prefill"))
    await slow.until(lambda: slow.engine.active)
    writer.close()
    await slow.until(lambda: not slow.engine.active)
    assert slow.engine.counts == {Finish.CANCELLED: 1}


async def test_requests_that_bear_the_same_id_are_kept_apart(slow):
    headers = {"X-Request-Id": "same", "X-Client-Request-Id": "same", "Idempotency-Key": "same"}
    body = {"messages": [{"role": "user", "content": "hi"}], "id": "same", "request_id": "same"}
    answers = await asyncio.gather(
        *(slow.post("/v1/chat/completions", body, headers=headers) for _ in range(5))
    )
    assert len({answer["id"] for _, answer in answers}) == 5
