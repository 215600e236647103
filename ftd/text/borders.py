"""Where messages begin and end in a prompt's tokens, as one chat template writes them.

Nothing is known of templates beforehand: a few conversations made of words that occur nowhere else
are rendered, and what stands between two of the words is what the template writes between two
messages. Of that only what begins with a token of its own (an added token, which no text runs into)
is looked for, so finding it again is a scan over ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from ftd.errors import RequestInvalid
from ftd.kv.anchors import Anchor, AnchorKind

from .messages import Message

_SYSTEM, _USER, _ANSWER, _NEXT, _LAST = "zqsystem", "zquser", "zqanswer", "zqnext", "zqlast"
_THOUGHT, _NAME, _ARGUMENT, _RESULT = "zqthought", "zqname", "zqargument", "zqresult"
_TOOL = {
    "type": "function",
    "function": {
        "name": "zqtool",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}
# what ended where a message begins, by the role of the one before
_ENDED = {
    "header": AnchorKind.SYSTEM,  # whatever stands before the first message
    "assistant": AnchorKind.TURN,
    "tool": AnchorKind.RESULT,
}


class Render(Protocol):
    def __call__(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class Borders:
    """What one template writes at borders, in tokens."""

    opens: tuple[
        tuple[tuple[int, ...], str], ...
    ] = ()  # how a role's message begins; longest first
    marks: Mapping[int, AnchorKind] = field(default_factory=dict)  # tokens within messages

    def anchors(self, ids: Sequence[int]) -> tuple[Anchor, ...]:
        """Borders within a prompt, each position once, in order. Cost: 1 µs for 200 tokens."""
        tokens = np.asarray(ids, np.int32)
        wanted = {pattern[0] for pattern, _ in self.opens} | self.marks.keys()
        places = np.flatnonzero(np.isin(tokens, list(wanted))).tolist()
        found: dict[int, AnchorKind] = {}
        before, last_user, end = "header", 0, 0
        for at in places:
            if at < end:
                continue
            if opened := self._opened(ids, at):
                pattern, role = opened
                end = at + len(pattern)
                if before == "header" and role == "system":
                    continue
                if at:
                    found[at] = _ENDED.get(before, AnchorKind.ROLE)
                last_user = at if role == "user" else last_user
                before = role
            elif before != "header" and (kind := self.marks.get(ids[at])):
                place = at if kind is AnchorKind.CALL else at + 1
                found.setdefault(place, kind)
        if last_user and found[last_user] is not AnchorKind.SYSTEM:
            found[last_user] = AnchorKind.USER
        found.pop(len(ids), None)
        return tuple(Anchor(at, found[at]) for at in sorted(found))

    def _opened(self, ids: Sequence[int], at: int) -> tuple[tuple[int, ...], str] | None:
        return next((o for o in self.opens if tuple(ids[at : at + len(o[0])]) == o[0]), None)


def find_borders(
    render: Render, encode: Callable[[str], list[int]], added: frozenset[int]
) -> Borders:
    """Ask a template how it writes borders.

    Args:
        encode: text to ids; added tokens are recognised in it.
        added: ids of those.
    Cost: a dozen small renderings; once for a template.
    """
    opens: dict[tuple[int, ...], str] = {}
    marks: dict[int, AnchorKind] = {}
    for messages in _CONVERSATIONS:
        for before, after, text in _between(render, messages):
            written = encode(text)
            closed = _agreed(written, encode(_end(render, messages[: before + 1])))
            opened = _from_added(written[closed:], added)
            if opened:
                opens[opened] = "assistant" if after is None else messages[after]["role"]
    known = {token for pattern in opens for token in pattern}
    known.update(encode(_end(render, _SPOKEN)))
    for messages in _CONVERSATIONS:
        for kind, text in _within(render, messages):
            own = [token for token in encode(text) if token in added and token not in known]
            if own:
                marks[own[-1] if kind is AnchorKind.THOUGHT else own[0]] = kind
    return Borders(_patterns(opens, added), marks)


def _message(role: str, content: str, **fields: Any) -> Message:
    return {"role": role, "content": content, **fields}


def _call(number: int) -> dict[str, Any]:
    function = {"name": f"{_NAME}{number}", "arguments": {"a": f"{_ARGUMENT}{number}"}}
    return {"id": f"zqcallid{number}", "type": "function", "function": function}


def _with_calls(calls: int, *, thought: bool) -> list[Message]:
    numbers = range(1, calls + 1)
    said = {"reasoning_content": _THOUGHT} if thought else {}
    return [
        _message("user", _USER),
        _message("assistant", _ANSWER, tool_calls=[_call(n) for n in numbers], **said),
        *(_message("tool", f"{_RESULT}{n}", tool_call_id=f"zqcallid{n}") for n in numbers),
    ]


_SPOKEN = (_message("user", _USER), _message("assistant", _ANSWER))
_CONVERSATIONS: tuple[list[Message], ...] = (
    [*_SPOKEN, _message("system", _SYSTEM), _message("user", _NEXT)],  # perhaps made a user's
    [*_SPOKEN, _message("user", _NEXT)],
    [_message("system", _SYSTEM), *_SPOKEN],
    _with_calls(1, thought=True),
    _with_calls(2, thought=False),
    [*_with_calls(1, thought=False), _message("assistant", _NEXT), _message("user", _LAST)],
)


def _words(message: Message) -> list[str]:
    """What is to be found of a message, in the order templates write it."""
    words = [message[key] for key in ("reasoning_content", "content") if key in message]
    for call in message.get("tool_calls", ()):
        words += [call["function"]["name"], call["function"]["arguments"]["a"]]
    return words


def _rendered(render: Render, messages: Sequence[Message], *, goes_on: bool) -> str:
    """The text; empty if the template does not take such a conversation."""
    tools = [_TOOL] if any("tool_calls" in message for message in messages) else None
    try:
        return render(messages, tools=tools, add_generation_prompt=goes_on)
    except RequestInvalid:
        return ""


def _places(text: str, messages: Sequence[Message]) -> list[tuple[int, int]] | None:
    """Where each message's first word begins and its last one ends; None: one is missing."""
    places, at = [], 0
    for message in messages:
        found = [text.find(word, at) for word in _words(message)]
        found = [begin for begin in found if begin >= 0]
        if not found:
            return None
        begin = min(found)
        at = max(text.find(word, at) + len(word) for word in _words(message) if word in text[at:])
        places.append((begin, at))
    return places


