"""One answer on its way from tokens to events: detokenized, parsed, cut at stop strings, counted.

Every API is a different wrapping of the ``Piece``s made here.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ftd.engine.api import Finish, Output, TokenLogprob
from ftd.kv.anchors import Resumed

from .events import Block, CallEnd, Event, Reasoning, Text, blocks_of
from .stops import StopScanner, StopSet
from .textmodel import TextModel

Reason = Literal["stop", "length"]
Remember = Callable[[Sequence[int], Sequence[Block]], None]

_MOST_BEHIND_CALL = 24  # tokens in which a block of one call, and the answer with it, should end


@dataclass(frozen=True, slots=True)
class Piece:
    """What may be shown, and the tokens it came from if logprobs were asked for."""

    events: tuple[Event, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    offsets: tuple[int, ...] = ()  # for each of them: characters of the answer before its text
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # in one of the first pieces
    reused_tokens: int | None = None  # of the prompt, in the first piece: the answer has begun
    finish: Reason | None = None  # of the last piece
    stop: str | None = None  # the stop string that ended the answer

    @property
    def text(self) -> str:
        """The text alone, without thinking and calls."""
        return "".join(event.text for event in self.events if isinstance(event, Text))


class Parser(Protocol):
    """Finds structure in an answer; see ``ftd.text.parse``."""

    @property
    def thinking(self) -> bool: ...

    def feed(self, token_id: int | None, text: str) -> list[Event]: ...

    def finish(self, cut: bool) -> list[Event]: ...


class PlainParser:
    """Everything is text."""

    thinking = False

    def feed(self, token_id: int | None, text: str) -> list[Event]:
        return [Text(text)] if text else []

    def finish(self, cut: bool) -> list[Event]:
        return []


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers of a request are read."""

    stops: StopSet
    parser: Callable[[], Parser] = PlainParser
    one_call: bool = False  # the answer ends behind its first call
    empty: bool = False  # only the prompt's logprobs are wanted; the token sampled is thrown away


