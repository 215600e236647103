"""One tool call while it is written: a reader for each form that calls come in."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from .arguments import JsonScanner, LiteralScanner
from .call_params import ParamsReader
from .call_reading import BLANKS, MAX_HEADER_CHARS, MAX_NAME_CHARS, NOT_YET, Reach, Reader, is_name
from .dialects import SYMBOL, Expression, Head, Params

_CALLED = re.compile(r"\s*([\w.:\-]+?)(?:\.call)?\s*([({])")
_CALLED_BEGINNING = re.compile(r"\s*[\w.:\-]*\s*\Z")
_KEY = re.compile(r'"([^"\\\x00-\x1f\ud800-\udfff]*)"\s*:\s*')
_KEY_BEGINNING = re.compile(r'"[^"\\\x00-\x1f\ud800-\udfff]*("\s*)?\Z')
_ARGUMENTS = frozenset({"arguments", "parameters"})
_MEMBERS = _ARGUMENTS | {"name", "id", "type"}


class ObjectReader(Reader):
    """``{"name": ..., "arguments": {...}}``; the brace is taken, the members come in any order.

    Args:
        bare: no marker says that this is a call: unknown members, or no arguments, say it is not.
    """

    def __init__(self, *common: Any, bare: bool) -> None:
        super().__init__(*common)
        self._bare = bare
        self._members: dict[str, str] = {}
        self._member = ""
        self._value: list[str] = []
        self._whole = False

    def whole_if_last(self) -> bool:
        return self._whole

    def _begin(self) -> Reach:
        """Between two members."""
        source = self._source
        body = source.skip(BLANKS + ",")
        if not body:
            return Reach.WAITING
        if body[0] == "}":
            source.take(1)
            return self._end()
        match = _KEY.match(body)
        if match and match.end() <= MAX_NAME_CHARS and (match.end() < len(body) or source.last):
            return self._begin_member(match)
        beginning = match or _KEY_BEGINNING.match(body)
        if beginning and not source.last and len(body) <= MAX_NAME_CHARS:
            return Reach.WAITING
        return self._spoilt()

    def _begin_member(self, match: re.Match[str]) -> Reach:
        self._member = match[1]
        told = self._call.started
        if self._bare and not told and self._member not in _MEMBERS:
            return Reach.NO_CALL
        self._source.take(match.end())
        self._json, self._value = JsonScanner(), []
        self.step = self._read_member
        name = self._name()
        if name and not told and self._member in _ARGUMENTS and self._source.text[:1] == "{":
            self._call.start(name)
            self.step = self._json_arguments
        return Reach.ONWARDS

    def _read_member(self) -> Reach:
        size, done = self._json.scan(self._source.text)
        self._value.append(self._source.take(size))
        if done:
            member = "arguments" if self._member in _ARGUMENTS else self._member
            self._members.setdefault(member, "".join(self._value))
            self.step = self._begin
            return Reach.ONWARDS
        if not self._json.stuck:
            return Reach.WAITING
        if self._json.in_string and SYMBOL.match(self._source.text):
            self._value.append(self._markup.spell(self._source.take(1)))
            return Reach.ONWARDS
        return self._spoilt()

    def _behind_json(self) -> Reach:
        self._whole = True
        self.step = self._begin
        return Reach.ONWARDS

    def _name(self) -> str:
        """Empty: not told yet, or none that could be one."""
        try:
            name = orjson.loads(self._members.get("name", '""'))
        except orjson.JSONDecodeError:
            return ""
        return name if isinstance(name, str) and is_name(name) else ""

    def _end(self) -> Reach:
        if self._call.started:
            return Reach.WHOLE
        name = self._name()
        if not name or (self._bare and "arguments" not in self._members):
            return Reach.NO_CALL
        self._call.start(name)
        self._call.argue(_unwrapped(self._members.get("arguments", "")))
        return Reach.WHOLE

    def _spoilt(self) -> Reach:
        """Something else stands where the object should go on."""
        if not self._call.started:
            return Reach.NO_CALL
        return Reach.WHOLE if self._whole else Reach.BROKEN


class HeadReader(Reader):
    """A header with the name, then a JSON object.

    Args:
        name: from a header that has been read already.
    """

    def __init__(self, *common: Any, name: str | None = None) -> None:
        super().__init__(*common)
        if name is not None:
            self._call.start(name)
            self.step = self._begin_arguments

    def whole_if_last(self) -> bool:
        return self.step == self._begin_arguments

    def _begin(self) -> Reach:
        head = self._dialect.call
        assert isinstance(head, Head)
        start = self._source.until(*head.end, most=MAX_HEADER_CHARS)
        if start == NOT_YET:
            return Reach.WAITING
        match = re.fullmatch(head.name, self._markup.spell(self._source.text[: max(start, 0)]))
        if match is None or not is_name(match["name"]):
            return Reach.NO_CALL
        self._source.take(start)
        end = next(end for end in head.end if self._source.text.startswith(end))
        self._source.take(0 if end == "{" else len(end))
        self._call.start(match["name"])
        self.step = self._begin_arguments
        return Reach.ONWARDS

    def _begin_arguments(self) -> Reach:
        body = self._source.skip()
        if not body:
            return Reach.WAITING
        start, mark = self._markup.call_marks.find(body, self._source.last)
        if body[0] == "{":
            self.step = self._json_arguments
        elif start > 0:
            self.step = self._out_of_order
        else:
            return Reach.WHOLE if mark else Reach.WAITING
        return Reach.ONWARDS


class ExpressionReader(Reader):
    """``name(key="value")`` or ``name{key:...}``."""

    def _begin(self) -> Reach:
        form = self._dialect.call
        assert isinstance(form, Expression)
        text = self._source.text
        match = _CALLED.match(text)
        if match is None and _CALLED_BEGINNING.match(text) and not self._source.last:
            return Reach.WAITING if len(text) < MAX_NAME_CHARS else Reach.NO_CALL
        if match is None or match.end() > MAX_NAME_CHARS or match[2] != form.bracket:
            return Reach.NO_CALL
        if not form.open and match[1] not in self._schemas:  # prose has brackets, too
            return Reach.NO_CALL
        self._source.take(match.end())
        self._call.start(match[1])
        self._call.argue("{")
        self._literal = LiteralScanner(form.bracket, form.quotes, self._markup.spelling)
        self.step = self._read_arguments
        return Reach.ONWARDS

    def _read_arguments(self) -> Reach:
        json, size, done = self._literal.scan(self._source.text, self._source.last)
        self._call.argue(json)
        self._source.take(size)
        if done:
            return Reach.WHOLE
        if not self._literal.stuck:
            return Reach.WAITING
        self.step = self._out_of_order
        return Reach.ONWARDS


READERS: Mapping[type, Callable[..., Reader]] = {
    Head: HeadReader,
    Params: ParamsReader,
    Expression: ExpressionReader,
}


def _unwrapped(arguments: str) -> str:
    """Arguments given as null mean none; given as a string, they are the JSON in that string."""
    if arguments == "null":
        return ""
    if not arguments.startswith('"'):
        return arguments
    try:
        return str(orjson.loads(arguments)).strip()
    except orjson.JSONDecodeError:
        return arguments
