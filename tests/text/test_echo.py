"""Which returned messages are taken for what was answered, and how much is remembered."""

from __future__ import annotations

import json
import string
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ftd.text.echo import Call, EchoMemory, Place, Said, contexts, same_value
from ftd.text.messages import Message, normalise

USER = {"role": "user", "content": "go"}
BEFORE = contexts(normalise([USER]))[-1]
PLACE = Place(BEFORE, b"", 0, "\n")
TEXT = st.text(max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
) | st.floats(allow_nan=False, allow_infinity=False)
ARGUMENTS = st.dictionaries(TEXT, JSON, max_size=4)


def call_id(number: int) -> str:
    return f"{number:037x}"


def as_javascript(value: Any) -> Any:
    """What JSON.parse and JSON.stringify make of it; keys in another order for good measure."""
    if isinstance(value, dict):
        return {key: as_javascript(value[key]) for key in reversed(value)}
    if isinstance(value, list):
        return [as_javascript(item) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        double = float(value)
        return int(double) if double.is_integer() and abs(double) < 1e21 else double
    return value


def message(said: Said, *, prefix: str = "call_", thoughts: str = "\n") -> Message:
    """``said`` as a client returns it."""
    calls = [
        {
            "id": f"{prefix}{call.id}",
            "function": {
                "name": call.name,
                "arguments": json.dumps(as_javascript(json.loads(call.arguments))),
            },
        }
        for call in said.calls
    ]
    out: Message = {"role": "assistant", "content": said.text, "tool_calls": calls}
    if said.reasoning:
        out["reasoning_content"] = thoughts.join(said.reasoning)
    return normalise([out])[0]


@settings(deadline=None)
@given(
    text=TEXT,
    reasoning=st.lists(st.text(min_size=1, max_size=12), max_size=2),
    calls=st.lists(st.tuples(st.sampled_from(["f", "g"]), ARGUMENTS), max_size=3),
    prefix=st.sampled_from(["call_", "toolu_", "", "call"]),
    thoughts=st.sampled_from(["", "\n"]),
    tokens=st.lists(st.integers(0, 2**31 - 1)),
)
def test_what_a_client_writes_anew_is_recognised(text, reasoning, calls, prefix, thoughts, tokens):
    said = Said(
        text,
        reasoning,
        [Call(call_id(i), name, json.dumps(a, indent=2)) for i, (name, a) in enumerate(calls)],
    )
    memory = EchoMemory()
    memory.keep(PLACE, tokens, said)
    found = memory.find(message(said, prefix=prefix, thoughts=thoughts), BEFORE)
    assert found is not None and list(found.tokens) == tokens
    assert memory.find(message(said), b"something else") is None


@settings(deadline=None)
@given(before=ARGUMENTS, after=ARGUMENTS)
def test_other_arguments_are_not_recognised(before, after):
    assume(stripped(as_javascript(before)) != stripped(as_javascript(after)))
    said, edited = (Said("", (), [Call(call_id(0), "f", json.dumps(a))]) for a in (before, after))
    memory = EchoMemory()
    memory.keep(PLACE, [1], said)
    assert memory.find(message(edited), BEFORE) is None


def stripped(value: Any) -> str:
    """Any two values that differ in more than blanks at line ends differ in this text."""
    if isinstance(value, dict):
        value = {key: stripped(item) for key, item in sorted(value.items())}
    elif isinstance(value, list):
        value = [stripped(item) for item in value]
    elif isinstance(value, str):
        value = "".join(char for char in value if not char.isspace() and char not in "\x1c\x85")
    return json.dumps(value)


@settings(deadline=None)
@given(said=TEXT, returned=TEXT, thoughts=TEXT, other=TEXT)
def test_other_words_are_not_recognised(said, returned, thoughts, other):
    memory = EchoMemory()
    memory.keep(PLACE, [1], Said(said, [thoughts] * bool(thoughts)))
    found = memory.find(message(Said(returned, [other] * bool(other))), BEFORE)
    assert (found is not None) == ((said, thoughts) == (returned, other))


@pytest.mark.parametrize(
    ("said", "returned", "same"),
    [
        ("a \nb\t\r\n c  ", "a\nb\r\n c", True),  # Claude Code's Write
        ("a\nb", "a \nb", False),
        ("a \nb ", "a \nb", False),
        (" a", "a", False),
        (1.0, 1, True),
        (12345678901234567890, 12345678901234567000, True),  # a double cannot tell
        (1, 2, False),
        (1, True, False),
        (0, False, False),
        (None, False, False),
        ("1", 1, False),
        ([1, 2], [2, 1], False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"a": None}, {}, False),
    ],
)
def test_same_value(said: Any, returned: Any, same: bool):
    assert same_value(said, returned) is same


