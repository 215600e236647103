"""How model families write thinking and tool calls: data, and the choice among them.

A family's chat template is the norm: its markers, and which newlines around them are markup. The
parser (``ftd.text.parse``) knows the few forms below; everything else about a family is a row.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ftd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Think:
    """Markers of thinking, and what the template writes inside and behind them."""

    open: str
    close: str
    lead: str = "\n"
    trail: str = "\n"
    after: str = "\n\n"
    also_open: str = ""  # another end of a prompt that has begun to think


@dataclass(frozen=True, slots=True)
class Head:
    """A call is ``open`` header ``end`` {JSON} ``close``."""

    name: str  # pattern of the header, with a group ``name``
    open: str = ""
    end: tuple[str, ...] = ()  # the first that comes; a brace belongs to the JSON already
    close: str = ""
    header: str = "{}"  # as the template writes it; text behind the name is followed by a number
    tail: str = ""  # what it writes between JSON and ``close``
    call_id: str = ""  # may stand behind the name, and an id behind it


@dataclass(frozen=True, slots=True)
class Params:
    """A call is ``open`` name ``name_end`` and for each argument a key and a value."""

    key: tuple[str, str]
    value: tuple[str, str]  # an empty first one: the value begins where the key ends
    open: str = ""
    name_end: str = ""  # empty: the name ends with its line, the first key or the block
    close: str = ""  # empty: the call ends with its block
    pad: str = ""  # what the template writes around values
    typed: str = ""  # within a key, before "true" for strings and "false" for JSON
    json: bool = False  # a JSON object may stand in place of keys and values


@dataclass(frozen=True, slots=True)
class Expression:
    """A call is ``open`` name and arguments in a bracket, as in a programming language."""

    bracket: str  # "(" or "{"
    open: str = ""
    quotes: tuple[str, ...] = ("'", '"')
    close: str = ""


@dataclass(frozen=True, slots=True)
class History:
    """What a family's template wants to find in messages of the past; see ``ftd.text.history``."""

    text_arguments: bool = False  # it joins arguments to text, so they have to be text
    numbered_ids: bool = False  # it writes ids, as functions.name:number
    one_call: bool = False  # it writes only the first call of a message


@dataclass(frozen=True, slots=True)
class Dialect:
    """One family's way. Calls stand in a block; one block may hold several."""

    name: str
    signs: tuple[str, ...] = ()  # all stand in the source of a template of this dialect
    think: Think | None = None
    block: tuple[str, str] = ("", "")  # empty end: it ends with the answer or with other text
    before: str = ""  # newlines the template writes between text and block
    json: bool = False  # calls are JSON objects with name and arguments, alone or in a list
    json_listed: bool = False  # the template writes a list
    call: Head | Params | Expression | None = None
    bare: str = ""  # an answer that begins with one of these may be calls without a block's marker
    channels: bool = False  # harmony: everything is a message with a header
    others: tuple[str, ...] = ()  # further markers
    history: History = History()


_THINK = Think("<think>", "</think>")
_AFTER_LINE = replace(_THINK, after="\n")
_AFTER_NOTHING = replace(_THINK, after="")
_TIGHT = Think("<think>", "</think>", "", "", "")
_TOOL_CALL = ("<tool_call>", "</tool_call>")
_DEEPSEEK_BLOCK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CALL = {"open": "<｜tool▁call▁begin｜>", "close": "<｜tool▁call▁end｜>"}
_SEED_BLOCK = ("<seed:tool_call>", "</seed:tool_call>")
_FUNCTION = Params(
    ("<parameter=", ">"), ("", "</parameter>"), "<function=", ">", close="</function>"
)
_INVOKE = Params(
    ('<parameter name="', '">'), ("", "</parameter>"), '<invoke name="', '">', close="</invoke>"
)
_DSML = Params(
    ('<｜DSML｜parameter name="', '">'),
    ("", "</｜DSML｜parameter>"),
    '<｜DSML｜invoke name="',
    '">',
    close="</｜DSML｜invoke>",
    typed='" string="',
    json=True,
)
_GLM = Params(("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"))
_HARMONY = r"(?s).*?\bto=(?:functions\.)?(?P<name>[^\s<]+).*"
_KIMI = r"\s*(?:functions\.)?(?P<name>[^\s:]+)(?::\d+)?\s*"

