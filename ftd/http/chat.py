"""``/v1/chat/completions``: messages in, an assistant's message out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from ftd.errors import FtdError, RequestInvalid
from ftd.text.answer import Piece
from ftd.text.conversation import Conversation, Demand, Thinking, Tool
from ftd.text.events import Block, Blocks, Step, blocks_of
from ftd.text.messages import normalise

from .errors import error_object
from .fields import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_TOKENS,
    Fields,
    read_include_usage,
    read_sampling,
    read_stop_ids,
    read_stops,
)
from .front import Asked
from .generation import Job, Usage
from .ids import call_id
from .logprobs import chat_logprobs
from .stream import DONE, event
from .turn import (
    MAX_TOOLS,
    default_thinking,
    demand_of,
    read_effort,
    read_schema,
    told,
    tool_named,
    turn_job,
)

_TEMPLATE_OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "self"})


def read_chat(fields: Fields, asked: Asked) -> Chat:
    """Check every field, render and tokenize: what is returned can be submitted as it is."""
    _refuse_what_cannot_be_kept(fields)
    limits, text = asked.served.engine.limits, asked.served.text
    sampling = read_sampling(fields, text.defaults, limits.vocab, logprobs=_read_logprobs(fields))
    max_tokens = _first_of(
        fields.whole("max_completion_tokens", 1, MAX_TOKENS),
        fields.whole("max_tokens", 1, MAX_TOKENS),
    )
    fields.text("model")  # any name is served: agents ask for names they know
    tools = _read_tools(fields)
    conversation = Conversation(
        normalise(fields.raw("messages")),
        told(tools, fields.raw("tool_choice")),
        default_thinking(asked, _read_thinking(fields)),
        _read_variables(fields),
        _read_demand(fields, tools),
    )
    job = turn_job(
        asked,
        conversation,
        sampling=sampling,
        stops=read_stops(fields),
        max_tokens=max_tokens,
        copies=fields.whole("n", 1, MAX_CHOICES) or 1,
        one_call=not fields.flag("parallel_tool_calls", True),
        ignore_eos=fields.flag("ignore_eos"),
        stop_ids=read_stop_ids(fields, limits.vocab),
        cache_key=fields.text("prompt_cache_key"),
    )
    stream = fields.flag("stream")
    return Chat(asked, job, stream, include_usage=read_include_usage(fields))


def _refuse_what_cannot_be_kept(fields: Fields) -> None:
    """Fields that promise something about the answer: silence would break the promise."""
    for name, instead in (("functions", "tools"), ("function_call", "tool_choice")):
        if fields.raw(name):
            raise RequestInvalid(f"{name} is the old form", param=name, hint=f"use {instead}")
    if fields.raw("audio"):
        raise RequestInvalid("audio is not made: this model has no voice", param="audio")
    if "audio" in fields.list("modalities", 8):
        raise RequestInvalid("modalities may be text only", param="modalities")


def _read_demand(fields: Fields, tools: list[Tool]) -> Demand:
    form = fields.object("response_format")
    if form.get("type") == "json_schema":
        inner = form.get("json_schema")
        form = {"type": "json_schema", **(inner if isinstance(inner, dict) else {})}
    asks = partial(
        demand_of,
        tools,
        schema=read_schema(form, "response_format"),
        schema_param="response_format",
    )
    match fields.raw("tool_choice"):
        case None | "auto" | "none":
            return asks()
        case "required":
            return asks(must_call=True)
        case {"type": "function", "function": {"name": name}}:
            return asks(names=[name], must_call=True)
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*entries]}}:
            names = [_function_name(entry) for entry in entries]
            return asks(names=names, must_call=mode == "required")
    raise RequestInvalid(
        "tool_choice must be auto, none, required, a function or allowed_tools",
        param="tool_choice",
    )


def _function_name(entry: Any) -> Any:
    function = entry.get("function") if isinstance(entry, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _read_logprobs(fields: Fields) -> int | None:
    wanted = fields.flag("logprobs")
    top = fields.whole("top_logprobs", 0, MAX_LOGPROBS)
    if top and not wanted:
        raise RequestInvalid("top_logprobs needs logprobs: true", param="top_logprobs")
    return (top or 0) if wanted else None


def _read_tools(fields: Fields) -> list[Tool]:
    """The functions; tools of other types run elsewhere."""
    tools = []
    for i, tool in enumerate(fields.list("tools", MAX_TOOLS)):
        if not isinstance(tool, dict):
            raise RequestInvalid(f"tools[{i}] must be an object", param=f"tools[{i}]")
        if tool.get("type") != "function":
            continue
        where, function = f"tools[{i}].function", tool.get("function")
        if not isinstance(function, dict):
            raise RequestInvalid(f"{where} must be an object with a name", param=where)
        name, parameters = (
            tool_named(function.get("name"), f"{where}.name"),
            function.get("parameters"),
        )
        parameters = parameters if isinstance(parameters, dict) else {}
        tools.append(Tool(name, parameters, tool, strict=function.get("strict") is True))
    return tools


def _read_thinking(fields: Fields) -> Thinking:
    """Thinking is switched in any of the ways clients know."""
    effort = read_effort(fields.text("reasoning_effort"), "reasoning_effort")
    reasoning = fields.object("reasoning")
    budget = reasoning.get("max_tokens")
    return Thinking(
        on=reasoning.get("enabled") if isinstance(reasoning.get("enabled"), bool) else None,
        effort=effort or read_effort(reasoning.get("effort"), "reasoning"),
        budget_tokens=budget if isinstance(budget, int) and budget > 0 else None,
    )


def _read_variables(fields: Fields) -> dict[str, Any]:
    variables = dict(fields.object("chat_template_kwargs"))
    if clash := _TEMPLATE_OWN & variables.keys():
        raise RequestInvalid(
            f"chat_template_kwargs may not set {', '.join(sorted(clash))}",
            param="chat_template_kwargs",
        )
    return variables


def _first_of(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


class Chat:
    """``dialect.Dialect`` of OpenAI chat."""

    def __init__(self, asked: Asked, job: Job, stream: bool, *, include_usage: bool) -> None:
        self.job = job
        self.stream = stream
        self._text = asked.served.text
        self._include_usage = include_usage
        self._request_id = asked.request_id
        self._envelope = {
            "id": asked.request_id,
            "created": int(time.time()),
            "model": asked.served.name,
        }
        self._blocks = [Blocks() for _ in range(job.answers)]

    def opening(self, told: int) -> Iterator[bytes]:
        for index in range(self.job.answers):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:
        blocks = self._blocks[index]
        logprobs = self._logprobs(piece)
        for written in piece.events:
            for step in blocks.push(written):
                if delta := self._delta(index, step):
                    shown = logprobs if "content" in delta else None
                    yield self._chunk(index, delta, logprobs=shown)
                    logprobs = None if shown else logprobs
        if logprobs:
            yield self._chunk(index, {"content": ""}, logprobs=logprobs)
        if piece.finish:
            yield self._chunk(index, {}, finish=_finish_reason(piece, blocks.all))

    def beat(self) -> Iterator[bytes]:
        yield self._chunk(0, {})

    def closing(self, usage: Usage) -> Iterator[bytes]:
        if self._include_usage:
            yield event(self._body("chat.completion.chunk", [], usage_object(usage)))
        yield DONE

    def failure(self, error: FtdError) -> Iterator[bytes]:
        yield event(error_object(error))

    def reply(self, answers: list[Piece], usage: Usage) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(answers):
            blocks = blocks_of(answer.events)
            choices.append(
                {
                    "index": index,
                    "message": self._message(index, blocks),
                    "logprobs": self._logprobs(answer),
                    "finish_reason": _finish_reason(answer, blocks),
                }
            )
        return self._body("chat.completion", choices, usage_object(usage))

    def _message(self, index: int, blocks: list[Block]) -> dict[str, Any]:
        def all_of(kind: str) -> str:
            return "".join(block.text for block in blocks if block.kind == kind)

        calls = [self._call(index, block) for block in blocks if block.kind == "call"]
        content, reasoning = all_of("text"), all_of("reasoning")
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if calls and not content else content,
            "refusal": None,
        }
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def _delta(self, index: int, step: Step) -> dict[str, Any]:
        match step.kind, step.block.kind:
            case "grow", "text":
                return {"content": step.text}
            case "grow", "reasoning":
                return {"reasoning_content": step.text}
            case "open", "call":
                return {"tool_calls": [{"index": step.block.call, **self._call(index, step.block)}]}
            case "grow", "call":
                fragment = {"arguments": step.text}
                return {"tool_calls": [{"index": step.block.call, "function": fragment}]}
        return {}

    def _call(self, index: int, block: Block) -> dict[str, Any]:
        return {
            "id": call_id("call_", self._request_id, index, block.call),
            "type": "function",
            "function": {"name": block.name, "arguments": block.text},
        }

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if self.job.sampling.logprobs is None or not piece.logprobs:
            return None
        return {"content": chat_logprobs(self._text, piece.logprobs), "refusal": None}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        finish: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": finish}
        choice["logprobs"] = logprobs
        return event(self._body("chat.completion.chunk", [choice], None))

    def _body(
        self, kind: str, choices: Iterable[dict[str, Any]], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        body: dict[str, Any] = {**self._envelope, "object": kind, "choices": list(choices)}
        if usage is not None or self._include_usage:
            body["usage"] = usage
        return body


def _finish_reason(piece: Piece, blocks: list[Block]) -> str | None:
    """An answer cut in the middle of a call says ``length``: that call is not to be run."""
    called = any(block.kind == "call" for block in blocks)
    return "tool_calls" if called and piece.finish == "stop" else piece.finish


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, **usage.match()},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
