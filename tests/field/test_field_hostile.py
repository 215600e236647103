"""Hostile requests: each ends with an answer or a typed error, and its neighbours do not notice."""

from __future__ import annotations

import asyncio
import gzip
import random
from typing import Any

import aiohttp
import orjson
import pytest
from ask import ask, chat, post
from running_ftd import ANSWERS, RunningFtd

CHAT = "/v1/chat/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


def raw(fields: str) -> bytes:
    return b'{"messages":[{"role":"user","content":"S10"}],%s}' % fields.encode()


def schema(value: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": value}}
    return chat("S10", max_tokens=5, response_format=form)


def tools(*functions: dict[str, Any]) -> dict[str, Any]:
    return chat("S10", max_tokens=5, tools=[{"type": "function", "function": f} for f in functions])


def custom(syntax: str, definition: str) -> dict[str, Any]:
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    tool = {"type": "custom", "name": "x", "format": form}
    return {"input": "S10", "max_output_tokens": 5, "tools": [tool]}


def call(arguments: str) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    return [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "r"},
        {"role": "user", "content": "S10"},
    ]


REFUSED = {  # what is sent, and what the refusal speaks of
    "deep JSON": (b'{"messages":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}", "depth"),
    "lists that never close": (b'{"messages":' + b"[" * 900_000, "depth"),
    "an integer of 100,000 digits": (raw('"seed":' + "9" * 100_000), "JSON"),
    "NaN": (raw('"temperature":NaN'), "JSON"),
    "infinite": (raw('"temperature":1e999'), "JSON"),
    "a lone surrogate": (raw('"user":"\\ud800"'), "surrogate"),
    "no UTF-8": (raw('"user":"\xff"').decode().encode("latin-1"), "UTF-8"),
    "UTF-16": (raw('"n":1').decode().encode("utf-16"), "UTF-8"),
    "nothing": (b"", "JSON"),
    "100,000 messages": ({"messages": [{"role": "user", "content": "x"}] * 100_000}, "20,000"),
    "50,000 tools": (tools(*[{"name": "f"}] * 50_000), "1,024"),
    "a tool name of 10 kB": (tools({"name": "n" * 10_240}), "256"),
    "a billion answers": (chat("S10", n=10**9), "128"),
    "more answers than may wait": (chat("S10", n=100), "66"),
    "10,000 stops": (chat("S10", stop=["x"] * 10_000), "64"),
    "a stop of 10 kB": (chat("S10", stop=["x" * 10_000]), "256"),
    "a bias of no token": (chat("S10", logit_bias={"1000000000": 1}), "8191"),
    "a bias of 1e30": (chat("S10", logit_bias={"1": 1e30}), "100"),
    "a prompt of 300 kB": (chat("a" * 300_000), "2047"),
    "special tokens by the thousand": (chat("<|im_end|>" * 50_000), "2047"),
    "arguments nested too deeply": (chat(call('{"a":' * 5000 + "1" + "}" * 5000)), "2047"),
    "a template's own name": (chat("S10", chat_template_kwargs={"self": 1}), "self"),
    "multiples of a large prime": (
        schema({"type": "integer", "multipleOf": 999_983}),
        "multipleOf",
    ),
    "joined patterns": (schema({"allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(40)]}), "40"),
    "a schema of itself": (schema({"$ref": "#"}), "without an end"),
    "a schema elsewhere": (schema({"$ref": "file:///etc/passwd"}), "file:///etc/passwd"),
    "a wide schema": (schema({"enum": ["v" * 600_000]}), "524,288"),
    "a broken pattern": (schema({"type": "string", "pattern": "("}), "unclosed group"),
}
TAKEN = {
    "NUL": (CHAT, chat("\0 S10", max_tokens=5)),
    "keys twice": (CHAT, b'{"messages":[],"messages":[{"role":"user","content":"S10"}]}'),
    "a tool name with markers": (CHAT, tools({"name": 'a\0b\n"<tool_call>'})),
    "one tool twice": (CHAT, tools({"name": "a"}, {"name": "a", "parameters": {"type": "object"}})),
    "arguments with NaN": (CHAT, chat(call('{"a":NaN,"b":"\\ud800"}'), max_tokens=5)),
    "a billion items": (CHAT, schema({"type": "array", "minItems": 10**9, "items": {}})),
    "a string of a billion": (CHAT, schema({"type": "string", "maxLength": 10**9})),
    "nested repetition": (CHAT, schema({"type": "string", "pattern": "^((a+)+b?)*$"})),
    "repeated repetition": (CHAT, schema({"type": "string", "pattern": "^(([a-z]{1,99}){1,99})$"})),
    "a tool of a large prime": (
        CHAT,
        tools({"name": "f", "parameters": {"properties": {"a": {"multipleOf": 999_983}}}}),
    ),
    "ambiguous Lark": (RESPONSES, custom("lark", 'start: s\ns: s s s | s s | "x" |')),
    "a doubling Lark": (
        RESPONSES,
        custom("lark", "start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(30)))
        | {"tool_choice": "auto"},
    ),
    "reasoning that is not ours": (
        RESPONSES,
        {
            "input": [
                {"type": "reasoning", "summary": [], "encrypted_content": "ftd1." + "A" * 10_000},
                {"type": "message", "role": "user", "content": "S10"},
            ],
            "max_output_tokens": 5,
        },
    ),
    "no sense in tools": (
        MESSAGES,
        {
            "max_tokens": 5,
            "messages": [{"role": "user", "content": "S10"}],
            "tools": [{"name": "x", "input_schema": {"type": "nonsense"}}],
        },
    ),
}


@pytest.fixture
async def neighbour(ftd: RunningFtd):
    """A stream that runs beside; what it brings is exactly its script."""
    stream = asyncio.create_task(ask(ftd.base, "S14", stream=True))
    yield
    assert (await stream).text == ANSWERS["S14"]["text"]


@pytest.mark.parametrize("case", REFUSED)
async def test_what_cannot_be_done_is_refused_and_says_why(ftd, neighbour, case):
    body, words = REFUSED[case]
    reply = await post(ftd.base, body)
    assert reply.status == 400, reply.body
    assert words in reply.error["message"]
    assert len(reply.error["message"]) < 400


@pytest.mark.parametrize("case", TAKEN)
async def test_what_is_odd_is_answered_or_refused_with_a_reason(ftd, neighbour, case):
    path, body = TAKEN[case]
    reply = await post(ftd.base, body, path)
    assert reply.status in (200, 400), reply.body
    assert reply.status == 200 or reply.error["message"]


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd"])
async def test_a_bomb_is_not_opened(ftd, encoding):
    bomb = gzip.compress(b" " * 50_000_000)
    reply = await post(ftd.base, bomb, headers={"Content-Encoding": encoding})
    assert reply.status == 415, reply.body


BODY = orjson.dumps(chat("S10"))
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
LINES = {  # bytes on the wire, and how the answers begin
    "garbage": (b"\x00\x01garbage\r\n\r\n", [400]),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 200, [400]),
    "no Host": (b"GET /v1/models HTTP/1.1\r\n\r\n", [400]),
    "two Hosts": (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", [400]),
    "a long path": (b"GET /" + b"a" * 50_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", [431]),
    "a long header": (HEAD + b"X: " + b"a" * 50_000 + b"\r\n\r\n", [431]),
    "many headers": (HEAD + b"".join(b"X%d: a\r\n" % i for i in range(5000)) + b"\r\n", [400]),
    "two lengths": (HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcde", [400]),
    "length and chunks": (
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        [400],
    ),
    "a chunk of no size": (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n", [400]),
    "chunks of one byte": (
        HEAD
        + b"Transfer-Encoding: chunked\r\n\r\n"
        + b"".join(b"1\r\n%c\r\n" % byte for byte in BODY)
        + b"0\r\n\r\n",
        [200],
    ),
    "pipelined": (WHOLE * 4, [200] * 4),
    "another's address": (b"GET http://localhost/ HTTP/1.1\r\nHost: evil.example\r\n\r\n", [403]),
    "HEAD /": (b"HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n", [404]),
    "HEAD /api/hello": (b"HEAD /api/hello HTTP/1.1\r\nHost: localhost\r\n\r\n", [404]),
    "a WebSocket": (
        b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
        b"Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        [426],
    ),
}


async def statuses(base: str, data: bytes, replies: int) -> list[int]:
    port = int(base.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    got = b""
    try:
        writer.write(data)
        async with asyncio.timeout(30):
            while got.count(b"HTTP/1.") < replies:
                part = await reader.read(65536)
                if not part:
                    break
                got += part
    finally:
        writer.close()
    return [int(part[2:5]) for part in got.split(b"HTTP/1.")[1:]]


@pytest.mark.parametrize("case", LINES)
async def test_what_is_no_request_is_refused_on_the_wire(ftd, neighbour, case):
    data, wanted = LINES[case]
    assert await statuses(ftd.base, data, len(wanted)) == wanted


async def test_half_requests_by_the_hundred_keep_nobody_waiting(ftd):
    port = int(ftd.base.rpartition(":")[2])
    halves = [HEAD + b"X: ", HEAD + b"Content-Length: 5000\r\n\r\nab", WHOLE[:-3]]
    open_ones = []
    for i in range(150):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(halves[i % 3])
        open_ones.append(writer)
    assert (await ask(ftd.base, "S10")).text == ANSWERS["S10"]["text"]
    for writer in open_ones:
        writer.close()


async def test_a_storm_of_cancels_changes_no_answer(ftd):
    rng = random.Random(3)

    async def leave(session: aiohttp.ClientSession) -> None:
        body = chat(rng.choice(["S13", "S14", "S20"]), stream=rng.random() < 0.5)
        asking = asyncio.create_task(session.post(ftd.base + CHAT, json=body))
        await asyncio.sleep(rng.random() * 0.1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    async with aiohttp.ClientSession() as session:
        stayed = asyncio.create_task(ask(ftd.base, "S14", stream=True))
        for _ in range(5):
            await asyncio.gather(*(leave(session) for _ in range(20)))
        assert (await stayed).text == ANSWERS["S14"]["text"]