# The first whose signs are all found is taken, so the more particular ones stand first.
_ROWS = (
    Dialect(
        "harmony",
        ("<|channel|>", "<|message|>"),
        Think("", "", "", "", ""),
        ("<|start|>", ""),
        call=Head(_HARMONY, end=("<|message|>",), close="<|call|>"),
        channels=True,
        others=("<|channel|>", "<|end|>", "<|return|>", "<|constrain|>"),
        history=History(one_call=True),
    ),
    Dialect(
        "gemma4",
        ("<|tool_call>",),
        Think("<|channel>", "<channel|>", "thought\n", "\n", ""),
        ("<|tool_call>", "<tool_call|>"),
        call=Expression("{", "call:", ('<|"|>',)),
    ),
    Dialect(
        "deepseek_v4",
        ("DSML", "tool_calls>"),
        _AFTER_NOTHING,
        ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
        "\n\n",
        call=_DSML,
    ),
    Dialect(
        "deepseek_v32",
        ("DSML",),
        _AFTER_NOTHING,
        ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        "\n\n",
        call=_DSML,
    ),
    Dialect(
        "deepseek_v3",
        (_DEEPSEEK_BLOCK[0], "```json"),
        _THINK,
        _DEEPSEEK_BLOCK,
        call=Head(
            r"\s*function<｜tool▁sep｜>(?P<name>\S+)\s*",
            end=("```json",),
            header="function<｜tool▁sep｜>{}",
            tail="\n```",
            **_DEEPSEEK_CALL,
        ),
        others=("<｜tool▁sep｜>",),
        history=History(text_arguments=True),
    ),
    Dialect(
        "deepseek_v31",
        (_DEEPSEEK_BLOCK[0],),
        _AFTER_NOTHING,
        _DEEPSEEK_BLOCK,
        call=Head(r"\s*(?P<name>\S+)\s*", end=("<｜tool▁sep｜>",), **_DEEPSEEK_CALL),
        history=History(text_arguments=True),
    ),
    Dialect(
        "kimi_k2",
        ("<|tool_calls_section_begin|>",),
        _AFTER_NOTHING,
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        call=Head(
            _KIMI,
            "<|tool_call_begin|>",
            ("<|tool_call_argument_begin|>",),
            "<|tool_call_end|>",
            "functions.{}:",
        ),
        history=History(numbered_ids=True),
    ),
    Dialect(
        "minimax_m2",
        ("<minimax:tool_call>",),
        _THINK,
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        "\n",
        call=_INVOKE,
    ),
    Dialect(
        "seed_oss",
        (_SEED_BLOCK[0],),
        Think("<seed:think>", "</seed:think>", after="\n", also_open="<seed:cot_budget_reflect>"),
        _SEED_BLOCK,
        "\n\n",
        call=_FUNCTION,
    ),
    # GLM 4.5 and 4.6 write a line each for call, key and value, 4.7 and 5 no newlines at all
    Dialect("glm45", ("<arg_key>", r"\n<tool_call>"), _AFTER_LINE, _TOOL_CALL, "\n", call=_GLM),
    Dialect("glm47", ("<arg_key>",), _TIGHT, _TOOL_CALL, call=_GLM),
    Dialect(
        "qwen3_coder",
        ("<tool_call>", "<function="),
        _THINK,
        _TOOL_CALL,
        "\n\n",
        call=replace(_FUNCTION, pad="\n"),
    ),
    Dialect(
        "lfm2",
        ("<|tool_call_start|>",),
        _TIGHT,
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        call=Expression("("),
    ),
    Dialect(
        "granite",
        ("<|tool_call|>",),
        _THINK,
        ("<|tool_call|>", ""),
        json=True,
        json_listed=True,
    ),
    Dialect(
        "mistral",
        ("[TOOL_CALLS]",),
        Think("[THINK]", "[/THINK]", "", "", ""),
        ("[TOOL_CALLS]", ""),
        json=True,
        json_listed=True,
        call=Head(
            r"\s*(?P<name>[^\s\[]+)(?:\[CALL_ID\]\w+)?\s*",
            end=("[ARGS]", "{"),
            call_id="[CALL_ID]",
        ),
    ),
    Dialect("hermes", ("<tool_call>",), _THINK, _TOOL_CALL, "\n", json=True),
    Dialect(
        "llama3",
        ("<|start_header_id|>", "parameters"),
        _THINK,
        ("<|python_tag|>", ""),
        json=True,
        call=Expression("("),
        bare="{",
    ),
    Dialect(
        "llama4",
        ("<|header_start|>", "tool"),
        _THINK,
        ("<|python_start|>", "<|python_end|>"),
        json=True,
        call=Expression("("),
        bare="[{",
    ),
    Dialect("gemma3", ("tool_code",), None, ("```tool_code", "```"), "\n", call=Expression("(")),
    Dialect("plain", (), _THINK),
)
DIALECTS: Mapping[str, Dialect] = {row.name: row for row in _ROWS}


