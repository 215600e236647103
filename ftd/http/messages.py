"""``/v1/messages``, Anthropic's API: blocks in, blocks out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from ftd.errors import FtdError
from ftd.text.answer import Piece
from ftd.text.events import Block, Blocks, Step, blocks_of

from .errors import anthropic_error_object
from .fields import MAX_TOKENS, Fields, read_sampling, read_stops
from .front import Asked
from .generation import Job, Prompt, Usage
from .ids import call_id, signature
from .messages_input import one_call, read_conversation
from .stream import event
from .turn import prompt_of, turn_job

_PING = event({"type": "ping"}, "ping")


def read_messages(fields: Fields, asked: Asked) -> Messages:
    """Check every field, render and tokenize: what is returned can be submitted as it is."""
    limits, text = asked.served.engine.limits, asked.served.text
    fields.text("model")  # any name is served: agents ask for names they know
    max_tokens = fields.whole("max_tokens", 0, MAX_TOKENS)
    job = turn_job(
        asked,
        read_conversation(fields, asked),
        sampling=read_sampling(fields, text.defaults, limits.vocab, logprobs=None),
        stops=read_stops(fields, "stop_sequences"),
        max_tokens=max_tokens,
        one_call=one_call(fields),
    )
    return Messages(asked, job, fields.flag("stream"))


def count_messages(fields: Fields, asked: Asked) -> dict[str, Any]:
    """The body of ``/v1/messages/count_tokens``."""
    prompt = prompt_of(asked, read_conversation(fields, asked))
    return {"input_tokens": len(prompt.ids)}


class Messages:
    """``dialect.Dialect`` of Anthropic's messages.

    ``message_start`` tells how much of the prompt was found in the cache, which is known when the
    first token is there; until then pings keep the client waiting. Arguments go out as they are
    written if they are held to a grammar; else in one piece, once it is known what they are.
    """

    def __init__(self, asked: Asked, job: Job, stream: bool) -> None:
        self.job = job
        self.stream = stream
        self._request_id = asked.request_id
        self._model = asked.served.name
        limits = asked.served.engine.limits
        self._most_tokens = min(limits.context_tokens, limits.pool_tokens)
        self._blocks = Blocks()
        self._calls_held = job.constraint is not None
        self._started = False
        self._last = Piece()

    def opening(self, told: int) -> Iterator[bytes]:
        yield _PING

    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:
        if not self._started:
            yield self._start(piece.reused_tokens or 0)
        for written in piece.events:
            for step in self._blocks.push(written):
                yield from self._events(step)
        self._last = piece

    def beat(self) -> Iterator[bytes]:
        yield _PING

    def closing(self, usage: Usage) -> Iterator[bytes]:
        for step in self._blocks.end():
            yield from self._events(step)
        delta = self._stop_facts(self._last, self._blocks.all, usage)
        facts = {"type": "message_delta", "delta": delta, "usage": _usage_object(usage)}
        yield event(facts, "message_delta")
        yield event({"type": "message_stop"}, "message_stop")

    def failure(self, error: FtdError) -> Iterator[bytes]:
        yield event(anthropic_error_object(error), "error")

    def reply(self, answers: list[Piece], usage: Usage) -> dict[str, Any]:
        (answer,) = answers
        blocks = blocks_of(answer.events)
        return {
            **self._envelope(),
            "content": [self._whole(block) for block in blocks],
            **self._stop_facts(answer, blocks, usage),
            "usage": _usage_object(usage),
        }

    def _envelope(self) -> dict[str, Any]:
        return {
            "id": self._request_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
        }

    def _start(self, reused_tokens: int) -> bytes:
        self._started = True
        prompt: Prompt = self.job.prompts[0]
        message = {
            **self._envelope(),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage_object(Usage(len(prompt.ids), 0, reused_tokens, 0)),
        }
        return event({"type": "message_start", "message": message}, "message_start")

    def _events(self, step: Step) -> Iterator[bytes]:
        block = step.block
        match step.kind, block.kind:
            case "open", _:
                facts = {"type": "content_block_start", "content_block": self._begun(block)}
                yield event({**facts, "index": block.index}, "content_block_start")
            case "grow", "text":
                yield _delta(block, {"type": "text_delta", "text": step.text})
            case "grow", "reasoning":
                yield _delta(block, {"type": "thinking_delta", "thinking": step.text})
            case "grow", "call":
                if self._calls_held:
                    yield _delta(block, {"type": "input_json_delta", "partial_json": step.text})
            case "close", _:
                if block.kind == "reasoning":
                    yield _delta(block, {"type": "signature_delta", "signature": self._sign(block)})
                if block.kind == "call" and not self._calls_held:
                    written = block.text if block.valid else orjson.dumps(_input(block)).decode()
                    yield _delta(block, {"type": "input_json_delta", "partial_json": written})
                yield event(
                    {"type": "content_block_stop", "index": block.index}, "content_block_stop"
                )

    def _begun(self, block: Block) -> dict[str, Any]:
        match block.kind:
            case "text":
                return {"type": "text", "text": ""}
            case "reasoning":
                return {"type": "thinking", "thinking": "", "signature": ""}
        return {
            "type": "tool_use",
            "id": call_id("toolu_", self._request_id, 0, block.call),
            "name": block.name,
            "input": {},
        }

    def _whole(self, block: Block) -> dict[str, Any]:
        match block.kind:
            case "text":
                content = {"text": block.text}
            case "reasoning":
                content = {"thinking": block.text, "signature": self._sign(block)}
            case "call":
                content = {"input": _input(block)}
        return self._begun(block) | content

    def _sign(self, block: Block) -> str:
        return signature(self._request_id, block.index)

    def _stop_facts(self, last: Piece, blocks: list[Block], usage: Usage) -> dict[str, Any]:
        reason = self._stop_reason(last, blocks, usage)
        stop = last.stop if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": stop}

    def _stop_reason(self, last: Piece, blocks: list[Block], usage: Usage) -> str:
        if last.finish == "length":
            full = usage.prompt_tokens + usage.completion_tokens >= self._most_tokens
            met = usage.completion_tokens == self.job.max_tokens
            return "model_context_window_exceeded" if full and not met else "max_tokens"
        if any(block.kind == "call" for block in blocks):
            return "tool_use"
        return "end_turn" if last.stop is None else "stop_sequence"


def _delta(block: Block, delta: dict[str, Any]) -> bytes:
    facts = {"type": "content_block_delta", "index": block.index, "delta": delta}
    return event(facts, "content_block_delta")


def _input(block: Block) -> Any:
    """Arguments that are no object are shown as what they are: no client takes them for whole."""
    try:
        parsed = orjson.loads(block.text or "{}")
    except orjson.JSONDecodeError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {"arguments": block.text}


def _usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_read_details": usage.match(),
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }
