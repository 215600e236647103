"""What a body of ``/v1/messages`` asks for, as a conversation.

Blocks of a user's message become messages of their own in their order: a tool result is a message,
the text between two of them another. Whatever only Anthropic's servers can run is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from ftd.errors import RequestInvalid
from ftd.text.conversation import Conversation, Demand, Thinking, Tool, announcement
from ftd.text.messages import MAX_MESSAGES, Message

from .fields import Fields
from .front import Asked
from .turn import (
    MAX_TOOLS,
    default_thinking,
    demand_of,
    read_effort,
    read_schema,
    told,
    tool_named,
)

_BILLING_LINE = "x-anthropic-billing-header:"  # Claude Code's first system block; it changes
_TOOL_TYPES = (None, "custom")  # tools of other types run on Anthropic's servers
_HOSTED_BLOCKS = frozenset(  # traces of such tools in histories that were begun elsewhere
    {"server_tool_use", "container_upload", "mcp_tool_use", "mcp_tool_listing", "fallback"}
)
_MEDIA_BLOCKS = frozenset({"image", "audio", "video"})


def read_conversation(fields: Fields, asked: Asked) -> Conversation:
    """Raises RequestInvalid, naming the message and the block."""
    messages = _Messages(_read_tools(fields))
    if system := _system_text(fields.raw("system"), keep_all=not asked.config.drop_billing_line):
        messages.out.append({"role": "system", "content": system})
    messages.read(fields.raw("messages"))
    tools = list(messages.tools.values())
    thinking = _read_thinking(fields, messages.effort)
    return Conversation(
        messages.out,
        told(tools, fields.object("tool_choice").get("type")),
        default_thinking(asked, thinking, unsaid=False),
        demand=_read_demand(fields, tools),
    )


def _read_tools(fields: Fields) -> dict[str, Tool]:
    tools = {}
    for i, entry in enumerate(fields.list("tools", MAX_TOOLS)):
        if tool := _read_tool(entry, f"tools[{i}]"):
            tools[tool.name] = tool
    return tools


def _read_tool(entry: Any, where: str, *, deferred: bool = False) -> Tool | None:
    if not isinstance(entry, dict):
        raise RequestInvalid(f"{where} must be an object", param=where)
    if entry.get("type") not in _TOOL_TYPES:
        return None
    name = tool_named(entry.get("name"), f"{where}.name")
    description = entry.get("description")
    return Tool.declare(
        name,
        description if isinstance(description, str) else None,
        entry.get("input_schema"),
        deferred=deferred or entry.get("defer_loading") is True,
        strict=entry.get("strict") is True,
    )


def _read_demand(fields: Fields, tools: list[Tool]) -> Demand:
    form = fields.object("output_config").get("format")
    schema = read_schema(form, "output_config")
    asks = partial(demand_of, tools, schema=schema, schema_param="output_config")
    match fields.object("tool_choice"):
        case {"type": "auto" | "none"}:
            return asks()
        case {"type": "any"}:
            return asks(must_call=True)
        case {"type": "tool", "name": name}:
            return asks(names=[name], must_call=True)
        case choice if choice:
            raise RequestInvalid(
                "tool_choice must be of type auto, none, any, or tool with a name",
                param="tool_choice",
            )
    return asks()


def one_call(fields: Fields) -> bool:
    return fields.object("tool_choice").get("disable_parallel_tool_use") is True


def _read_thinking(fields: Fields, effort_of_messages: str | None) -> Thinking:
    """Unasked, this API does not think."""
    config = fields.object("output_config")
    said = fields.object("thinking")
    kind, budget = said.get("type"), said.get("budget_tokens")
    if not said:
        return Thinking()
    if not isinstance(kind, str):
        raise RequestInvalid("thinking.type must be a string", param="thinking")
    if kind == "disabled":
        return Thinking(on=False)
    return Thinking(
        on=True,
        effort=effort_of_messages or read_effort(config.get("effort"), "output_config"),
        budget_tokens=budget if isinstance(budget, int) and budget > 0 else None,
    )


def _system_text(system: Any, *, keep_all: bool) -> str:
    if system is None or isinstance(system, str):
        system = [{"type": "text", "text": system or ""}]
    if not isinstance(system, list):
        raise RequestInvalid("system must be text or a list of text blocks", param="system")
    texts = [_block_text(block, f"system[{i}]") for i, block in enumerate(system)]
    return _lines(t for t in texts if keep_all or not t.startswith(_BILLING_LINE))


class _Messages:
    """Reads messages one after the other; what tools they bring and what effort they ask for."""

    def __init__(self, tools: dict[str, Tool]) -> None:
        self.out: list[Message] = []
        self.tools = tools
        self.effort: str | None = None

    def read(self, messages: Any) -> None:
        if not isinstance(messages, list) or not messages:
            raise RequestInvalid(
                "messages must be a list with at least one message", param="messages"
            )
        if len(messages) > MAX_MESSAGES:
            raise RequestInvalid(
                f"messages has {len(messages):,} entries, {MAX_MESSAGES:,} is the most",
                param="messages",
            )
        for i, message in enumerate(messages):
            self._read_message(message, f"messages[{i}]")

    def _read_message(self, message: Any, where: str) -> None:
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant", "system"):
            raise RequestInvalid(
                f"{where}.role must be user, assistant or system", param=f"{where}.role"
            )
        blocks = _blocks(message.get("content"), f"{where}.content")
        if role == "assistant":
            self.out.append(_assistant_message(blocks))
            return
        if role == "system":
            config = message.get("output_config")
            effort = config.get("effort") if isinstance(config, dict) else None
            self.effort = read_effort(effort, f"{where}.output_config") or self.effort
        self._read_blocks(str(role), blocks)

    def _read_blocks(self, role: str, blocks: list[tuple[str, dict[str, Any]]]) -> None:
        texts: list[str] = []
        results = 0
        for where, block in blocks:
            if block["type"] != "tool_result":
                texts.append(self._text(block, where))
                continue
            self._say(role, texts)
            texts, results = [], results + 1
            self.out.append(self._tool_message(block, where))
        self._say(role, texts, even_nothing=not results)

    def _say(self, role: str, texts: list[str], *, even_nothing: bool = False) -> None:
        if (text := _lines(texts)) or even_nothing:
            self.out.append({"role": role, "content": text})

    def _tool_message(self, block: dict[str, Any], where: str) -> Message:
        call_id = block.get("tool_use_id")
        parts = _blocks(block.get("content"), f"{where}.content")
        return {
            "role": "tool",
            "tool_call_id": call_id if isinstance(call_id, str) and call_id else "call_0",
            "content": _lines(self._text(part, place) for place, part in parts),
        }

    def _text(self, block: dict[str, Any], where: str) -> str:
        """A block's text; of a reference to a tool, the tool."""
        match block["type"]:
            case "tool_reference":
                return self._announced(self.tools.get(str(block.get("tool_name"))))
            case "tool_addition":
                return self._added(block.get("tool"), where)
            case "tool_removal":
                tool = block.get("tool")
                name = tool.get("name") if isinstance(tool, dict) else None
                return f"The function {name} can no longer be called." if name else ""
        return _block_text(block, where)

    def _added(self, change: Any, where: str) -> str:
        change = change if isinstance(change, dict) else {}
        if change.get("type") != "tool_definition":
            return self._announced(self.tools.get(str(change.get("name"))))
        tool = _read_tool(change.get("definition"), f"{where}.tool.definition", deferred=True)
        if tool is not None:
            self.tools[tool.name] = tool
        return self._announced(tool)

    @staticmethod
    def _announced(tool: Tool | None) -> str:
        """Tools that stand at the head of the prompt need no second declaration."""
        return announcement([tool]) if tool is not None and tool.deferred else ""


