"""What an answer is made of: thinking, text and tool calls, in the order they were written.

The parser makes these events, every API wraps them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    index: int  # of the call within its answer
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    index: int
    fragment: str  # of JSON text


@dataclass(frozen=True, slots=True)
class CallEnd:
    index: int
    arguments: str  # all fragments joined
    valid: bool  # they are a JSON object; False: the model wrote something else, or was cut


Event = Reasoning | Text | CallStart | CallArguments | CallEnd


@dataclass(slots=True)
class Block:
    """A run of one kind in an answer."""

    index: int
    kind: Literal["reasoning", "text", "call"]
    text: str = ""  # of a call: its arguments
    name: str = ""  # of a call's tool
    call: int = 0  # which call of the answer this is
    valid: bool = True  # of a call: whether its arguments are a whole JSON object


@dataclass(frozen=True, slots=True)
class Step:
    """A block opens, grows by ``text``, or closes."""

    kind: Literal["open", "grow", "close"]
    block: Block
    text: str = ""


class Blocks:
    """Puts an answer's events into blocks: at most one is open, and the next begins where it ends.

    Text of blanks alone between two blocks is layout of the model's own and makes no block.
    """

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None
        self._blanks = ""  # that may begin a block of ``_blanks_kind``
        self._blanks_kind = ""

    def push(self, event: Event) -> Iterator[Step]:
        match event:
            case Reasoning(text):
                yield from self._run("reasoning", text)
            case Text(text):
                yield from self._run("text", text)
            case CallStart(index, name):
                yield from self.end()
                yield self._begin(Block(len(self.all), "call", name=name, call=index, valid=False))
            case CallArguments(_, fragment):
                yield from self._grow(fragment)
            case CallEnd(_, arguments, valid):
                block = self._open
                assert block is not None and block.kind == "call", event
                block.text, block.valid = arguments, valid
                yield from self.end()

    def end(self) -> Iterator[Step]:
        """Close what is open; after the last event, the answer is over."""
        self._blanks = ""
        if self._open is not None:
            closed, self._open = self._open, None
            yield Step("close", closed)

    def _run(self, kind: Literal["reasoning", "text"], text: str) -> Iterator[Step]:
        if self._open is not None and self._open.kind == kind:
            yield from self._grow(text)
            return
        text = self._blanks + text if self._blanks_kind == kind else text
        if not text.strip():
            self._blanks, self._blanks_kind = text, kind
            return
        yield from self.end()
        yield self._begin(Block(len(self.all), kind))
        yield from self._grow(text)

    def _begin(self, block: Block) -> Step:
        self.all.append(block)
        self._open = block
        return Step("open", block)

    def _grow(self, text: str) -> Iterator[Step]:
        assert self._open is not None
        self._open.text += text
        if text:
            yield Step("grow", self._open, text)


def blocks_of(events: Iterable[Event]) -> list[Block]:
    """The blocks of a whole answer."""
    blocks = Blocks()
    for event in events:
        for _ in blocks.push(event):
            pass
    for _ in blocks.end():
        pass
    return blocks.all