class Answer:
    """Turns the engine's outputs for one request into pieces.

    Stop strings are looked for in text, neither in thinking nor in calls.

    Args:
        remember: given the tokens and the blocks of an answer that the model has ended itself.
    """

    def __init__(self, text: TextModel, reading: Reading, remember: Remember | None = None) -> None:
        self.tokens = 0  # sampled, the one that ended the answer included
        self.reasoning_tokens = 0
        self.reused_tokens = 0
        self.resumed: Resumed | None = None
        self._reading = reading
        self._remember = remember
        self._generated = array("i")  # but for the token that ends the answer
        self._told: list[Event] = []  # so far, if it is to be remembered
        self._ended_itself = False
        self._behind_call: int | None = None  # tokens read since the only call there may be
        self._detokenizer = text.detokenizer()
        self._parser = reading.parser()
        self._scanner = StopScanner(reading.stops)
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()  # with the offset of their text
        self._read_chars = 0  # of text, given to the scanner
        self._shown_chars = 0

    def push(self, output: Output) -> Piece:
        """Take one output; once a piece has ``finish``, push no more."""
        if output.reused_tokens is not None:
            self.reused_tokens, self.resumed = output.reused_tokens, output.resumed
        if self._reading.empty:
            finish: Reason | None = "length" if output.tokens or output.finish else None
            return Piece(
                prompt_logprobs=output.prompt_logprobs,
                reused_tokens=output.reused_tokens,
                finish=finish,
            )
        events: list[Event] = []
        finish = self._read_output(output, events)
        events = list(_merged(events))
        if self._remember is not None:
            self._told += events
            if self._ended_itself:
                self._remember(self._generated, blocks_of(self._told))
        self._shown_chars += sum(len(e.text) for e in events if isinstance(e, Text))
        logprobs = self._logprobs_shown(all_=finish is not None and not self._scanner.matched)
        return Piece(
            tuple(events),
            logprobs=tuple(logprob for _, logprob in logprobs),
            offsets=tuple(offset for offset, _ in logprobs),
            prompt_logprobs=output.prompt_logprobs,
            reused_tokens=output.reused_tokens,
            finish=finish,
            stop=self._scanner.matched,
        )

    def _read_output(self, output: Output, shown: list[Event]) -> Reason | None:
        """Add what these tokens let through to ``shown``; why the answer ends, if it does."""
        tokens = output.tokens
        if output.finish in (Finish.EOS, Finish.STOP):
            tokens = tokens[:-1]  # an eos or stop id is no part of the text
        for i, token in enumerate(tokens):
            self.tokens += 1
            if self._remember is not None:
                self._generated.append(token)
            if output.logprobs:
                self._waiting.append((self._read_chars, output.logprobs[i]))
            thinking = self._parser.thinking
            events = self._parser.feed(token, self._detokenizer.push(token))
            self.reasoning_tokens += thinking or self._parser.thinking
            if self._show(events, shown) or self._lingers():
                return "stop"
        self.tokens += len(output.tokens) - len(tokens)
        if output.finish is None:
            return None
        cut = output.finish is Finish.LENGTH
        if self._show(self._parser.feed(None, self._detokenizer.flush()), shown):
            return "stop"
        thinking = self._parser.thinking
        if self._show(self._parser.finish(cut), shown):
            return "stop"
        shown.append(Text(self._scanner.flush()))
        self._ended_itself = output.finish is Finish.EOS and not thinking
        # an answer that ends within its thinking has been cut, whoever cut it
        return "length" if (cut or thinking) and self._behind_call is None else "stop"

    def _show(self, events: Iterable[Event], shown: list[Event]) -> bool:
        """Add to ``shown`` what stop strings let through; whether the answer ends here."""
        for event in events:
            if self._behind_call is not None:
                if isinstance(event, Text) and not event.text.strip():
                    continue
                return True
            if isinstance(event, Text):
                self._read_chars += len(event.text)
                shown.append(Text(self._scanner.push(event.text)))
                if self._scanner.matched:
                    return True
                continue
            shown.append(Text(self._scanner.flush()))
            shown.append(event)
            if self._reading.one_call and isinstance(event, CallEnd):
                self._behind_call = 0
        return False

    def _lingers(self) -> bool:
        """Whether the answer should have ended by now, behind the only call there may be."""
        if self._behind_call is None:
            return False
        self._behind_call += 1
        return self._behind_call > _MOST_BEHIND_CALL

    def _logprobs_shown(self, *, all_: bool) -> list[tuple[int, TokenLogprob]]:
        """Those of tokens whose text has begun to be shown; a stop string's tokens never are."""
        all_ = all_ or (self._reading.parser is not PlainParser and not self._scanner.holding)
        shown = []
        while self._waiting and (all_ or self._waiting[0][0] < self._shown_chars):
            shown.append(self._waiting.popleft())
        return shown


def _merged(events: Iterable[Event]) -> Iterator[Event]:
    """Neighbouring text as one event, and thinking likewise; empty ones left out."""
    last: Text | Reasoning | None = None
    for event in events:
        if isinstance(event, Text | Reasoning):
            if not event.text:
                continue
            if last is not None and type(last) is type(event):
                last = type(last)(last.text + event.text)
            else:
                if last is not None:
                    yield last
                last = event
            continue
        if last is not None:
            yield last
            last = None
        yield event
    if last is not None:
        yield last


def joined(pieces: Sequence[Piece]) -> Piece:
    """All pieces of an answer as one."""
    given = (piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs is not None)
    reused = (piece.reused_tokens for piece in pieces if piece.reused_tokens is not None)
    return Piece(
        tuple(_merged(event for piece in pieces for event in piece.events)),
        logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
        offsets=tuple(offset for piece in pieces for offset in piece.offsets),
        prompt_logprobs=next(given, None),
        reused_tokens=next(reused, None),
        finish=pieces[-1].finish if pieces else None,
        stop=pieces[-1].stop if pieces else None,
    )
