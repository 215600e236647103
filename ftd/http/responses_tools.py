"""Tools of ``/v1/responses``, which knows more kinds than models do: all become functions.

A tool in a namespace is a function whose name begins with the namespace; a free-form (custom) tool
is one whose only argument is a string; a search for tools that the client runs is one as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from ftd.errors import RequestInvalid
from ftd.text.conversation import Tool

from .turn import MAX_TOOLS, tool_named

SEARCH = "tool_search"
_FREE_FORM = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
_FREE_FORM_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# whole characters of a JSON string, an escaped surrogate pair being one
_STRING_CHARS = re.compile(
    r'(?:[^"\\]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\[^u])*"
)


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A function the model knows, and what the client calls it."""

    tool: Tool
    kind: Literal["function", "custom", "search"]
    name: str
    namespace: str | None = None


def flat_name(name: str, namespace: Any) -> str:
    """The function's name for the model."""
    if not isinstance(namespace, str) or not namespace:
        return name
    return f"{namespace.rstrip('_')}__{name}"


def read_tools(entries: list[Any], where: str, *, late: bool = False) -> dict[str, ClientTool]:
    """By the name the model knows; tools that run elsewhere are left out.

    Args:
        late: they come up in the middle of a conversation, not at its head.
    """
    found = {}
    client_searches = any(_is_client_search(entry) for entry in entries)
    for entry, place, namespace in _each(entries, where):
        deferred = late or (client_searches and entry.get("defer_loading") is True)
        if client_tool := _read_tool(entry, place, namespace, deferred=deferred):
            found[client_tool.tool.name] = client_tool
    if len(found) > MAX_TOOLS:
        raise RequestInvalid(f"{where} has {len(found):,} tools, {MAX_TOOLS:,} is the most")
    return found


def _each(entries: list[Any], where: str) -> Iterator[tuple[dict[str, Any], str, str | None]]:
    for i, entry in enumerate(entries):
        place = f"{where}[{i}]"
        if not isinstance(entry, dict):
            raise RequestInvalid(f"{place} must be an object", param=place)
        if entry.get("type") != "namespace":
            yield entry, place, None
            continue
        namespace = tool_named(entry.get("name"), f"{place}.name")
        inner = entry.get("tools")
        for j, tool in enumerate(inner if isinstance(inner, list) else []):
            if isinstance(tool, dict):
                yield tool, f"{place}.tools[{j}]", namespace


def _is_client_search(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and entry.get("type") == SEARCH
        and entry.get("execution") == "client"
    )


def _read_tool(
    entry: dict[str, Any], where: str, namespace: str | None, *, deferred: bool
) -> ClientTool | None:
    kind, description = entry.get("type"), entry.get("description")
    description = description if isinstance(description, str) else None
    if _is_client_search(entry):
        tool = Tool.declare(SEARCH, description, entry.get("parameters"), deferred=deferred)
        return ClientTool(tool, "search", SEARCH)
    if kind not in ("function", "custom"):
        return None
    name = tool_named(entry.get("name"), f"{where}.name")
    known_as = flat_name(name, namespace)
    if kind == "function":
        tool = Tool.declare(
            known_as,
            description,
            entry.get("parameters"),
            deferred=deferred,
            strict=entry.get("strict") is True,
        )
        return ClientTool(tool, "function", name, namespace)
    grammar = _grammar(entry.get("format"))
    if grammar:
        syntax, definition = grammar
        description = f"{description or ''}\nThe input follows this {syntax} grammar:\n{definition}"
    tool = Tool.declare(known_as, description, _FREE_FORM, deferred=deferred, grammar=grammar)
    return ClientTool(tool, "custom", name, namespace)


def _grammar(form: Any) -> tuple[str, str] | None:
    if not isinstance(form, dict) or form.get("type") != "grammar":
        return None
    inner = form.get("grammar")  # one of the API's two spellings wraps it once more
    form = inner if isinstance(inner, dict) else form
    syntax, definition = form.get("syntax"), form.get("definition")
    if isinstance(syntax, str) and isinstance(definition, str):
        return syntax, definition
    return None


def free_form_arguments(text: str) -> dict[str, str]:
    return {"input": text}


def free_form_input(arguments: str) -> str:
    """The text within a free-form tool's arguments; they themselves, should they hold none."""
    try:
        parsed = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    text = parsed.get("input") if isinstance(parsed, dict) else None
    return text if isinstance(text, str) else arguments


class FreeFormReader:
    """``free_form_input`` while the arguments are still being written."""

    def __init__(self) -> None:
        self._unread = ""
        self._within = False

    def feed(self, fragment: str) -> str:
        """The text that has become certain."""
        self._unread += fragment
        if not self._within:
            head = _FREE_FORM_HEAD.match(self._unread)
            if head is None:
                return ""
            self._within, self._unread = True, self._unread[head.end() :]
        match = _STRING_CHARS.match(self._unread)
        assert match is not None
        self._unread = self._unread[match.end() :]
        try:
            return str(orjson.loads(f'"{match[0]}"'))
        except orjson.JSONDecodeError:  # the end of the call will tell
            return ""
