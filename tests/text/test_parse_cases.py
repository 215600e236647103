"""What models get wrong, and what only looks like structure: one case each."""

# ruff: noqa: E501 - answers stand here as models write them

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ftd.engine.api import Finish, Output
from ftd.errors import ConfigError
from ftd.text.answer import Answer, Reading, joined
from ftd.text.dialects import DIALECTS, Markup, detect, markers_of
from ftd.text.events import CallEnd, CallStart, Event, Reasoning, Text
from ftd.text.messages import normalise
from ftd.text.parse import OutputParser
from ftd.text.stops import StopSet
from ftd.text.textmodel import TextModel


@dataclass(frozen=True)
class Declared:
    name: str
    parameters: dict[str, Any] = field(default_factory=dict)


TOOLS = [
    Declared(
        "f",
        {
            "properties": {
                "s": {"type": "string"},
                "n": {"type": "integer"},
                "o": {"type": "object"},
            }
        },
    ),
    Declared("now"),
    Declared("get_weather"),
]
THINK = ["<think>", "</think>"]
CALL = ["<tool_call>", "</tool_call>"]


def markup(name: str, tokens: Iterable[str] = ()) -> Markup:
    return Markup(DIALECTS[name], {token: 1000 + i for i, token in enumerate(tokens)})


def pieces_of(text: str, form: Markup) -> list[tuple[int | None, str]]:
    """Markers are tokens; ``⟨x⟩`` stands for a marker ``<x>`` spelled with ordinary tokens."""
    ids = {form.spelling[ord(symbol)]: token for token, symbol in form.symbols.items()}
    parts = re.split(f"({'|'.join(map(re.escape, ids)) or '(?!)'})", text)
    return [
        (ids[part], "") if part in ids else (None, char)
        for part in parts
        for char in ([part] if part in ids else part.replace("⟨", "<").replace("⟩", ">"))
    ]


def parse(form: Markup, pieces: Iterable[tuple[int | None, str]], **options: Any) -> list[Any]:
    """Short forms of the events, neighbours joined."""
    cut = options.pop("cut", False)
    parser = OutputParser(form, tools=options.pop("tools", TOOLS), **options)
    events = [event for token, text in pieces for event in parser.feed(token, text)]
    return short(events + parser.finish(cut))


def short(events: Iterable[Event]) -> list[Any]:
    out: list[Any] = []
    name, fragments = "", []
    for kind, group in itertools.groupby(events, type):
        run = list(group)
        if kind is Text:
            out.append("".join(event.text for event in run))
        elif kind is Reasoning:
            out.append({"thinking": "".join(event.text for event in run)})
        elif kind is CallEnd:
            (end,) = run
            assert "".join(fragments) == end.arguments
            out.append((name, end.arguments) if end.valid else (name, end.arguments, "invalid"))
        elif kind is CallStart:
            (start,) = run
            name, fragments = start.name, []
        else:
            fragments += [event.fragment for event in run]
    return out


def check(name: str, tokens: Sequence[str], written: str, *wanted: Any, **options: Any) -> None:
    """The same result by characters, in one piece, and for every cut in two."""
    form = markup(name, tokens)
    pieces = pieces_of(written, form)
    assert parse(form, pieces, **options) == list(wanted)
    for cut_at in range(len(pieces) + 1):
        parts = [_joined(pieces[:cut_at]), _joined(pieces[cut_at:])]
        assert parse(form, itertools.chain(*parts), **options) == list(wanted), cut_at


def _joined(pieces: Sequence[tuple[int | None, str]]) -> list[tuple[int | None, str]]:
    out: list[tuple[int | None, str]] = []
    for is_text, group in itertools.groupby(pieces, lambda piece: piece[0] is None):
        run = list(group)
        out += [(None, "".join(text for _, text in run))] if is_text else run
    return out


F = '{"name": "f", "arguments": {"s": "x"}}'
ARGS = '{"s": "x"}'


