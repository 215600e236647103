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


async def test_both_clients_read_the_model_list(front):
    anthropic = pytest.importorskip("anthropic")
    async with anthropic.AsyncAnthropic(base_url=front.url, api_key="local") as client:
        names = [model.id async for model in client.models.list()]
    assert names == ["test-model", "gpt-test"]
