"""One tool call while it is written: a reader for each form that calls come in.

A reader takes what it is sure of from the front of a ``Source`` and tells a ``Call``. It never
looks at how the text came, only at what there is, so its result does not depend on the pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any

import orjson

from .arguments import JsonScanner, LiteralScanner, as_json, is_object, kinds, quoted
from .dialects import SYMBOL, Expression, Head, Markup, Params
from .events import CallArguments, CallEnd, CallStart, Event

MAX_NAME_CHARS = 256
MAX_HEADER_CHARS = 1024
_TAIL_CHARS = 64  # no marker is longer
_GAP_CHARS = 64  # of layout looked over behind what may end a value

BLANKS = " \t\r\n"
NOT_YET, NEVER = -1, -2
_NAME = re.compile(r"[^\s<>\"'{}\[\]()\ud800-\udfff]+")
_CALLED = re.compile(r"\s*([\w.:\-]+?)(?:\.call)?\s*([({])")
_CALLED_BEGINNING = re.compile(r"\s*[\w.:\-]*\s*\Z")
_KEY = re.compile(r'"([^"\\\x00-\x1f\ud800-\udfff]*)"\s*:\s*')
_KEY_BEGINNING = re.compile(r'"[^"\\\x00-\x1f\ud800-\udfff]*("\s*)?\Z')
_ARGUMENTS = frozenset({"arguments", "parameters"})
_MEMBERS = _ARGUMENTS | {"name", "id", "type"}

Schema = Mapping[str, Any]


class Source:
    """The text of an answer that nobody has taken yet."""

    def __init__(self) -> None:
        self.text = ""
        self.last = False  # no more will come
        self.raw: list[str] | None = None  # what was taken, if it may have to be given back

    def take(self, size: int) -> str:
        taken, self.text = self.text[:size], self.text[size:]
        if self.raw is not None:
            self.raw.append(taken)
        return taken

    def skip(self, chars: str = BLANKS) -> str:
        """Take all of ``chars`` from the front and return what follows."""
        self.take(len(self.text) - len(self.text.lstrip(chars)))
        return self.text

    def may_become(self, *wanted: str) -> bool:
        """Whether all there is may be the beginning of one of these."""
        return not self.last and any(text.startswith(self.text) for text in wanted if text)

    def until(self, *ends: str, most: int = MAX_NAME_CHARS) -> int:
        """Where the first of ``ends`` begins; NOT_YET, or NEVER if it is too late for that."""
        found = [(start, end) for end in ends if (start := self.text.find(end)) >= 0]
        if found:
            start, end = min(found)
            return start if start + len(end) <= most else NEVER
        return NEVER if self.last or len(self.text) >= most else NOT_YET


class Call:
    """A call of an answer, and what has been told of it.

    Args:
        begun: to be called before anything is told.
    """

    def __init__(self, index: int, events: list[Event], begun: Callable[[], None]) -> None:
        self.started = False
        self.tail = ""  # of its arguments, a marker's length
        self._index = index
        self._events = events
        self._begun = begun
        self._fragments: list[str] = []

    @property
    def argued(self) -> bool:
        return bool(self._fragments)

    def start(self, name: str) -> None:
        self.started = True
        self._begun()
        self._events.append(CallStart(self._index, name))

    def argue(self, fragment: str) -> None:
        if fragment:
            self._fragments.append(fragment)
            self.tail = (self.tail + fragment)[-_TAIL_CHARS:]
            self._events.append(CallArguments(self._index, fragment))

    def end(self, *, whole: bool) -> None:
        if whole and not self._fragments:
            self.argue("{}")
        arguments = "".join(self._fragments)
        self._events.append(CallEnd(self._index, arguments, whole and is_object(arguments)))


class Reach(Enum):
    """How far a reader has come."""

    WAITING = auto()  # for more text
    ONWARDS = auto()
    NO_CALL = auto()  # nothing was told: what was taken is no call
    WHOLE = auto()  # the call ends
    BROKEN = auto()  # it ends, but its arguments do not


class Reader:
    """What all forms have in common."""

    def __init__(
        self, source: Source, call: Call, markup: Markup, schemas: Mapping[str, Schema]
    ) -> None:
        self._source = source
        self._call = call
        self._markup = markup
        self._dialect = markup.dialect
        self._schemas = schemas
        self._json = JsonScanner()
        self.step: Callable[[], Reach] = self._begin

    def _begin(self) -> Reach:
        raise NotImplementedError

    def whole_if_last(self) -> bool:
        """The answer ends here: whether the call is complete all the same."""
        return False

    def _json_arguments(self) -> Reach:
        """An object whose very characters are the arguments."""
        size, done = self._json.scan(self._source.text)
        self._call.argue(self._source.take(size))
        if done:
            return self._behind_json()
        if not self._json.stuck:
            return Reach.WAITING
        if self._json.in_string and self._ends_within_string():
            return Reach.BROKEN
        if self._json.in_string and SYMBOL.match(self._source.text):
            self._call.argue(self._markup.spell(self._source.take(1)))
        else:
            self.step = self._out_of_order
        return Reach.ONWARDS

    def _behind_json(self) -> Reach:
        return Reach.WHOLE

    def _ends_within_string(self) -> bool:
        """Whether the last thing written in an unclosed string is the end of the call.

        A string may quote that marker; but no string goes on with a newline or a further marker.
        """
        call, block = self._dialect.call, self._dialect.block
        ends = (call.close if isinstance(call, Head) else "", block[1])
        return self._call.tail.endswith(tuple(self._markup.spell(end) for end in ends if end))

    def _out_of_order(self) -> Reach:
        """Arguments of no known form: told as they are, up to whatever ends the call."""
        start, mark = self._markup.call_marks.find(self._source.text, self._source.last)
        self._call.argue(self._markup.spell(self._source.take(start)))
        return Reach.BROKEN if mark else Reach.WAITING


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


class ParamsReader(Reader):
    """A name, then keys and values with markers around them.

    Strings are told as they come, if the schema says they are strings; other values when they end.
    """

    def __init__(self, *common: Any) -> None:
        super().__init__(*common)
        assert isinstance(self._dialect.call, Params)
        self._form = self._dialect.call
        self._properties: Schema = {}
        self._schema: Schema = {}
        self._allowed: frozenset[str] | None = None  # types of the value
        self._string = False  # it is told as it comes
        self._value: list[str] = []
        self._pad = ""  # layout that may still come before the value
        self._held = ""  # layout, if the value ends here

    def whole_if_last(self) -> bool:
        if self.step != self._between:
            return False
        self._close()
        return True

    def _begin(self) -> Reach:
        form = self._form
        ends = (form.name_end,) if form.name_end else ("\n", form.key[0], self._dialect.block[1])
        start = self._source.until(*ends)
        if start == NOT_YET:
            return Reach.WAITING
        name = self._source.text[: max(start, 0)].strip()
        if not is_name(name):
            return Reach.NO_CALL
        self._source.take(start + len(form.name_end))
        self._call.start(name)
        self._schema = self._schemas.get(name, {})
        properties = self._schema.get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self.step = self._between
        return Reach.ONWARDS

    def _between(self) -> Reach:
        """Between two arguments."""
        form, block_end = self._form, self._dialect.block[1]
        body = self._source.skip()
        if not body:
            return Reach.WAITING
        if (form.close and body.startswith(form.close)) or body.startswith(block_end):
            self._close()
            return Reach.WHOLE  # the block takes the marker
        if body.startswith(form.key[0]):
            self._source.take(len(form.key[0]))
            self.step = self._read_key
        elif form.json and body[0] == "{" and not self._call.argued:
            self.step = self._json_arguments
        elif self._source.may_become(form.close, block_end, form.key[0]):
            return Reach.WAITING
        else:
            return Reach.BROKEN
        return Reach.ONWARDS

    def _close(self) -> None:
        self._call.argue("}" if self._call.argued else "{}")

    def _read_key(self) -> Reach:
        form = self._form
        end = self._source.until(form.key[1])
        if end == NOT_YET:
            return Reach.WAITING
        if end == NEVER:
            self.step = self._out_of_order
            return Reach.ONWARDS
        key, _, typed = self._source.take(end).partition(form.typed or "\n")
        self._source.take(len(form.key[1]))
        key = self._markup.spell(key.strip())
        self._call.argue(f"{', ' if self._call.argued else '{'}{quoted(key)}: ")
        if typed:
            self._allowed = frozenset({"string"}) if typed == "true" else None
        else:
            self._allowed = kinds(self._properties.get(key), self._schema)
        self.step = self._begin_value
        return Reach.ONWARDS

    def _begin_value(self) -> Reach:
        opened = self._form.value[0]
        if opened and not self._source.skip().startswith(opened):
            if not self._source.text or self._source.may_become(opened):
                return Reach.WAITING
            self.step = self._out_of_order
            return Reach.ONWARDS
        self._source.take(len(opened))
        self._string = self._allowed == {"string"}
        self._call.argue('"' if self._string else "")
        self._value, self._pad, self._held = [], self._form.pad, ""
        self.step = self._read_value
        return Reach.ONWARDS

    def _read_value(self) -> Reach:
        form, source = self._form, self._source
        if self._pad and not source.text:
            return Reach.WAITING
        if self._pad and source.text.startswith(self._pad):
            source.take(len(self._pad))
        self._pad = ""
        size, taken, ended = self._value_end()
        text = self._held + source.take(size)
        source.take(taken)
        self._held = form.pad if form.pad and text.endswith(form.pad) else ""
        self._tell_value(self._markup.spell(text.removesuffix(self._held)))
        if not ended:
            return Reach.WAITING
        end = '"' if self._string else as_json("".join(self._value), self._allowed)
        self._call.argue(end)
        self.step = self._between
        return Reach.ONWARDS

    def _tell_value(self, text: str) -> None:
        if self._string:
            self._call.argue(quoted(text)[1:-1])
            return
        self._value.append(text)
        if self._allowed == {"string", "null"}:  # a string as soon as it cannot be null
            so_far = "".join(self._value)
            self._value = [so_far]
            may_be_null = any(word.startswith(so_far.strip()) for word in ("null", "None"))
            if not may_be_null or len(so_far) > MAX_NAME_CHARS:
                self._string = True
                self._call.argue(quoted(so_far)[:-1])

    def _value_end(self) -> tuple[int, int, bool]:
        """Where the value ends, how long its marker is, and True; else how much surely is value.

        A value may hold its own end marker: one counts only if what has to follow it does follow.
        """
        text, last, form = self._source.text, self._source.last, self._form
        opened, closed = self._dialect.block
        position = 0
        while True:
            start, mark = self._markup.value_marks.find(text, last, position)
            if not mark:
                return start, 0, False
            gap = text[start + len(mark) :][: _GAP_CHARS + MAX_NAME_CHARS]
            rest = gap.lstrip(BLANKS)
            torn = mark == self._markup.torn_end
            follow = (opened,) if torn else (form.key[0], form.close or closed, closed)
            if rest.startswith(follow) or (last and not rest):
                return start, 0 if torn else len(mark), True
            unsure = not last and len(gap) - len(rest) <= _GAP_CHARS
            if unsure and any(sign.startswith(rest) for sign in follow):
                return start, 0, False
            position = start + len(mark)


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


def is_name(name: str) -> bool:
    return len(name) <= MAX_NAME_CHARS and bool(_NAME.fullmatch(name))


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
