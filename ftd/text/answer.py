"""One answer on its way from tokens to text: detokenized, cut at stop strings, counted.

Every API is a different wrapping of the ``Piece``s made here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ftd.engine.api import Finish, Output, TokenLogprob

from .stops import StopScanner, StopSet
from .textmodel import TextModel

Reason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that may be shown, and the tokens it came from if logprobs were asked for."""

    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    offsets: tuple[int, ...] = ()  # for each of them: characters of the answer before its text
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # in one of the first pieces
    finish: Reason | None = None  # of the last piece
    stop: str | None = None  # the stop string that ended the answer


class Answer:
    """Turns the engine's outputs for one request into pieces.

    Args:
        empty: nothing but the prompt's logprobs was asked for; the one token an engine must sample
            is thrown away.
    """

    def __init__(self, text: TextModel, stops: StopSet, *, empty: bool = False) -> None:
        self.tokens = 0  # sampled, the one that ended the answer included
        self.reused_tokens = 0
        self._empty = empty
        self._detokenizer = text.detokenizer()
        self._scanner = StopScanner(stops)
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()  # with the offset of their text
        self._read_chars = 0  # given to the scanner
        self._shown_chars = 0

    def push(self, output: Output) -> Piece:
        """Take one output; once a piece has ``finish``, push no more."""
        if output.reused_tokens is not None:
            self.reused_tokens = output.reused_tokens
        if self._empty:
            finish: Reason | None = "length" if output.tokens or output.finish else None
            return Piece(prompt_logprobs=output.prompt_logprobs, finish=finish)
        text, finish = self._read_tokens(output)
        self._shown_chars += len(text)
        logprobs = self._logprobs_shown(rest=finish is not None and not self._scanner.matched)
        return Piece(
            text,
            logprobs=tuple(logprob for _, logprob in logprobs),
            offsets=tuple(offset for offset, _ in logprobs),
            prompt_logprobs=output.prompt_logprobs,
            finish=finish,
            stop=self._scanner.matched,
        )

    def _read_tokens(self, output: Output) -> tuple[str, Reason | None]:
        """The text these tokens let through, and why the answer ends, if it does."""
        tokens = output.tokens
        if output.finish in (Finish.EOS, Finish.STOP):
            tokens = tokens[:-1]  # an eos or stop id is no part of the text
        shown = []
        for i, token in enumerate(tokens):
            self.tokens += 1
            if output.logprobs:
                self._waiting.append((self._read_chars, output.logprobs[i]))
            shown.append(self._read(self._detokenizer.push(token)))
            if self._scanner.matched:
                return "".join(shown), "stop"
        self.tokens += len(output.tokens) - len(tokens)
        if output.finish is None:
            return "".join(shown), None
        shown.append(self._read(self._detokenizer.flush()))
        if self._scanner.matched:
            return "".join(shown), "stop"
        shown.append(self._scanner.flush())
        return "".join(shown), "length" if output.finish is Finish.LENGTH else "stop"

    def _read(self, text: str) -> str:
        self._read_chars += len(text)
        return self._scanner.push(text)

    def _logprobs_shown(self, *, rest: bool) -> list[tuple[int, TokenLogprob]]:
        """Those of tokens whose text has begun to be shown; a stop string's tokens never are."""
        shown = []
        while self._waiting and (rest or self._waiting[0][0] < self._shown_chars):
            shown.append(self._waiting.popleft())
        return shown


def joined(pieces: Sequence[Piece]) -> Piece:
    """All pieces of an answer as one."""
    given = (piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs is not None)
    return Piece(
        "".join(piece.text for piece in pieces),
        logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
        offsets=tuple(offset for piece in pieces for offset in piece.offsets),
        prompt_logprobs=next(given, None),
        finish=pieces[-1].finish if pieces else None,
        stop=pieces[-1].stop if pieces else None,
    )
