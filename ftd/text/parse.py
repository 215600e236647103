"""An answer taken apart while it is written: thinking, text and tool calls.

One state machine for all dialects. It works on text in which markers that are tokens stand as
single symbols (``dialects.Markup``); a state takes what it is sure of from the front and waits for
more where that could still become something else. So the events do not depend on how the answer was
cut, and a whole answer is parsed by the same code as a stream.

What the model writes between markers is never lost: a block that turns out to be no call is given
back as text, as it was written; a call that goes wrong after its name was told ends as not valid.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from .call_reading import (
    BLANKS,
    MAX_HEADER_CHARS,
    NEVER,
    NOT_YET,
    Call,
    Reach,
    Reader,
    Source,
    is_name,
)
from .calls import READERS, HeadReader, ObjectReader
from .dialects import SYMBOL, Expression, Head, Markup
from .events import Event, Reasoning, Text

_MAX_BLANKS_HELD = 256


class CallableTool(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def parameters(self) -> Mapping[str, Any]: ...


class OutputParser:
    """Parses one answer.

    Args:
        tools: what may be called; without any, calls are no structure and stay text.
        thinking_open: the prompt ended within thinking (``Markup.opens_thinking``).
    Cost: linear in the answer; text without markers takes about a microsecond a token.
    """

    def __init__(
        self,
        markup: Markup,
        *,
        tools: Sequence[CallableTool] | None = None,
        thinking_open: bool = False,
    ) -> None:
        dialect = markup.dialect
        self._markup = markup
        self._dialect = dialect
        self._schemas = {tool.name: tool.parameters for tool in tools or ()}
        self._text_marks = markup.text_marks_with_calls if tools else markup.text_marks
        self._source = Source()
        self._events: list[Event] = []
        # prose: text or thinking
        self._thinking = thinking_open and dialect.think is not None
        self._blank = True  # nothing but blanks since it began
        self._first = not self._thinking  # no marker before it
        self._held = ""  # newlines that may be layout, or blanks
        self._skip = dialect.think.lead if self._thinking and dialect.think else ""
        self._stray = ""  # end of a block that was given back
        # calls
        self._called = False  # a call came of this block
        self._bare = False  # it has no marker of its own
        self._reader: Reader | None = None
        self._call: Call | None = None
        self._calls = 0
        self._state: Callable[[], bool] = self._prose
        if dialect.channels:
            self._open_block("")

    @property
    def thinking(self) -> bool:
        """Whether the answer is within thinking now."""
        return self._thinking

    def feed(self, token_id: int | None, text: str) -> list[Event]:
        """Take a token and the text that became certain with it.

        Returns:
            What has become certain; fragments as small as they come.
        """
        symbol = None if token_id is None else self._markup.symbols.get(token_id)
        if symbol is not None:
            marker = self._markup.spelling[ord(symbol)]
            before, _, after = text.rpartition(marker) if marker in text else (text, "", "")
            text = before + symbol + after
        elif not self._source.text and not self._held and not self._blank and self._is_plain(text):
            return [Reasoning(text) if self._thinking else Text(text)] if text else []
        self._source.text += text
        return self._run()

    def finish(self, cut: bool) -> list[Event]:
        """The answer is over.

        Args:
            cut: by ``max_tokens``: a call that is open has not been written to its end.
        """
        source = self._source
        source.last = not cut  # what a cut left unclear stays so
        events = self._run()
        lost = cut
        if self._reader is not None and self._call is not None and self._call.started:
            self._end_call(whole=not cut and self._reader.whole_if_last())
        elif source.raw is not None and not (cut and (self._called or source.raw[0])):
            self._give_back()
            lost = False
        if lost:
            source.text, source.raw, self._state = "", None, self._prose
        events += self._run()
        if self._first or not self._blank:
            self._tell(self._held)
        return events + self._run()

    def _run(self) -> list[Event]:
        while self._state():
            pass
        events = self._events[:]
        self._events.clear()
        return events

    # Prose -----------------------------------------------------------------------------------

    def _is_plain(self, text: str) -> bool:
        """Certainly prose: no mark begins in it, and no newline at its end may be layout."""
        marks = self._markup.think_marks if self._thinking else self._text_marks
        return (
            self._state == self._prose
            and not self._skip
            and not text.endswith("\n")
            and marks.firsts.isdisjoint(text)
        )

    def _prose(self) -> bool:
        source = self._source
        if self._skip and not self._skip_layout():
            return False
        if self._begins_bare_call():
            return True
        marks = self._markup.think_marks if self._thinking else self._text_marks
        start, mark = marks.find(source.text, source.last)
        self._say(source.text[:start])
        source.text = source.text[start + len(mark) :]
        if mark:
            self._meet(mark)
        return bool(mark)

    def _begins_bare_call(self) -> bool:
        if not self._dialect.bare or not self._schemas or not self._blank or self._thinking:
            return False
        rest = self._source.text.lstrip(BLANKS)
        if rest[:1] not in self._dialect.bare or not rest:
            return False
        self._say(self._source.text[: len(self._source.text) - len(rest)])
        self._source.text = rest
        self._open_block("")
        return True

    def _skip_layout(self) -> bool:
        """Drop what the template writes behind a marker; whether that is settled."""
        skip, text = self._skip, self._source.text
        if len(text) < len(skip) and skip.startswith(text) and not self._source.last:
            return False
        if text.startswith(skip):
            self._source.text = text[len(skip) :]
        elif skip.isspace():  # fewer newlines than the template has
            self._source.text = text.lstrip("\n")
        self._skip = ""
        return True

    def _say(self, text: str) -> None:
        """Tell prose, but hold back blanks at its beginning and newlines at its end."""
        if not text:
            return
        text, self._held = self._held + text, ""
        if self._blank and text.isspace() and len(text) <= _MAX_BLANKS_HELD:
            self._held = text
            return
        self._blank = False
        think = self._dialect.think
        layout = think.trail if think and self._thinking else self._dialect.before
        size = min(len(text) - len(text.rstrip("\n")), len(layout))
        self._held = text[len(text) - size :]
        self._tell(text[: len(text) - size])

    def _tell(self, prose: str) -> None:
        if prose:
            prose = self._markup.spell(prose)
            self._events.append(Reasoning(prose) if self._thinking else Text(prose))

    def _begin_prose(self, *, thinking: bool = False, skip: str = "") -> None:
        """Behind a marker: newlines held before it were layout, and nothing will be given back."""
        self._thinking, self._skip = thinking, skip
        self._held, self._blank, self._first = "", True, False
        self._source.raw, self._state = None, self._prose

    def _meet(self, mark: str) -> None:
        """A mark in prose."""
        dialect, think = self._dialect, self._dialect.think
        if dialect.channels:
            if self._thinking:
                self._begin_prose()
            if mark in (dialect.block[0], dialect.others[0]):
                self._open_block(mark)
        elif think and mark == think.close and self._thinking:
            self._begin_prose(skip=think.after)
        elif think and mark == think.open and not self._thinking:
            if not self._blank and not SYMBOL.search(mark):
                self._say(mark)  # without a token of its own it counts at the beginning only
                return
            if not self._blank:
                self._tell(self._held)
            self._begin_prose(thinking=True, skip=think.lead)
        elif mark == dialect.block[0] and self._schemas:
            self._open_block(mark)
        elif self._thinking or mark == self._stray:
            self._say(mark)
            self._stray = ""

    # Blocks of calls -------------------------------------------------------------------------

    def _open_block(self, mark: str) -> None:
        self._source.raw = [mark]
        self._called, self._bare, self._stray = False, not mark, ""
        self._state = self._message if self._dialect.channels else self._block

    def _block(self) -> bool:
        """Before, between and behind the calls of a block."""
        dialect, form, source = self._dialect, self._dialect.call, self._source
        opened, closed = dialect.block
        body, raw = source.skip(), source.raw or []
        if not body:
            return False
        own = form.open if form else ""
        end = form.close if form and self._called else ""
        if dialect.json and body[0] == "{":
            source.take(1)
            self._read(ObjectReader, bare=self._bare)
        elif opened and body.startswith(opened) and not any(map(str.strip, raw[1:])):
            source.take(len(opened))  # the end of the block before is missing
            self._open_block(opened)
        elif closed and body.startswith(closed) and self._called:
            source.take(len(closed))
            self._begin_prose()
        elif end and body.startswith(end):
            source.take(len(end))
        elif own and body.startswith(own):
            source.take(len(own))
            self._read(READERS[type(form)])
        elif source.may_become(opened, closed, own, end):
            return False
        elif body[0] in self._punctuation():
            source.take(1)
        elif form and not own and not (self._called and isinstance(form, Head)):
            self._read(READERS[type(form)])
        else:
            self._give_back()
        return True

    def _punctuation(self) -> str:
        """What may stand between calls, or in excess behind one."""
        listed = self._dialect.json or isinstance(self._dialect.call, Expression)
        return ("[],;" if listed else "") + ("}`" if self._called else "")

    def _read(self, reader: Callable[..., Reader], **options: Any) -> None:
        self._state = self._in_call
        self._call = Call(self._calls, self._events, self._begin_call)
        common = (self._source, self._call, self._markup, self._schemas)
        self._reader = reader(*common, **options)

    def _begin_call(self) -> None:
        self._begin_prose()  # what there was of it has ended
        self._called, self._state = True, self._in_call

    def _in_call(self) -> bool:
        assert self._reader is not None and self._call is not None
        reach = self._reader.step()
        if reach is Reach.NO_CALL:
            self._reader = None
            self._give_back()
        elif reach in (Reach.WHOLE, Reach.BROKEN):
            self._end_call(whole=reach is Reach.WHOLE)
        return reach is not Reach.WAITING

    def _end_call(self, *, whole: bool) -> None:
        """Back to the block, or to prose where there is none."""
        assert self._call is not None
        self._call.end(whole=whole)
        self._calls += 1
        self._reader = None
        self._begin_prose()
        if not self._dialect.channels:
            self._source.raw, self._state = [], self._block

    def _give_back(self) -> None:
        """No call comes of what was taken: it is prose."""
        raw, self._source.raw = "".join(self._source.raw or []), None
        self._state = self._prose
        if self._called:
            self._begin_prose()
            raw = raw.lstrip("]}`;,")
            self._state = self._beside if self._dialect.block[1] else self._prose
        elif not self._dialect.channels:
            self._stray = self._dialect.block[1]
        self._say(raw)

    def _beside(self) -> bool:
        """Text that stands in a block behind a call."""
        source = self._source
        start, mark = self._markup.call_marks.find(source.text, source.last)
        self._say(source.text[:start])
        source.text = source.text[start:]
        if mark:
            self._begin_prose()
            source.raw, self._state = [], self._block
        return bool(mark)

    # Harmony ---------------------------------------------------------------------------------

    def _message(self) -> bool:
        """A message's header: a recipient makes it a call, a channel thinking or text."""
        form, source = self._dialect.call, self._source
        assert isinstance(form, Head)
        start = source.until(*form.end, most=MAX_HEADER_CHARS)
        if start == NOT_YET:
            return False
        if start == NEVER:
            self._give_back()
            return True
        header = source.take(start)
        source.take(len(form.end[0]))
        for mark in (*self._dialect.others, self._dialect.block[0]):
            header = header.replace(mark, " ")
        match = re.fullmatch(form.name, self._markup.spell(header))
        if match and is_name(match["name"]) and self._schemas:
            self._read(HeadReader, name=match["name"])
        else:
            self._begin_prose(thinking="analysis" in header and match is None)
        return True
