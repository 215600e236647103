"""Calls of the past in the form one family's template writes them in.

Clients send them back in the APIs' terms. Some templates take only a part of those, and lose the
rest or refuse; here is what they need, so that a call is rendered as it was generated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count

from .dialects import Dialect
from .messages import Message


def in_terms_of(dialect: Dialect, messages: Sequence[Message]) -> Sequence[Message]:
    """``messages`` (from ``messages.normalise``) for a template of ``dialect``."""
    form = dialect.history
    if form.one_call:
        messages = list(_one_call_each(messages))
    if form.numbered_ids:
        messages = list(_with_numbered_ids(messages))
    if form.text_arguments:
        messages = [_with_text_arguments(message) for message in messages]
    return messages


def _with_text_arguments(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        text = (
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        )
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls}


def _one_call_each(messages: Sequence[Message]) -> Iterator[Message]:
    """Parallel calls one after the other, each with its result."""
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        calls = message.get("tool_calls", [])
        if len(calls) < 2:
            yield message
            continue
        results = []
        while position < len(messages) and messages[position]["role"] == "tool":
            results.append(messages[position])
            position += 1
        for i, call in enumerate(calls):
            said = message if i == 0 else {"role": "assistant", "content": ""}
            yield {**said, "tool_calls": [call]}
            yield from (result for result in results if result["tool_call_id"] == call["id"])
        known = {call["id"] for call in calls}
        yield from (result for result in results if result["tool_call_id"] not in known)


def _with_numbered_ids(messages: Sequence[Message]) -> Iterator[Message]:
    numbers = count()
    renamed: dict[str, str] = {}
    for message in messages:
        if calls := message.get("tool_calls"):
            for call in calls:
                renamed[call["id"]] = f"functions.{call['function']['name']}:{next(numbers)}"
            message = {
                **message,
                "tool_calls": [{**call, "id": renamed[call["id"]]} for call in calls],
            }
        elif (known := message.get("tool_call_id")) in renamed:
            message = {**message, "tool_call_id": renamed[known]}
        yield message
