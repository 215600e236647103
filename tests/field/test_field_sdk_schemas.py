"""The official clients' own ways to ask for held answers, on a model that would say its scripts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest

pydantic = pytest.importorskip("pydantic")
openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")


class Verdict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    n: int
    kind: Literal["a", "b"]


SCHEMA = Verdict.model_json_schema()
ASKED = [{"role": "user", "content": "S10"}]  # its script is no JSON
# what Claude Code's terminal asks for beside the first turn, in other words
TITLE = {
    "model": "claude-haiku-4-5",
    "max_tokens": 64,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1.0.0.abc;"},
        {"type": "text", "text": "Name the session in three to seven words, as JSON."},
    ],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "<session>S64</session>"}]}],
    "tools": [],
    "metadata": {"user_id": "{}"},
    "output_config": {
        "format": {
            "type": "json_schema",
            "schema": {
                "type": "object",
                "properties": {"title": {"type": "string"}},
                "required": ["title"],
                "additionalProperties": False,
            },
        }
    },
}


@pytest.fixture
async def gpt(ftd: Any) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(base_url=f"{ftd.base}/v1", api_key="x", max_retries=0) as client:
        yield client


@pytest.fixture
async def claude(ftd: Any) -> AsyncIterator[Any]:
    async with anthropic.AsyncAnthropic(base_url=ftd.base, api_key="x", max_retries=0) as client:
        yield client


async def test_openai_chat_parse(gpt):
    reply = await gpt.chat.completions.parse(
        model="any", messages=ASKED, response_format=Verdict, reasoning_effort="none"
    )
    assert isinstance(reply.choices[0].message.parsed, Verdict)


async def test_openai_chat_stream_with_a_format(gpt):
    async with gpt.chat.completions.stream(
        model="any", messages=ASKED, response_format=Verdict, reasoning_effort="none"
    ) as stream:
        final = await stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Verdict)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "judge"}}]
)
async def test_openai_chat_required_call(gpt, choice):
    tools = [{"type": "function", "function": {"name": "judge", "parameters": SCHEMA}}]
    async with gpt.chat.completions.stream(
        model="any", messages=ASKED, tools=tools, tool_choice=choice, parallel_tool_calls=False
    ) as stream:
        final = await stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls
    assert call.function.name == "judge"
    Verdict.model_validate_json(call.function.arguments)


async def test_openai_responses_parse(gpt):
    reply = await gpt.responses.parse(model="any", input="S10", text_format=Verdict, store=False)
    assert isinstance(reply.output_parsed, Verdict)


async def test_openai_responses_custom_tool_with_a_grammar(gpt):
    grammar = 'start: "*** Begin\\n" LINE "*** End"\nLINE: /[a-z]{1,8}\\n/'
    tool = {
        "type": "custom",
        "name": "apply_patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": grammar},
    }
    async with gpt.responses.stream(
        model="any", input="S10", tools=[tool], tool_choice="required", parallel_tool_calls=False
    ) as stream:
        final = await stream.get_final_response()
    (call,) = [item for item in final.output if item.type == "custom_tool_call"]
    first, word, last = call.input.split("\n")
    assert (first, last) == ("*** Begin", "*** End") and word.isalpha()


@pytest.mark.parametrize("choice", ["any", "tool"])
async def test_anthropic_forced_call(claude, choice):
    forced = {"type": choice, "disable_parallel_tool_use": True}
    async with claude.messages.stream(
        model="any",
        max_tokens=512,
        messages=ASKED,
        tools=[{"name": "judge", "input_schema": SCHEMA}],
        tool_choice=forced | ({"name": "judge"} if choice == "tool" else {}),
    ) as stream:
        final = await stream.get_final_message()
    assert final.stop_reason == "tool_use"
    (call,) = [block for block in final.content if block.type == "tool_use"]
    Verdict.model_validate(call.input)


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_title_request(claude, stream):
    if stream:
        async with claude.messages.stream(**TITLE) as events:
            final = await events.get_final_message()
    else:
        final = await claude.messages.create(**TITLE)
    (block,) = final.content
    assert final.stop_reason == "end_turn"
    assert json.loads(block.text) == {"title": "Create hello file"}
