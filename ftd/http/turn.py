"""A conversation's next turn as a job for the engine; what all three chat APIs share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ftd.engine.api import Sampling
from ftd.errors import RequestInvalid
from ftd.text.answer import Reading
from ftd.text.conversation import EFFORTS, Conversation, Demand, Thinking, Tool
from ftd.text.stops import StopSet
from ftd.text.textmodel import Rendered

from .errors import readable
from .front import Asked
from .generation import Job, Prompt, refuse_too_long, room_tokens

MAX_TOOLS = 1024
MAX_NAME_CHARS = 256
MAX_SESSION_CHARS = 128
_SESSION_HEADERS = ("x-claude-code-session-id", "session-id", "x-session-id")


def prompt_of(asked: Asked, conversation: Conversation) -> Rendered:
    """Render and tokenize; what tokens are counted by is exactly what is generated from."""
    return asked.served.text.prompt(conversation, asked.tool_dialect)


def turn_job(
    asked: Asked,
    conversation: Conversation,
    *,
    sampling: Sampling,
    stops: StopSet,
    max_tokens: int | None,
    copies: int = 1,
    one_call: bool = False,
    ignore_eos: bool = False,
    stop_ids: frozenset[int] = frozenset(),
    cache_key: str | None = None,
) -> Job:
    """What is returned can be submitted as it is.

    Args:
        one_call: the answer ends behind its first tool call.
        cache_key: names the conversation, if no header does.
    Raises:
        RequestInvalid: the template refuses, or a schema or choice of tools cannot be kept to.
        ContextExceeded: the prompt is too long.
    """
    limits, text = asked.served.engine.limits, asked.served.text
    check = partial(refuse_too_long, limits=limits)
    prompt = text.prompt(conversation, asked.tool_dialect, check)
    room_tokens(len(prompt.ids), limits)
    constraint = text.constraint(conversation, prompt.tail, limits.vocab, asked.tool_dialect)
    demand = conversation.demand
    if ignore_eos and (demand.schema is not None or demand.must_call):
        raise RequestInvalid(
            "ignore_eos cannot go with a schema or a forced call, behind which nothing may come",
            param="ignore_eos",
        )
    shown = text.text_of(prompt.pieces) if asked.config.log_prompts else None
    return Job(
        prompts=(Prompt(prompt.ids, shown, prompt.place, text.anchors(prompt.ids)),),
        copies=copies,
        max_tokens=max_tokens,
        sampling=sampling,
        reading=Reading(
            stops,
            text.parser(conversation, prompt.tail, asked.tool_dialect),
            one_call=one_call,
            empty=max_tokens == 0,
        ),
        eos_ids=frozenset() if ignore_eos else text.eos_ids,
        stop_ids=stop_ids,
        constraint=constraint,
        session=session_of(asked.headers, cache_key),
    )


def session_of(headers: Mapping[str, str], cache_key: str | None = None) -> str:
    """Whose conversation it is, as clients say it: a sub-agent's is one of its own."""
    found = (headers.get(name, "") for name in _SESSION_HEADERS)
    session = next((value for value in found if value), cache_key or "")
    agent = headers.get("x-claude-code-agent-id", "")
    return readable(f"{session}/{agent}" if agent else session)[:MAX_SESSION_CHARS]


def default_thinking(asked: Asked, said: Thinking, *, unsaid: bool | None = None) -> Thinking:
    """What the request said of thinking; else the server's setting; else ``unsaid``."""
    if said.on is not None or said.effort is not None or said.budget_tokens is not None:
        return said
    setting = asked.config.thinking
    return replace(said, on=unsaid if setting == "auto" else setting == "on")


def read_effort(value: Any, param: str) -> str | None:
    if value is not None and value not in EFFORTS:
        raise RequestInvalid(f"{param} must be one of {', '.join(EFFORTS)}", param=param)
    return None if value is None else str(value)


def tool_named(name: Any, param: str) -> str:
    """Raises RequestInvalid unless ``name`` can be a tool's name."""
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARS:
        raise RequestInvalid(
            f"{param} must be a string of 1 to {MAX_NAME_CHARS} characters", param=param
        )
    return name


def read_schema(form: Any, param: str) -> Mapping[str, Any] | None:
    """The JSON schema a form asks for; None for text.

    Args:
        form: ``{"type": "text" | "json_object" | "json_schema", "schema": ...}``.
    """
    if form is None:
        return None
    kind = form.get("type", "text") if isinstance(form, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {}
    if kind != "json_schema" or not isinstance(form.get("schema"), dict):
        raise RequestInvalid(
            f"{param} must be of type text, json_object, or json_schema with a schema", param=param
        )
    return dict(form["schema"])


def demand_of(
    tools: Sequence[Tool],
    *,
    schema: Mapping[str, Any] | None = None,
    schema_param: str = "",
    names: Iterable[Any] | None = None,
    must_call: bool = False,
) -> Demand:
    """A demand whose tools exist.

    Args:
        names: of the only tools that may be called, as the model knows them.
    """
    known = {tool.name for tool in tools}
    chosen = None if names is None else list(names)
    for name in chosen or ():
        if name not in known:
            raise RequestInvalid(
                f"tool_choice names {name!r:.100}, which is not among the tools",
                param="tool_choice",
            )
    if must_call and not known:
        raise RequestInvalid("tool_choice wants a call and there are no tools", param="tool_choice")
    allowed = None if chosen is None else frozenset(chosen)
    return Demand(schema, schema_param, allowed, must_call, "tool_choice")


def told(tools: Sequence[Tool], choice: Any) -> tuple[Tool, ...]:
    """The tools the model is told of: with tool choice ``none`` it does not hear of any."""
    return () if choice == "none" else tuple(tools)
