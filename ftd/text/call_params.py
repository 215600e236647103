"""Reads a call whose keys and values have markers around them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .arguments import as_json, kinds, quoted
from .call_reading import BLANKS, MAX_NAME_CHARS, NEVER, NOT_YET, Reach, Reader, Schema, is_name
from .dialects import Params

_GAP_CHARS = 64  # of layout looked over behind what may end a value


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
