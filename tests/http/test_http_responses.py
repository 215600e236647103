"""/v1/responses: plain and streamed, stored and continued, over a scripted engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from ftd.config import Config
from ftd.errors import EngineFailed

WRITE = {
    "type": "function",
    "name": "write_file",
    "description": "Write a file.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    "strict": False,
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Change files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
SPACE = {
    "type": "namespace",
    "name": "mcp__files__",
    "description": "Files.",
    "tools": [{"type": "function", "name": "stat", "parameters": {}}],
}
ARGUMENTS = {"path": 'a "b"\\c 😀', "lines": ["{ } </", "\n", ""]}


def call(name: str, arguments: Any) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


FULL = f"<think>\nLet me see.\n</think>\n\nI write it.\n{call('write_file', ARGUMENTS)}"


def kinds(events: list[Any]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


async def test_a_plain_answer(front):
    front.script("greet", "Hi there, 世界!", reused_tokens=5)
    status, body = await front.respond("greet", model="gpt-anything", instructions="be brief")
    prompt = len(front.engine.requests[0].prompt_ids)
    out = len(front.text.encode("Hi there, 世界!")) + 1
    assert status == 200
    assert (body["object"], body["status"], body["model"]) == (
        "response",
        "completed",
        "test-model",
    )
    assert body["id"].startswith("resp_")
    (item,) = body["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"][0]["text"] == "Hi there, 世界!"
    assert body["usage"] == {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": 5,
            "cache_write_tokens": 0,
            "recomputed_tokens": prompt - 5,
        },
        "output_tokens": out,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + out,
    }
    assert front.prompt().index("be brief") < front.prompt().index("greet")


async def test_the_order_of_events(front):
    front.script("work", FULL)
    events = await front.stream_response("work", tools=[WRITE])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [k for k in kinds(events) if not k.endswith(".delta")] == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    deltas = "".join(e["delta"] for e in events if e["type"].endswith("call_arguments.delta"))
    assert json.loads(deltas) == ARGUMENTS
    done = [e["item"] for e in events if e["type"].endswith("output_item.done")]
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call"]
    assert done == events[-1]["response"]["output"]
    assert done[0]["summary"][0]["text"] == "Let me see."
    assert done[0]["encrypted_content"]
    assert events[-1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"] > 3
    for event in events:  # what belongs together says so
        if "item_id" in event:
            assert event["item_id"] == done[event["output_index"]]["id"]


async def test_free_form_tools_are_called_with_text(front):
    text = 'line "one"\nline two \\ 😀 </end>'
    front.script("patch", call("apply_patch", {"input": text}))
    _, body = await front.respond("patch", tools=[PATCH])
    (item,) = body["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", text)
    events = await front.stream_response("patch", tools=[PATCH])
    deltas = [e["delta"] for e in events if e["type"].endswith("tool_call_input.delta")]
    assert "".join(deltas) == text
    assert len(deltas) > 3
    assert next(e for e in events if e["type"].endswith("call_input.done"))["input"] == text
    assert "start: /.+/" in front.prompt(), "the model is told of the grammar"


async def test_tools_in_namespaces(front):
    front.script("look", call("mcp__files__stat", {}))
    _, body = await front.respond("look", tools=[SPACE, {"type": "web_search"}])
    (item,) = body["output"]
    assert (item["namespace"], item["name"], item["arguments"]) == ("mcp__files__", "stat", "{}")
    back = [{"role": "user", "content": "x"}, item]
    await front.respond(back, tools=[SPACE])
    assert '"name": "mcp__files__stat", "arguments": {}' in front.prompt()


async def test_a_search_for_tools_that_the_client_runs(front):
    search = {"type": "tool_search", "execution": "client", "description": "d", "parameters": {}}
    lazy = {**WRITE, "name": "lazy_tool", "defer_loading": True}
    front.script("find", call("tool_search", {"query": "x"}))
    _, body = await front.respond("find", tools=[search, lazy])
    (item,) = body["output"]
    assert (item["type"], item["arguments"]) == ("tool_search_call", {"query": "x"})
    assert "lazy_tool" not in front.prompt()
    found = {"type": "tool_search_output", "call_id": item["call_id"], "tools": [lazy]}
    front.scripts.clear()
    front.script("lazy_tool", call("lazy_tool", {"path": "x"}))
    given = [{"role": "user", "content": "find"}, item, found]
    _, body = await front.respond(given, tools=[search, lazy])
    assert body["output"][0]["name"] == "lazy_tool"


async def test_tools_given_as_the_first_item_stand_at_the_head(front):
    tools = {"type": "additional_tools", "role": "developer", "tools": [WRITE]}
    user = {"type": "message", "role": "user", "content": "go ahead"}
    front.script("go ahead", call("write_file", {"path": "x"}))
    _, body = await front.respond([tools, user])
    assert body["output"][0]["name"] == "write_file"
    assert front.prompt().index("write_file") < front.prompt().index("go ahead")
    await front.respond([user, tools])
    assert front.prompt().index("write_file") > front.prompt().index("go ahead")


HISTORY: list[dict[str, Any]] = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "one"}]},
    {"role": "user", "content": "two", "id": "msg_1"},
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "three"}]},
    {
        "type": "message",
        "role": "assistant",
        "phase": "commentary",
        "content": [{"type": "output_text", "text": "four", "annotations": []}],
    },
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"five": 5}'},
    {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "six"},
    {"type": "function_call_output", "call_id": "c1", "output": "seven"},
    {
        "type": "custom_tool_call_output",
        "call_id": "c2",
        "output": [{"type": "input_text", "text": "eight"}],
    },
    {"type": "local_shell_call", "call_id": "c3", "action": {"command": ["nine"]}},
    {"type": "local_shell_call_output", "id": "c3", "output": "ten"},
    {"type": "shell_call", "call_id": "c4", "action": {"commands": ["eleven"]}},
    {"type": "shell_call_output", "call_id": "c4", "output": [{"stdout": "twelve", "stderr": ""}]},
    {"type": "web_search_call", "id": "ws_1", "status": "completed"},
    {"type": "compaction_trigger"},
    {"type": "ghost_snapshot", "ghost_commit": {"id": "x"}},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "thirteen"}]},
]


async def test_items_of_all_kinds_are_rendered_in_order(front):
    status, body = await front.respond(HISTORY)
    assert status == 200, body
    words = [
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
        "thirteen",
    ]
    places = [front.prompt().index(word) for word in words]
    assert places == sorted(places)
    assert front.prompt().count("assistant\n") == 4, "what came from one answer is one message"


async def test_thinking_survives_in_what_the_client_sends_back_unread(front):
    front.script("muse", "<think>\ndeep thoughts\n</think>\n\nDone.")
    _, body = await front.respond("muse", store=False, include=["reasoning.encrypted_content"])
    reasoning, message = body["output"]
    back = {**reasoning, "summary": [], "id": None}
    await front.respond([{"role": "user", "content": "x"}, back, message])
    assert "<think>\ndeep thoughts\n</think>\n\nDone." in front.prompt()


async def test_a_stored_response_is_gone_on_from(front):
    front.script("first words", FULL)
    _, first = await front.respond("first words", tools=[WRITE], instructions="one")
    result = {
        "type": "function_call_output",
        "call_id": first["output"][2]["call_id"],
        "output": "it is written",
    }
    _, second = await front.respond([result], previous_response_id=first["id"], tools=[WRITE])
    prompt = front.prompt()
    assert second["previous_response_id"] == first["id"]
    assert prompt.index("first words") < prompt.index("Let me see.") < prompt.index("it is written")
    await front.respond("third", previous_response_id=second["id"])
    assert "first words" in front.prompt()
    reference = {"type": "item_reference", "id": first["output"][2]["id"]}
    await front.respond([{"role": "user", "content": "x"}, reference])
    assert "write_file" in front.prompt()


async def test_what_is_stored_can_be_read_and_deleted(front):
    _, body = await front.respond("greet")
    path = f"/v1/responses/{body['id']}"
    async with front.client.get(f"{front.url}{path}") as response:
        assert await response.json() == body
    async with front.client.get(f"{front.url}{path}/input_items") as response:
        assert (await response.json())["data"][0]["content"] == "greet"
    assert await front.post(f"{path}/cancel") == (200, body), "it has ended: it stays as it is"
    async with front.client.delete(f"{front.url}{path}") as response:
        assert (await response.json())["deleted"] is True
    async with front.client.get(f"{front.url}{path}") as response:
        assert response.status == 404
    status, _ = await front.respond("x", previous_response_id=body["id"])
    assert status == 404
    _, body = await front.respond("greet", store=False)
    async with front.client.get(f"{front.url}/v1/responses/{body['id']}") as response:
        assert response.status == 404


async def test_a_running_response_is_cancelled_by_id(front):
    front.script("long", "word " * 300, delay_s=0.02)
    stream = asyncio.create_task(front.stream_response("long"))
    await front.until(lambda: front.engine.active)
    (request_id,) = front.engine.active
    status, body = await front.post(f"/v1/responses/{request_id}/cancel")
    assert (status, body["status"]) == (200, "cancelled")
    last = (await stream)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "cancelled")
    assert not front.engine.active


async def test_an_answer_that_is_cut_is_incomplete(front):
    front.script("work", FULL)
    cut = len(front.text.encode(FULL)) - 12
    for body in (
        (await front.respond("work", tools=[WRITE], max_output_tokens=cut))[1],
        (await front.stream_response("work", tools=[WRITE], max_output_tokens=cut))[-1]["response"],
    ):
        assert body["status"] == "incomplete"
        assert body["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [item["status"] for item in body["output"]] == [
            "completed",
            "completed",
            "incomplete",
        ]


async def test_one_call_only_when_parallel_calls_are_forbidden(front):
    front.script("work", call("write_file", {}) + "\n" + call("write_file", {}))
    _, body = await front.respond("work", tools=[WRITE], parallel_tool_calls=False)
    assert [item["type"] for item in body["output"]] == ["function_call"]
    assert body["status"] == "completed"


async def test_life_signs_are_events_codex_counts(start_front):
    front = await start_front(Config(heartbeat=0.05))
    front.script("slow", "done", first_delay_s=0.3)
    events = await front.stream_response("slow")
    assert kinds(events)[:5] == ["created", *["in_progress"] * 4]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_an_error_in_the_stream_is_a_failed_response(front):
    front.script("bad", "some text", error=EngineFailed("a step failed: boom"), error_at=2)
    last = (await front.stream_response("bad"))[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "a step failed: boom"}


async def test_a_prompt_too_long_is_refused_with_both_numbers(front):
    for stream in (False, True):
        status, body = await front.respond("word " * 3000, stream=stream)
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


async def test_the_count_is_what_the_request_costs(front):
    fields = {"tools": [WRITE, SPACE], "instructions": "be brief"}
    _, count = await front.post("/v1/responses/input_tokens", {"input": HISTORY, **fields})
    _, body = await front.respond(HISTORY, **fields)
    assert count["input_tokens"] == body["usage"]["input_tokens"]


async def test_a_conversation_is_compacted_and_gone_on_from(front):
    front.script("Write a summary", "they greeted each other")
    history = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hello to you"},
        {"role": "user", "content": "what now?"},
    ]
    status, body = await front.post("/v1/responses/compact", {"input": history, "model": "x"})
    assert (status, body["object"]) == (200, "response.compaction")
    *kept, summary = body["output"]
    assert kept == [history[0], history[2]]
    assert summary["type"] == "compaction"
    await front.respond([*body["output"], {"role": "user", "content": "go on"}])
    prompt = front.prompt()
    assert prompt.index("what now?") < prompt.index("they greeted") < prompt.index("go on")
    assert "hello to you" not in prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": [7]}, "input[0]"),
        ({"input": [{"type": "hologram", "content": "x"}]}, "input[0]"),
        ({"input": [{"type": "message", "role": "robot"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"type": "item_reference", "id": "nope"}]}, "input[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"reasoning": {"effort": "wild"}}, "reasoning.effort"),
    ],
)
async def test_what_is_wrong_is_named(front, fields, param):
    status, body = (
        await front.respond("hi", **fields)
        if "input" not in fields
        else (await front.post("/v1/responses", fields))
    )
    assert (status, body["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("fields", "off"),
    [({"reasoning": {"effort": "none"}}, True), ({"reasoning": {"effort": "low"}}, False)],
)
@pytest.mark.parametrize("tools", [[], [WRITE]])
async def test_thinking_off_is_off(front, fields, off, tools):
    await front.respond("hi", tools=tools, **fields)
    assert front.prompt().endswith("<think>\n\n</think>\n\n") == off
