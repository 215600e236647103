"""``/v1/chat/completions``: messages in, an assistant's message out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from ftd.errors import FtdError, RequestInvalid
from ftd.text.answer import Piece
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
from .generation import Job, Prompt, Usage, room_tokens
from .logprobs import chat_logprobs
from .ports import ServedModel
from .stream import DONE, event

MAX_TOOLS = 1024
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_TEMPLATE_OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


def read_chat(fields: Fields, served: ServedModel, request_id: str) -> Chat:
    """Check every field, render and tokenize: what is returned can be submitted as it is."""
    _refuse_what_cannot_be_kept(fields)
    limits, text = served.engine.limits, served.text
    sampling = read_sampling(fields, text.defaults, limits.vocab, logprobs=_read_logprobs(fields))
    max_tokens = _first_of(
        fields.whole("max_completion_tokens", 1, MAX_TOKENS),
        fields.whole("max_tokens", 1, MAX_TOKENS),
    )
    fields.text("model")  # any name is served: agents ask for names they know
    tools = _read_tools(fields)
    rendered = text.render(
        normalise(fields.raw("messages")), tools=tools or None, extra=_read_template_extra(fields)
    )
    ids = text.encode(rendered)
    room_tokens(len(ids), limits)
    job = Job(
        prompts=(Prompt(ids, rendered),),
        copies=fields.whole("n", 1, MAX_CHOICES) or 1,
        max_tokens=max_tokens,
        sampling=sampling,
        stops=read_stops(fields),
        eos_ids=frozenset() if fields.flag("ignore_eos") else text.eos_ids,
        stop_ids=read_stop_ids(fields, limits.vocab),
    )
    stream = fields.flag("stream")
    return Chat(served, request_id, job, stream, include_usage=read_include_usage(fields))


def _refuse_what_cannot_be_kept(fields: Fields) -> None:
    """Fields that promise something about the answer: silence would break the promise."""
    response_format = fields.object("response_format")
    if response_format.get("type", "text") != "text":
        raise RequestInvalid(
            "response_format asks for a form this server does not enforce",
            param="response_format",
            hint="ask for the form in the prompt and use type text",
        )
    choice = fields.raw("tool_choice")
    if choice not in (None, "auto", "none"):
        raise RequestInvalid(
            "tool_choice may be auto or none: a call is not forced", param="tool_choice"
        )
    for name, instead in (("functions", "tools"), ("function_call", "tool_choice")):
        if fields.raw(name):
            raise RequestInvalid(f"{name} is the old form", param=name, hint=f"use {instead}")
    if fields.raw("audio"):
        raise RequestInvalid("audio is not made: this model has no voice", param="audio")
    if "audio" in fields.list("modalities", 8):
        raise RequestInvalid("modalities may be text only", param="modalities")


def _read_logprobs(fields: Fields) -> int | None:
    wanted = fields.flag("logprobs")
    top = fields.whole("top_logprobs", 0, MAX_LOGPROBS)
    if top and not wanted:
        raise RequestInvalid("top_logprobs needs logprobs: true", param="top_logprobs")
    return (top or 0) if wanted else None


def _read_tools(fields: Fields) -> list[dict[str, Any]]:
    """Tools for the template; with ``tool_choice`` none the model is not told of them."""
    tools = fields.list("tools", MAX_TOOLS)
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise RequestInvalid(f"tools[{i}] must be an object", param=f"tools[{i}]")
        function = tool.get("function")
        if tool.get("type") == "function" and not (
            isinstance(function, dict) and isinstance(function.get("name"), str)
        ):
            raise RequestInvalid(
                f"tools[{i}].function must be an object with a name", param=f"tools[{i}].function"
            )
    if fields.raw("tool_choice") == "none":
        return []
    return [tool for tool in tools if tool.get("type") == "function"]  # hosted tools run elsewhere


def _read_template_extra(fields: Fields) -> dict[str, Any]:
    """Template variables; thinking is switched in any of the ways clients know."""
    extra = dict(fields.object("chat_template_kwargs"))
    if clash := _TEMPLATE_OWN & extra.keys():
        raise RequestInvalid(
            f"chat_template_kwargs may not set {', '.join(sorted(clash))}",
            param="chat_template_kwargs",
        )
    effort = _first_of(fields.text("reasoning_effort"), fields.object("reasoning").get("effort"))
    if effort is not None:
        if effort not in _EFFORTS:
            raise RequestInvalid(
                f"reasoning_effort must be one of {', '.join(_EFFORTS)}", param="reasoning_effort"
            )
        extra.setdefault("reasoning_effort", effort)
        extra.setdefault("enable_thinking", effort != "none")
    return extra


def _first_of(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


class Chat:
    """``exchange.Dialect`` of OpenAI chat.

    The content is the text the model wrote, special tokens left out. Calls and thinking stand in
    it as the model spells them.
    """

    def __init__(
        self, served: ServedModel, request_id: str, job: Job, stream: bool, *, include_usage: bool
    ) -> None:
        self.job = job
        self.stream = stream
        self._text = served.text
        self._include_usage = include_usage
        self._envelope = {"id": request_id, "created": int(time.time()), "model": served.name}

    def opening(self) -> Iterator[bytes]:
        for index in range(self.job.answers):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:
        logprobs = self._logprobs(piece)
        if piece.text or logprobs:
            yield self._chunk(index, {"content": piece.text}, logprobs=logprobs)
        if piece.finish:
            yield self._chunk(index, {}, finish=piece.finish)

    def beat(self) -> Iterator[bytes]:
        yield self._chunk(0, {})

    def closing(self, usage: Usage) -> Iterator[bytes]:
        if self._include_usage:
            yield event(self._body("chat.completion.chunk", [], usage_object(usage)))
        yield DONE

    def failure(self, error: FtdError) -> Iterator[bytes]:
        yield event(error_object(error))

    def reply(self, answers: list[Piece], usage: Usage) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": self._logprobs(answer),
                "finish_reason": answer.finish,
            }
            for index, answer in enumerate(answers)
        ]
        return self._body("chat.completion", choices, usage_object(usage))

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


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