def test_a_call_under_another_id_or_name_is_another_call():
    memory = EchoMemory()
    memory.keep(
        PLACE, [1], Said("", (), [Call(call_id(1), "f", "{}"), Call(call_id(2), "f", "{}")])
    )

    def found(*calls: tuple[int, str]) -> bool:
        said = Said("", (), [Call(call_id(i), name, "{}") for i, name in calls])
        return memory.find(message(said), BEFORE) is not None

    assert found((1, "f"), (2, "f"))
    assert not found((1, "f"))
    assert not found((1, "f"), (3, "f"))
    assert not found((1, "f"), (2, "g"))
    assert not found((2, "f"), (1, "f"))


def test_of_answers_that_look_alike_the_newer_is_remembered():
    memory = EchoMemory()
    memory.keep(PLACE, [1, 2], Said("yes"))
    size = memory.size_bytes
    memory.keep(PLACE, [3, 4], Said("yes"))
    assert memory.size_bytes == size
    found = memory.find(message(Said("yes")), BEFORE)
    assert found is not None and list(found.tokens) == [3, 4]


def test_memory_is_bounded_and_the_least_recently_used_go_first():
    memory = EchoMemory(100_000)
    first = Said("", (), [Call(call_id(0), "f", "{}")])
    memory.keep(PLACE, range(10), first)
    for i in range(1, 500):
        arguments = json.dumps({"text": string.printable * (i % 5)})
        memory.keep(PLACE, range(i % 300), Said("", (), [Call(call_id(i), "f", arguments)]))
        assert memory.size_bytes <= 100_000
        assert memory.find(message(first), BEFORE) is not None, "it is in use"
    assert memory.find(message(Said("", (), [Call(call_id(1), "f", "{}")])), BEFORE) is None
    memory.keep(PLACE, range(100_000), Said("too large for all of it"))
    assert memory.size_bytes <= 100_000


def test_a_turn_that_was_forgotten_is_not_found():
    memory = EchoMemory()
    memory.keep(PLACE, [1], Said("yes"))
    turn = memory.find(message(Said("yes")), BEFORE)
    assert turn is not None
    memory.forget(turn)
    memory.forget(turn)
    assert memory.find(message(Said("yes")), BEFORE) is None
    assert memory.size_bytes == 0


def test_a_context_is_all_that_was_said_but_for_how_clients_write_it():
    call = {"id": "call_ab_c1", "function": {"name": "f", "arguments": '{"a": 1.0}'}}
    result = {"role": "tool", "tool_call_id": "call_ab_c1", "content": "done"}
    said = {"role": "assistant", "content": "yes", "tool_calls": [call]}

    def context(*messages: Message, tools: list[Any] | None = None) -> bytes:
        return contexts(normalise(list(messages)), tools)[-1]

    known = context(USER, said, result)
    mangled = {"id": "callabc1", "function": {"name": "f", "arguments": '{"a":1}'}}
    same = {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}
    same["tool_calls"] = [mangled]
    assert context(USER, same, {**result, "tool_call_id": "callabc1"}) == known
    others = [
        context({**USER, "content": "stop"}, said, result),
        context(USER, {**said, "content": "no"}, result),
        context(USER, {**said, "tool_calls": [{**call, "id": "call_2"}]}, result),
        context(USER, said, {**result, "content": "failed"}),
        context(USER, said, result, USER),
        context(USER, said),
        context(said, result, USER),
        context(USER, said, result, tools=[{"type": "function"}]),
    ]
    assert known not in others and len(set(others)) == len(others)