@pytest.mark.parametrize("tokens", [[], THINK + CALL], ids=["strings", "tokens"])
@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ("", []),
        ("  just text \n", ["  just text \n"]),
        ("<think>\n\n</think>\n\nNo thought.", ["No thought."]),
        ("<think>\na\n\nb\n</think>\n\nText", [{"thinking": "a\n\nb"}, "Text"]),
        (f"<tool_call>\n{F}\n</tool_call>", [("f", ARGS)]),
        (f"<tool_call>{F}</tool_call>\n\n", [("f", ARGS)]),
        ('<tool_call>\n{"name": "now"}\n</tool_call>', [("now", "{}")]),
        ('<tool_call>\n{"name": "now", "arguments": null}\n</tool_call>', [("now", "{}")]),
        ('<tool_call>\n{"name": "now", "arguments": ""}\n</tool_call>', [("now", "{}")]),
        ('<tool_call>{"arguments": {"s": "x"}, "name": "f"}</tool_call>', [("f", ARGS)]),
        ('<tool_call>{"name": "f", "arguments": "{\\"s\\": \\"x\\"}"}</tool_call>', [("f", ARGS)]),
        ('<tool_call>{"name": "f", "parameters": {"s": "x"}, "x": [1]}</tool_call>', [("f", ARGS)]),
        (f"<tool_call>\n[{F}, {F}]\n</tool_call>", [("f", ARGS), ("f", ARGS)]),
        (f"<tool_call>\n{F}\n<tool_call>\n{F}\n</tool_call>", [("f", ARGS), ("f", ARGS)]),
        (f"A\n<tool_call>{F}</tool_call>\nB", ["A", ("f", ARGS), "\nB"]),
        (f"A\n\n<tool_call>{F}</tool_call>", ["A\n", ("f", ARGS)]),
        # malformed, before the name is known: given back as written
        ("<tool_call>\nno JSON\n</tool_call>\nB", ["<tool_call>\nno JSON\n</tool_call>\nB"]),
        ("A\n<tool_call></tool_call>", ["A\n<tool_call></tool_call>"]),
        ('<tool_call>\n{"arguments": {}}\n</tool_call>', ['<tool_call>\n{"arguments": {}}\n</tool_call>']),
        ('<tool_call>{"name": "a b", "arguments": {}}</tool_call>', ['<tool_call>{"name": "a b", "arguments": {}}</tool_call>']),
        ("A\n<tool_call>", ["A\n<tool_call>"]),
        (f"<tool_call>oh {F}</tool_call><tool_call>{F}</tool_call>", [f"<tool_call>oh {F}</tool_call>", ("f", ARGS)]),
        # malformed behind the name: flagged
        ('<tool_call>\n{"name": "f", "arguments": {"s": "x\n</tool_call>', [("f", '{"s": "x\n', "invalid")]),
        ('<tool_call>{"name": "f", "arguments": {"s": x}}</tool_call>B', [("f", '{"s": x}}', "invalid"), "B"]),
        ('<tool_call>{"name": "f", "arguments": {"s": [1}}</tool_call>B', [("f", '{"s": [1}}', "invalid"), "B"]),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', [("f", "[1]", "invalid")]),
        ('<tool_call>{"name": "f", "arguments": {"s": "x"', [("f", '{"s": "x"', "invalid")]),
        (f'<tool_call>{{"name": "f", "arguments": {{"s": "x</tool_call>\n<tool_call>{F}</tool_call>', [("f", '{"s": "x</tool_call>', "invalid"), ("f", ARGS)]),
        # too many or too few brackets, but nothing is unclear
        (f"<tool_call>\n{F}}}\n</tool_call>B", [("f", ARGS), "B"]),
        ('<tool_call>{"name": "f", "arguments": {"s": "x"}</tool_call>B', [("f", ARGS), "B"]),
        (f"<tool_call>\n{F} oh\n</tool_call>\nB", [("f", ARGS), " oh\nB"]),
        # never closed, but the model was done
        (f"<tool_call>\n{F}", [("f", ARGS)]),
        ('<tool_call>\n{"name": "f", "arguments": {"s": "x"}', [("f", ARGS)]),
        # a string may quote the marker
        ('<tool_call>{"name": "f", "arguments": {"s": "a </tool_call>\\n b"}}</tool_call>', [("f", '{"s": "a </tool_call>\\n b"}')]),
        ('<tool_call>{"name": "f", "arguments": {"s": "</tool_call>"}}</tool_call>', [("f", '{"s": "</tool_call>"}')]),
    ],
)  # fmt: skip
def test_hermes(written: str, wanted: list[Any], tokens: list[str]):
    check("hermes", tokens, written, *wanted)


