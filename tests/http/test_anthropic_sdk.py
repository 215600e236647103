"""The official Anthropic client, plain and streamed."""

from __future__ import annotations

import pytest

from ftd.config import Config
from ftd.errors import EngineFailed

anthropic = pytest.importorskip("anthropic")

MESSAGES = [{"role": "user", "content": "greet"}]
TOOL = {
    "name": "f",
    "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
FULL = f"<think>\nhm\n</think>\n\nI call.\n{CALL}"
THINKING = {"type": "enabled", "budget_tokens": 2000}


@pytest.fixture
async def client(front):
    async with anthropic.AsyncAnthropic(
        base_url=front.url, api_key="local", max_retries=0
    ) as client:
        yield client


async def test_messages(front, client):
    front.script("greet", "Hi, 世界!", reused_tokens=4)
    reply = await client.messages.create(model="claude-x", max_tokens=64, messages=MESSAGES)
    assert reply.content[0].text == "Hi, 世界!"
    assert (reply.stop_reason, reply.model) == ("end_turn", "test-model")
    usage = reply.usage
    count = await client.messages.count_tokens(model="claude-x", messages=MESSAGES)
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    assert reply._request_id.startswith("msg_")


@pytest.mark.parametrize("beta", [False, True])
async def test_the_stream_helper(front, client, beta):
    front.script("greet", FULL, reused_tokens=4)
    messages = client.beta.messages if beta else client.messages
    async with messages.stream(
        model="claude-x", max_tokens=640, messages=MESSAGES, tools=[TOOL], thinking=THINKING
    ) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_message()
    assert {"thinking", "signature", "text", "input_json", "message_stop"} <= set(kinds)
    thinking, text, call = final.content
    assert (thinking.thinking, text.text, call.input) == ("hm", "I call.", {"a": "b"})
    assert thinking.signature
    assert final.stop_reason == "tool_use"
    assert final.usage.cache_read_input_tokens == 4
    assert final.usage.output_tokens_details.thinking_tokens > 0
    plain = await messages.create(
        model="claude-x", max_tokens=640, messages=MESSAGES, tools=[TOOL], thinking=THINKING
    )
    assert [b.type for b in plain.content] == [b.type for b in final.content]
    back = [*MESSAGES, {"role": "assistant", "content": final.content}]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "greet"}
    reply = await messages.create(
        model="claude-x",
        max_tokens=640,
        messages=[*back, {"role": "user", "content": [result]}],
        tools=[TOOL],
        thinking=THINKING,
    )
    assert reply.content


async def test_the_stream_helper_while_pings_come(start_front):
    front = await start_front(Config(heartbeat=0.1))
    front.script("greet", "done", first_delay_s=0.5)
    async with (
        anthropic.AsyncAnthropic(base_url=front.url, api_key="local", max_retries=0) as client,
        client.messages.stream(model="x", max_tokens=64, messages=MESSAGES) as stream,
    ):
        assert "".join([text async for text in stream.text_stream]) == "done"


async def test_errors_are_the_clients_own_kinds(front, client):
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        await client.messages.create(
            model="x", max_tokens=5, messages=[{"role": "user", "content": "word " * 3000}]
        )
    with pytest.raises(anthropic.NotFoundError):
        await client.models.retrieve("no/such")
    front.script("greet", "some words", error=EngineFailed("a step failed: boom"), error_at=1)
    with pytest.raises(anthropic.APIStatusError, match="boom"):
        async with client.messages.stream(model="x", max_tokens=64, messages=MESSAGES) as stream:
            await stream.get_final_message()
    front.lifecycle.served = None
    with pytest.raises(anthropic.OverloadedError):
        await client.messages.create(model="x", max_tokens=5, messages=MESSAGES)


async def test_models(front, client):
    assert [model.id async for model in client.models.list()] == ["test-model", "gpt-test"]
    model = await client.models.retrieve("claude-any")
    assert (model.type, model.lifecycle, model.max_input_tokens) == ("model", "active", 2047)
