"""What readers of calls have in common: the text nobody has taken yet, and what a call tells.

A reader takes what it is sure of from the front of a ``Source`` and tells a ``Call``. It never
looks at how the text came, only at what there is, so its result does not depend on the pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any

from .arguments import JsonScanner, is_object
from .dialects import SYMBOL, Head, Markup
from .events import CallArguments, CallEnd, CallStart, Event

MAX_NAME_CHARS = 256
MAX_HEADER_CHARS = 1024
_TAIL_CHARS = 64  # no marker is longer

BLANKS = " \t\r\n"
NOT_YET, NEVER = -1, -2
_NAME = re.compile(r"[^\s<>\"'{}\[\]()\ud800-\udfff]+")

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


def is_name(name: str) -> bool:
    return len(name) <= MAX_NAME_CHARS and bool(_NAME.fullmatch(name))