def test_markers_spelled_with_ordinary_tokens_are_text():
    written = "Use ⟨tool_call⟩" + F + "⟨/tool_call⟩ and ⟨think⟩."
    check("hermes", THINK + CALL, written, written.replace("⟨", "<").replace("⟩", ">"))
    check(
        "hermes",
        THINK + CALL,
        "<think>\nA ⟨/think⟩ b\n</think>\n\nc",
        {"thinking": "A </think> b"},
        "c",
    )


def test_a_string_marker_of_thinking_counts_at_the_beginning_only():
    check("hermes", [], "Say <think> now", "Say <think> now")


@pytest.mark.parametrize("tokens", [[], THINK + CALL], ids=["strings", "tokens"])
def test_without_tools_calls_are_text(tokens: list[str]):
    shown = f"A\n<tool_call>\n{F}\n</tool_call>\nB"
    if tokens:  # and their tokens, which mean nothing then, are not shown
        shown = f"A\n\n{F}\n\nB"
    check("hermes", tokens, f"A\n<tool_call>\n{F}\n</tool_call>\nB", shown, tools=[])


def test_an_answer_that_begins_within_thinking():
    form = markup("hermes", THINK)
    assert form.opens_thinking("<|im_start|>assistant\n<think>\n")
    assert not form.opens_thinking("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not form.opens_thinking("<think> is what I want\n<|im_start|>assistant\n")
    check("hermes", THINK, "hm\n</think>\n\nA", {"thinking": "hm"}, "A", thinking_open=True)
    check("hermes", THINK, "hm\n", {"thinking": "hm\n"}, thinking_open=True)
    check("gemma4", [], "hm<channel|>A", {"thinking": "hm"}, "A", thinking_open=True)
    assert markup("seed_oss").opens_thinking("x\n<seed:think><seed:cot_budget_reflect>")
    assert markup("gemma4").opens_thinking("<|turn>model\n<|channel>thought\n")
    assert not markup("gemma4").opens_thinking("<|turn>model\n<|channel>thought\n<channel|>")


def test_a_call_within_thinking_ends_it_if_its_marker_is_a_token():
    written = f"<think>\nhm\n<tool_call>\n{F}\n</tool_call>"
    check("hermes", THINK + CALL, written, {"thinking": "hm"}, ("f", ARGS))
    quoting = "<think>\nI write <tool_call> first\n</think>\n\nA"
    check("hermes", THINK + CALL, quoting, {"thinking": "I write <tool_call> first"}, "A")


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ("A\n<tool_c", ["A\n"]),
        ("A\n<tool_call>", ["A\n"]),
        ('<tool_call>{"name": "f", "argu', []),
        ('<tool_call>{"name": "f", "arguments": {', [("f", "{", "invalid")]),
        ('<tool_call>{"name": "f", "arguments": {"s": "x"}', [("f", ARGS, "invalid")]),
        (f"<tool_call>{F}", [("f", ARGS)]),
        (f"<tool_call>{F}</tool", [("f", ARGS)]),
        ("<think>\nhm", [{"thinking": "hm"}]),
        ("<think>\nhm\n</thi", [{"thinking": "hm\n"}]),
        (f"<tool_call>{F}</tool_call>\n<tool_ca", [("f", ARGS)]),
    ],
)
def test_cut_by_max_tokens(written: str, wanted: list[Any]):
    check("hermes", [], written, *wanted, cut=True)


