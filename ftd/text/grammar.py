"""What an answer may be, as a grammar in the library's dialect of Lark.

An answer is JSON of a schema, or tool calls as the model's family writes them, or either. Markers
that are tokens stand as token ids, so text can never hold them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .arguments import kinds
from .declared import (
    MOST_UNORDERED,
    is_plain_object,
    listed_texts,
    properties_of,
    resolved,
    rooted,
)
from .dialects import SYMBOL, Head, Markup, Params
from .schema import Schema
from .tool_grammar import quoted

_HEADER = '%llguidance {"no_forcing": true}'
_TERMINALS = r"""
ANY: /(?s:.*)/
WS: /[ \n]{1,2}/
BLANKS: /[ \n\r\t]{1,40}/
OBJECT_NAME: /\{[ \t\r\n]{0,8}"name"[ \n]{0,2}:[ \n]{0,2}/
OBJECT_ARGUMENTS: /[ \n]{0,2},[ \t\r\n]{0,8}"(arguments|parameters)"[ \n]{0,2}:[ \n]{0,8}/
OBJECT_ID: /[ \n]{0,2},[ \t\r\n]{0,8}"id"[ \n]{0,2}:[ \n]{0,2}"[A-Za-z0-9_\-]{1,40}"/
OBJECT_END: /[ \t\r\n]{0,8}\}/
CALL_NUMBER: /[0-9]{1,3}/
CALL_ID: /[A-Za-z0-9]{9}/
BARE_TEXT: /([^{\[ \n](?s:.*))?/
ANY_KEY: /[A-Za-z0-9_.\-]{1,64}/
"""
# Blanks are bounded, or a model may write them for ever; a break and a deep indentation fit.
_JSON_OPTIONS = {
    "whitespace_pattern": r"[ \n\r\t]{1,40}",
    "json_allow_general_unicode_escapes": True,
}
_ANY_TEXT = "ANY"
_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})


@dataclass(frozen=True, slots=True)
class HeldTool:
    """A tool that may be called."""

    name: str
    schema: Schema  # of its arguments, from ``schema.prepared``
    lenient: bool = False  # what the library cannot hold of the schema is let go
    text: str | None = None  # Lark grammar of its only argument


def can_hold_calls(markup: Markup) -> bool:
    """Whether calls of this dialect can be held to schemas: not those written as expressions."""
    d = markup.dialect
    return bool(d.block[0]) and (d.json or isinstance(d.call, Head | Params))


def answer_grammar(
    markup: Markup,
    eos_ids: frozenset[int],
    *,
    schema: Schema | None = None,
    tools: Sequence[HeldTool] = (),
    free: bool = False,
    one: bool = False,
    thinking: str = "",
) -> str:
    """Of a whole answer: JSON of ``schema`` or calls of ``tools``.

    Args:
        free: text may stand beside the calls.
        one: call, not several.
        thinking: "behind" a thought that is looked after elsewhere; "open" or "optional" if one
            comes first and its end is no token.
    """
    writer = _Writer(markup, eos_ids)
    if markup.dialect.channels:
        return writer.harmony(schema, tools, free=free)
    if free:
        body = writer.blocks_in_text(tools)
        if markup.dialect.bare:  # what could be a call without a marker is one
            body = f"{writer.blocks(tools, bare=True)} | BARE_TEXT | {writer.blocks(tools)}"
        return writer.grammar(f"{writer.thought(thinking)} ({body})")
    forms = [] if schema is None else [writer.json(schema)]
    if tools:
        forms.append(writer.blocks(tools, one=one, bare=schema is None))
    return writer.grammar(f"{writer.thought(thinking)} ({' | '.join(forms)})")


def call_grammar(markup: Markup, tools: Sequence[HeldTool]) -> str:
    """Of what follows the token that opens a block of calls (``Markup.opening_token``)."""
    writer = _Writer(markup, frozenset())
    _, _, rest = re.split(f"({SYMBOL.pattern})", markup.dialect.block[0], maxsplit=1)
    inner = writer.inner(tools)
    if not markup.dialect.block[1]:  # nothing ends it but the end of the answer
        inner = writer.repeated(inner)
    return writer.grammar(f"{writer.marker(rest)} {inner}")


def arguments_grammar(markup: Markup, eos_ids: frozenset[int], tool: HeldTool) -> str:
    """Of what follows a header that names the tool, where everything has a header."""
    writer = _Writer(markup, eos_ids)
    another = writer.marker(markup.dialect.others[1])  # message may follow
    close = writer.close_of_message()
    ends = f"({close} | {another})" if close else f"({another})?"
    return writer.grammar(f"{writer.arguments(tool)} {ends}")


class _Writer:
    """Collects rules; its methods return what refers to them."""

    def __init__(self, markup: Markup, eos_ids: frozenset[int]) -> None:
        self.ids = {symbol: token for token, symbol in markup.symbols.items()}
        self._dialect = markup.dialect
        self._eos_ids = eos_ids
        self._rules: list[str] = []
        self._inner: dict[str, str] = {}

    def grammar(self, start: str) -> str:
        main = "\n".join([_HEADER, f"start: {start}", *self._rules, _TERMINALS])
        if not self._inner:
            return main
        grammars = {"main": main, **self._inner}
        return json.dumps(
            {"grammars": [{"name": n, "lark_grammar": text} for n, text in grammars.items()]}
        )

    def _within(self, lark: str) -> str:
        """A grammar of its own, with rules whose names mean nothing here."""
        name = f"inner{len(self._inner)}"
        self._inner[name] = f"{_HEADER}\n{lark}"
        return f"@{name}"

    def add(self, name: str, body: str) -> str:
        self._rules.append(f"{name}: {body}")
        return name.partition("[")[0]

    def _new(self, body: str, options: str = "") -> str:
        return self.add(f"r{len(self._rules)}{options}", body)

    # Pieces ----------------------------------------------------------------------------------

    def marker(self, text: str) -> str:
        parts = re.split(f"({SYMBOL.pattern})", text)
        return " ".join(
            f"<[{self.ids[part]}]>" if part in self.ids else _literal(part)
            for part in parts
            if part
        )

    def json(self, schema: Schema, *, lenient: bool = False) -> str:
        options = _JSON_OPTIONS | ({"lenient": True} if lenient else {})
        return self._new(f"%json {json.dumps({**schema, 'x-guidance': options})}")

    def arguments(self, tool: HeldTool) -> str:
        if tool.text is not None:
            (name,) = properties_of(tool.schema)[0]
            text = self._within(quoted(tool.text))
            return f'"{{" WS? {_literal(json.dumps(name))} WS? ":" WS? "\\"" {text} "\\"" WS? "}}"'
        if not is_plain_object(tool.schema):
            return self.json(tool.schema, lenient=tool.lenient)
        properties, required = properties_of(tool.schema)
        members = {}
        for name, prop in properties.items():
            value = self.json(rooted(prop, tool.schema), lenient=tool.lenient)
            key = _literal(json.dumps(name, ensure_ascii=False))
            members[self._new(f'{key} BLANKS? ":" BLANKS? {value}')] = name in required
        body = self._any_order(members, comma='"," BLANKS?')
        return f'"{{" BLANKS? {body} "}}"'

    def _any_order(self, members: Mapping[str, bool], comma: str = "") -> str:
        """Each of ``members`` at most once, and once if it is marked so.

        Models do not keep to the order of a schema, and what was passed over could not come later.
        A rule's parameter has a bit for each member that has come.
        """
        ranked = sorted(members, key=lambda member: not members[member])
        needed = sum(members.values())
        rest = f"r{len(self._rules)}rest"
        done = f"%if is_ones([0:{needed}])" if needed else ""
        again = [
            f"{comma} {member} BLANKS? {rest}::set_bit({i}) %if bit_clear({i})"
            for i, member in enumerate(ranked)
        ]
        self.add(f"{rest}::_", " | ".join([f'"" {done}', *again]))
        first = [f"{member} BLANKS? {rest}::{1 << i:#x}" for i, member in enumerate(ranked)]
        return self._new(" | ".join([*([] if needed else ['""']), *first]))

    def text_until(self, body: str, end: str) -> str:
        """Text ``body``, a terminal, up to and with the marker ``end``."""
        symbol = SYMBOL.search(end)
        if symbol is None:  # lazy: the first end ends it
            return self._new(f"{body} {_literal(end)}", "[lazy]")
        lead, rest = end[: symbol.start()], self.marker(end[symbol.start() :])
        if lead:
            body = self.add(f"TEXT{len(self._rules)}", f"{body} {_literal(lead)}")
        return f"{body} {rest}"

    def thought(self, thinking: str) -> str:
        think = self._dialect.think
        if think is None or not thinking:
            return ""
        after = f"({_literal(think.after)})?" if think.after else ""
        if thinking == "behind":
            return after
        text = f"{self.text_until(_ANY_TEXT, think.close)} {after}"
        return text if thinking == "open" else f"({self.marker(think.open)} {text})?"

    # Calls -----------------------------------------------------------------------------------

    def blocks(self, tools: Sequence[HeldTool], *, one: bool = False, bare: bool = False) -> str:
        """Calls to the end of the answer, in as many blocks as it takes."""
        if bare and self._dialect.bare:
            call = self._call(tools)
            return call if one else f'{call} (";" WS? {call})*'
        inner = self.inner(tools, one=one)
        begin = self.marker(self._dialect.block[0])
        return f"{begin} {inner if one else self.repeated(inner)}"

    def repeated(self, inner: str) -> str:
        """The rest of a block, and further blocks."""
        if self._listed:
            return inner
        return f"{inner} (WS? {self.marker(self._dialect.block[0])} {inner})*"

    def inner(self, tools: Sequence[HeldTool], *, one: bool = False) -> str:
        """A block behind its opening marker."""
        form, calls = self._dialect.call, self._call(tools)
        several = self._listed or (form and form.open and not self._dialect.json)
        if several and not one:
            comma = '"," ' if self._listed else ""
            calls = f"{calls} ({comma}WS? {calls})*"
        if self._listed:
            calls = f'"[" WS? {calls} WS? "]"'
        return self._new(f"WS? {calls} WS? {self.marker(self._dialect.block[1])}")

    def blocks_in_text(self, tools: Sequence[HeldTool]) -> str:
        """Text anywhere beside the calls; their blocks are found by what they begin with."""
        begin = self._dialect.block[0]
        others = [i for symbol, i in self.ids.items() if symbol not in "".join(self._dialect.block)]
        stray = f"(ANY <[{','.join(map(str, others))}]>)*" if others else ""
        block = f"{self.text_until(_ANY_TEXT, begin)} {self.inner(tools)}"
        return f"({stray} {block})* {stray} ANY"

    @property
    def _headed(self) -> bool:
        """Calls have a header; where both forms exist, the tokenizer tells which is meant."""
        form = self._dialect.call
        return isinstance(form, Head) and (not self._dialect.json or form.end[0] in self.ids)

    @property
    def _listed(self) -> bool:
        return self._dialect.json_listed and not self._headed

    def _call(self, tools: Sequence[HeldTool]) -> str:
        form = self._dialect.call
        if isinstance(form, Head) and self._headed:
            calls = [self._headed_call(form, tool) for tool in tools]
            return self._new(" | ".join(calls))
        if isinstance(form, Params):
            return self._new(" | ".join(self._params_call(form, tool) for tool in tools))
        objects = [
            f"{_literal(json.dumps(tool.name, ensure_ascii=False))} OBJECT_ARGUMENTS "
            f"{self.arguments(tool)}"
            for tool in tools
        ]
        return self._new(f"OBJECT_NAME ({' | '.join(objects)}) OBJECT_ID? OBJECT_END")

    def _headed_call(self, form: Head, tool: HeldTool) -> str:
        before, _, numbered = form.header.partition("{}")
        number = f"{_literal(numbered)} CALL_NUMBER" if numbered else ""
        return " ".join(
            [
                *(self.marker(part) for part in (form.open, before) if part),
                _literal(tool.name),
                number,
                f"({self.marker(form.call_id)} CALL_ID)?" if form.call_id in self.ids else "",
                f"WS? {self.marker(form.end[0])} WS?",
                self.arguments(tool),
                f"WS? {self.marker(form.tail + form.close)}",
            ]
        )

    def _params_call(self, form: Params, tool: HeldTool) -> str:
        properties, required = properties_of(tool.schema)
        begin = f"{self.marker(form.open)} {_literal(tool.name)} {self.marker(form.name_end)}"
        params = []
        if 0 < len(properties) <= MOST_UNORDERED:
            members = {
                self._new(f"WS? {self._param(form, name, prop, tool)}"): name in required
                for name, prop in properties.items()
            }
            params.append(self._any_order(members))
        else:
            for name, prop in properties.items():
                param = f"WS? {self._param(form, name, prop, tool)}"
                params.append(param if name in required else f"({param})?")
        if not properties and tool.schema.get("additionalProperties") is not False:
            value = self._text_value(form, _ANY_TEXT)
            key = f"{self.marker(form.key[0])} ANY_KEY {self._key_end(form, text=True)}"
            params.append(f"(WS? {key} {value})*")
        return " ".join([begin, *params, f"WS? {self.marker(form.close)}"])

    def _param(self, form: Params, name: str, prop: Any, tool: HeldTool) -> str:
        key = f"{self.marker(form.key[0])} {_literal(name)}"
        if tool.text is not None:
            text = f"{_pad(form)} {self._within(tool.text)} {self.marker(form.pad + form.value[1])}"
            return f"{key} {self._key_end(form, text=True)} {text}"
        types = kinds(prop, tool.schema)
        forms = []
        if types is None or "string" in types:
            bodies = self._bodies(resolved(prop, tool.schema), only_texts=bool(form.typed))
            forms.append(f"{self._key_end(form, text=True)} {self._text_value(form, *bodies)}")
        schema = rooted(prop, tool.schema)
        others = (_TYPES if types is None else types) - {"string"}
        if types is None or "string" in types:
            schema = {**rooted({}, tool.schema), "allOf": [schema, {"type": sorted(others)}]}
        if others and (form.typed or (types is not None and "string" not in types)):
            value = f"{_pad(form)} {self.json(schema, lenient=tool.lenient)} {_pad(form)}"
            forms.append(f"{self._key_end(form, text=False)} {value} {self.marker(form.value[1])}")
        return self._new(" | ".join(f"{key} {rest}" for rest in forms))

    def _key_end(self, form: Params, *, text: bool) -> str:
        typed = f"{form.typed}{'true' if text else 'false'}" if form.typed else ""
        gap = f"WS? {self.marker(form.value[0])}" if form.value[0] else ""
        return f"{self.marker(typed + form.key[1])} {gap}"

    def _text_value(self, form: Params, *bodies: str) -> str:
        texts = [f"{_pad(form)} {self.text_until(b, form.pad + form.value[1])}" for b in bodies]
        return self._new(" | ".join(texts))

    def _bodies(self, prop: Schema, *, only_texts: bool) -> Iterable[str]:
        texts = listed_texts(prop, only=only_texts)
        if texts is not None:
            return map(_literal, texts)
        low, high = prop.get("minLength") or 0, prop.get("maxLength")
        if not (low or high is not None) or not isinstance(low, int):
            return [_ANY_TEXT]
        name = f"TEXT{len(self._rules)}"
        return [self.add(name, f"/(?s:.{{{low},{'' if high is None else high}}})/")]

    # Harmony ---------------------------------------------------------------------------------

    def harmony(
        self, schema: Schema | None, tools: Sequence[HeldTool], *, free: bool = False
    ) -> str:
        """Messages with headers: thoughts, then the answer or a call."""
        form, (channel, end, _, constrain) = self._dialect.call, self._dialect.others
        assert isinstance(form, Head)
        message, begin = self.marker(form.end[0]), self.marker(self._dialect.block[0])
        channel, end = self.marker(channel), self.marker(end)
        kind = f'(" "? {self.marker(constrain)} "json" | " json")?'
        thoughts = "analysis" if not free else "(analysis|commentary)"
        self.add(
            "message",
            f'{channel} /{thoughts}/ {message} ANY {end} {begin} "assistant"',
        )
        forms = []
        if schema is not None:
            forms.append(f'{channel} "final" {kind} {message} {self.json(schema)}')
        if free:
            forms.append(f'{channel} "final" {message} ANY')
        for tool in tools:
            to = _literal(f"commentary to=functions.{tool.name}")
            forms.append(
                f"{channel} {to} {kind} {message} {self.arguments(tool)} {self.close_of_message()}"
            )
        return self.grammar(f"message* ({' | '.join(forms)})")

    def close_of_message(self) -> str:
        """Empty where this token ends the whole answer."""
        form = self._dialect.call
        close = form.close if isinstance(form, Head) else ""
        return "" if self.ids.get(close) in self._eos_ids else self.marker(close)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _pad(form: Params) -> str:
    return _literal(form.pad) if form.pad else ""
