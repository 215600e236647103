"""Answers held to a schema or to tools: always valid, and nothing but valid ones can be drawn."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from held_answers import (
    DIALECTS_HELD,
    MUST,
    UNHELD,
    Bench,
    bench_for,
    may_come,
    tool,
    written,
)
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker

from ftd.errors import RequestInvalid
from ftd.text import constrain
from ftd.text.conversation import Demand, Tool
from ftd.text.dialects import Thought
from ftd.text.events import CallEnd, CallStart, Event
from ftd.text.parse import OutputParser

THINK = ["<think>", "</think>"]
CALL = ["<tool_call>", "</tool_call>"]
S = {"type": "string"}
N = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
N["additionalProperties"] = False
HERMES = Bench("hermes", THINK + CALL)
STRINGS = Bench("hermes")  # no marker is a token


class Anything:
    def mask(self) -> None:
        return None

    def accept(self, token: int) -> None:
        pass


def wants(schema: Any) -> Demand:
    return Demand(schema=schema, schema_param="response_format")


# --- random schemas ------------------------------------------------------------------------------

STRINGS_OF = [
    {},
    {"minLength": 2, "maxLength": 5},
    {"pattern": "^[a-c]{2,4}-[0-9]+$"},
    {"pattern": "b.?a"},
    {"format": "date"},
    {"format": "uuid"},
    {"format": "ipv4"},
]
names = st.sampled_from(["a", "b", "name", "ключ", 'q"uote', "with space"])
leaves = st.one_of(
    st.sampled_from(STRINGS_OF).map(lambda more: {"type": "string", **more}),
    st.tuples(st.integers(-50, 50), st.integers(0, 90)).map(
        lambda x: {"type": "integer", "minimum": x[0], "maximum": x[0] + x[1]}
    ),
    st.integers(-5, 5).map(lambda x: {"type": "number", "exclusiveMinimum": x}),
    st.just({"type": "integer", "multipleOf": 7}),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}]),
    st.lists(
        st.sampled_from(["x", "ünï", 3, None, True, {"k": [1]}, "a\nb"]), min_size=1, max_size=3
    ).map(lambda values: {"enum": values}),
    st.sampled_from([{"const": 5}, {"const": "</tool_call>"}, {"$ref": "#/$defs/tree"}]),
)


def _objects(schemas: st.SearchStrategy) -> st.SearchStrategy:
    def build(parts: tuple[dict, list[bool], Any]) -> dict:
        properties, chosen, more = parts
        required = [name for name, yes in zip(properties, chosen) if yes]
        found = {"type": "object", "properties": properties, "required": required}
        return found | ({} if more is None else {"additionalProperties": more})

    return st.tuples(
        st.dictionaries(names, schemas, max_size=3),
        st.lists(st.booleans(), min_size=3, max_size=3),
        st.sampled_from([None, False, {"type": "integer"}]),
    ).map(build)


def _compound(schemas: st.SearchStrategy) -> st.SearchStrategy:
    arrays = st.tuples(schemas, st.integers(0, 2)).map(
        lambda x: {"type": "array", "items": x[0], "minItems": x[1], "maxItems": x[1] + 2}
    )
    either = st.lists(schemas, min_size=2, max_size=3).map(lambda x: {"anyOf": x})
    pairs = schemas.map(lambda x: {"type": "array", "prefixItems": [x, S], "items": False})
    both = schemas.map(
        lambda x: {"allOf": [{"properties": {"one": x}}, {"type": "object", "required": ["one"]}]}
    )
    return st.one_of(_objects(schemas), arrays, either, pairs, both)


TREE = {
    "type": "object",
    "properties": {"v": S, "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    "required": ["v"],
    "additionalProperties": False,
}
schemas = st.recursive(leaves, _compound, max_leaves=6).map(
    lambda s: {**s, "$defs": {"tree": TREE}}
)


def validate(value: Any, schema: Any) -> None:
    Draft202012Validator(schema, format_checker=FormatChecker()).validate(value)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schema=schemas, seed=st.integers(0, 2**32))
def test_whatever_is_drawn_is_valid_json_of_the_schema(schema: Any, seed: int):
    tokens = HERMES.draw(HERMES.make(wants(schema)), seed)
    if tokens[-1] != HERMES.eos:
        return  # cut: the engine says so
    validate(json.loads(HERMES.text(tokens)), schema)


def test_an_answer_ends_where_the_grammar_lets_it_and_nowhere_else():
    constraint = HERMES.make(wants({"enum": [1, 12]}))
    assert not may_come(constraint, HERMES.eos)
    constraint.accept(HERMES.token("1"))
    assert may_come(constraint, HERMES.eos) and may_come(constraint, HERMES.token("2"))
    constraint.accept(HERMES.token("2"))
    left = [t for t in range(HERMES.vocab) if may_come(constraint, t)]
    assert left == [HERMES.eos]


def test_any_object_is_what_json_object_asks_for():
    for text in ("{}", '{"a": [1, {"b": null}], "c": "\\u00e9\\n"}', '{\n    "a": 1\n}'):
        assert HERMES.accepts(HERMES.make(wants({})), text)
    for text in ("[]", "1", '{"a": }', '{"a": "\\ud800"}', "{" + " " * 99 + "}", "{} x"):
        assert not HERMES.accepts(HERMES.make(wants({})), text)


def test_answers_of_one_request_are_independent():
    make = HERMES.compiler.constraint(HERMES.markup, wants(N), (), Thought(), HERMES.vocab)
    first, second = make(), make()
    assert HERMES.accepts(first, '{"n": 5', ends=False)
    assert HERMES.accepts(second, '{"n": -1}')
    assert HERMES.accepts(first, "7}")


# --- thinking ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bench", [HERMES, STRINGS], ids=["tokens", "strings"])
def test_a_schema_holds_behind_the_thinking(bench: Any):
    answer = '{"n": 3}'
    thinking = 'Well, {"n": "x"}, or not?\n</think>\n\n'
    opened, optional, off = Thought(open=True), Thought(optional=True), Thought()
    for thought, texts in {
        opened: [thinking + answer, f"</think>{answer}"],
        optional: [answer, f"<think>\n{thinking}{answer}"],
        off: [answer],
    }.items():
        for text in texts:
            assert bench.accepts(bench.make(wants(N), thought=thought), text), text
    for thought, text in [
        (opened, "hm"),  # an end within thinking would leave the promise unkept
        (opened, thinking + "{}"),
        (opened, thinking + "<think>"),
        (optional, "<think>hm"),
        (optional, f"{answer}<think>"),
        (off, "<think>hm</think>" + answer),
        (off, "Sure"),
    ]:
        assert not bench.accepts(bench.make(wants(N), thought=thought), text), text


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_drawn_behind_a_thought_of_any_kind(seed: int):
    tokens = HERMES.draw(HERMES.make(wants(N), thought=Thought(open=True)), seed)
    text = HERMES.text(tokens, errors="replace")
    if tokens[-1] == HERMES.eos:
        validate(json.loads(text.rpartition("</think>")[2]), N)


# --- tools ---------------------------------------------------------------------------------------

WRITE = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "minLength": 1, "maxLength": 9},
        "mode": {"enum": ["read", "write", None]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "note": {"anyOf": [S, {"type": "null"}]},
        "options": {"type": "object", "properties": {"deep": {"$ref": "#/$defs/flag"}}},
    },
    "required": ["path", "count"],
    "additionalProperties": False,
    "$defs": {"flag": {"type": "boolean"}},
}
NOW = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [tool("write_file", WRITE), tool("now", NOW), tool("mcp__a-b", {"type": "object"})]
SCHEMAS = {t.name: t.parameters for t in TOOLS}
CALLS = [
    ("write_file", {"path": "a/<b>", "mode": "read", "count": 3, "note": None, "options": {}}),
    ("now", {}),
    ("write_file", {"path": 'ü"\n', "count": 0, "note": "x\ny", "options": {"deep": True}}),
]
BEYOND_FLOAT = re.compile(r"\d[eE]\+?\d{3}|\d{300}")  # numbers no parser of JSON likes
NAMED = Demand(must_call=True, tools=frozenset({"now"}), choice_param="tool_choice")


def events_of(bench: Any, tokens: list[int], tools: Any = TOOLS) -> list[Event]:
    parser = OutputParser(bench.markup, tools=tools)
    detokenizer = bench.vocabulary.detokenizer()
    events = []
    for token in tokens:
        if token != bench.eos:
            events += parser.feed(token, detokenizer.push(token))
    events += parser.feed(None, detokenizer.flush())
    return events + parser.finish(cut=tokens[-1] != bench.eos)


def calls_of(events: list[Event]) -> list[tuple[str, str, bool]]:
    names = [event.name for event in events if isinstance(event, CallStart)]
    ends = [event for event in events if isinstance(event, CallEnd)]
    return [(name, end.arguments, end.valid) for name, end in zip(names, ends, strict=True)]


@pytest.mark.parametrize("name", DIALECTS_HELD)
def test_calls_as_the_family_writes_them_are_allowed(name: str):
    bench, write = bench_for(name), written.TEMPLATES[name]
    one = name == "harmony"  # a message each, the first of which ends the answer
    for text in ("", "Some text."):
        for calls in ([], CALLS[:1], CALLS[: 1 if one else 3]):
            whole = write("", text, calls)
            assert bench.accepts(bench.make(Demand(), TOOLS) or Anything(), whole), whole
    forced = write("", "", CALLS[: 1 if one else 3]).lstrip("\n")
    if name != "llama4":  # which is told to write JSON here
        assert bench.accepts(bench.make(MUST, TOOLS), forced)
        assert bench.accepts(bench.make(NAMED, TOOLS), write("", "", [("now", {})]).lstrip("\n"))
    assert not bench.accepts(bench.make(MUST, TOOLS), write("", "Some text.", []))
    assert not bench.accepts(bench.make(NAMED, TOOLS), write("", "", CALLS[:1]).lstrip("\n"))


@pytest.mark.parametrize("name", DIALECTS_HELD)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_whatever_is_drawn_is_calls_that_obey_their_schemas(name: str, seed: int):
    bench = bench_for(name)
    tokens = bench.draw(bench.make(MUST, TOOLS), seed, most=900)
    assume(not BEYOND_FLOAT.search(bench.text(tokens, errors="replace")))
    calls = calls_of(events_of(bench, tokens))
    ended = tokens[-1] == bench.eos
    assert calls or not ended
    for number, (called, arguments, valid) in enumerate(calls, start=1):
        if valid or ended or number < len(calls):  # the last may have been cut
            validate(json.loads(arguments), SCHEMAS[called])


@pytest.mark.parametrize("name", DIALECTS_HELD)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_calls_in_free_text_obey_their_schemas(name: str, seed: int):
    bench = bench_for(name)
    tokens = bench.draw(bench.make(Demand(), TOOLS), seed, most=300)
    assume(not BEYOND_FLOAT.search(bench.text(tokens, errors="replace")))
    for called, arguments, valid in calls_of(events_of(bench, tokens)):
        if valid and called in SCHEMAS:
            validate(json.loads(arguments), SCHEMAS[called])


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "deepseek_v32", "kimi_k2"])
def test_arguments_come_in_any_order_each_at_most_once(name: str):
    bench, write = bench_for(name), written.TEMPLATES[name]
    path, count, mode = ("path", "a"), ("count", 3), ("mode", "read")
    for chosen, allowed in [
        ([path, count, mode], True),
        ([mode, count, path], True),
        ([count, path], True),
        ([mode, path], False),
        ([], False),
    ]:
        call = write("", "", [("write_file", dict(chosen))]).lstrip("\n")
        assert bench.accepts(bench.make(MUST, TOOLS), call) is allowed, chosen
    twice = write("", "", [("write_file", {"path": "a", "path2": "a", "count": 3})])
    call = twice.replace("path2", "path").lstrip("\n")
    assert not bench.accepts(bench.make(MUST, TOOLS), call)


def test_arguments_too_many_for_any_order_come_in_that_of_the_schema():
    names = [f"p{i}" for i in range(70)]
    many = {"type": "object", "properties": dict.fromkeys(names, S), "additionalProperties": False}
    for bench, write in ((HERMES, written.hermes), (bench_for("glm47"), written.glm47)):
        for chosen, allowed in (("p3", "p68"), True), (("p68", "p3"), False):
            call = write("", "", [("f", dict.fromkeys(chosen, "x"))])
            assert bench.accepts(bench.make(MUST, [tool("f", many)]), call) is allowed


def test_what_a_mask_allows_can_be_accepted():
    tokens = HERMES.encode('<tool_call>\n{"name": "write_file", "arguments": {"path": "ü", "count"')
    for length in range(len(tokens)):
        constraint = HERMES.make(MUST, TOOLS)
        assert HERMES.refused_at(constraint, tokens[:length]) is None
        allowed = [t for t in range(HERMES.vocab) if may_come(constraint, t)]
        assert tokens[length] in allowed
        for token in allowed:
            constraint = HERMES.make(MUST, TOOLS)
            for before in tokens[:length]:
                constraint.accept(before)
            constraint.accept(token)


def test_only_calls_are_watched():
    constraint = HERMES.make(Demand(), TOOLS, Thought(optional=True))
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for token in HERMES.encode(f"<think>no</think> Text </tool_call>{call} and {call}"):
        within = constraint.mask() is not None
        assert may_come(constraint, token)
        assert within <= (not may_come(constraint, HERMES.eos))
        constraint.accept(token)
    assert constraint.mask() is None


def test_only_tools_of_the_choice_may_be_called():
    some = Demand(tools=frozenset({"now", "mcp__a-b"}), choice_param="tool_choice")
    call = '<tool_call>\n{{"name": "{}", "arguments": {{}}}}\n</tool_call>'
    for bench in (HERMES, STRINGS):
        assert bench.accepts(bench.make(some, TOOLS), "Well. " + call.format("now"))
        assert bench.accepts(bench.make(some, TOOLS), "Nothing to call.")
        assert not bench.accepts(bench.make(some, TOOLS), call.format("write_file"))
        assert not bench.accepts(bench.make(Demand(), TOOLS), call.format("unknown"))


def test_a_schema_beside_tools_leaves_the_choice_between_them():
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for bench in (HERMES, STRINGS):
        for text, allowed in {'{"n": 1}': True, call: True, "{}": False, "Hm": False}.items():
            assert bench.accepts(bench.make(wants(N), TOOLS), text) is allowed
            forced = Demand(schema=N, schema_param="response_format", must_call=True)
            assert bench.accepts(bench.make(forced, TOOLS), text) is (text == call)


def test_a_choice_of_no_tool_at_all_is_refused():
    with pytest.raises(RequestInvalid, match="none of the tools"):
        HERMES.make(Demand(tools=frozenset(), choice_param="tool_choice"), TOOLS)


@pytest.mark.parametrize("name", sorted(UNHELD))
def test_a_dialect_whose_calls_cannot_be_held_refuses_promises_and_nothing_else(name: str):
    bench = Bench(name, THINK)
    assert bench.make(Demand(), TOOLS) is None
    assert bench.accepts(bench.make(wants(N), TOOLS), '{"n": 1}')
    for demand, tools in [(MUST, TOOLS), (NAMED, TOOLS), (Demand(), [tool("f", N, strict=True)])]:
        with pytest.raises(RequestInvalid, match=name):
            bench.make(demand, tools)


# --- what cannot be held -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": S}, "#/not: the keyword not is not supported"),
        ({"properties": {"a": {"uniqueItems": True}}}, "#/properties/a/uniqueItems"),
        ({"anyOf": [S, {"items": {"contains": {}}}]}, "#/anyOf/1/items/contains"),
        ({"$defs": {"x": {"if": S}}, "$ref": "#/$defs/x"}, "#/$defs/x/if"),
        ({"type": "string", "format": "regex"}, "#/format: the format regex"),
        ({"properties": {"a": {"type": "strng"}}}, "#/properties/a: Invalid type: strng"),
        ({"items": {"pattern": "("}}, "#/items: regex parse error"),
        ({"items": {"type": "string", "pattern": "(?=a)"}}, "look-ahead"),
        ({"prefixItems": [{"minLength": -1}]}, "#/prefixItems/0: Expected"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "greater than"),
        ({"$ref": "#/$defs/none"}, "does not exist"),
        ({"$ref": "https://example.com/schema"}, "https://example.com/schema"),
        ({"properties": [S]}, "properties"),
        ({"properties": {"a": 5}}, "#/properties/a: a schema must be an object"),
        ({"required": "a"}, "'required'"),
        ({"oneOf": [{"minLength": 1}, {"maxLength": 3}]}, "oneOf"),
        ({"enum": []}, "#"),
        ({"$ref": "#"}, "without an end"),
        ({"multipleOf": 10_007}, "multipleOf"),
        (
            {"multipleOf": 9973, "$ref": "#/$defs/x", "$defs": {"x": {"multipleOf": 97}}},
            "multipleOf",
        ),
        ({"anyOf": [{"multipleOf": 1e-300}, {"multipleOf": 1e300}]}, "multipleOf"),
        ({"allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(30)]}, "30 patterns"),
        ({"enum": [f"{i:0600}" for i in range(900)]}, "540,000 bytes|524,288 is the most"),
    ],
)
def test_a_schema_that_cannot_be_held_is_refused_by_name_and_place(schema: Any, words: str):
    for _ in range(2):  # the second time from the cache
        with pytest.raises(RequestInvalid, match=words.replace("$", "\\$").replace("(", "\\(")):
            HERMES.make(wants(schema))


def test_a_tool_whose_schema_would_take_too_long_is_called_with_any_object():
    """As long as it is not strict: nothing of such a schema is compiled."""
    schema = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 999_983}}}
    demand = Demand(tools=frozenset(["f"]), must_call=True)
    HERMES.make(demand, [Tool("f", schema, {})])
    with pytest.raises(RequestInvalid, match="multipleOf"):
        HERMES.make(demand, [Tool("f", schema, {}, strict=True)])


def test_a_schema_nested_too_deeply_is_refused():
    schema: Any = S
    for _ in range(60):
        schema = {"type": "array", "items": schema}
    with pytest.raises(RequestInvalid, match="deeper than 40 levels"):
        HERMES.make(wants(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": False, "items": {"type": "integer", "format": "int32"}},
        {
            "title": "T",
            "description": "d",
            "default": 1,
            "examples": [1],
            "deprecated": True,
            "x-a": 1,
        },
        {"type": "object", "propertyNames": {"type": "string"}, "minProperties": 0},
        {"type": "string", "format": "a format of our own"},
        {"$schema": "http://json-schema.org/draft-07/schema#", "type": "string", "nullable": True},
        {"x-guidance": {"lenient": True, "whitespace_flexible": False}, "type": "object"},
    ],
)
def test_what_constrains_nothing_is_no_obstacle(schema: Any):
    before = json.dumps(schema)
    assert HERMES.make(wants(schema)) is not None
    assert json.dumps(schema) == before


def test_a_grammar_too_large_is_refused():
    either = [
        {"anyOf": [{"properties": {f"{name}{i}": {"const": i}}} for name in "ab"]}
        for i in range(14)
    ]
    with pytest.raises(RequestInvalid, match="too large"):
        HERMES.make(wants({"type": "object", "allOf": either}))


def test_tools_that_cannot_be_held_exactly_are_held_as_far_as_possible():
    odd = {"type": "object", "properties": {"n": {"type": "integer"}}, "not": {"required": ["m"]}}
    worse = {"type": "object", "properties": {"n": {"type": "nonsense"}}}
    tools = [tool("odd", odd), tool("worse", worse), tool("now", NOW)]
    call = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
    for name, arguments, allowed in [
        ("odd", '{"n": 5}', True),
        ("odd", '{"n": "x"}', False),
        ("worse", '{"n": "x"}', True),
        ("worse", "[]", False),
        ("now", '{"n": 5}', False),
    ]:
        constraint = HERMES.make(Demand(), tools)
        assert HERMES.accepts(constraint, call.format(name, arguments)) is allowed, (
            name,
            arguments,
        )
    for strict, words in [(odd, "tool f: JSON schema at #/not"), (worse, "Invalid type: nonsense")]:
        with pytest.raises(RequestInvalid, match=words):
            HERMES.make(Demand(), [tool("f", strict, strict=True)])


def test_arguments_written_as_text_are_held_as_far_as_text_tells():
    bench = bench_for("qwen3_coder")
    loose = {
        "properties": {
            "s": {"type": "string", "pattern": "^a"},
            "x": {"type": ["string", "integer"]},
            "y": {"anyOf": [{"type": "string", "pattern": "^a"}, {"type": "null"}]},
        }
    }
    call = written.qwen3_coder("", "", [("f", {"s": "b", "x": "{}"})])
    assert bench.accepts(bench.make(Demand(), [tool("f", loose)]), call)
    for name, words in [
        ("s", "#/properties/s/pattern"),
        ("x", "#/properties/x: text or something else"),
        ("y", "#/properties/y/anyOf"),
    ]:
        strict = {"properties": {name: loose["properties"][name]}}
        with pytest.raises(RequestInvalid, match=words):
            bench.make(Demand(), [tool("f", strict, strict=True)])


# --- the cache -----------------------------------------------------------------------------------


def test_grammars_are_compiled_once_and_kept_within_bounds(monkeypatch):
    bench = Bench("hermes", CALL)
    compiled = []
    original = constrain._Compilation.rules
    monkeypatch.setattr(
        constrain._Compilation, "rules", lambda *a: compiled.append(1) or original(*a)
    )
    monkeypatch.setattr(constrain, "MAX_GRAMMARS", 3)
    for number in (1, 1, 2, 3, 1, 4, 2):  # 2 was the least recently used when 4 came
        bench.make(wants({"const": number}))
    assert len(compiled) == 5
    monkeypatch.setattr(constrain, "MAX_GRAMMAR_BYTES", 500)
    for number in range(5):
        bench.make(wants({"const": number, "description": "x" * 150}))
    compiler = bench.compiler
    assert len(compiler._kept) == 2 and 300 < compiler._kept_bytes <= 500
    bench.make(wants({"const": 0, "description": "x" * 600}))  # never kept
    assert len(compiler._kept) == 2


def test_demands_that_differ_are_kept_apart():
    for first, second in [
        (wants(N), wants({})),
        (Demand(), MUST),
        (MUST, NAMED),
        (Demand(tools=frozenset({"now"})), Demand()),
    ]:
        texts = ['{"n": 1}', "{}", '<tool_call>{"name": "now", "arguments": {}}</tool_call>', "x"]
        texts.append('<tool_call>{"name": "mcp__a-b", "arguments": {}}</tool_call>')
        allowed = [
            [HERMES.accepts(HERMES.make(demand, TOOLS) or Anything(), text) for text in texts]
            for demand in (first, second)
        ]
        assert allowed[0] != allowed[1]
