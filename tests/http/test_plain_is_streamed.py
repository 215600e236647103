"""Whatever a model writes and however it is cut, plain and streamed answers are the same."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
TEXT = st.text(
    st.characters(codec="utf-8", exclude_characters="\x00") | st.sampled_from('<>{}"\\/\n 界👋'),
    max_size=20,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
CALL = st.builds(
    lambda name, arguments: (
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    ),
    st.sampled_from(["write_file", "other"]),
    st.dictionaries(TEXT, JSON, max_size=3),
)
PART = TEXT | CALL | st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "\n\n"])
THOUGHT = TEXT.map(lambda text: f"<think>\n{text}\n</think>\n\n")
ANSWER = st.builds(
    lambda thought, parts: thought + "".join(parts),
    st.just("") | THOUGHT,
    st.lists(PART, max_size=4),
)


def chat_of_stream(events: list[Any]) -> Any:
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    finish = None
    for event in events[:-1]:
        for choice in event["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for entry in delta.get("tool_calls", []):
                if "id" in entry:
                    assert entry["index"] == len(message["tool_calls"])
                    message["tool_calls"].append([entry["function"]["name"], ""])
                message["tool_calls"][entry["index"]][1] += entry["function"]["arguments"]
            finish = choice["finish_reason"] or finish
    return message, finish


def chat_of_plain(body: Any) -> Any:
    (choice,) = body["choices"]
    message = choice["message"]
    calls = [
        [c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", [])
    ]
    return {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "tool_calls": calls,
    }, choice["finish_reason"]


def blocks_of_stream(events: list[Any]) -> Any:
    blocks: list[dict[str, Any]] = []
    closed = 0
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks) == closed
                blocks.append(event["content_block"] | {"text": ""})
            case "content_block_delta":
                delta = dict(event["delta"])
                delta.pop("signature", None)
                kind = delta.pop("type")
                blocks[event["index"]]["text"] += "".join(delta.values()) if delta else ""
                assert kind.endswith("_delta")
            case "content_block_stop":
                assert event["index"] == closed
                closed += 1
    assert closed == len(blocks)
    return [(b["type"], b.get("name"), b["text"]) for b in blocks], events[-2]["delta"]


def same_blocks(streamed: Any, body: Any) -> None:
    blocks, delta = streamed
    assert delta["stop_reason"] == body["stop_reason"]
    shown = []
    for kind, name, text in blocks:
        if kind == "tool_use":
            try:
                value = json.loads(text or "{}")
            except json.JSONDecodeError:
                value = None
            if not isinstance(value, dict):
                value = {"arguments": text}
            shown.append((kind, name, value))
        else:
            shown.append((kind, name, text))
    plain = [
        (b["type"], b.get("name"), b.get("text", b.get("thinking", b.get("input"))))
        for b in body["content"]
    ]
    assert shown == plain


def without_ids(response: Any) -> Any:
    items = [
        {k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]
    ]
    return items, response["status"], response["usage"]


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
async def test_plain_is_streamed(front, api):
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        answer=ANSWER,
        per_output=st.integers(1, 9),
        most=st.none() | st.integers(1, 60),
        stop=st.none() | st.sampled_from(["界", "other", "</", "}"]),
    )
    def check(answer: str, per_output: int, most: int | None, stop: str | None) -> None:
        front.script("go", answer, per_output=per_output)
        asyncio.run_coroutine_threadsafe(compare(most, stop), loop).result(30)

    async def compare(most: int | None, stop: str | None) -> None:
        if api == "chat":
            tools = [{"type": "function", "function": {"name": "write_file", "parameters": SCHEMA}}]
            fields = {"tools": tools, "max_tokens": most, "stop": stop}
            events, (_, body) = (
                await front.stream_chat("go", **fields),
                await front.chat("go", **fields),
            )
            assert chat_of_stream(events) == chat_of_plain(body)
        elif api == "messages":
            fields = {
                "tools": [{"name": "write_file", "input_schema": SCHEMA}],
                "thinking": {"type": "adaptive"},
                "max_tokens": most or 1000,
                "stop_sequences": [stop] if stop else [],
            }
            events = await front.stream_message("go", **fields)
            _, body = await front.message("go", **fields)
            same_blocks(blocks_of_stream(events), body)
            assert events[-2]["usage"] == body["usage"]
        else:
            tools = [{"type": "function", "name": "write_file", "parameters": SCHEMA}]
            fields = {"tools": tools, "max_output_tokens": most}
            events = await front.stream_response("go", **fields)
            _, body = await front.respond("go", **fields)
            assert without_ids(events[-1]["response"]) == without_ids(body)
            done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
            assert done == events[-1]["response"]["output"]

    loop = asyncio.get_running_loop()
    await asyncio.to_thread(check)
