"""Answers held to schemas and tools, from outside, on a model that would rather say its scripts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ask import ask, chat, post
from jsonschema import validate
from running_ftd import ANSWERS

THINKER = next(key for key, answer in ANSWERS.items() if answer["thinking"] and answer["text"])
SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["a", "b", None]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
    },
    "required": ["n", "kind"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
MODES = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


def messages_of(reply: Any) -> list[dict[str, Any]]:
    """Content, reasoning and calls of each choice."""
    found: dict[int, dict[str, Any]] = {}
    for choice in [c for e in reply.events for c in e["choices"]] or reply.body["choices"]:
        part = choice.get("delta") or choice.get("message") or {}
        message = found.setdefault(choice["index"], {"content": "", "reasoning": "", "calls": {}})
        message["content"] += part.get("content") or ""
        message["reasoning"] += part.get("reasoning_content") or ""
        message["finish"] = choice.get("finish_reason") or message.get("finish")
        for i, call in enumerate(part.get("tool_calls") or []):
            name, text = message["calls"].get(call.get("index", i), ("", ""))
            function = call["function"]
            entry = name + function.get("name", ""), text + function["arguments"]
            message["calls"][call.get("index", i)] = entry
    return [found[index] for index in sorted(found)]


@MODES
async def test_thinking_is_free_and_the_answer_behind_it_is_of_the_schema(ftd, stream):
    reply = await ask(ftd.base, THINKER, stream=stream, response_format=FORMAT)
    (message,) = messages_of(reply)
    assert message["reasoning"] == ANSWERS[THINKER]["thinking"]
    assert message["finish"] == "stop"
    validate(json.loads(message["content"]), SCHEMA)


@MODES
async def test_too_few_tokens_for_the_schema_say_length(ftd, stream):
    for most in (2, 40):
        fields = {"response_format": FORMAT, "max_tokens": most, "temperature": 2.0, "seed": most}
        reply = await ask(ftd.base, THINKER, stream=stream, **fields)
        (message,) = messages_of(reply)
        if message["finish"] == "stop":
            validate(json.loads(message["content"]), SCHEMA)
        else:
            assert message["finish"] == "length"


@MODES
async def test_every_choice_is_held_by_itself(ftd, stream):
    fields = {"response_format": FORMAT, "n": 3, "temperature": 3.0, "seed": 1}
    reply = await ask(ftd.base, "S10", stream=stream, reasoning_effort="none", **fields)
    contents = [message["content"] for message in messages_of(reply)]
    assert len(set(contents)) == 3
    for content in contents:
        validate(json.loads(content), SCHEMA)


@MODES
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"first", "second"}),
        ({"type": "function", "function": {"name": "second"}}, {"second"}),
    ],
)
async def test_a_forced_call_comes_and_obeys_its_schema(ftd, choice, names, stream):
    tools = [tool("first"), tool("second", strict=True)]
    fields = {"tools": tools, "tool_choice": choice, "temperature": 1.5, "seed": 5}
    reply = await ask(
        ftd.base, "S10", stream=stream, parallel_tool_calls=False, reasoning_effort="none", **fields
    )
    (message,) = messages_of(reply)
    assert message["finish"] == "tool_calls" and not message["content"].strip()
    ((name, arguments),) = message["calls"].values()
    assert name in names
    validate(json.loads(arguments), SCHEMA)


async def test_a_schema_that_cannot_be_held_is_refused_and_neighbours_are_not_disturbed(ftd):
    bad = {"type": "json_schema", "json_schema": {"schema": {"items": {"uniqueItems": True}}}}
    refused = await post(ftd.base, chat("S10", response_format=bad))
    assert refused.status == 400
    assert "#/items/uniqueItems" in refused.body["error"]["message"]
    known = await ask(ftd.base, "S10")
    assert messages_of(known)[0]["content"] == ANSWERS["S10"]["text"]
