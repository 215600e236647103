"""Messages as clients send them, brought into the form chat templates expect.

Clients disagree about content (a string, parts, null, nothing), ids and arguments of tool calls and
the place of system messages. What is certain is mended here; what a template refuses is rewritten
step by step (``rewrites``) and only refused when nothing helps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

import orjson

from ftd.errors import RequestInvalid

MAX_MESSAGES = 20_000
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_NINE = re.compile("[A-Za-z0-9]{9}")
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")

Message = dict[str, Any]


def normalise(messages: Any) -> list[Message]:
    """Check and mend a request's ``messages``.

    Returns:
        Messages with ``role`` and ``content`` (a string), and where given ``name``,
        ``reasoning_content``, ``tool_calls`` (id, name and arguments always there) and
        ``tool_call_id``.
    Raises:
        RequestInvalid: naming the message and the part.
    """
    if not isinstance(messages, list) or not messages:
        raise RequestInvalid("messages must be a list with at least one message", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestInvalid(
            f"messages has {len(messages):,} entries, {MAX_MESSAGES:,} is the most",
            param="messages",
        )
    return [_message(message, f"messages[{i}]", i) for i, message in enumerate(messages)]


def rewrites(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Forms of the same conversation, each asking less of a template, to try until one is taken.

    1. As given: system messages stay where they are, as the prefix cache wants them.
    2. Ids of calls have nine letters and digits (Mistral's templates insist), and an assistant's
       message has calls with thinking or with content, not both (gpt-oss's template).
    3. One system message at the start; later ones become user messages in their place; messages of
       user or assistant that follow one of the same role are joined to it with an empty line.
       Arguments of a tool call that are no object become one that holds them.
    4. The system message is put before the first user message, for templates without that role.
    """
    given = list(messages)
    strict = [_strict_calls(m) for m in given]
    joined = [_with_object_arguments(m) for m in _joined(_late_system_as_user(strict))]
    last = None
    for form in (given, strict, joined, _system_in_user(joined)):
        if form != last:
            yield form
        last = form


def _message(message: Any, where: str, index: int) -> Message:
    if not isinstance(message, dict):
        raise RequestInvalid(f"{where} must be an object", param=where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestInvalid(
            f"{where}.role is {_shown(role)}; it must be one of {', '.join(sorted(_ROLES))}",
            param=f"{where}.role",
        )
    role = {"developer": "system", "function": "tool"}.get(role, role)
    out: Message = {
        "role": role,
        "content": content_text(message.get("content"), f"{where}.content"),
    }
    if isinstance(name := message.get("name"), str) and name:
        out["name"] = name
    if role == "assistant":
        _add_assistant_fields(out, message, where, index)
    elif role == "tool":
        call_id = message.get("tool_call_id")
        out["tool_call_id"] = call_id if isinstance(call_id, str) and call_id else f"call_{index}"
    return out


def _add_assistant_fields(out: Message, message: Message, where: str, index: int) -> None:
    for field in _REASONING_FIELDS:
        if isinstance(reasoning := message.get(field), str) and reasoning:
            out["reasoning_content"] = reasoning
            break
    calls = message.get("tool_calls")
    if calls is None or calls == []:
        if isinstance(refusal := message.get("refusal"), str) and not out["content"]:
            out["content"] = refusal
        return
    if not isinstance(calls, list):
        raise RequestInvalid(f"{where}.tool_calls must be a list", param=f"{where}.tool_calls")
    out["tool_calls"] = [
        _tool_call(call, f"{where}.tool_calls[{i}]", f"call_{index}_{i}")
        for i, call in enumerate(calls)
    ]


def _tool_call(call: Any, where: str, made_up_id: str) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestInvalid(
            f"{where} must have a function with a name", param=f"{where}.function.name"
        )
    call_id = call.get("id")
    return {
        "id": call_id if isinstance(call_id, str) and call_id else made_up_id,
        "type": "function",
        "function": {
            "name": function["name"],
            "arguments": arguments_value(function.get("arguments")),
        },
    }


def arguments_value(arguments: Any) -> Any:
    """An object if it is one or parses to one, for templates that walk it; else the text as it is.

    A call cut in the middle by some server must not make its conversation unusable for ever.
    """
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def content_text(content: Any, where: str) -> str:
    """The text of a message's content; parts are joined by a newline, empty ones add nothing."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, dict):  # a single part without its list
        content = [content]
    if not isinstance(content, list):
        raise RequestInvalid(
            f"{where} is {_shown(content)}; it must be text, a list of text parts, or null",
            param=where,
        )
    texts = [_part_text(part, f"{where}[{i}]") for i, part in enumerate(content)]
    return "\n".join(text for text in texts if text)


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    if kind == "refusal" and isinstance(text := part.get("refusal"), str):
        return text
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise RequestInvalid(
            f"{where} is {_what(part, kind)}; this model reads text only",
            param=where,
            hint="send parts of type text",
        )
    text = part.get("text")
    if text is not None and not isinstance(text, str):
        raise RequestInvalid(f"{where}.text must be a string", param=f"{where}.text")
    return text or ""


def _what(part: Any, kind: Any) -> str:
    if isinstance(kind, str):
        return f"of type {kind}"
    return "of no type" if isinstance(part, Mapping) else "not an object"


def _strict_calls(message: Message) -> Message:
    if call_id := message.get("tool_call_id"):
        return {**message, "tool_call_id": _nine_characters(call_id)}
    if "tool_calls" not in message:
        return message
    calls = [{**call, "id": _nine_characters(call["id"])} for call in message["tool_calls"]]
    message = {**message, "tool_calls": calls}
    if "reasoning_content" in message and message["content"]:
        thoughts = _paragraphs(message["reasoning_content"], message["content"])
        message |= {"reasoning_content": thoughts, "content": ""}
    return message


def _nine_characters(call_id: str) -> str:
    return call_id if _NINE.fullmatch(call_id) else sha256(call_id.encode()).hexdigest()[:9]


def _late_system_as_user(messages: Sequence[Message]) -> list[Message]:
    out: list[Message] = []
    for message in messages:
        leading = all(earlier["role"] == "system" for earlier in out)
        if message["role"] == "system" and not leading:
            message = {**message, "role": "user"}
        out.append(message)
    return out


def _joined(messages: Sequence[Message]) -> list[Message]:
    out: list[Message] = []
    for message in messages:
        if out and _may_join(out[-1], message):
            out[-1] = {**message, "content": _paragraphs(out[-1]["content"], message["content"])}
        else:
            out.append(message)
    return out


def _may_join(first: Message, second: Message) -> bool:
    return (
        first["role"] == second["role"] != "tool"
        and first.get("name") == second.get("name")
        and not {"tool_calls", "reasoning_content"} & (first.keys() | second.keys())
    )


def _with_object_arguments(message: Message) -> Message:
    calls = message.get("tool_calls", [])
    if all(isinstance(call["function"]["arguments"], dict) for call in calls):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Message) -> Message:
    function = call["function"]
    if isinstance(function["arguments"], dict):
        return call
    return {**call, "function": {**function, "arguments": {"arguments": function["arguments"]}}}


def _system_in_user(messages: list[Message]) -> list[Message]:
    if messages[0]["role"] != "system":
        return messages
    system, rest = messages[0], messages[1:]
    if rest and rest[0]["role"] == "user":
        text = _paragraphs(system["content"], rest[0]["content"])
        return [{**rest[0], "content": text}, *rest[1:]]
    return [{**system, "role": "user"}, *rest]


def _paragraphs(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)


def _shown(value: Any) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= 40 else f"{text[:37]}..."