def _assistant_message(blocks: list[tuple[str, dict[str, Any]]]) -> Message:
    reasoning: list[str] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for where, block in blocks:
        match block["type"]:
            case "thinking":
                reasoning.append(_string(block, "thinking", where))
            case "redacted_thinking":
                pass
            case "tool_use":
                calls.append(_call(block, where, f"call_{len(calls)}"))
            case _:
                texts.append(_block_text(block, where))
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if thoughts := _lines(reasoning):
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: dict[str, Any], where: str, made_up_id: str) -> dict[str, Any]:
    call_id, arguments = block.get("id"), block.get("input")
    name = tool_named(block.get("name"), f"{where}.name")
    return {
        "id": call_id if isinstance(call_id, str) and call_id else made_up_id,
        "type": "function",
        "function": {"name": name, "arguments": {} if arguments is None else arguments},
    }


def _blocks(content: Any, where: str) -> list[tuple[str, dict[str, Any]]]:
    """The blocks of a content, each with its place."""
    if content is None or isinstance(content, str):
        return [(where, {"type": "text", "text": content or ""})]
    if isinstance(content, dict):  # a single block without its list
        content = [content]
    if not isinstance(content, list):
        raise RequestInvalid(f"{where} must be text or a list of blocks", param=where)
    blocks = []
    for i, block in enumerate(content):
        if isinstance(block, str):
            block = {"type": "text", "text": block}
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise RequestInvalid(
                f"{where}[{i}] must be an object with a type", param=f"{where}[{i}]"
            )
        blocks.append((f"{where}[{i}]", block))
    return blocks


def _block_text(block: Any, where: str) -> str:
    if isinstance(block, str):
        return block
    kind = block.get("type") if isinstance(block, dict) else None
    match kind:
        case "text":
            return _string(block, "text", where)
        case "document":
            return _document_text(block, where)
        case "search_result":
            parts = _blocks(block.get("content"), f"{where}.content")
            head = [_string(block, "title", where), _string(block, "source", where)]
            return _lines([*head, *(_block_text(part, place) for place, part in parts)])
        case "compaction":
            return _string(block, "content", where)
        case str() if kind in _HOSTED_BLOCKS or kind.endswith("_tool_result"):
            return ""
    raise RequestInvalid(
        f"{where} is {'of type ' + kind if isinstance(kind, str) else 'not a block'}; "
        "this model reads text only",
        param=where,
        hint="send blocks of type text" if isinstance(kind, str) and kind in _MEDIA_BLOCKS else "",
    )


def _document_text(block: dict[str, Any], where: str) -> str:
    source = block.get("source")
    source = source if isinstance(source, dict) else {}
    head = [_string(block, "title", where), _string(block, "context", where)]
    if source.get("type") == "text":
        return _lines([*head, _string(source, "data", f"{where}.source")])
    if source.get("type") == "content":
        parts = _blocks(source.get("content"), f"{where}.source.content")
        return _lines([*head, *(_block_text(part, place) for place, part in parts)])
    raise RequestInvalid(
        f"{where} is a document that is no text; this model reads text only",
        param=where,
        hint="send the document's text",
    )


def _string(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if value is not None and not isinstance(value, str):
        raise RequestInvalid(f"{where}.{name} must be a string", param=f"{where}.{name}")
    return value or ""


def _lines(texts: Iterable[str]) -> str:
    """Blocks are joined by a newline; empty ones add nothing."""
    return "\n".join(text for text in texts if text)