def refuse_unknown(chosen: str) -> None:
    """Raise ConfigError where ``--tool-dialect`` names none."""
    if chosen not in ("auto", *DIALECTS):
        raise ConfigError(
            f"--tool-dialect: there is none of the name {chosen!r}",
            hint=f"known are auto, {', '.join(DIALECTS)}",
        )


def detect(template: str, added_tokens: Iterable[str], chosen: str | None = None) -> Dialect:
    """The dialect of a checkpoint.

    Args:
        template: source of its chat template.
        added_tokens: those its tokenizer has beside its ordinary vocabulary.
        chosen: the setting; None: found by the template.
    Raises:
        ConfigError: there is no dialect of the name chosen.
    """
    if chosen is not None:
        refuse_unknown(chosen)
    dialect = next(row for row in _ROWS if all(sign in template for sign in row.signs))
    dialect = DIALECTS[chosen] if chosen else dialect
    think = dialect.think
    if think and not (dialect.channels or think.close in template or think.close in added_tokens):
        dialect = replace(dialect, think=None)
    return dialect


@dataclass(frozen=True, slots=True)
class Thought:
    """Where an answer's thinking stands when it begins."""

    open: bool = False  # the prompt has begun it
    optional: bool = False  # the answer may begin with it


class Marks:
    """Finds the first of some strings in text that comes in pieces."""

    def __init__(self, marks: Iterable[str]) -> None:
        wanted = sorted({mark for mark in marks if mark}, key=len, reverse=True) or ["\ud800"]
        self.firsts = {mark[0] for mark in wanted}
        self._longest = len(wanted[0])
        self._whole = re.compile("|".join(map(re.escape, wanted)))
        self._part = re.compile(f"(?:{'|'.join(map(_beginning, wanted))})\\Z")

    def find(self, text: str, last: bool, start: int = 0) -> tuple[int, str]:
        """Where one begins, and which; no mark: how much of ``text`` certainly belongs to none.

        Args:
            last: no more text comes, so nothing at the end is the beginning of a mark.
        """
        whole = self._whole.search(text, start)
        part = None if last else self._part.search(text, max(start, len(text) - self._longest + 1))
        if whole and not (part and part.start() < whole.start()):
            return whole.start(), whole[0]
        return (part.start() if part else len(text)), ""


def _beginning(mark: str) -> str:
    """A pattern for what may become ``mark``: at least one character, not the last one."""
    pattern = ""
    for char in reversed(mark[:-1]):
        pattern = re.escape(char) + (f"(?:{pattern})?" if pattern else "")
    return pattern or "(?!)"


SYMBOL = re.compile("[\ud800-\udfff]")
_NO_MARKERS = frozenset(
    {"name", "signs", "bracket", "history"}
)  # fields whose text no answer holds


