"""Answers of every dialect, written as the families' chat templates write them, taken apart again.

``write`` is the inverse of the parser, made from the published templates; what comes back must be
what went in, however the answer was cut into pieces.
"""

# ruff: noqa: E501 - patterns and templates are clearer in one line

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ftd.text.dialects import DIALECTS, Markup
from ftd.text.events import CallArguments, CallEnd, CallStart, Event, Reasoning, Text
from ftd.text.parse import OutputParser


@dataclass(frozen=True)
class Declared:
    name: str
    parameters: dict[str, Any]


ANYTHING = {"type": ["object", "array", "number", "boolean", "null"]}
TOOLS = [
    Declared(
        "write_file",
        {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "text": {"type": "string"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "count": {"type": "integer"},
                "options": ANYTHING,
            },
        },
    ),
    Declared("now", {"type": "object", "properties": {}}),
    Declared(
        "mcp__web__search-it",
        {"properties": {"path": {"$ref": "#/$defs/p"}}, "$defs": {"p": {"type": "string"}}},
    ),
]
Call = tuple[str, dict[str, Any]]


# --- the templates -------------------------------------------------------------------------------


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def function_call(call: Call, pad: str = "") -> str:
    name, arguments = call
    params = "".join(
        f"<parameter={k}>{pad}{plain(v)}{pad}</parameter>\n" for k, v in arguments.items()
    )
    return f"<function={name}>\n{params}</function>"


def thought(thinking: str, before: str, after: str) -> str:
    return f"{before}{thinking}{after}" if thinking else ""


def hermes(thinking: str, text: str, calls: Sequence[Call]) -> str:
    blocks = [
        f'<tool_call>\n{{"name": {dumps(n)}, "arguments": {dumps(a)}}}\n</tool_call>'
        for n, a in calls
    ]
    return thought(thinking, "<think>\n", "\n</think>\n\n") + "\n".join(
        [text] * bool(text) + blocks
    )


def granite(thinking: str, text: str, calls: Sequence[Call]) -> str:
    objects = ", ".join(f'{{"name": {dumps(n)}, "arguments": {dumps(a)}}}' for n, a in calls)
    block = f"<|tool_call|>[{objects}]" if calls else ""
    return thought(thinking, "<think>\n", "\n</think>\n\n") + text + block


def llama3(thinking: str, text: str, calls: Sequence[Call]) -> str:
    objects = [f'{{"name": {dumps(n)}, "parameters": {dumps(a)}}}' for n, a in calls]
    return text or "; ".join(objects)


def qwen3_coder(thinking: str, text: str, calls: Sequence[Call]) -> str:
    blocks = [f"<tool_call>\n{function_call(call, chr(10))}\n</tool_call>" for call in calls]
    between = "\n\n" if text and calls else ""
    return thought(thinking, "<think>\n", "\n</think>\n\n") + text + between + "\n".join(blocks)


def seed_oss(thinking: str, text: str, calls: Sequence[Call]) -> str:
    blocks = [f"\n<seed:tool_call>\n{function_call(call)}\n</seed:tool_call>" for call in calls]
    text += "\n" if text and calls else ""
    return thought(thinking, "<seed:think>", "</seed:think>\n") + text + "".join(blocks)


def glm45(thinking: str, text: str, calls: Sequence[Call]) -> str:
    blocks = "".join(
        f"\n<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{plain(v)}</arg_value>\n"
            for k, v in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )
    return thought(thinking, "\n<think>", "</think>\n") + text + blocks


def glm47(thinking: str, text: str, calls: Sequence[Call]) -> str:
    return (
        thought(thinking, "<think>", "</think>")
        + text
        + "".join(
            f"<tool_call>{name}"
            + "".join(
                f"<arg_key>{k}</arg_key><arg_value>{plain(v)}</arg_value>"
                for k, v in arguments.items()
            )
            + "</tool_call>"
            for name, arguments in calls
        )
    )


