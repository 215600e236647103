"""What every chat API asks for, in one form: messages, tools, how much to think.

The APIs' readers make a ``Conversation``; ``TextModel.render`` turns it into a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .messages import Message

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_COMMON = frozenset({"low", "medium", "high"})  # what templates that name no efforts understand
# a budget in tokens as an effort, for templates that know only those
_EFFORT_UP_TO = ((4096, "low"), (16384, "medium"))


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call; the client runs it."""

    name: str
    parameters: Mapping[str, Any]  # JSON schema of the arguments; empty: anything
    declaration: Mapping[str, Any]  # as templates take it: {"type": "function", "function": ...}
    deferred: bool = False  # not declared up front, but where a message refers to it
    strict: bool = False  # the client relies on it that calls obey the schema
    grammar: tuple[str, str] | None = None  # of its only argument, a text: syntax and definition

    @staticmethod
    def declare(name: str, description: str | None, parameters: Any, **options: Any) -> Tool:
        parameters = parameters if isinstance(parameters, dict) else {}
        function: dict[str, Any] = {"name": name}
        if description:
            function["description"] = description
        function["parameters"] = parameters or {"type": "object", "properties": {}}
        declaration = {"type": "function", "function": function}
        return Tool(name, parameters, declaration, **options)


def announcement(tools: Sequence[Tool]) -> str:
    """Tools as text, for where they become available in the middle of a conversation."""
    lines = [json.dumps(tool.declaration, ensure_ascii=False) for tool in tools]
    return "\n".join(["These functions can be called from now on:", *lines])


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What a chat template's source tells of it."""

    variables: frozenset[str] = frozenset()  # that it reads and nobody sets within it
    efforts: frozenset[str] = frozenset()  # those of EFFORTS it names


@dataclass(frozen=True, slots=True)
class Thinking:
    """How much the model is to think; None: nothing was said."""

    on: bool | None = None
    effort: str | None = None  # one of EFFORTS
    budget_tokens: int | None = None

    def variables(self, facts: TemplateFacts) -> dict[str, Any]:
        """Template variables: each family of templates reads one of them, the others are unused."""
        on, effort = self.on, self.effort
        if on is None and (effort or self.budget_tokens):
            on = effort != "none"
        if on is False:
            effort = "none"
        elif effort is None and self.budget_tokens and "thinking_budget" not in facts.variables:
            effort = _effort_of(self.budget_tokens)
        variables: dict[str, Any] = {}
        if on is not None:
            variables |= {"enable_thinking": on, "thinking": on}
        if effort is not None:
            variables["reasoning_effort"] = _nearest(effort, facts.efforts)
        if on is False:
            variables["thinking_budget"] = 0
        elif self.budget_tokens:
            variables["thinking_budget"] = self.budget_tokens
        return variables


@dataclass(frozen=True, slots=True)
class Demand:
    """What the client insists on; a model may or may not do it by itself."""

    schema: Mapping[str, Any] | None = None  # the text is JSON of this schema; {}: any object
    schema_param: str = ""  # the field that asked for it
    tools: frozenset[str] | None = None  # only these may be called
    must_call: bool = False  # one of them, or of all
    choice_param: str = ""


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: Sequence[Message]  # from ``messages.normalise``
    tools: Sequence[Tool] = ()  # the model is told of those that are not deferred
    thinking: Thinking = Thinking()
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the client; they win
    demand: Demand = Demand()

    @property
    def declarations(self) -> list[Mapping[str, Any]] | None:
        """For the template; None instead of an empty list, which some take for tools."""
        return [tool.declaration for tool in self.tools if not tool.deferred] or None


def _effort_of(budget_tokens: int) -> str:
    return next((effort for most, effort in _EFFORT_UP_TO if budget_tokens <= most), "high")


def _nearest(effort: str, named: frozenset[str]) -> str:
    """The effort the template understands: a model has not seen others in training.

    A template that names several understands just those; one that names one (its default) or none
    understands the common ones too.
    """
    known = named if len(named) > 1 else named | _COMMON
    rank = EFFORTS.index(effort)
    return min(known, key=lambda e: (abs(EFFORTS.index(e) - rank), -EFFORTS.index(e)))
