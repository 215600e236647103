"""A second turn reuses what the first one computed, whatever the client made of its answer."""

from __future__ import annotations

import json
from typing import Any

from ask import post
from running_ftd import ANSWERS

KEY = next(k for k, a in ANSWERS.items() if a["thinking"] and a["calls"])
(CALL,) = ANSWERS[KEY]["calls"]
PARAMETERS = {"type": "object", "properties": {key: {} for key in CALL["arguments"]}}
FUNCTION = {"name": CALL["name"], "parameters": PARAMETERS}


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