class Markup:
    """A dialect for one tokenizer; made once, shared by all answers.

    Markers that are tokens are decided by token. The parser sees each of them as one character
    of its own, a lone surrogate, which text decoded from UTF-8 never holds: the same marker spelled
    with ordinary tokens stays text. ``dialect`` has its markers in that form, ``spelled`` as text.

    Args:
        added_tokens: the tokenizer's added tokens and their ids.
    """

    def __init__(self, dialect: Dialect, added_tokens: Mapping[str, int]) -> None:
        markers = list(markers_of(dialect))
        tokens = [
            token
            for token in sorted(added_tokens, key=len, reverse=True)
            if len(token) >= 5 and any(token in marker for marker in markers)  # not "\n\n" or "<"
        ]
        symbols = {token: chr(0xD800 + i) for i, token in enumerate(tokens)}
        self.symbols = {added_tokens[token]: symbol for token, symbol in symbols.items()}
        self.spelling = {ord(symbol): token for token, symbol in symbols.items()}
        self.spelled = dialect
        self.dialect: Dialect = _with_symbols(dialect, symbols)
        self._set_marks(self.dialect)

    def _set_marks(self, d: Dialect) -> None:
        symbols, opened = self.symbols.values(), d.block[0]
        call_ends = (d.call.open, d.call.close) if d.call else ()
        messages = [opened, *d.others, *call_ends] if d.channels else []
        if d.channels and isinstance(d.call, Head):
            messages += d.call.end
        prose = [*symbols, *messages, d.think.open if d.think else ""]
        # where text ends, without tools and with them, and where thinking ends: a block of calls
        # ends that only if its marker is a token
        self.text_marks = Marks(prose)
        self.text_marks_with_calls = Marks([*prose, opened])
        self.think_marks = Marks(
            [
                *symbols,
                *messages,
                d.think.close if d.think else "",
                opened if SYMBOL.search(opened) else "",
            ]
        )
        # where a call that is out of order ends at the latest
        self.call_marks = Marks([*call_ends, *d.block, *(d.others if d.channels else ())])
        # how a block ends whose last value has no end of its own
        params = d.call if isinstance(d.call, Params) else None
        self.torn_end = f"{params.close}\n{d.block[1]}" if params and params.close else ""
        self.value_marks = Marks([params.value[1] if params else "", self.torn_end])

    def spell(self, text: str) -> str:
        """Symbols as the markers they stand for."""
        return text if text.isascii() else text.translate(self.spelling)

    def opens_thinking(self, prompt: str) -> bool:
        """Whether the answer to ``prompt`` begins within thinking."""
        think = self.spelled.think
        if think is None or not think.open:
            return False
        ends = (think.open, f"{think.open}{think.lead}".rstrip(), think.open + think.also_open)
        return prompt.rstrip().endswith(ends)

    def thought(self, prompt: str, on: bool | None) -> Thought:
        """
        Args:
            on: whether the answer is to think, if anybody said so.
        """
        think, is_open = self.spelled.think, self.opens_thinking(prompt)
        over = bool(think and think.close and prompt.rstrip().endswith(think.close))
        return Thought(is_open, on is not False and not is_open and not over)

    def opening_token(self) -> int | None:
        """The token by which a block of calls is known; None: it has none."""
        symbol = SYMBOL.search(self.dialect.block[0])
        return next((t for t, s in self.symbols.items() if symbol and s == symbol[0]), None)


def markers_of(value: Any) -> Iterator[str]:
    """All markers in a dialect or in a part of one."""
    if isinstance(value, str):
        yield from [value] if value else []
    elif isinstance(value, tuple):
        for item in value:
            yield from markers_of(item)
    elif dataclasses.is_dataclass(value):
        for name in {f.name for f in dataclasses.fields(value)} - _NO_MARKERS:
            yield from markers_of(getattr(value, name))


def _with_symbols(value: Any, symbols: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        for token, symbol in symbols.items():
            value = value.replace(token, symbol)
    elif isinstance(value, tuple):
        value = tuple(_with_symbols(item, symbols) for item in value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = {f.name for f in dataclasses.fields(value)} - _NO_MARKERS
        value = replace(value, **{n: _with_symbols(getattr(value, n), symbols) for n in names})
    return value
