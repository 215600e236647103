"""What reaches a socket and is no request: garbage, head and body in pieces, silence."""

from __future__ import annotations

import asyncio
import time

import orjson
import pytest
from structlog.testing import capture_logs

from ftd.config import Config
from ftd.http import connection

HOST = b"Host: localhost\r\n"


async def ask(front, *pieces: bytes, pause_s: float = 0.02) -> tuple[int, dict[bytes, bytes], dict]:
    """Status, headers and body of the answer to bytes that arrive one piece after the other."""
    reader, writer = await asyncio.open_connection(*front.url.removeprefix("http://").split(":"))
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(pause_s)
    async with asyncio.timeout(10):
        answer = await reader.read()  # until the connection is closed
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    headers = dict(line.lower().split(b": ", 1) for line in lines)
    return int(first.split()[1]), headers, orjson.loads(body)


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 tls\r\n\r\n", 400, "http_invalid"),
        (b"hello\r\n\r\n", 400, "http_invalid"),
        (b"GET /health HTTP/9.9x\r\n" + HOST + b"\r\n", 400, "http_invalid"),
        (b"GET /health HTTP/1.1\r\n" + HOST + b"X: a\x01b\r\n\r\n", 400, "http_invalid"),
        (b"GET /health HTTP/1.1\r\n" + HOST + b"Content-Length: x\r\n\r\n", 400, "http_invalid"),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 9000 + b"\r\n\r\n", 431, None),
        (b"GET / HTTP/1.1\r\n" + HOST + b"X: a\r\n" * 200 + b"\r\n", 400, "http_invalid"),
    ],
    ids=["tls", "text", "version", "control", "length", "path", "header", "headers"],
)
async def test_what_is_no_http_is_answered_with_an_error_object(front, sent, status, code):
    got, headers, body = await ask(front, sent)
    assert (got, headers[b"content-type"][:16]) == (status, b"application/json")
    assert body["error"]["code"] == (code or "headers_too_large")
    assert body["error"]["type"] == "invalid_request_error"
    assert "\n" not in body["error"]["message"]


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (b"Host: a\xff", 403),
        (b"Host: localhost\r\nOrigin: http://a\xff", 403),
        (b"Host: localhost\r\nContent-Encoding: \xff", 415),
        (b"Host: localhost\r\nX-Session-Id: a\xffb", 200),
    ],
    ids=["host", "origin", "encoding", "session"],
)
async def test_headers_that_are_no_utf_8_are_told_with_a_mark(front, header, status):
    front.script("hi", "a")
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    length = f"\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\n" + header
    got, _, answer = await ask(front, head + length + body)
    assert got == status, answer
    if status == 200:
        assert front.engine.requests[0].session == "a?b"


async def test_a_foreign_origin_that_is_no_utf_8_is_refused_though_all_are_allowed(start_front):
    front = await start_front(Config(allow_origin=("*",)))
    for method in (b"OPTIONS", b"GET"):
        asked = b"Access-Control-Request-Method: GET\r\nAccess-Control-Request-Headers: \xff\r\n"
        head = method + b" /health/live HTTP/1.1\r\nConnection: close\r\n" + HOST + asked
        got, _, _ = await ask(front, head + b"Origin: http://a\xff\r\n\r\n")
        assert got == 403


async def test_a_proxy_s_request_names_what_it_asked_for(front):
    connect = b"CONNECT a.example:443 HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n"
    status, _, body = await ask(front, connect)
    assert status == 404 and body["error"]["message"] == "a.example:443 does not exist"


async def test_clients_of_messages_get_the_error_object_they_know(front):
    head = b"POST /v1/messages HTTP/1.1\r\n" + HOST
    for rest in (b"X: a\x01\r\n\r\n", b"Expect: the unexpected\r\nContent-Length: 2\r\n\r\n{}"):
        _, _, body = await ask(front, head + b"Connection: close\r\n" + rest)
        assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"


async def test_what_is_refused_before_the_application_is_asked_is_json(front):
    head = b"POST /v1/completions HTTP/1.1\r\nConnection: close\r\n" + HOST
    status, _, body = await ask(front, head + b"Expect: tea\r\nContent-Length: 2\r\n\r\n{}")
    assert (status, body["error"]["code"]) == (417, "http_error")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages/count_tokens"])
async def test_a_broken_chunk_in_mid_body_is_refused_at_once(front, caplog, path):
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    began_s = time.monotonic()
    with capture_logs() as lines:
        status, _, body = await ask(
            front, head.encode(), b'5\r\n{"mes\r\n', b"sk-secret\r\nabc\r\n"
        )
    assert time.monotonic() - began_s < connection.HEADERS_TIMEOUT_S / 2
    assert status == 400
    assert "the body could not be read" in body["error"]["message"]
    assert not caplog.records and "sk-" not in str(lines)


async def test_headers_that_never_end_are_given_up(front, monkeypatch):
    monkeypatch.setattr(connection, "HEADERS_TIMEOUT_S", 0.15)
    head = b"POST /v1/messages HTTP/1.1\r\n" + HOST
    status, _, body = await ask(front, head[:9], head[9:], *[b"X-Drip: 1\r\n"] * 4)
    assert status == 408 and body["type"] == "error"
    assert "the headers did not arrive within 0.15 s" in body["error"]["message"]


async def test_a_connection_that_says_nothing_is_closed_and_one_that_waits_is_not(
    front, monkeypatch
):
    monkeypatch.setattr(connection, "HEADERS_TIMEOUT_S", 0.1)
    host, port = front.url.removeprefix("http://").split(":")
    silent, closed = await asyncio.open_connection(host, port)
    reader, writer = await asyncio.open_connection(host, port)
    request = b"GET /health/live HTTP/1.1\r\n" + HOST + b"\r\n"
    async with asyncio.timeout(10):
        for _ in range(2):
            writer.write(request)
            assert b"200" in await reader.readuntil(b"}")
            await asyncio.sleep(0.2)
        assert await silent.read() == b""
    for each in (closed, writer):
        each.close()


async def test_a_body_may_take_longer_than_headers(front, monkeypatch):
    monkeypatch.setattr(connection, "HEADERS_TIMEOUT_S", 0.05)
    body = b'{"prompt": "hi", "max_tokens": 1}'
    head = f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    pieces = (b"POST /v1/completions HTTP/1.1\r\n" + HOST + head, body[:5], body[5:])
    front.script("hi", "a")
    status, _, _ = await ask(front, *pieces, pause_s=0.1)
    assert status == 200
