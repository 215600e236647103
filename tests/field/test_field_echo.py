"""A second turn reuses what the first one computed, whatever the client made of its answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ask import post
from running_ftd import ANSWERS, running_ftd

KEY = next(k for k, a in ANSWERS.items() if a["thinking"] and a["calls"])
(CALL,) = ANSWERS[KEY]["calls"]
PARAMETERS = {"type": "object", "properties": {key: {} for key in CALL["arguments"]}}
FILLER = "The quick brown fox jumps over the lazy dog. "
FUNCTION = {"name": CALL["name"], "parameters": PARAMETERS}


@pytest.fixture
def fresh():
    """A pool in which nothing of others has its worth."""
    with running_ftd() as ftd:
        yield ftd


def rewritten(arguments: str) -> str:
    return json.dumps(dict(reversed(json.loads(arguments).items())), indent=4)


async def turn(base: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = await post(base, {**body, "temperature": 0}, path)
    assert reply.status == 200, reply.body
    return reply.body


def nearly_all(cached: int, before: int) -> None:
    assert before * 0.9 < cached <= before, (cached, before)


async def test_chat(ftd):
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Chat. {KEY}"}]
    body = {"messages": messages, "tools": [{"type": "function", "function": FUNCTION}]}
    first = await turn(ftd.base, "/v1/chat/completions", body)
    message = first["choices"][0]["message"]
    (call,) = message["tool_calls"]
    call["function"]["arguments"] = rewritten(call["function"]["arguments"])
    result = {"role": "tool", "tool_call_id": call["id"].replace("_", ""), "content": "done"}
    call["id"] = call["id"].replace("_", "")
    body["messages"] = [*messages, message, result]
    usage = (await turn(ftd.base, "/v1/chat/completions", body))["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    nearly_all(cached, first["usage"]["total_tokens"])


async def test_messages(ftd):
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Messages. {KEY}"}]
    tools = [{"name": CALL["name"], "input_schema": PARAMETERS}]
    body = {"messages": messages, "tools": tools, "max_tokens": 500}
    body["thinking"] = {"type": "adaptive"}
    first = await turn(ftd.base, "/v1/messages", body)
    (use,) = (block for block in first["content"] if block["type"] == "tool_use")
    use["input"] = dict(reversed(use["input"].items()))
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "done"}
    body["messages"] = [
        *messages,
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result]},
    ]
    usage = (await turn(ftd.base, "/v1/messages", body))["usage"]
    before = first["usage"]["input_tokens"] + first["usage"]["cache_read_input_tokens"]
    nearly_all(usage["cache_read_input_tokens"], before + first["usage"]["output_tokens"])


async def test_responses(ftd):
    items: list[dict[str, Any]] = [{"role": "user", "content": f"Responses. {KEY}"}]
    body = {"input": items, "tools": [{"type": "function", **FUNCTION}], "store": False}
    first = await turn(ftd.base, "/v1/responses", body)
    (call,) = (item for item in first["output"] if item["type"] == "function_call")
    call["arguments"] = rewritten(call["arguments"])
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
    body["input"] = [*items, *first["output"], result]
    usage = (await turn(ftd.base, "/v1/responses", body))["usage"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    nearly_all(cached, first["usage"]["total_tokens"])


async def test_titles_and_sub_agents_leave_the_main_conversation_its_prefix(fresh):
    ftd, beside = fresh, 0  # tokens
    path = "/v1/chat/completions"
    system = {"role": "system", "content": f"Main. {FILLER * 70}"}
    messages = [system, {"role": "user", "content": KEY}]
    body = {"messages": messages, "tools": [{"type": "function", "function": FUNCTION}]}
    main = {"x-session-id": "main"}
    first = (await post(ftd.base, {**body, "temperature": 0}, path, main)).body
    for i in range(12):
        title = [{"role": "user", "content": f"Title {i}. {FILLER * 25}"}]
        reply = await post(ftd.base, {"messages": title, "max_tokens": 4}, path, main)
        beside += reply.body["usage"]["total_tokens"]
    for i in range(3):
        headers = {"x-claude-code-session-id": "main", "x-claude-code-agent-id": f"agent {i}"}
        task = {"messages": [{"role": "user", "content": f"Task {i}. {FILLER * 90}"}]}
        reply = await post(ftd.base, {**task, "max_tokens": 4}, path, headers)
        beside += reply.body["usage"]["total_tokens"]
    engine = ftd.engine()
    assert beside > engine.pages_total * engine.page_tokens, "they need the whole pool and more"
    message = first["choices"][0]["message"]
    (call,) = message["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
    body["messages"] = [*messages, message, result]
    second = (await post(ftd.base, {**body, "temperature": 0}, path, main)).body
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    nearly_all(cached, first["usage"]["total_tokens"])
