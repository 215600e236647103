"""What a body of ``/v1/responses`` asks for, as a conversation.

Items become messages: thinking, text and calls that follow each other are one message of the
assistant, as they came from one answer. What only OpenAI's servers run is left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import Any

from ftd.errors import RequestInvalid
from ftd.text.conversation import Conversation, Demand, Thinking, Tool, announcement
from ftd.text.messages import MAX_MESSAGES, Message, arguments_value, content_text

from .fields import Fields
from .front import Asked
from .ids import unseal
from .responses_tools import (
    SEARCH,
    ClientTool,
    flat_name,
    free_form_arguments,
    read_tools,
)
from .turn import (
    MAX_TOOLS,
    default_thinking,
    demand_of,
    read_effort,
    read_schema,
    told,
    tool_named,
)

_HOSTED_ITEMS = frozenset(  # traces of tools that run on OpenAI's servers, and its own marks
    {
        "code_interpreter_call",
        "compaction_trigger",
        "file_search_call",
        "image_generation_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "program",
        "program_output",
        "web_search_call",
    }
)
_CALL_CONTENTS = ("arguments", "action", "operation", "actions")
SUMMARY_HEAD = "Summary of the conversation up to here:"

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Input:
    conversation: Conversation
    items: list[Item]  # the whole input, what came before included
    tools: dict[str, ClientTool]  # by the name the model knows


def read_input(fields: Fields, asked: Asked) -> Input:
    """Raises RequestInvalid, naming the item and the part; NoSuchResponse."""
    items = _read_items(fields, asked)
    reader = _Items(asked, read_tools(fields.list("tools", MAX_TOOLS), "tools"))
    if instructions := fields.text("instructions"):
        reader.out.append({"role": "system", "content": instructions})
    for i, item in enumerate(items):
        reader.read(item, f"input[{i}]")
    if not reader.out:
        raise RequestInvalid("input must hold at least one message", param="input")
    effort = read_effort(fields.object("reasoning").get("effort"), "reasoning.effort")
    tools = [known.tool for known in reader.tools.values()]
    conversation = Conversation(
        reader.out,
        told(tools, fields.raw("tool_choice")),
        default_thinking(asked, Thinking(effort=reader.effort or effort)),
        demand=_read_demand(fields, tools),
    )
    return Input(conversation, items, reader.tools)


def _read_items(fields: Fields, asked: Asked) -> list[Item]:
    value = fields.raw("input")
    if isinstance(value, str):
        value = [{"type": "message", "role": "user", "content": value}]
    elif value is not None and not isinstance(value, list):
        raise RequestInvalid("input must be text or a list of items", param="input")
    items: list[Item] = list(value or [])
    if previous := fields.text("previous_response_id"):
        stored = asked.responses.get(previous, param="previous_response_id")
        items = [*stored.items, *stored.response["output"], *items]
    if len(items) > MAX_MESSAGES:
        raise RequestInvalid(
            f"input has {len(items):,} items, {MAX_MESSAGES:,} is the most", param="input"
        )
    return items


def _read_demand(fields: Fields, tools: list[Tool]) -> Demand:
    schema = read_schema(fields.object("text").get("format"), "text")
    asks = partial(demand_of, tools, schema=schema, schema_param="text")
    match fields.raw("tool_choice"):
        case None | "auto" | "none":
            return asks()
        case "required":
            return asks(must_call=True)
        case {"type": "function" | "custom", "name": str(name), **rest}:
            return asks(names=[flat_name(name, rest.get("namespace"))], must_call=True)
        case {"type": "allowed_tools", "mode": mode, "tools": [*entries]}:
            return asks(names=map(_chosen_name, entries), must_call=mode == "required")
    raise RequestInvalid(
        "tool_choice must be auto, none, required, a function or custom tool, or allowed_tools",
        param="tool_choice",
    )


def _chosen_name(entry: Any) -> Any:
    entry = entry if isinstance(entry, dict) else {}
    return flat_name(str(entry.get("name")), entry.get("namespace"))


class _Items:
    """Reads items one after the other."""

    def __init__(self, asked: Asked, tools: dict[str, ClientTool]) -> None:
        self.out: list[Message] = []
        self.tools = tools
        self.effort: str | None = None
        self._asked = asked
        self._turn: Message | None = None  # the assistant's, while it may still grow
        self._begun = False  # something stands in the prompt, so tools come late

    def read(self, item: Any, where: str) -> None:
        if not isinstance(item, dict):
            raise RequestInvalid(f"{where} must be an object", param=where)
        kind = item.get("type") or ("message" if "role" in item else "item_reference")
        if not isinstance(kind, str):
            raise RequestInvalid(f"{where}.type must be a string", param=f"{where}.type")
        match kind:
            case "message":
                self._message(item, where)
            case "reasoning":
                self._reasoning(item)
            case "item_reference":
                self._reference(item, where)
            case "additional_tools" | "tool_search_output":
                self._late_tools(item, kind, where)
            case "compaction" | "compaction_summary":
                if (summary := unseal(item.get("encrypted_content"))) is not None:
                    self._say("user", f"{SUMMARY_HEAD}\n\n{summary}")
            case "configuration_update":
                reasoning = item.get("reasoning")
                if isinstance(reasoning, dict):
                    self.effort = read_effort(reasoning.get("effort"), where) or self.effort
            case _ if kind in _HOSTED_ITEMS:
                pass
            case _ if kind.endswith("_call_output"):
                self._result(item, _output_text(item.get("output"), f"{where}.output"))
            case _ if kind.endswith("_call"):
                self._call(item, kind, where)
            case _ if "content" in item:
                raise RequestInvalid(
                    f"{where} is of type {kind[:100]}, which this server does not know", param=where
                )

    def _say(self, role: str, content: str) -> None:
        self._turn = None
        self._begun = True
        self.out.append({"role": role, "content": content})

    def _message(self, item: Item, where: str) -> None:
        role = {"developer": "system"}.get(str(item.get("role")), item.get("role"))
        if role not in ("user", "assistant", "system"):
            raise RequestInvalid(
                f"{where}.role must be user, assistant, system or developer", param=f"{where}.role"
            )
        content = content_text(item.get("content"), f"{where}.content")
        if role != "assistant":
            self._say(role, content)
            return
        turn = self._turn
        if turn is None or turn["content"] or "tool_calls" in turn:
            turn = self._new_turn()
        turn["content"] = content

    def _new_turn(self) -> Message:
        self._say("assistant", "")
        self._turn = self.out[-1]
        return self._turn

    def _reasoning(self, item: Item) -> None:
        text = unseal(item.get("encrypted_content"))
        if text is None:  # not ours, or the client did not keep it
            parts = item.get("content") or item.get("summary")
            parts = parts if isinstance(parts, list) else []
            texts = (part.get("text") for part in parts if isinstance(part, dict))
            text = "\n".join(text for text in texts if isinstance(text, str))
        if not text:
            return
        turn = self._turn
        if turn is None or turn["content"] or "tool_calls" in turn:
            turn = self._new_turn()
        known = turn.get("reasoning_content")
        turn["reasoning_content"] = f"{known}\n{text}" if known else text

    def _reference(self, item: Item, where: str) -> None:
        item_id = item.get("id")
        found = self._asked.responses.item(item_id) if isinstance(item_id, str) else None
        if found is None:
            raise RequestInvalid(
                f"{where} refers to the item {str(item_id)[:100]!r}, which is not stored",
                param=where,
                hint="send the item itself",
            )
        self.read(found, where)

    def _call(self, item: Item, kind: str, where: str) -> None:
        call_id = item.get("call_id") or item.get("id")
        turn = self._turn or self._new_turn()
        calls = turn.setdefault("tool_calls", [])
        calls.append(
            {
                "id": call_id if isinstance(call_id, str) else f"call_{len(self.out)}_{len(calls)}",
                "type": "function",
                "function": _called(item, kind, where),
            }
        )

    def _result(self, item: Item, text: str) -> None:
        call_id = item.get("call_id") or item.get("id")
        self._say("tool", text)
        self.out[-1]["tool_call_id"] = call_id if isinstance(call_id, str) else "call_0"

    def _late_tools(self, item: Item, kind: str, where: str) -> None:
        """Before everything else they stand at the head; later, where they come up."""
        late = self._begun or kind == "tool_search_output"
        entries = item.get("tools")
        entries = entries if isinstance(entries, list) else []
        found = read_tools(entries, f"{where}.tools", late=late)
        fresh = [t for name, t in found.items() if not self._declared(name)]
        self.tools |= {t.tool.name: t for t in fresh}
        text = announcement([t.tool for t in fresh]) if late and fresh else ""
        if kind == "tool_search_output":
            self._result(item, text or "Nothing was found.")
        elif text:
            self._say("system", text)

    def _declared(self, name: str) -> bool:
        return name in self.tools and not self.tools[name].tool.deferred


def _called(item: Item, kind: str, where: str) -> dict[str, Any]:
    """Name and arguments of a call, as the model wrote them."""
    if kind == "custom_tool_call":
        name, text = tool_named(item.get("name"), f"{where}.name"), item.get("input")
        known_as = flat_name(name, item.get("namespace"))
        return {"name": known_as, "arguments": free_form_arguments(str(text or ""))}
    if kind == "function_call":
        name = flat_name(tool_named(item.get("name"), f"{where}.name"), item.get("namespace"))
        return {"name": name, "arguments": arguments_value(item.get("arguments"))}
    name = SEARCH if kind == f"{SEARCH}_call" else kind.removesuffix("_call")
    given = next((item[key] for key in _CALL_CONTENTS if key in item), None)
    return {"name": name, "arguments": arguments_value(given)}


def _output_text(output: Any, where: str) -> str:
    """A result is text or text parts; of a shell it may be an object of its own kind."""
    parts = output if isinstance(output, list) else [output]
    if output is None or isinstance(output, str) or all(_is_part(part) for part in parts):
        return content_text(output, where)
    return json.dumps(output, ensure_ascii=False)


def _is_part(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("type"), str)
