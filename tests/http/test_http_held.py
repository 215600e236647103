"""What each API calls a schema or a forced call reaches the engine as a constraint."""

from __future__ import annotations

from typing import Any

import pytest

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
JSON_SCHEMA = {"type": "json_schema", "name": "x", "schema": SCHEMA}
FUNCTION = {"name": "f", "parameters": SCHEMA}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
TOOLS = {
    "chat": CHAT_TOOLS,
    "message": [{"name": "f", "input_schema": SCHEMA}],
    "respond": [{"type": "function", **FUNCTION}],
}
NAMED = {
    "chat": {"type": "function", "function": {"name": "f"}},
    "message": {"type": "tool", "name": "f"},
    "respond": {"type": "function", "name": "f"},
}
FORCED = {"chat": "required", "message": {"type": "any"}, "respond": "required"}
SCHEMAS = {
    "chat": {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    "message": {"output_config": {"format": JSON_SCHEMA}},
    "respond": {"text": {"format": JSON_SCHEMA}},
}
NOT_THINKING = {"chat": {"reasoning_effort": "none"}, "respond": {"reasoning": {"effort": "none"}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"n": 5}}\n</tool_call>'
APIS = pytest.mark.parametrize("api", ["chat", "message", "respond"])


async def constraint_of(front: Any, api: str, **fields: Any) -> Any:
    status, body = await getattr(front, api)("hi", **NOT_THINKING.get(api, {}), **fields)
    assert status == 200, body
    return front.engine.requests[-1].constraint


def accepts(front: Any, constraint: Any, text: str) -> bool:
    for token in [*front.text.encode(text), min(front.text.eos_ids)]:
        mask = constraint.mask()
        if mask is not None and not int(mask[token // 32]) >> token % 32 & 1:
            return False
        constraint.accept(token)
    return True


@APIS
async def test_a_schema_is_held(front, api: str):
    for text, allowed in {'{"n": 5}': True, '{"n": "5"}': False, "Sure!": False}.items():
        constraint = await constraint_of(front, api, **SCHEMAS[api])
        assert accepts(front, constraint, text) is allowed


@APIS
@pytest.mark.parametrize("choices", [FORCED, NAMED], ids=["any", "named"])
async def test_a_call_is_forced(front, api: str, choices: dict[str, Any]):
    for text, allowed in {CALL: True, CALL.replace("5", '"5"'): False, "Sure!": False}.items():
        fields = {"tools": TOOLS[api], "tool_choice": choices[api]}
        assert accepts(front, await constraint_of(front, api, **fields), text) is allowed


@APIS
async def test_calls_the_model_makes_by_itself_are_held(front, api: str):
    for text, allowed in {CALL: True, CALL.replace("5", '"5"'): False, "Sure!": True}.items():
        constraint = await constraint_of(front, api, tools=TOOLS[api])
        assert accepts(front, constraint, text) is allowed


@APIS
async def test_a_strict_tool_that_cannot_be_held_is_refused(front, api: str):
    (tool,) = TOOLS[api]
    odd = {"type": "object", "not": {"required": ["a"]}}
    if api == "chat":
        strict = {**tool, "function": {**FUNCTION, "parameters": odd, "strict": True}}
    else:
        strict = {**tool, "parameters": odd, "input_schema": odd, "strict": True}
    status, body = await getattr(front, api)("hi", tools=[strict])
    assert status == 400 and "tool f: JSON schema at #/not" in body["error"]["message"]


async def test_copies_have_constraints_of_their_own_and_text_has_none(front):
    await front.chat("hi", n=3, **SCHEMAS["chat"])
    assert len({id(request.constraint) for request in front.engine.requests}) == 3
    assert await constraint_of(front, "chat") is None
    fields = {"tools": CHAT_TOOLS, "tool_choice": "none"}
    assert await constraint_of(front, "chat", **fields) is None


async def test_the_text_of_a_custom_tool_is_held_to_its_grammar(front):
    form = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+ [0-9]+"}
    tools = [{"type": "custom", "name": "f", "format": form}]
    for text, allowed in {"abc 12": True, "abc": False}.items():
        constraint = await constraint_of(front, "respond", tools=tools)
        call = CALL.replace('{"n": 5}', f'{{"input": "{text}"}}')
        assert accepts(front, constraint, call) is allowed
    form["definition"] = "("
    status, body = await front.respond("hi", tools=tools)
    assert status == 400 and "tool f: its grammar" in body["error"]["message"]
