"""Tool calls and thinking, in both modes, on a model that writes its scripts exactly."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from ask import Reply, ask
from running_ftd import ANSWERS, running_ftd

SHORT = [key for key, answer in ANSWERS.items() if len(answer["token_ids"]) < 600]
RAW = {"S43", "S44", "S45", "S46", "S53", "S54"}
MODES = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    parameters = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def tools_of(key: str) -> list[dict[str, Any]]:
    names = dict.fromkeys(call["name"] for call in ANSWERS[key]["calls"])
    return [tool(name) for name in names or ["f"]]


def counted(stream: bool) -> dict[str, Any]:
    return {"stream": True, "stream_options": {"include_usage": True}} if stream else {}


@dataclass
class Message:
    """What a client puts together."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    deltas: int = 0


def message_of(reply: Reply) -> Message:
    out = Message()
    choices = [c for e in reply.events for c in e["choices"]] or reply.body["choices"]
    for choice in choices:
        part = choice.get("delta") or choice.get("message") or {}
        out.content += part.get("content") or ""
        out.reasoning += part.get("reasoning_content") or ""
        for index, call in enumerate(part.get("tool_calls") or []):
            out.deltas += 1
            if call.get("index", index) == len(out.calls):
                assert call["type"] == "function"
                out.calls.append({"id": call["id"], "name": call["function"]["name"], "text": ""})
            else:  # id, type and name come once
                assert set(call) == {"index", "function"} and "name" not in call["function"]
            out.calls[call.get("index", index)]["text"] += call["function"]["arguments"]
    assert len({call["id"] for call in out.calls}) == len(out.calls)
    return out


@MODES
@pytest.mark.parametrize("key", [key for key in SHORT if key not in RAW])
async def test_every_answer_comes_apart_as_it_was_scripted(ftd, key, stream):
    script = ANSWERS[key]
    reply = await ask(ftd.base, key, stream=stream, tools=tools_of(key))
    message = message_of(reply)
    assert message.content == script["text"]
    assert message.reasoning == script["thinking"]
    called = [{"name": c["name"], "arguments": json.loads(c["text"])} for c in message.calls]
    assert called == script["calls"]
    assert reply.finish == ("tool_calls" if script["calls"] else "stop")
    for call in message.calls:
        if call["name"] == "now":
            assert call["text"] == "{}"


@MODES
@pytest.mark.parametrize(
    ("key", "content", "calls"),
    [
        ("S46", "Before.\nBetween.\nBehind.", [("now", "{}"), ("get_weather", '{"city": "Rome"}')]),
        ("S54", "An empty thought came first.", []),
    ],
)
async def test_text_around_calls_is_kept(ftd, key, content, calls, stream):
    tools = [tool("now"), tool("get_weather")]
    message = message_of(await ask(ftd.base, key, stream=stream, tools=tools))
    assert message.content == content
    assert [(call["name"], call["text"]) for call in message.calls] == calls


@MODES
@pytest.mark.parametrize(
    ("key", "name"), [("S43", "broken"), ("S44", "never_closed"), ("S45", "f")]
)
async def test_a_call_that_would_be_malformed_is_held_to_its_schema(ftd, key, name, stream):
    parameters = {"type": "object", "properties": {"path": {"type": "string", "maxLength": 9}}}
    parameters |= {"additionalProperties": False}
    fields = {"tools": [tool(name, parameters)], "max_tokens": 60}
    reply = await ask(ftd.base, key, stream=stream, **fields)
    called = message_of(reply).calls
    assert called and {call["name"] for call in called} == {name}
    for call in called[: None if reply.finish == "tool_calls" else -1]:
        arguments = json.loads(call["text"])
        assert set(arguments) <= {"path"} and len(arguments.get("path", "")) <= 9


