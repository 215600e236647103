"""Puts generated tokens in the place of answers that a template has rendered.

A template decides everything around an answer, so it is asked: a remembered answer goes into it as
a mark, and what the mark came out in, from the assistant's header to the token that ends the turn,
gives way to the tokens. If the template leaves anything unclear, the turn is rendered as usual.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ftd.errors import RequestInvalid

from .dialects import Dialect, markers_of
from .echo import Place, Turn, digest
from .messages import Message

_OPENING_CHARS = 512  # at a prompt's end, at most: thinking opened, perhaps with words about it
_MOST_HEADER_CHARS = 768  # between that and an answer's first word: markers, a tool's id and name
_MOST_END_CHARS = 512  # from a call's last argument to the end of the turn: markers again
_LAYOUT = " \t\r\n\"\\':,;{}[]()`"  # what may stand around markers behind a call

_MARK = re.compile(r"said[0-9a-f]{38}")

Spliced = list[str | Sequence[int]]  # text of the template, tokens of an answer, text, ...


class NotPlaced(Exception):
    """This answer's place is unclear in this template."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(frozen=True, slots=True)
class Marked:
    """A remembered answer that stands in a conversation as a mark."""

    turn: Turn
    mark: str
    times: int  # the template may write it
    called: bool


class Frame:
    """What a template writes around answers.

    Args:
        dialect: with its markers spelled out.
        ends: the tokens that end answers, as text.
    """

    def __init__(self, dialect: Dialect, ends: Iterable[str]) -> None:
        self.dialect = dialect
        own, end = _either(markers_of(dialect.think)), _either(ends)
        opened = _either([dialect.think.open if dialect.think else ""])
        self._opening = re.compile(
            rf"(?:\s|{own})*\Z|\s*(?:{opened})(?:(?!{opened}|{end}).)*\Z", re.DOTALL
        )
        self._markers = re.compile(_either(markers_of(dialect)))
        self._ends = re.compile(end)

    def place(self, context: bytes, tail: str) -> Place:
        """Where the answer to a prompt stands.

        Args:
            tail: the prompt's text behind the last remembered answer.
        """
        opening = self._opening.search(tail, max(0, len(tail) - _OPENING_CHARS))
        chars = opening.start() if opening else len(tail)
        return Place(context, digest(tail[:chars]), chars, tail[chars:])

    def splice(self, text: str, answers: Sequence[Marked]) -> Spliced:
        """Raises NotPlaced, with the number of the answer."""
        written: dict[str, list[re.Match[str]]] = {}
        for match in _MARK.finditer(text) if answers else ():
            written.setdefault(match[0], []).append(match)
        pieces: Spliced = []
        end = 0
        for number, marked in enumerate(answers):
            place, marks = marked.turn.place, written.get(marked.mark, ())
            if not marks or len(marks) > marked.times:
                raise NotPlaced(number)
            begin = end + place.chars
            if not begin <= marks[0].start() <= begin + _MOST_HEADER_CHARS:
                raise NotPlaced(number)
            if digest(text[end:begin]) != place.written:
                raise NotPlaced(number)
            pieces += [text[end:begin] + place.opening, marked.turn.tokens]
            end = marks[-1].end()
            if marked.called:
                end = self._end(text, end, number)
        return [*pieces, text[end:]]

    def _end(self, text: str, behind: int, number: int) -> int:
        """Where a turn ends whose last mark is within a call."""
        found = self._ends.search(text, behind, behind + _MOST_END_CHARS)
        if found is None:
            raise NotPlaced(number)
        own = self._markers.sub("", text[behind : found.start()])
        if own.strip(_LAYOUT):
            raise NotPlaced(number)
        return found.start()


def with_marks(
    messages: Sequence[Message], turns: Mapping[int, Turn]
) -> tuple[list[Message], list[Marked]]:
    """The conversation with marks in place of its remembered answers.

    Args:
        turns: by the number of the message.
    """
    nonce = uuid.uuid4().hex  # no message of the client holds it
    marks = {i: f"said{nonce}{i:06x}" for i in turns}
    out = [_marked(m, marks[i]) if i in marks else m for i, m in enumerate(messages)]
    answers = []
    for i, turn in turns.items():
        calls = len(messages[i].get("tool_calls", ()))
        times = 2 * calls + bool(messages[i]["content"])
        answers.append(Marked(turn, marks[i], times, calls > 0))
    return out, answers


def in_one_place(render: Callable[[list[Message]], str], text: str, num_calls: int) -> bool:
    """Whether a template writes a message with such text and calls before what follows it: some
    write results of calls between the calls, or before the text.

    Args:
        render: raises RequestInvalid for what the template does not take.
    """
    mark, behind = "zqmark", "zqbehind"
    calls = [
        {"id": f"zqcall{i}", "type": "function", "function": {"name": f"zqf{i}", "arguments": {}}}
        for i in range(num_calls)
    ]
    said: Message = {"role": "assistant", "content": text, "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": c["id"], "content": behind} for c in calls]
    go_on = {"role": "user", "content": behind}
    try:
        written = render([{"role": "user", "content": "zq"}, _marked(said, mark), *results, go_on])
    except RequestInvalid:
        return False
    return written.rfind(mark) < written.find(behind)


def _marked(message: Message, mark: str) -> Message:
    out = {key: value for key, value in message.items() if key != "reasoning_content"}
    if message["content"]:
        out["content"] = mark
    if "tool_calls" in message:
        out["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": {mark: mark}}}
            for call in message["tool_calls"]
        ]
    return out


def _either(markers: Iterable[str]) -> str:
    wanted = sorted({marker.strip() for marker in markers} - {""}, key=len, reverse=True)
    return "|".join(map(re.escape, wanted)) or "(?!)"
