"""Echo memory: answers as the tokens they were generated in, for when clients send them back.

Clients parse the arguments of calls and write them anew, strip ids and drop layout, so a message of
the past, rendered by the template, is seldom what was generated; from there on the prefix cache
finds nothing. Here an answer is kept by the id of its first call, or by its words and all before,
and given back only for a message that still says the same in the same conversation. Whatever the
client changed is rendered as changed, and what is forgotten costs time, never truth.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson

from .messages import Message

LIMIT_BYTES = 16 * 2**20  # some 8,000 turns of an agent
_TURN_BYTES = 900  # of Python's objects in a turn, beside what they hold
_ID_CHARS = 32  # at the end of a call's id: those tell calls apart
_LINE_END = re.compile(r"(\r\n|\n|\r)")


@dataclass(frozen=True, slots=True)
class Place:
    """Where an answer stands: behind what.

    Text counts from the end of the remembered answer before it, or from the prompt's beginning.
    """

    context: bytes  # digest of the messages before it
    written: bytes  # digest of the prompt's text, up to what only a prompt to be answered has
    chars: int  # of that text
    opening: str  # which follows it and the answer begins behind, such as an opened thinking


@dataclass(frozen=True, slots=True)
class Call:
    id: str
    name: str
    arguments: str  # JSON, as generated


@dataclass(frozen=True, slots=True)
class Said:
    """An answer in the terms clients send it back in."""

    text: str
    reasoning: Sequence[str] = ()  # block by block: the APIs join them differently
    calls: Sequence[Call] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """An answer that is remembered."""

    key: bytes
    place: Place
    tokens: array[int]  # without the one that ended it
    text: bytes  # digest
    reasoning: frozenset[bytes]  # digests, of every way to join it
    calls: tuple[Call, ...]

    @property
    def size_bytes(self) -> int:
        texts = [text for call in self.calls for text in (call.id, call.name, call.arguments)]
        tokens = len(self.tokens) * self.tokens.itemsize
        return _TURN_BYTES + tokens + sum(map(len, texts))


class EchoMemory:
    """Bounded: the least recently used turn goes first. Every method may be called from any thread.

    Args:
        limit_bytes: of all turns together.
    """

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._turns: OrderedDict[bytes, Turn] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        return self._bytes

    def keep(self, place: Place, tokens: Iterable[int], said: Said) -> None:
        """Remember an answer; of two that cannot be told apart, the newer."""
        turn = Turn(
            _key(place.context, said.text, said.reasoning, [call.id for call in said.calls]),
            place,
            array("i", tokens),
            digest(said.text),
            frozenset({digest("".join(said.reasoning)), digest("\n".join(said.reasoning))}),
            tuple(said.calls),
        )
        with self._lock:
            self._drop(turn.key)
            self._turns[turn.key] = turn
            self._bytes += turn.size_bytes
            while self._bytes > self._limit_bytes:
                self._drop(next(iter(self._turns)))

    def find(self, message: Message, context: bytes) -> Turn | None:
        """The turn that ``message``, a normalised one of the assistant, is.

        Args:
            context: of the messages before it, by ``contexts``.
        """
        ids = [call["id"] for call in message.get("tool_calls", ())]
        reasoning = message.get("reasoning_content", "")
        key = _key(context, message["content"], [reasoning], ids)
        with self._lock:
            turn = self._turns.get(key)
            if turn is not None:
                self._turns.move_to_end(key)
        if turn is None or turn.place.context != context or not _says(message, turn):
            return None
        return turn

    def forget(self, turn: Turn) -> None:
        with self._lock:
            if self._turns.get(turn.key) is turn:
                self._drop(turn.key)

    def _drop(self, key: bytes) -> None:
        if (turn := self._turns.pop(key, None)) is not None:
            self._bytes -= turn.size_bytes


def contexts(messages: Sequence[Message], *beside: Any) -> list[bytes]:
    """For each message, and for what may follow the last: a digest of all before it.

    Arguments and thinking are left out: clients write them anew, and the prompt's text has them.

    Args:
        beside: what else the prompt depends on.
    """
    before = blake2b(orjson.dumps(beside), digest_size=16)
    digests = []
    for message in messages:
        digests.append(before.digest())
        calls = [[_stable(c["id"]), c["function"]["name"]] for c in message.get("tool_calls", ())]
        result_of = _stable(message["tool_call_id"]) if "tool_call_id" in message else ""
        facts = [message["role"], message.get("name"), message["content"], calls, result_of]
        before.update(orjson.dumps(facts))
    return [*digests, before.digest()]


def _says(message: Message, turn: Turn) -> bool:
    """Whether ``message`` is what was answered, but for how clients write it."""
    calls = message.get("tool_calls", ())
    return (
        digest(message["content"]) == turn.text
        and digest(message.get("reasoning_content", "")) in turn.reasoning
        and len(calls) == len(turn.calls)
        and all(map(_is_call, calls, turn.calls))
    )


def _is_call(returned: Message, call: Call) -> bool:
    function = returned["function"]
    return (
        _stable(returned["id"]) == _stable(call.id)
        and function["name"] == call.name
        and same_value(orjson.loads(call.arguments), function["arguments"])
    )


def same_value(said: Any, returned: Any) -> bool:
    """Whether a client that reads JSON and writes it anew, as JavaScript does, makes this of that.

    Numbers are doubles there, and keys may change their order. Claude Code cuts off blanks at the
    end of lines.
    """
    if isinstance(said, dict):
        return (
            isinstance(returned, dict)
            and said.keys() == returned.keys()
            and all(same_value(value, returned[key]) for key, value in said.items())
        )
    if isinstance(said, list):
        return (
            isinstance(returned, list)
            and len(said) == len(returned)
            and all(map(same_value, said, returned))
        )
    if isinstance(said, str):
        return isinstance(returned, str) and returned in (said, _without_trailing_blanks(said))
    if _is_number(said) and _is_number(returned):
        return float(said) == float(returned)
    return type(said) is type(returned) and bool(said == returned)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _without_trailing_blanks(text: str) -> str:
    return "".join(part if i % 2 else part.rstrip() for i, part in enumerate(_LINE_END.split(text)))


def _key(context: bytes, text: str, reasoning: Sequence[str], call_ids: Sequence[str]) -> bytes:
    if call_ids:
        return _stable(call_ids[0]).encode()
    thoughts = "".join(reasoning).replace("\n", "")  # the same however the blocks are joined
    return blake2b(orjson.dumps([text, thoughts]), digest_size=16, key=context).digest()


def _stable(call_id: str) -> str:
    """What of a call's id no client changes: prefixes differ by API, and some keep letters only."""
    return "".join(filter(str.isalnum, call_id))[-_ID_CHARS:]


def digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()