async def test_a_call_that_is_cut_is_the_same_in_both_modes_and_not_complete(ftd):
    whole = len(ANSWERS["S01"]["token_ids"])
    for cut in (3, 10, whole // 2, whole - 6):
        fields = {"tools": tools_of("S01"), "max_tokens": cut}
        plain = await ask(ftd.base, "S01", **fields)
        stream = await ask(ftd.base, "S01", stream=True, **fields)
        assert plain.finish == stream.finish == "length"
        texts = [[c["text"] for c in message_of(reply).calls] for reply in (plain, stream)]
        assert texts[0] == texts[1]
        assert message_of(plain).content == message_of(stream).content == ""
        for text in texts[0]:
            with pytest.raises(json.JSONDecodeError):
                json.loads(text)


@MODES
@pytest.mark.parametrize(
    "fields",
    [{"tool_choice": "none", "tools": [tool("f")]}, {"tool_choice": "none"}, {"tools": []}],
    ids=["none", "no tools", "empty tools"],
)
async def test_without_tools_to_call_nothing_is_called(ftd, fields, stream):
    reply = await ask(ftd.base, "S05", stream=stream, **fields)
    message = message_of(reply)
    assert message.calls == [] and reply.finish == "stop"
    assert message.content.startswith("Let me look at the file first.")
    assert "<tool_call>" not in message.content and "</tool_call>" not in message.content


@MODES
@pytest.mark.parametrize("arguments", ['{"path": "a', "", {"path": "a"}, None, "[1]"], ids=repr)
@pytest.mark.parametrize("call_id", ["call_1", None, "", ...], ids=repr)
async def test_broken_history_does_not_poison_the_session(ftd, arguments, call_id, stream):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    if call_id is not ...:
        call["id"] = call_id
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "matches nothing", "content": "result"},
        {"role": "user", "content": "S03"},
    ]
    reply = await ask(ftd.base, messages, stream=stream, tools=tools_of("S03"))
    assert [call["name"] for call in message_of(reply).calls] == ["get_weather"]


async def test_a_long_argument_flows(ftd):
    message = message_of(await ask(ftd.base, "S41", stream=True, tools=tools_of("S41")))
    (call,) = message.calls
    assert json.loads(call["text"]) == ANSWERS["S41"]["calls"][0]["arguments"]
    assert message.deltas > len(call["text"]) / 40


OFF = [
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"reasoning_effort": "none"},
    {"reasoning": {"effort": "none"}},
    {"reasoning": {"enabled": False}},
]


@MODES
@pytest.mark.parametrize("way", OFF, ids=str)
@pytest.mark.parametrize("key", ["S50", "S06", "S07"])
async def test_off_means_off_also_with_tools(ftd, key, way, stream):
    for tools in ({}, {"tools": tools_of(key)}):
        reply = await ask(ftd.base, key, **way, **tools, **counted(stream))
        message = message_of(reply)
        assert message.reasoning == ""
        assert reply.usage["completion_tokens_details"]["reasoning_tokens"] == 0
        assert "think>" not in message.content
        if tools:
            assert len(message.calls) == len(ANSWERS[key]["calls"])


async def test_the_request_wins_over_the_servers_default():
    with running_ftd(thinking="off") as ftd:
        assert message_of(await ask(ftd.base, "S50")).reasoning == ""
        asked = await ask(ftd.base, "S50", reasoning_effort="high")
        assert message_of(asked).reasoning == ANSWERS["S50"]["thinking"]


@MODES
async def test_thinking_that_eats_the_whole_output_is_told(ftd, stream):
    reply = await ask(ftd.base, "S51", max_tokens=16, **counted(stream))
    message = message_of(reply)
    assert reply.finish == "length"
    assert message.content == ""
    assert message.reasoning and ANSWERS["S51"]["thinking"].startswith(message.reasoning)
    assert reply.usage["completion_tokens_details"]["reasoning_tokens"] == 16
    ended = message_of(await ask(ftd.base, "S53", **counted(stream)))
    assert ended.reasoning == "This thought never ends because the budget is gone"
