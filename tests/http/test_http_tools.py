"""Tools and thinking on /v1/chat/completions, over a scripted engine and a real socket."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ftd.config import Config

ARGUMENTS = {"path": 'a "b"\\c 😀', "lines": ["{ } </", "\n", ""]}
WRITE = {
    "type": "function",
    "function": {
        "name": "write_file",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}


def call(arguments: Any = ARGUMENTS, name: str = "write_file") -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


FULL = f"<think>\nLet me see.\n</think>\n\nI write it.\n{call()}\n{call()}"


async def test_a_plain_answer_with_everything_in_it(front):
    front.script("work", FULL)
    _, body = await front.chat("work", tools=[WRITE])
    (choice,) = body["choices"]
    message = choice["message"]
    assert message["reasoning_content"] == "Let me see."
    assert message["content"] == "I write it."
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["write_file"] * 2
    assert [json.loads(c["function"]["arguments"]) for c in message["tool_calls"]] == [
        ARGUMENTS
    ] * 2
    assert len({c["id"] for c in message["tool_calls"]}) == 2
    assert choice["finish_reason"] == "tool_calls"
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 3


async def test_name_and_id_come_once_and_arguments_in_fragments(front):
    front.script("work", FULL)
    events = await front.stream_chat("work", tools=[WRITE])
    deltas = [e["choices"][0]["delta"] for e in events[:-1]]
    calls = [entry for delta in deltas for entry in delta.get("tool_calls", [])]
    for index in (0, 1):
        first, *fragments = [entry for entry in calls if entry["index"] == index]
        assert (first["type"], first["function"]["name"]) == ("function", "write_file")
        assert first["id"].startswith("call_")
        assert all(set(f) == {"index", "function"} for f in fragments)
        text = "".join(entry["function"]["arguments"] for entry in [first, *fragments])
        assert json.loads(text) == ARGUMENTS
        assert len(fragments) > 5
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Let me see."


async def test_a_call_alone_has_null_content_and_empty_arguments(front):
    front.script("now", call({}, "now"))
    tool = {"type": "function", "function": {"name": "now"}}
    _, body = await front.chat("now", tools=[tool])
    message = body["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"][0]["function"]["arguments"] == "{}"


async def test_a_call_cut_in_the_middle_says_length(front):
    front.script("work", call())
    cut = len(front.text.encode(call())) - 12
    _, body = await front.chat("work", tools=[WRITE], max_tokens=cut)
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])
    events = await front.stream_chat("work", tools=[WRITE], max_tokens=cut)
    assert events[-2]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("fields", [{"tool_choice": "none", "tools": [WRITE]}, {}])
async def test_without_tools_there_are_no_calls_and_no_markers(front, fields):
    front.script("work", FULL)
    _, body = await front.chat("work", **fields)
    (choice,) = body["choices"]
    assert "tool_calls" not in choice["message"]
    assert "<tool_call>" not in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"


async def test_one_call_only_when_parallel_calls_are_forbidden(front):
    front.script("work", FULL)
    _, body = await front.chat("work", tools=[WRITE], parallel_tool_calls=False)
    (choice,) = body["choices"]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"
    assert not front.engine.active


async def test_thinking_eats_the_whole_output(front):
    front.script("muse", "<think>\nHm, let me think about this for a while")
    _, body = await front.chat("muse", max_tokens=6)
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == ""
    assert choice["message"]["reasoning_content"].startswith("Hm")
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6


async def test_a_stop_string_is_looked_for_in_the_text_only(front):
    front.script("work", "<think>\nstop here\n</think>\n\nnow stop here")
    _, body = await front.chat("work", stop=["stop"])
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("stop here", "now ")


async def test_logprobs_cover_every_token(front):
    front.script("work", FULL)
    _, body = await front.chat("work", tools=[WRITE], logprobs=True)
    content = body["choices"][0]["logprobs"]["content"]
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == FULL
    events = await front.stream_chat("work", tools=[WRITE], logprobs=True)
    streamed = [
        entry
        for e in events[:-1]
        for choice in e["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert streamed == content


async def test_thinking_goes_back_into_the_prompt(front):
    for name in ("reasoning_content", "reasoning"):
        assistant = {"role": "assistant", "content": "b", name: "deep thoughts"}
        messages = [{"role": "user", "content": "a"}, assistant]
        await front.post("/v1/chat/completions", {"messages": messages})
        assert "<think>\ndeep thoughts\n</think>" in front.prompt()


async def test_the_request_wins_over_the_servers_default(start_front):
    front = await start_front(Config(thinking="off"))
    await front.chat("hi")
    assert front.prompt().endswith("<think>\n\n</think>\n\n")
    for fields in (
        {"reasoning_effort": "low"},
        {"chat_template_kwargs": {"enable_thinking": True}},
    ):
        await front.chat("hi", **fields)
        assert not front.prompt().endswith("<think>\n\n</think>\n\n")


async def test_the_dialect_can_be_set(start_front):
    front = await start_front(Config(tool_dialect="llama3"))
    body = json.dumps({"name": "write_file", "parameters": ARGUMENTS})
    front.script("work", body)
    _, answer = await front.chat("work", tools=[WRITE])
    calls = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(calls[0]["function"]["arguments"]) == ARGUMENTS


async def test_an_unknown_dialect_is_refused_at_the_start(start_front):
    from ftd.errors import ConfigError

    with pytest.raises(ConfigError, match="klingon"):
        await start_front(Config(tool_dialect="klingon"))


NAMED = {"type": "function", "function": {"name": "write_file"}}
OTHER = {"type": "function", "function": {"name": "no_such"}}


@pytest.mark.parametrize(
    ("choice", "tools", "words"),
    [
        (OTHER, [WRITE], "no_such"),
        ("required", [], "no tools"),
        ("perhaps", [WRITE], "must be auto"),
        ({"type": "function"}, [WRITE], "must be auto"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
            [WRITE],
            "none of the tools",
        ),
    ],
)
async def test_what_is_not_kept_is_refused(front, choice, tools, words):
    status, body = await front.chat("hi", tools=tools, tool_choice=choice)
    assert (status, body["error"]["param"]) == (400, "tool_choice")
    assert words in body["error"]["message"]