def minimax_m2(thinking: str, text: str, calls: Sequence[Call]) -> str:
    invokes = "".join(
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{k}">{plain(v)}</parameter>\n' for k, v in arguments.items())
        + "</invoke>\n"
        for name, arguments in calls
    )
    block = f"\n<minimax:tool_call>\n{invokes}</minimax:tool_call>" if calls else ""
    return thought(thinking, "<think>\n", "\n</think>\n\n") + text + block


def dsml(block: str, thinking: str, text: str, calls: Sequence[Call]) -> str:
    tag = "｜DSML｜"

    def parameter(k: str, v: Any) -> str:
        string = "true" if isinstance(v, str) else "false"
        return f'<{tag}parameter name="{k}" string="{string}">{plain(v)}</{tag}parameter>'

    invokes = "".join(
        f'\n<{tag}invoke name="{name}">\n'
        + "\n".join(parameter(k, v) for k, v in arguments.items())
        + f"\n</{tag}invoke>"
        for name, arguments in calls
    )
    calls_text = f"\n\n<{tag}{block}>{invokes}\n</{tag}{block}>" if calls else ""
    return thought(thinking, "<think>", "</think>") + text + calls_text


def deepseek_v32(thinking: str, text: str, calls: Sequence[Call]) -> str:
    return dsml("function_calls", thinking, text, calls)


def deepseek_v4(thinking: str, text: str, calls: Sequence[Call]) -> str:
    return dsml("tool_calls", thinking, text, calls)


def deepseek_v31(thinking: str, text: str, calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{dumps(a)}<｜tool▁call▁end｜>" for n, a in calls
    )
    block = f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>" if calls else ""
    return thought(thinking, "<think>", "</think>") + text + block


