"""The official OpenAI client, plain and streamed."""

from __future__ import annotations

import pytest

openai = pytest.importorskip("openai")


@pytest.fixture
async def client(front):
    async with openai.AsyncOpenAI(
        base_url=f"{front.url}/v1", api_key="local", max_retries=0
    ) as client:
        yield client


MESSAGES = [{"role": "user", "content": "greet"}]


async def test_chat(front, client):
    front.script("greet", "Hi, 世界!")
    reply = await client.chat.completions.create(
        model="any", messages=MESSAGES, max_completion_tokens=64, logprobs=True, top_logprobs=2
    )
    assert reply.choices[0].message.content == "Hi, 世界!"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.prompt_tokens_details.cached_tokens == 0
    assert reply.choices[0].logprobs.content[0].top_logprobs


async def test_chat_stream_helper(front, client):
    front.script("greet", "Hi, 世界!")
    async with client.chat.completions.stream(
        model="any", messages=MESSAGES, n=2, stream_options={"include_usage": True}
    ) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert [choice.message.content for choice in final.choices] == ["Hi, 世界!"] * 2
    assert final.usage.completion_tokens > 0


async def test_chat_with_tools_and_history(front, client):
    front.script("greet", "done")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    reply = await client.chat.completions.create(
        model="any",
        messages=[
            {"role": "developer", "content": "be brief"},
            *MESSAGES,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "r"}]},
        ],
        tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
    )
    assert reply.choices[0].message.content == "done"


async def test_completions(front, client):
    front.script("greet", "!")
    reply = await client.completions.create(model="any", prompt=["greet", "x"], echo=True)
    assert [choice.text for choice in reply.choices] == ["greet!", "xunscripted"]
    stream = await client.completions.create(model="any", prompt="greet", stream=True)
    assert "".join([c.choices[0].text async for c in stream]) == "!"


async def test_models(front, client):
    assert [model.id async for model in client.models.list()] == ["test-model", "gpt-test"]
    assert (await client.models.retrieve("test-model")).id == "test-model"


async def test_errors_are_the_clients_own_kinds(front, client):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="any", messages=[])
    assert caught.value.param == "messages"
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model="any", input="x")
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "word " * 3000}], stream=True
        )
    assert caught.value.code == "context_length_exceeded"
    front.lifecycle.served = None
    with pytest.raises(openai.InternalServerError):
        await client.chat.completions.create(model="any", messages=MESSAGES)


async def test_an_error_in_the_stream_reaches_the_caller(front, client):
    from ftd.errors import EngineFailed

    front.script("greet", "some words", error=EngineFailed("a step failed: boom"), error_at=1)
    stream = await client.chat.completions.create(model="any", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="boom"):
        async for _ in stream:
            pass


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
FUNCTION = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


async def test_chat_stream_helper_with_tools(front, client):
    front.script("greet", f"<think>\nhm\n</think>\n\nI call.\n{CALL}")
    tool = {"type": "function", "function": {"name": "f", "parameters": FUNCTION}}
    async with client.chat.completions.stream(
        model="any", messages=MESSAGES, tools=[tool], stream_options={"include_usage": True}
    ) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    (choice,) = final.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.arguments == '{"a": "b"}'
    assert choice.message.reasoning_content == "hm"
    assert final.usage.completion_tokens_details.reasoning_tokens > 0


async def test_responses(front, client):
    front.script("greet", "Hi, 世界!")
    reply = await client.responses.create(model="any", input="greet", instructions="be brief")
    assert (reply.output_text, reply.status) == ("Hi, 世界!", "completed")
    assert reply.usage.input_tokens_details.cached_tokens == 0
    again = await client.responses.retrieve(reply.id)
    assert again.output_text == "Hi, 世界!"
    items = await client.responses.input_items.list(reply.id)
    assert items.data[0].content == "greet"
    more = await client.responses.create(
        model="any", input="and?", previous_response_id=reply.id, store=False
    )
    assert more.previous_response_id == reply.id
    await client.responses.delete(reply.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(reply.id)
    count = await client.responses.input_tokens.count(model="any", input="greet")
    assert count.input_tokens > 0
    compact = await client.responses.compact(model="any", input=[MESSAGES[0]])
    assert [item.type for item in compact.output][-1] == "compaction"


@pytest.mark.parametrize("most", [None, 3])
async def test_responses_stream_helper(front, client, most):
    front.script("greet", f"<think>\nhm\n</think>\n\nI call.\n{CALL}", per_output=2)
    tool = {"type": "function", "name": "f", "parameters": FUNCTION, "strict": False}
    custom = {"type": "custom", "name": "patch"}
    kinds = []
    async with client.responses.stream(
        model="any",
        input="greet",
        tools=[tool, custom],
        max_output_tokens=most or openai.omit,
        store=False,
    ) as stream:
        async for event in stream:
            kinds.append(event.type)
    assert kinds[0] == "response.created"
    if most:
        assert kinds[-1] == "response.incomplete"
        return
    final = await stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output[2].arguments == '{"a": "b"}'
    assert {
        "response.output_text.delta",
        "response.reasoning_summary_text.delta",
        "response.function_call_arguments.delta",
    } <= set(kinds)


async def test_both_clients_read_the_model_list(front):
    anthropic = pytest.importorskip("anthropic")
    async with anthropic.AsyncAnthropic(base_url=front.url, api_key="local") as client:
        names = [model.id async for model in client.models.list()]
    assert names == ["test-model", "gpt-test"]