X = "<tool_call>\n<function=f>\n<parameter=s>\n{}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize("tokens", [[], CALL], ids=["strings", "tokens"])
@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        (X.format("x"), [("f", ARGS)]),
        (X.format("\n x \n"), [("f", '{"s": "\\n x \\n"}')]),
        (X.format("a </parameter> b"), [("f", '{"s": "a </parameter> b"}')]),
        (X.format("</function>"), [("f", '{"s": "</function>"}')]),
        (X.format("5"), [("f", '{"s": "5"}')]),
        (X.format("5").replace("=s>", "=n>"), [("f", '{"n": 5}')]),
        (X.format("five").replace("=s>", "=n>"), [("f", '{"n": "five"}')]),
        (X.format("{'a': True, 'b': None}").replace("=s>", "=o>"), [("f", '{"o": {"a":true,"b":null}}')]),
        (X.format("True").replace("=s>", "=unknown>"), [("f", '{"unknown": true}')]),
        (X.format("5x").replace("=s>", "=unknown>"), [("f", '{"unknown": "5x"}')]),
        (X.replace("\n", "").format("x"), [("f", ARGS)]),
        ("<tool_call>\n<function=now>\n</function>\n</tool_call>", [("now", "{}")]),
        ("<tool_call>\n<function=now></tool_call>", [("now", "{}")]),
        ("<tool_call>\nnothing\n</tool_call>", ["<tool_call>\nnothing\n</tool_call>"]),
        ("<tool_call>\n<function=f>\noh\n</function>\n</tool_call>B", [("f", "", "invalid"), "ohB"]),
        # the end of the value is missing, then of the call, then of everything
        (X.replace("</parameter>\n", "").format("x") + "\n" + X.format("y"), [("f", ARGS), ("f", '{"s": "y"}')]),
        (X.replace("</function>\n", "").format("x"), [("f", ARGS)]),
        ("<tool_call>\n<function=f>\n<parameter=s>\nx\n</parameter>", [("f", ARGS)]),
        ("<tool_call>\n<function=f>\n<parameter=s>\nx", [("f", '{"s": "x', "invalid")]),
    ],
)  # fmt: skip
def test_qwen3_coder(written: str, wanted: list[Any], tokens: list[str]):
    check("qwen3_coder", tokens, written, *wanted)


def test_other_dialects():
    check(
        "deepseek_v4",
        ["｜DSML｜"],
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n{"s": "x"}\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        ("f", ARGS),
    )
    check(
        "mistral",
        [],
        '[TOOL_CALLS] [{"name": "f", "arguments": {"s": "x"}}]\nBye',
        ("f", ARGS),
        "\nBye",
    )
    check("mistral", [], '[TOOL_CALLS]f{"s": "x"}', ("f", ARGS))
    check("mistral", ["[TOOL_CALLS]"], "[TOOL_CALLS]", "[TOOL_CALLS]")
    check("llama3", [], '<|python_tag|>f.call(s="x")', ("f", ARGS.replace(" ", "")))
    check("llama3", [], "<|python_tag|>import os", "<|python_tag|>import os")
    check("llama3", [], '{"n": 42}', '{"n": 42}')
    check("llama3", [], '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}')
    check("llama3", [], '{"name": "Ada"}', '{"name": "Ada"}')
    check("llama4", [], "[see other(1)]", "[see other(1)]")
    check(
        "llama4",
        [],
        "[f(s='it\\'s', n=-1.5e3, o={'a': (1, None)})]",
        ("f", '{"s":"it\'s", "n":-1.5e3, "o":{"a": [1, null]}}'),
    )
    check(
        "gemma4",
        [],
        '<|tool_call>call:f{s:<|"|>"q" \\ \n<|"|>,n:1}<tool_call|>',
        ("f", '{"s":"\\"q\\" \\\\ \\n","n":1}'),
    )
    check(
        "kimi_k2",
        [],
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>oops<|tool_call_end|><|tool_calls_section_end|>A",
        ("f", "oops", "invalid"),
        "A",
    )
    check(
        "harmony",
        [],
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>A",
        {"thinking": "hm"},
        "A",
    )
    check(
        "harmony",
        [],
        "<|channel|>commentary to=python<|message|>print(1)<|call|>",
        ("python", "print(1)", "invalid"),
    )
    check("harmony", [], "No header at all", "No header at all")
    check(
        "harmony", [], "<|channel|>commentary to=functions.f<|message|>{}<|call|>", "{}", tools=[]
    )
    check("glm47", [], "A<tool_call>now</tool_call>B", "A", ("now", "{}"), "B")