def deepseek_v3(thinking: str, text: str, calls: Sequence[Call]) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{dumps(a)}\n```<｜tool▁call▁end｜>"
        for n, a in calls
    )
    block = f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>" if calls else ""
    return thought(thinking, "<think>\n", "\n</think>\n\n") + text + block


def kimi_k2(thinking: str, text: str, calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{dumps(a)}<|tool_call_end|>"
        for i, (n, a) in enumerate(calls)
    )
    block = f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>" if calls else ""
    return thought(thinking, "<think>", "</think>") + text + block


def mistral(thinking: str, text: str, calls: Sequence[Call]) -> str:
    blocks = [f"[TOOL_CALLS]{n}[ARGS]{dumps(a)}" for n, a in calls]
    return thought(thinking, "[THINK]", "[/THINK]") + text + "".join(blocks)


def mistral_v7(thinking: str, text: str, calls: Sequence[Call]) -> str:
    objects = ", ".join(
        f'{{"name": {dumps(n)}, "arguments": {dumps(a)}, "id": "abcdefgh{i}"}}'
        for i, (n, a) in enumerate(calls)
    )
    return text + (f"[TOOL_CALLS][{objects}]" if calls else "")


def mistral_ids(thinking: str, text: str, calls: Sequence[Call]) -> str:
    return text + "".join(
        f"[TOOL_CALLS]{n}[CALL_ID]abcdefgh{i}[ARGS]{dumps(a)}" for i, (n, a) in enumerate(calls)
    )


def harmony(thinking: str, text: str, calls: Sequence[Call]) -> str:
    messages = [f"<|channel|>analysis<|message|>{thinking}"] * bool(thinking)
    channel = "commentary" if calls else "final"
    messages += [f"<|channel|>{channel}<|message|>{text}"] * bool(text)
    for i, (n, a) in enumerate(calls):
        if i % 2:
            head = f" to=functions.{n}<|channel|>commentary json"
        else:
            head = f"<|channel|>commentary to=functions.{n} <|constrain|>json"
        messages.append(f"{head}<|message|>{dumps(a)}")
    return "<|end|><|start|>assistant".join(messages) + ("<|call|>" if calls else "")


def gemma4(thinking: str, text: str, calls: Sequence[Call]) -> str:
    def argument(value: Any) -> str:
        match value:
            case str():
                return f'<|"|>{value}<|"|>'
            case dict():
                return "{" + ",".join(f"{k}:{argument(v)}" for k, v in value.items()) + "}"
            case list():
                return "[" + ",".join(map(argument, value)) + "]"
        return dumps(value)

    blocks = [
        f"<|tool_call>call:{name}{argument(arguments)}<tool_call|>" for name, arguments in calls
    ]
    return thought(thinking, "<|channel>thought\n", "\n<channel|>") + text + "".join(blocks)


def python_call(call: Call) -> str:
    return f"{call[0]}({', '.join(f'{k}={v!r}' for k, v in call[1].items())})"


def lfm2(thinking: str, text: str, calls: Sequence[Call]) -> str:
    block = f"<|tool_call_start|>[{', '.join(map(python_call, calls))}]<|tool_call_end|>"
    return thought(thinking, "<think>", "</think>") + text + block * bool(calls)


def llama4(thinking: str, text: str, calls: Sequence[Call]) -> str:
    return text or f"[{', '.join(map(python_call, calls))}]" * bool(calls)


def gemma3(thinking: str, text: str, calls: Sequence[Call]) -> str:
    block = "```tool_code\n" + "\n".join(map(python_call, calls)) + "\n```"
    return "\n".join([text] * bool(text) + [block] * bool(calls))


def plain_dialect(thinking: str, text: str, calls: Sequence[Call]) -> str:
    return thought(thinking, "<think>\n", "\n</think>\n\n") + text


TEMPLATES = {
    "hermes": hermes,
    "granite": granite,
    "llama3": llama3,
    "qwen3_coder": qwen3_coder,
    "seed_oss": seed_oss,
    "glm45": glm45,
    "glm47": glm47,
    "minimax_m2": minimax_m2,
    "deepseek_v32": deepseek_v32,
    "deepseek_v4": deepseek_v4,
    "deepseek_v31": deepseek_v31,
    "deepseek_v3": deepseek_v3,
    "kimi_k2": kimi_k2,
    "mistral": mistral,
    "mistral v7": mistral_v7,
    "mistral ids": mistral_ids,
    "harmony": harmony,
    "gemma4": gemma4,
    "lfm2": lfm2,
    "llama4": llama4,
    "gemma3": gemma3,
    "plain": plain_dialect,
}
WITHOUT_THINKING = {"llama3", "mistral v7", "mistral ids", "llama4", "gemma3"}
EITHER = {"llama3", "llama4"}  # text or calls
WITHOUT_DASHES = {"gemma4", "lfm2", "llama4", "gemma3"}  # names are as in Python

# What the tokenizers of these families have as tokens of their own.
USUAL = r"</?[|｜]?[a-z▁_]+[|｜]?>|\[/?[A-Z_]+\]"
UNUSUAL = {
    "deepseek_v32": "｜DSML｜|</?think>",
    "deepseek_v4": "｜DSML｜|</?think>",
    "qwen3_coder": "</?(?:think|tool_call)>",
    "minimax_m2": "</?(?:think|minimax:tool_call)>",
    "seed_oss": "</?seed:[a-z_]+>",
    "gemma4": r"<\|?(?:channel|tool_call|\")\|?>",
    "gemma3": "(?!)",
}
TOKENS = {
    name: re.findall(UNUSUAL.get(name, USUAL), template("x", "x", [("now", {"path": "a"})] * 2))
    for name, template in TEMPLATES.items()
}


# --- feeding -------------------------------------------------------------------------------------

# Characters of literal text that must not become markers: the tokenizer spells them in pieces.
MASK = {"<": "𐀀", "[": "𐀁", "｜": "𐀂", "|": "𐀃"}


def mask(value: Any) -> Any:
    if isinstance(value, str):
        return value.translate(str.maketrans(MASK))
    if isinstance(value, dict):
        return {mask(k): mask(v) for k, v in value.items()}
    return [mask(item) for item in value] if isinstance(value, list) else value


def unmask(text: str) -> str:
    return text.translate({ord(v): k for k, v in MASK.items()})


def markup(name: str, tokens: Iterable[str] = ()) -> Markup:
    return Markup(
        DIALECTS[name.partition(" ")[0]], {token: 1000 + i for i, token in enumerate(tokens)}
    )


def pieces_of(masked: str, form: Markup) -> list[tuple[int | None, str]]:
    """One piece for each marker token and for each character of the rest."""
    ids = {form.spelling[ord(symbol)]: token for token, symbol in form.symbols.items()}
    pieces: list[tuple[int | None, str]] = []
    pattern = "|".join(re.escape(token) for token in sorted(ids, key=len, reverse=True)) or "(?!)"
    last = 0
    for match in re.finditer(pattern, masked):
        pieces += [(None, char) for char in unmask(masked[last : match.start()])]
        pieces.append((ids[match[0]], match[0] if ids[match[0]] % 2 else ""))  # visible or not
        last = match.end()
    return pieces + [(None, char) for char in unmask(masked[last:])]


def grouped(
    pieces: Sequence[tuple[int | None, str]], cuts: Iterable[int]
) -> list[tuple[int | None, str]]:
    """Neighbouring characters joined, except at ``cuts``."""
    wanted, out = set(cuts), []
    for i, (token, text) in enumerate(pieces):
        if out and token is None and out[-1][0] is None and i not in wanted:
            out[-1] = (None, out[-1][1] + text)
        else:
            out.append((token, text))
    return out


def parse(
    form: Markup,
    pieces: Iterable[tuple[int | None, str]],
    *,
    tools: Sequence[Declared] = TOOLS,
    cut: bool = False,
    thinking_open: bool = False,
) -> list[Event]:
    parser = OutputParser(form, tools=tools, thinking_open=thinking_open)
    events = [event for token, text in pieces for event in parser.feed(token, text)]
    return merged(events + parser.finish(cut))


def merged(events: Iterable[Event]) -> list[Event]:
    out: list[Event] = []
    for event in events:
        match out[-1] if out else None, event:
            case Text(before), Text(text):
                out[-1] = Text(before + text)
            case Reasoning(before), Reasoning(text):
                out[-1] = Reasoning(before + text)
            case CallArguments(index, before), CallArguments(_, fragment):
                out[-1] = CallArguments(index, before + fragment)
            case _:
                out.append(event)
    return out


def expected(thinking: str, text: str, calls: Sequence[Call]) -> list[Any]:
    return [*[("thinking", thinking)] * bool(thinking), *[("text", text)] * bool(text), *calls]


def content(events: Iterable[Event]) -> list[Any]:
    """What was written; checks on the way that fragments and ends of calls agree."""
    out: list[Any] = []
    fragments: list[str] = []
    name = ""
    for event in events:
        match event:
            case Reasoning(text):
                out.append(("thinking", text))
            case Text(text):
                out.append(("text", text))
            case CallStart(_, name):
                fragments = []
            case CallArguments(_, fragment):
                fragments.append(fragment)
            case CallEnd(_, arguments, valid):
                assert "".join(fragments) == arguments
                out.append((name, json.loads(arguments)) if valid else (name, arguments, "invalid"))
    return out


# --- answers -------------------------------------------------------------------------------------

NASTY = [
    "</tool_call>", "<tool_call>", "</parameter>", "</think>", "{", '"', "\\", "\\u00e9", "\n", "'",
    "\t", "😀", "漢字", "<", "</", "[TOOL_CALLS]", "<|call|>", "```", "e\u0301", "\u2028", "null", "}}", "|", "｜DSML｜", '<|"|>', "&amp;", "\x00",
]  # fmt: skip
texts = st.lists(
    st.one_of(
        st.sampled_from(NASTY),
        st.text("ab {}:,\"'\\\n=()", max_size=6),
        st.text(st.characters(exclude_characters="𐀀𐀁𐀂𐀃", codec="utf-8"), max_size=3),
    ),
    max_size=6,
).map("".join)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**53), 2**53),
    st.floats(allow_nan=False, allow_infinity=False),
    texts,
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["a", "b_c", "d9"]), inner, max_size=3),
    ),
    max_leaves=6,
)
containers = st.one_of(
    st.lists(values, max_size=3), st.dictionaries(st.sampled_from(["a", "key"]), values, max_size=3)
)
files = st.fixed_dictionaries(
    {"path": texts},
    optional={
        "text": texts,
        "note": texts.filter(lambda t: t.strip() not in ("null", "None")),
        "count": st.integers(),
        "options": containers,
    },
)
calls = st.one_of(
    st.tuples(st.just("write_file"), files),
    st.tuples(st.just("now"), st.just({})),
    st.tuples(st.just("mcp__web__search-it"), st.fixed_dictionaries({"path": texts})),
)
prose = texts.filter(lambda text: text == "" or bool(text.strip()))
answers = st.tuples(prose.map(str.strip), prose, st.lists(calls, max_size=3))