def _between(render: Render, messages: list[Message]) -> Iterator[tuple[int, int | None, str]]:
    """Message, the one behind it (None: an answer is to come), and what is written in between."""
    text = _rendered(render, messages, goes_on=True)
    places = _places(text, messages)
    if places is None:
        return
    for i, ((_, end), (begin, _)) in enumerate(pairwise(places)):
        yield i, i + 1, text[end:begin]
    if messages[-1]["role"] != "assistant":
        yield len(messages) - 1, None, text[places[-1][1] :]


def _end(render: Render, messages: Sequence[Message]) -> str:
    """What is written behind the last message when nothing is to follow."""
    text = _rendered(render, messages, goes_on=False)
    places = _places(text, messages)
    return text[places[-1][1] :] if places else ""


def _within(render: Render, messages: Sequence[Message]) -> Iterator[tuple[AnchorKind, str]]:
    """What is written behind thinking, before a call and behind one."""
    text = _rendered(render, messages, goes_on=True)
    name, argument = f"{_NAME}1", f"{_ARGUMENT}1"
    if not all(word in text for word in (_ANSWER, name, argument)):
        return
    answer = text.index(_ANSWER)
    if 0 <= (thought := text.find(_THOUGHT)) < answer:
        yield AnchorKind.THOUGHT, text[thought + len(_THOUGHT) : answer]
    if answer < (begin := text.index(name)):
        yield AnchorKind.CALL, text[answer + len(_ANSWER) : begin]
    behind = text[text.index(argument) + len(argument) :]
    nexts = [at for at in (behind.find(_RESULT), behind.find(_NAME)) if at >= 0]
    yield AnchorKind.CALL_END, behind[: min(nexts, default=len(behind))]


def _agreed(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _from_added(tokens: Sequence[int], added: frozenset[int]) -> tuple[int, ...]:
    first = next((i for i, token in enumerate(tokens) if token in added), len(tokens))
    return tuple(tokens[first:])


def _patterns(
    opens: Mapping[tuple[int, ...], str], added: frozenset[int]
) -> tuple[tuple[tuple[int, ...], str], ...]:
    """As much of each beginning as tells the roles apart: what follows may run into the text."""
    found = {}
    for tokens, role in opens.items():
        others = [
            other
            for other, its in opens.items()
            if its != role and other[: len(tokens)] != tokens  # longer ones are looked for first
        ]
        least = 1 + max(i for i, token in enumerate(tokens) if token in added)
        length = next(
            (n for n in range(least, len(tokens)) if all(o[:n] != tokens[:n] for o in others)),
            len(tokens),
        )
        found[tokens[:length]] = role
    return tuple(sorted(found.items(), key=lambda item: -len(item[0])))
