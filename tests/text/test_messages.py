"""Messages in every form clients send them."""

from __future__ import annotations

from typing import Any

import pytest

from ftd.errors import RequestInvalid
from ftd.text.messages import normalise, rewrites


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        ([part("a"), part("b"), part("c")], "a\nb\nc"),
        ([part("a"), part(""), part("b")], "a\nb"),
        ([{"type": "input_text", "text": "a"}, "b"], "a\nb"),
        ({"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, "a"),
        ([], ""),
        (None, ""),
    ],
)
def test_content_forms(content: Any, text: str):
    for role in ("system", "user", "assistant", "tool"):
        assert normalise([{"role": role, "content": content}])[0]["content"] == text


def test_missing_content_is_empty():
    assert normalise([{"role": "assistant"}]) == [assistant("")]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", 7, None, ["text"], {}])
def test_an_image_is_refused_with_its_place(kind: Any):
    chat = [user("hi"), {"role": "user", "content": [part("a"), {"type": kind, "image_url": {}}]}]
    with pytest.raises(RequestInvalid, match=r"messages\[1\].content\[1\] .*reads text only"):
        normalise(chat)


@pytest.mark.parametrize(
    ("chat", "where"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ({}, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "robot", "content": "hi"}], "messages[0].role"),
        ([{"role": ["user"], "content": "hi"}], "messages[0].role"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "text", "text": 7}]}],
            "messages[0].content[0].text",
        ),
        ([assistant("", tool_calls="no")], "messages[0].tool_calls"),
        ([assistant("", tool_calls=[{"id": "1"}])], "messages[0].tool_calls[0].function.name"),
    ],
)
def test_what_cannot_be_mended_is_refused_by_place(chat: Any, where: str):
    with pytest.raises(RequestInvalid) as caught:
        normalise(chat)
    assert caught.value.param == where


@pytest.mark.parametrize(
    ("arguments", "becomes"),
    [
        ('{"path": "a"}', {"path": "a"}),
        ('{"path": "a', '{"path": "a'),
        ("", {}),
        (None, {}),
        ({"path": "a"}, {"path": "a"}),
        ("[1]", "[1]"),
        ('"text"', '"text"'),
    ],
)
@pytest.mark.parametrize("call_id", [None, "", "call_7"])
def test_tool_history_is_mended(arguments: Any, becomes: Any, call_id: Any):
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}
    chat = [user("x"), assistant("", tool_calls=[call]), {"role": "tool", "content": "r"}]
    mended = normalise(chat)
    function = mended[1]["tool_calls"][0]
    assert function["function"] == {"name": "f", "arguments": becomes}
    assert function["id"] == (call_id or "call_1_0")
    assert mended[2]["tool_call_id"] == "call_2"


def test_roles_of_other_times_are_translated():
    chat = normalise([{"role": "developer", "content": "d"}, {"role": "function", "content": "f"}])
    assert [m["role"] for m in chat] == ["system", "tool"]


def test_reasoning_is_kept_under_one_name():
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert normalise([assistant("a", **{name: "why"})])[0]["reasoning_content"] == "why"


def test_unknown_fields_of_messages_are_dropped():
    chat = normalise([{**user("a"), "provider_specific_fields": {}, "cache_control": 1}])
    assert chat == [user("a")]


def test_a_conversation_is_first_tried_as_it_is():
    chat = [system("s"), user("a"), assistant("b"), system("t"), user("c")]
    forms = list(rewrites(chat))
    assert forms[0] == chat
    assert forms[1] == [system("s"), user("a"), assistant("b"), user("t\n\nc")]
    assert forms[2] == [user("s\n\na"), assistant("b"), user("t\n\nc")]


def test_forms_that_change_nothing_are_not_tried_again():
    assert list(rewrites([user("a"), assistant("b"), user("c")])) == [
        [user("a"), assistant("b"), user("c")]
    ]


def test_two_system_messages_at_the_start_become_one():
    assert list(rewrites([system("a"), system("b"), user("c")]))[1] == [system("a\n\nb"), user("c")]


def test_only_a_system_message_becomes_the_users():
    assert list(rewrites([system("a")]))[-1] == [user("a")]


def test_tool_results_and_calls_are_never_joined():
    call = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": {}}}
    tool = {"role": "tool", "content": "r", "tool_call_id": "123456789"}
    chat = [user("a"), assistant("x", tool_calls=[call]), tool, tool, assistant("y")]
    assert list(rewrites(chat)) == [chat]


def test_arguments_that_are_text_become_an_object_if_the_template_insists():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a'}}
    last = list(rewrites([user("a"), assistant("", tool_calls=[call])]))[-1]
    assert last[1]["tool_calls"][0]["function"]["arguments"] == {"arguments": '{"a'}


def test_ids_of_calls_become_short_and_stay_the_same_on_both_sides():
    """Mistral's templates refuse ids that are not nine letters and digits."""
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {}}}
    chat = [user("a"), assistant("", tool_calls=[call]), {**user("r"), "role": "tool"}]
    chat[2]["tool_call_id"] = "call_1"
    strict = list(rewrites(chat))[1]
    short = strict[1]["tool_calls"][0]["id"]
    assert len(short) == 9
    assert short.isalnum()
    assert strict[2]["tool_call_id"] == short


def test_thinking_and_content_before_a_call_are_one_where_a_template_insists():
    call = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": {}}}
    chat = [user("a"), assistant("b", tool_calls=[call], reasoning_content="why")]
    strict = list(rewrites(chat))[1]
    assert (strict[1]["reasoning_content"], strict[1]["content"]) == ("why\n\nb", "")