def within(name: str, thinking: str, text: str, said: list[Call]) -> tuple[str, str, list[Call]]:
    """The part of an answer that the dialect can write at all."""
    if name in WITHOUT_THINKING:
        thinking = ""
    if name == "plain":
        said = []
    if name in EITHER:
        said = [] if text else said
        text = text.lstrip(" \t\r\n{[")
    if name in WITHOUT_DASHES:
        said = [(n, a) for n, a in said if "-" not in n]
    if name == "gemma3":
        assume("```" not in text + repr(said))
    if name == "harmony" and not thinking and not text and not said:
        text = "x"
    return thinking, text, said


def unambiguous(name: str, said: Sequence[Call]) -> bool:
    """No value of an XML-like dialect holds its own end just as it would have to be written."""
    strings = [v for _, a in said for v in a.values() if isinstance(v, str)]
    ends = re.compile(
        r"</(?:｜DSML｜)?parameter>\s*(?:</?(?:｜DSML｜)?(?:function|invoke|parameter|tool_call|seed:|minimax:)|$)|</arg_value>\s*(?:<arg_key>|</tool_call>|$)|</(?:function|invoke)>\n</"
    )
    return not any(ends.search(v) for v in strings)


PROPERTY = settings(max_examples=30, deadline=None)


@pytest.mark.parametrize("name", TEMPLATES)
@PROPERTY
@given(answer=answers, cuts=st.lists(st.integers(0, 400), max_size=40))
def test_what_was_written_comes_back_with_markers_as_tokens(name: str, answer, cuts):
    thinking, text, said = within(name, *answer)
    assume(unambiguous(name, said))
    form = markup(name, dict.fromkeys(TOKENS[name]))
    pieces = pieces_of(
        TEMPLATES[name](mask(thinking), mask(text), [(n, mask(a)) for n, a in said]), form
    )
    by_character = parse(form, pieces)
    assert content(by_character) == expected(thinking, text, said)
    assert parse(form, grouped(pieces, cuts)) == by_character
    assert parse(form, grouped(pieces, ())) == by_character


@pytest.mark.parametrize("name", TEMPLATES)
@PROPERTY
@given(answer=answers, cuts=st.lists(st.integers(0, 400), max_size=40))
def test_what_was_written_comes_back_with_markers_as_strings(name: str, answer, cuts):
    thinking, text, said = within(name, *answer)
    assume(unambiguous(name, said))
    form = markup(name)
    markers = {marker for token in TOKENS.values() for marker in token} | {"｜DSML｜"}
    assume(not any(marker in thinking + text for marker in markers))
    if name == "gemma4":
        assume('<|"|>' not in dumps(said).replace('\\"', '"'))
    if name == "harmony":
        assume("<|" not in thinking + text)
    pieces = [(None, char) for char in TEMPLATES[name](thinking, text, said)]
    by_character = parse(form, pieces)
    assert content(by_character) == expected(thinking, text, said)
    assert parse(form, grouped(pieces, cuts)) == by_character
    assert parse(form, grouped(pieces, ())) == by_character