def test_long_arguments_flow_in_every_dialect():
    """Field case 6: no long silence, whatever the dialect."""
    long = "word " * 400
    writings = {
        "hermes": '<tool_call>\n{"name": "f", "arguments": {"s": "%s"}}\n</tool_call>',
        "qwen3_coder": X.replace("{}", "%s"),
        "glm47": "<tool_call>f<arg_key>s</arg_key><arg_value>%s</arg_value></tool_call>",
        "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="s" string="true">%s</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "gemma4": '<|tool_call>call:f{s:<|"|>%s<|"|>}<tool_call|>',
        "lfm2": "<|tool_call_start|>[f(s='%s')]<|tool_call_end|>",
        "harmony": '<|channel|>commentary to=functions.f<|message|>{"s": "%s"}<|call|>',
    }
    for name, writing in writings.items():
        form = markup(name)
        parser = OutputParser(form, tools=TOOLS)
        silent = longest = 0
        for char in writing % long:
            silent = 0 if parser.feed(None, char) else silent + 1
            longest = max(longest, silent)
        assert longest < 100, name
        ends = [event for event in parser.finish(False) if isinstance(event, CallEnd)]
        assert all(event.valid for event in ends)


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("seed", range(25))
def test_any_output_at_all_is_taken_apart(name: str, seed: int):
    """Random pieces of markup: nothing raises, ends agree with starts, cuts change nothing."""
    chance = random.Random(seed)
    markers = sorted(markers_of(DIALECTS[name]))
    words = [
        *markers,
        *markers,
        '{"name": "f", "arguments": {',
        '"s": "',
        '\\"',
        "f",
        "now",
        *'x \n<[,"}',
    ]
    tokens = chance.sample(markers, len(markers) // 2) if seed % 2 else []
    written = "".join(chance.choice(words) for _ in range(40))
    form = markup(name, dict.fromkeys(tokens))
    pieces = pieces_of(written, form)
    for cut in (False, True):
        events = []
        parser = OutputParser(form, tools=TOOLS)
        for token, text in pieces:
            events += parser.feed(token, text)
        events += parser.finish(cut)
        starts = [e.index for e in events if isinstance(e, CallStart)]
        ends = [e.index for e in events if isinstance(e, CallEnd)]
        assert starts == ends == list(range(len(starts)))
        shown = "".join(e.text for e in events if isinstance(e, Text | Reasoning))
        shown.encode()  # no symbol is left
        assert parse(form, _joined(pieces), cut=cut) == short(events)


# --- the script model's answers, token by token ---------------------------------------------------

SCRIPTS = Path(__file__).parents[1] / "data" / "script-model"
SCRIPT_TEXT = TextModel(SCRIPTS)
ANSWERS = json.loads((SCRIPTS / "answers.json").read_text())
RAW = {"S43", "S44", "S45", "S46", "S53", "S54"}  # what is wrong with them has cases above
MARKERS = {"<think>": 8123, "</think>": 8124, "<tool_call>": 8125, "</tool_call>": 8126}


@pytest.mark.parametrize("key", sorted(ANSWERS.keys() - RAW))
@pytest.mark.parametrize("per_output", [1, 7, 10_000])
def test_answers_of_the_script_model(key: str, per_output: int):
    script = ANSWERS[key]
    tools = [Declared(call["name"]) for call in script["calls"]] or [Declared("f")]
    form = Markup(DIALECTS["hermes"], MARKERS)
    reading = Reading(StopSet(()), parser=lambda: OutputParser(form, tools=tools))
    answer = Answer(SCRIPT_TEXT, reading)
    ids = script["token_ids"]
    outputs = [ids[i : i + per_output] for i in range(0, len(ids), per_output)]
    whole = joined(
        [
            answer.push(
                Output("r", tuple(part), finish=Finish.EOS if i + 1 == len(outputs) else None)
            )
            for i, part in enumerate(outputs)
        ]
    )
    thinking = "".join(event.text for event in whole.events if isinstance(event, Reasoning))
    ends = [event for event in whole.events if isinstance(event, CallEnd)]
    assert thinking == script["thinking"]
    assert whole.text == script["text"]
    assert [json.loads(event.arguments) for event in ends] == [
        c["arguments"] for c in script["calls"]
    ]
    names = [event.name for event in whole.events if isinstance(event, CallStart)]
    assert names == [call["name"] for call in script["calls"]]
    assert all(event.valid for event in ends)
    assert (answer.reasoning_tokens > 0) == bool(script["thinking"])


@pytest.mark.parametrize("key", sorted(ANSWERS.keys() - RAW))
def test_history_renders_as_it_was_generated(key: str):
    """What the parser tells of an answer is what the template makes the same answer of."""
    script = ANSWERS[key]
    tools = [Declared(call["name"]) for call in script["calls"]] or [Declared("f")]
    parser = OutputParser(Markup(DIALECTS["hermes"], MARKERS), tools=tools)
    detokenizer = SCRIPT_TEXT.detokenizer()
    ids = script["token_ids"][:-1]
    told = short(
        [event for token in ids for event in parser.feed(token, detokenizer.push(token))]
        + parser.finish(False)
    )
    calls = [
        {"id": "c", "type": "function", "function": {"name": item[0], "arguments": item[1]}}
        for item in told
        if isinstance(item, tuple)
    ]
    message = {
        "role": "assistant",
        "content": "".join(item for item in told if isinstance(item, str)),
        "reasoning_content": "".join(i["thinking"] for i in told if isinstance(i, dict)),
        "tool_calls": calls,
    }
    history = SCRIPT_TEXT.render(normalise([{"role": "user", "content": key}, message]))
    assert f"assistant\n{script['answer']}<|im_end|>" in history


# --- which dialect --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony"),
        ("'<|tool_call>call:' + function['name'] + '{'", "gemma4"),
        ('set dsml_token = "｜DSML｜" <{{ dsml_token }}function_calls>', "deepseek_v32"),
        ('set dsml_token = "｜DSML｜" <{{ dsml_token }}tool_calls>', "deepseek_v4"),
        ("<｜tool▁calls▁begin｜> function<｜tool▁sep｜> '\\n' + '```json'", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek_v31"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("toolcall_begin_token = '<minimax:tool_call>'", "minimax_m2"),
        ("toolcall_begin_token = '<seed:tool_call>'", "seed_oss"),
        ("{{ '\\n<tool_call>' + tc.name }} <arg_key>{{ k }}</arg_key>", "glm45"),
        ("{{- '<tool_call>' + tc.name -}} <arg_key>{{ k }}</arg_key>", "glm47"),
        ("'<tool_call>\\n<function=' + tool_call.name", "qwen3_coder"),
        ("<|tool_call_start|>[", "lfm2"),
        ("<|tool_call|>", "granite"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ('<tool_call>\\n{"name": "', "hermes"),
        ('<|start_header_id|> \'{"name": "\' + \'"parameters": \'', "llama3"),
        ("<|header_start|>assistant tools", "llama4"),
        ("{{ message.content }}", "plain"),
    ],
)
def test_dialect_of_a_template(source: str, name: str):
    assert detect(source, {}).name == name
    assert detect("{{ message.content }}", {}, chosen=name).name == name


def test_a_model_that_was_not_taught_to_think_has_no_markers_of_thinking():
    assert detect("<tool_call>", {}).think is None
    assert detect("<tool_call> </think>", {}).think is not None
    assert detect("<tool_call>", {"<think>": 1, "</think>": 2}).think is not None
    check("plain", [], "no <tool_call>{}</tool_call> here", "no <tool_call>{}</tool_call> here")


def test_an_unknown_dialect_is_refused_with_those_there_are():
    with pytest.raises(ConfigError) as refused:
        detect("", {}, chosen="klingon")
    assert "hermes" in str(refused.value.hint)
