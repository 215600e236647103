"""What a client hears while it waits, on every API; a full queue says when to come back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ask import chat, post
from running_ftd import running_ftd

LONG = "lorem ipsum dolor sit amet " * 100 + "S10"  # behind a word that no other prompt begins with
APIS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat(f"chat {LONG}"),
    "/v1/completions": {"prompt": f"complete {LONG}"},
    "/v1/messages": {"max_tokens": 9, **chat(f"message {LONG}")},
    "/v1/responses": {"input": f"respond {LONG}"},
}


@pytest.fixture(scope="module")
def slow():
    """A long prompt takes seconds; two requests run, one waits, a fourth is refused."""
    with running_ftd(fault="slow:40ms", prefill_chunk=32, max_running=2, max_waiting=1) as ftd:
        yield ftd


def kind(event: dict[str, Any]) -> str:
    if "type" in event:
        return event["type"]
    choice = event["choices"][0]
    if "text" in choice:
        return "text" if choice["text"] else "empty"
    delta = choice["delta"]
    return "role" if "role" in delta else "text" if delta.get("content") else "empty"


FIRST = {
    "/v1/chat/completions": ["role", "empty", "empty"],
    "/v1/completions": ["empty", "empty", "empty"],
    "/v1/messages": ["ping", "ping", "ping"],
    "/v1/responses": ["response.created", "response.in_progress", "response.in_progress"],
}


@pytest.mark.parametrize("path", APIS)
async def test_signs_of_life_are_of_the_kind_each_api_counts(slow, path):
    body = {**APIS[path], "stream": True, "temperature": 0}
    reply = await post(slow.base, body, path)
    assert reply.status == 200, reply.body
    assert [kind(event) for event in reply.events[:3]] == FIRST[path]
    slow.wait_rest()


async def test_a_full_queue_is_429_with_a_time_to_come_back_and_serves_the_others(slow):
    asking = []
    for number in range(3):
        asking.append(asyncio.create_task(post(slow.base, chat(f"{number} {LONG}"))))
    await asyncio.sleep(0.6)
    for path, body in APIS.items():
        reply = await post(slow.base, {**body, "stream": path == "/v1/messages"}, path)
        assert reply.status == 429, (path, reply.body)
        assert 1 <= int(reply.headers["Retry-After"]) <= 30
        assert reply.error["type"] == "rate_limit_error"
    for task in asking:
        assert (await task).status == 200
    slow.wait_rest()
