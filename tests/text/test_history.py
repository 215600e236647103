"""What templates are given of a conversation's past."""

from __future__ import annotations

import json

import pytest

from ftd.text.dialects import DIALECTS
from ftd.text.history import in_terms_of
from ftd.text.messages import normalise
from ftd.text.template import ChatTemplate


def call(call_id: str, name: str = "f", arguments: str = '{"a": 1}'):
    return {"id": call_id, "function": {"name": name, "arguments": arguments}}


CHAT = normalise(
    [
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [call("call_1"), call("call_2", "g")],
        },
        {"role": "tool", "tool_call_id": "call_2", "content": "two"},
        {"role": "tool", "tool_call_id": "call_1", "content": "one"},
        {"role": "assistant", "tool_calls": [call("abcdefgh9", "h")]},
        {"role": "tool", "tool_call_id": "abcdefgh9", "content": "three"},
        {"role": "tool", "tool_call_id": "nobody's", "content": "four"},
    ]
)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45", "mistral"])
def test_most_templates_take_messages_as_they_are(name: str):
    assert in_terms_of(DIALECTS[name], CHAT) == CHAT


@pytest.mark.parametrize("name", DIALECTS)
def test_nothing_said_or_called_or_answered_is_lost(name: str):
    before = json.dumps(CHAT)
    after = in_terms_of(DIALECTS[name], CHAT)
    assert json.dumps(CHAT) == before  # the client's messages are left as they are
    text = json.dumps(after)
    assert all(word in text for word in ["go", "I look.", "hm", "one", "two", "three", "four"])
    names = [c["function"]["name"] for m in after for c in m.get("tool_calls", [])]
    assert names == ["f", "g", "h"]


def test_numbered_ids_count_through_the_conversation():
    messages = in_terms_of(DIALECTS["kimi_k2"], CHAT)
    ids = [c["id"] for m in messages for c in m.get("tool_calls", [])]
    assert ids == ["functions.f:0", "functions.g:1", "functions.h:2"]
    results = [m["tool_call_id"] for m in messages if m["role"] == "tool"]
    assert results == ["functions.g:1", "functions.f:0", "functions.h:2", "nobody's"]


def test_templates_that_join_text_get_text():
    template = ChatTemplate(
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name + ' ' + c.function.arguments }};{% endfor %}{% endfor %}"
    )
    rendered = template.render(in_terms_of(DIALECTS["deepseek_v31"], CHAT))
    assert rendered == 'f {"a": 1};g {"a": 1};h {"a": 1};'


def test_harmony_has_one_call_a_message_each_with_its_result():
    messages = in_terms_of(DIALECTS["harmony"], CHAT)
    assert [m["role"] for m in messages] == [
        *("user", "assistant", "tool", "assistant", "tool", "assistant", "tool", "tool")
    ]
    assert [m["content"] for m in messages if m["role"] == "tool"] == [
        "one",
        "two",
        "three",
        "four",
    ]
    assert all(len(m.get("tool_calls", [])) <= 1 for m in messages)
    assert (messages[1]["content"], messages[3]["content"]) == ("I look.", "")
