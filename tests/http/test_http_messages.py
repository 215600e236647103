"""/v1/messages: plain and streamed, over a scripted engine and a real socket."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from ftd.config import Config
from ftd.errors import EngineFailed, QueueFull

WRITE = {
    "name": "write_file",
    "description": "Write a file.",
    "input_schema": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "lines": {"type": "array"}},
        "required": ["path"],
    },
}
THINKING = {"type": "adaptive", "display": "omitted"}
ARGUMENTS = {"path": 'a "b"\\c 😀', "lines": ["{ } </", "\n", ""]}
CALL = f"<tool_call>\n{json.dumps({'name': 'write_file', 'arguments': ARGUMENTS})}\n</tool_call>"
FULL = f"<think>\nLet me see.\n</think>\n\nI write it.\n{CALL}\n{CALL}"


def kinds(events: list[Any]) -> list[str]:
    return [event["type"] for event in events]


async def test_a_plain_answer(front):
    front.script("greet", "Hi there, 世界!", reused_tokens=5)
    status, body = await front.message("greet", model="claude-anything")
    prompt = len(front.engine.requests[0].prompt_ids)
    assert status == 200
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "test-model",
        "content": [{"type": "text", "text": "Hi there, 世界!"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": prompt - 5,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 5,
            "cache_read_details": {"recomputed_tokens": prompt - 5},
            "output_tokens": len(front.text.encode("Hi there, 世界!")) + 1,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }


async def test_the_order_of_events(front):
    front.script("work", FULL, reused_tokens=3)
    events = await front.stream_message("work", tools=[WRITE], thinking=THINKING)
    assert [k for k in kinds(events) if k != "content_block_delta"] == [
        "ping",
        "message_start",
        *["content_block_start", "content_block_stop"] * 4,
        "message_delta",
        "message_stop",
    ]
    start = events[1]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["cache_read_input_tokens"] == 3
    starts = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    assert [s["type"] for s in starts] == ["thinking", "text", "tool_use", "tool_use"]
    assert starts[2]["input"] == {}
    assert starts[2]["id"] != starts[3]["id"]
    deltas = [e["delta"]["type"] for e in events if e.get("index") == 0 and "delta" in e]
    assert set(deltas[:-1]) == {"thinking_delta"}
    assert deltas[-1] == "signature_delta"
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens_details"]["thinking_tokens"] > 3
    arguments = "".join(
        e["delta"]["partial_json"] for e in events if e.get("index") == 2 and "delta" in e
    )
    assert json.loads(arguments) == ARGUMENTS


async def test_a_plain_answer_with_everything_in_it(front):
    front.script("work", FULL)
    _, body = await front.message("work", tools=[WRITE], thinking=THINKING)
    thinking, text, first, second = body["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "Let me see.")
    assert thinking["signature"]
    assert text == {"type": "text", "text": "I write it."}
    assert first["input"] == second["input"] == ARGUMENTS
    assert body["stop_reason"] == "tool_use"


async def test_one_call_only_when_parallel_calls_are_forbidden(front):
    front.script("work", FULL)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    _, body = await front.message("work", tools=[WRITE], thinking=THINKING, tool_choice=choice)
    assert [block["type"] for block in body["content"]] == ["thinking", "text", "tool_use"]
    assert body["stop_reason"] == "tool_use"
    assert not front.engine.active


async def test_a_call_without_arguments_has_an_empty_input(front):
    front.script("now", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    tool = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
    _, body = await front.message("now", tools=[tool])
    assert body["content"][0]["input"] == {}
    events = await front.stream_message("now", tools=[tool])
    deltas = [e["delta"]["partial_json"] for e in events if e["type"] == "content_block_delta"]
    assert json.loads("".join(deltas)) == {}


async def test_a_call_cut_in_the_middle_is_not_shown_as_complete(front):
    front.script("work", CALL)
    cut = len(front.text.encode(CALL)) - 12
    _, body = await front.message("work", tools=[WRITE], max_tokens=cut)
    (block,) = body["content"]
    assert (body["stop_reason"], block["name"]) == ("max_tokens", "write_file")
    events = await front.stream_message("work", tools=[WRITE], max_tokens=cut)
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"
    written = arguments_of(events)
    with pytest.raises(json.JSONDecodeError):
        json.loads(written)
    assert block["input"] == {"arguments": written}


def arguments_of(events):
    return "".join(e["delta"]["partial_json"] for e in events if e["type"] == "content_block_delta")


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ('{"path": "a", "lines": [1]}', {"path": "a", "lines": [1]}),
        ('{"path": "a\n', {"arguments": '{"path": "a\n'}),
        ('{"path": oops}', {"arguments": '{"path": oops}'}),
        ('{"path": "a', {"arguments": '{"path": "a'}),
    ],
    ids=["sound", "control character", "no JSON", "never closed"],
)
async def test_arguments_that_nothing_holds_are_sound_json_in_streams_too(
    start_front, written, wanted
):
    front = await start_front(Config(tool_dialect="llama3"))  # its calls have no token to begin
    front.script("work", f'{{"name": "write_file", "parameters": {written}')
    events = await front.stream_message("work", tools=[WRITE])
    _, body = await front.message("work", tools=[WRITE])
    assert json.loads(arguments_of(events)) == body["content"][0]["input"] == wanted
    assert events[-2]["delta"]["stop_reason"] == body["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({}, "end_turn", None),
        ({"max_tokens": 3}, "max_tokens", None),
        ({"max_tokens": 0}, "max_tokens", None),
        ({"stop_sequences": ["END OF"]}, "stop_sequence", "END OF"),
        ({"stop_sequences": ["END OFF"]}, "end_turn", None),
    ],
)
async def test_stop_reasons(front, fields, reason, sequence):
    front.script("greet", "alpha END OF FILE omega")
    _, body = await front.message("greet", **fields)
    events = await front.stream_message("greet", **fields)
    told = {"stop_reason": reason, "stop_sequence": sequence}
    assert {key: body[key] for key in told} == told
    assert events[-2]["delta"] == told


async def test_the_end_of_the_context_is_told_apart_from_max_tokens(front):
    front.engine.limits = replace(front.engine.limits, context_tokens=60)
    front.script("greet", "word " * 200)
    _, body = await front.message("greet", max_tokens=64_000)
    assert body["stop_reason"] == "model_context_window_exceeded"


async def test_thinking_that_is_never_closed_is_cut_with_what_there_is(front):
    front.script("muse", "<think>\nHm, let me think about this for a while")
    for fields in ({}, {"max_tokens": 6}):
        _, body = await front.message("muse", thinking=THINKING, **fields)
        assert body["stop_reason"] == "max_tokens"
        assert [block["type"] for block in body["content"]] == ["thinking"]
        assert body["content"][0]["thinking"].startswith("Hm")
        usage = body["usage"]
        assert usage["output_tokens_details"]["thinking_tokens"] >= usage["output_tokens"] - 1


OFF = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("fields", "config", "off"),
    [
        ({}, {}, True),
        ({"thinking": {"type": "disabled"}}, {"thinking": "on"}, True),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, {}, False),
        ({"thinking": THINKING}, {"thinking": "off"}, False),
        ({}, {"thinking": "on"}, False),
        ({"output_config": {"effort": "high"}}, {}, True),
    ],
)
@pytest.mark.parametrize("tools", [[], [WRITE]])
async def test_thinking_is_on_only_if_asked_for(start_front, fields, config, off, tools):
    front = await start_front(Config(**config))
    await front.message("hi", tools=tools, **fields)
    assert front.prompt().endswith(OFF) == off


SHAPES: list[dict[str, Any]] = [
    {},
    {"system": "be brief"},
    {"system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}] * 5},
    {"tools": [WRITE]},
    {"tools": [WRITE], "tool_choice": {"type": "none"}},
    {"thinking": THINKING},
    {"thinking": {"type": "disabled"}, "tools": [WRITE]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}]}]},
    {
        "messages": [
            {"role": "user", "content": "go"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "made up"},
                    {"type": "tool_use", "id": "toolu_1", "name": "write_file", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "ok"}],
            },
        ]
    },
    {
        "messages": [
            {"role": "user", "content": "go"},
            {"role": "system", "content": "a file changed"},
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
        ]
    },
]


@pytest.mark.parametrize("fields", SHAPES, ids=range(len(SHAPES)))
async def test_count_is_what_the_request_costs(front, fields):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, **fields}
    front.script("", "done", reused_tokens=2)
    _, count = await front.post("/v1/messages/count_tokens?beta=true", body)
    assert not front.engine.requests, "counting takes no place in the engine"
    _, answer = await front.post("/v1/messages?beta=true", body)
    usage = answer["usage"]
    total = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert count == {"input_tokens": total + usage["cache_creation_input_tokens"]}
    assert count["input_tokens"] == len(front.engine.requests[0].prompt_ids)


async def test_counting_needs_no_room(front):
    status, body = await front.post(
        "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "word " * 3000}]}
    )
    assert status == 200
    assert body["input_tokens"] > 3000


async def test_many_counts_at_once(front):
    body = {"messages": [{"role": "user", "content": "word " * 500}], "tools": [WRITE]}
    counts = await asyncio.gather(
        *(front.post("/v1/messages/count_tokens", body) for _ in range(26))
    )
    assert len({count["input_tokens"] for _, count in counts}) == 1


BILLING = "x-anthropic-billing-header: cc_version=2.1.332.%s; cc_entrypoint=cli;"


async def test_the_billing_line_does_not_reach_the_prompt(start_front):
    front = await start_front()
    for suffix in ("a1b", "c2d"):
        system = [{"type": "text", "text": BILLING % suffix}, {"type": "text", "text": "be brief"}]
        await front.message("hi", system=system)
    first, second = front.engine.requests
    assert first.prompt_ids == second.prompt_ids
    assert "billing" not in front.prompt()
    kept = await start_front(Config(drop_billing_line=False))
    await kept.message("hi", system=system)
    assert BILLING % "c2d" in kept.prompt()


async def test_marks_and_unknown_fields_change_nothing(front):
    await front.message("hi", system="s", tools=[WRITE])
    mark = {"cache_control": {"type": "ephemeral", "ttl": "9 years"}}
    status, _ = await front.post(
        "/v1/messages?beta=true",
        {
            "max_tokens": 9,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", **mark}]}],
            "system": [{"type": "text", "text": "s", **mark}, {"type": "text", "text": "", **mark}],
            "tools": [{**WRITE, **mark}, {"type": "web_search_20250305", "name": "web_search"}],
            "metadata": {"user_id": "u"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "betas": ["context-1m-2025-08-07"],
            "mcp_servers": [],
            "unheard_of": {"a": [1]},
            **mark,
        },
        headers={"anthropic-beta": "a,b,c", "anthropic-version": "2023-06-01"},
    )
    first, second = front.engine.requests
    assert status == 200
    assert first.prompt_ids == second.prompt_ids


async def test_messages_are_rendered_where_they_stand(front):
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "first"}]},
        {"role": "system", "content": [{"type": "text", "text": "second"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "third", "signature": ""},
                {"type": "text", "text": "fourth"},
                {
                    "type": "tool_use",
                    "id": "toolu_1",
                    "name": "write_file",
                    "input": {"n": "fifth"},
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {**result, "content": [{"type": "text", "text": "sixth"}]},
                {**result, "content": "seventh"},
                {"type": "text", "text": "eighth"},
            ],
        },
        {"role": "system", "content": "ninth"},
    ]
    await front.post("/v1/messages", {"max_tokens": 9, "messages": messages})
    prompt = front.prompt()
    words = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth"]
    places = [prompt.index(word) for word in words]
    assert places == sorted(places)
    assert prompt.count("<tool_response>") == 2


async def test_a_deferred_tool_is_declared_where_it_is_referred_to(front):
    lazy = {**WRITE, "name": "lazy_tool", "description": "Found later.", "defer_loading": True}
    before = [
        {"role": "user", "content": "find a tool"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "toolu_1", "name": "search", "input": {}}],
        },
    ]
    reference = [{"type": "tool_reference", "tool_name": "lazy_tool"}]
    found = {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": reference}],
    }
    call = json.dumps({"name": "lazy_tool", "arguments": {"path": "x"}})
    front.script("Found later.", f"<tool_call>\n{call}\n</tool_call>")
    await front.post("/v1/messages", {"messages": before, "tools": [WRITE]})
    _, body = await front.post(
        "/v1/messages", {"messages": [*before, found], "tools": [lazy, WRITE]}
    )
    first, second = (front.prompt(i) for i in (0, 1))
    shared = first.rpartition("assistant")[0]
    assert second.startswith(shared), "the head of the prompt stays as it was"
    assert "Found later." not in shared
    assert "Found later." in second
    assert body["content"][0]["name"] == "lazy_tool"


async def test_tools_that_come_and_go_in_system_messages(front):
    change = {"type": "tool_definition", "definition": {**WRITE, "name": "late_tool"}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "system", "content": [{"type": "tool_addition", "tool": change}]},
        {
            "role": "system",
            "content": [
                {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "write_file"}}
            ],
        },
    ]
    status, _ = await front.post("/v1/messages", {"messages": messages, "tools": [WRITE]})
    assert status == 200
    prompt = front.prompt()
    assert prompt.index("late_tool") > prompt.index("hi")
    assert "write_file can no longer be called" in prompt


@pytest.mark.parametrize(
    ("block", "where"),
    [
        ({"type": "image", "source": {}}, "messages[0].content[1]"),
        ({"type": "document", "source": {"type": "base64", "data": ""}}, "messages[0].content[1]"),
        (
            {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]},
            "messages[0].content[1].content[0]",
        ),
    ],
)
async def test_an_image_is_refused_by_place(front, block, where):
    status, body = await front.message([{"type": "text", "text": "look"}, block])
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert body["error"]["message"].startswith(where)
    assert "reads text only" in body["error"]["message"]
    assert (await front.message("hi"))[0] == 200


async def test_text_documents_are_read(front):
    document = {"type": "document", "title": "T", "source": {"type": "text", "data": "the body"}}
    found = {
        "type": "search_result",
        "title": "R",
        "source": "https://x",
        "content": [{"type": "text", "text": "the hit"}],
    }
    assert (await front.message([document, found]))[0] == 200
    assert "T\nthe body\nR\nhttps://x\nthe hit" in front.prompt()


async def test_a_prompt_too_long_is_refused_in_the_words_that_make_clients_compact(front):
    for stream in (False, True):
        status, body = await front.message("word " * 3000, stream=stream)
        assert status == 400
        assert body["type"] == "error"
        assert body["error"]["type"] == "invalid_request_error"
        message = body["error"]["message"]
        assert message.startswith("prompt is too long: 30")
        assert message.endswith(" tokens > 2047 maximum")


async def test_max_tokens_beyond_the_context_is_cut_silently(front):
    status, _ = await front.message("hi", max_tokens=64_000)
    request = front.engine.requests[0]
    assert (status, request.max_tokens + len(request.prompt_ids)) == (200, 2048)


async def test_pings_before_the_first_token(start_front):
    front = await start_front(Config(heartbeat=0.05))
    front.script("slow", "done", first_delay_s=0.3)
    events = await front.stream_message("slow")
    assert kinds(events)[:4] == ["ping"] * 4
    assert next(k for k in kinds(events) if k != "ping") == "message_start"


async def test_errors_have_anthropics_form(front):
    front.engine.refusal = QueueFull("4 requests wait", retry_after_s=7)
    body = {"messages": [{"role": "user", "content": "hi"}]}
    async with front.client.post(f"{front.url}/v1/messages", json=body) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "7")
        assert (await response.json())["error"]["type"] == "rate_limit_error"
    front.lifecycle.served = None
    async with front.client.post(f"{front.url}/v1/messages", json=body) as response:
        assert (response.status, response.headers["Retry-After"]) == (529, "3")
        assert (await response.json())["error"]["type"] == "overloaded_error"
    for path, status in (("/v1/messages/batches", 404), ("/v1/messages/count_tokens", 529)):
        async with front.client.post(f"{front.url}{path}", json=body) as response:
            assert response.status == status
            assert (await response.json())["type"] == "error"


async def test_an_error_in_the_stream_is_an_event(front):
    front.script("bad", "some text", error=EngineFailed("a step failed: boom"), error_at=2)
    events = await front.stream_message("bad")
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "api_error"
    assert "message_stop" not in kinds(events)
    front.script("worse", "some text", error=EngineFailed("a step failed: boom"))
    assert kinds(await front.stream_message("worse")) == ["ping", "error"]
    assert not front.engine.active


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": 7}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "hologram"),
        ({"system": 7}, "system"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": "x"}, "tools"),
        ({"thinking": {"type": 7}}, "thinking"),
        ({"thinking": THINKING, "output_config": {"effort": "wild"}}, "output_config"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
async def test_what_is_wrong_is_named(front, fields, word):
    status, body = await front.message("hi", **fields)
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert word in body["error"]["message"]
