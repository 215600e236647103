"""A conversation's next turn as a job for the engine; what all three chat APIs share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ftd.engine.api import Sampling
from ftd.errors import RequestInvalid
from ftd.text.answer import Reading
from ftd.text.conversation import EFFORTS, Conversation, Thinking, Tool
from ftd.text.stops import StopSet

from .exchange import Asked
from .generation import Job, Prompt, room_tokens

MAX_TOOLS = 1024
MAX_NAME_CHARS = 256


def prompt_of(asked: Asked, conversation: Conversation) -> Prompt:
    """Render and tokenize; what tokens are counted by is exactly what is generated from."""
    text = asked.served.text.prompt(conversation)
    return Prompt(asked.served.text.encode(text), text)


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
) -> Job:
    """What is returned can be submitted as it is.

    Args:
        one_call: the answer ends with its first tool call.
    Raises:
        RequestInvalid, ContextExceeded: the template refuses, or the prompt is too long.
    """
    prompt = prompt_of(asked, conversation)
    room_tokens(len(prompt.ids), asked.served.engine.limits)
    return Job(
        prompts=(prompt,),
        copies=copies,
        max_tokens=max_tokens,
        sampling=sampling,
        reading=Reading(
            stops,
            asked.served.text.parser(conversation, prompt.text or "", asked.tool_dialect),
            one_call=one_call,
            empty=max_tokens == 0,
        ),
        eos_ids=frozenset() if ignore_eos else asked.served.text.eos_ids,
        stop_ids=stop_ids,
    )


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


def told(tools: Sequence[Tool], choice: Any) -> tuple[Tool, ...]:
    """The tools the model is told of: with tool choice ``none`` it does not hear of any."""
    return () if choice == "none" else tuple(tools)
