"""``/v1/responses``: items in, items out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import orjson

from ftd.errors import FtdError, QueueFull, RequestCancelled, RequestInvalid
from ftd.text.answer import Piece
from ftd.text.events import Block, Blocks, Step, blocks_of
from ftd.text.stops import StopSet

from .fields import MAX_TOKENS, Fields, read_sampling
from .front import Asked
from .generation import Job, Usage
from .ids import call_id, item_id, seal
from .responses_input import Input, read_input
from .responses_tools import ClientTool, FreeFormReader, free_form_input
from .stream import event
from .turn import prompt_of, turn_job

_ITEM_PREFIXES = {"function": "fc_", "custom": "ctc_", "search": "tsc_"}

Item = dict[str, Any]


def read_responses(fields: Fields, asked: Asked) -> Responses:
    """Check every field, render and tokenize: what is returned can be submitted as it is."""
    _refuse_what_cannot_be_kept(fields)
    fields.text("model")  # any name is served: agents ask for names they know
    limits, text = asked.served.engine.limits, asked.served.text
    given = read_input(fields, asked)
    one_call = not fields.flag("parallel_tool_calls", True)
    job = turn_job(
        asked,
        given.conversation,
        sampling=read_sampling(fields, text.defaults, limits.vocab, logprobs=None),
        stops=StopSet([]),
        max_tokens=fields.whole("max_output_tokens", 1, MAX_TOKENS),
        one_call=one_call,
        cache_key=fields.text("prompt_cache_key"),
    )
    stream, store = fields.flag("stream"), fields.flag("store", True)
    drawn = {"temperature": job.sampling.temperature, "top_p": job.sampling.top_p}
    echo = {**echoed(fields), "model": asked.served.name, **drawn}
    return Responses(asked, job, given, stream, store, echo)


def count_responses(fields: Fields, asked: Asked) -> dict[str, Any]:
    """The body of ``/v1/responses/input_tokens``."""
    prompt = prompt_of(asked, read_input(fields, asked).conversation)
    return {"object": "response.input_tokens", "input_tokens": len(prompt.ids)}


def _refuse_what_cannot_be_kept(fields: Fields) -> None:
    """Fields that promise something about the answer: silence would break the promise."""
    if fields.flag("background"):
        raise RequestInvalid(
            "background is not offered: work ends when the client leaves",
            param="background",
            hint="use stream: true",
        )
    if fields.raw("conversation") is not None:
        raise RequestInvalid(
            "conversation is not kept here", param="conversation", hint="use previous_response_id"
        )
    if fields.raw("prompt") is not None:
        raise RequestInvalid("prompt refers to a template that is not kept here", param="prompt")
    if fields.whole("top_logprobs", 0, 20) or "message.output_text.logprobs" in fields.list(
        "include", 64
    ):
        raise RequestInvalid(
            "top_logprobs are not given here", param="top_logprobs", hint="/v1/chat/completions has"
        )


def echoed(fields: Fields) -> Item:
    """A response as far as its request alone tells."""
    return {
        "object": "response",
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        "background": False,
        "instructions": fields.text("instructions"),
        "max_output_tokens": fields.whole("max_output_tokens", 1, MAX_TOKENS),
        "metadata": fields.object("metadata"),
        "model": fields.text("model") or "",
        "parallel_tool_calls": fields.flag("parallel_tool_calls", True),
        "previous_response_id": fields.text("previous_response_id"),
        "prompt_cache_key": fields.text("prompt_cache_key"),
        "reasoning": {"effort": fields.object("reasoning").get("effort"), "summary": "detailed"},
        "service_tier": "default",
        "store": fields.flag("store", True),
        "temperature": fields.raw("temperature"),
        "text": {"format": {"type": "text"}},
        "tool_choice": fields.raw("tool_choice") or "auto",
        "tools": fields.raw("tools") or [],
        "top_p": fields.raw("top_p"),
        "truncation": "disabled",
    }


def failed(error: FtdError) -> Item:
    """How a response that failed differs from what it was."""
    code = "invalid_prompt" if isinstance(error, RequestInvalid) else "server_error"
    code = error.code if isinstance(error, QueueFull) else code
    return {"status": "failed", "error": {"code": code, "message": error.message}}


class Responses:
    """``dialect.Dialect`` of OpenAI's responses.

    Thinking is told as a summary, in full; ``encrypted_content`` holds it once more, since that is
    what clients send back.
    """

    def __init__(
        self, asked: Asked, job: Job, given: Input, stream: bool, store: bool, echo: Item
    ) -> None:
        self.job = job
        self.stream = stream
        self._asked = asked
        self._tools = given.tools
        self._items = given.items
        self._store = store
        self._id = asked.request_id
        self._echo = echo
        self._created = int(time.time())
        self._blocks = Blocks()
        self._free_form = FreeFormReader()  # of the call that is being written
        self._done: list[Item] = []
        self._last = Piece()
        self._number = -1

    def opening(self, told: int) -> Iterator[bytes]:
        if told:
            self._number = told - 1
            return
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response("in_progress"))

    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:
        for written in piece.events:
            for step in self._blocks.push(written):
                yield from self._events(step)
        self._last = piece

    def beat(self) -> Iterator[bytes]:
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def closing(self, usage: Usage) -> Iterator[bytes]:
        cut = self._last.finish == "length"
        for step in self._blocks.end():
            yield from self._events(step, cut=cut)
        response = self._ended(self._done, usage, cut=cut)
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, error: FtdError) -> Iterator[bytes]:
        cancelled = isinstance(error, RequestCancelled)
        response = self._response("failed", self._done) | failed(error)
        response["status"] = "cancelled" if cancelled else "failed"
        self._keep(response)
        yield self._event("response.failed", response=response)

    def reply(self, answers: list[Piece], usage: Usage) -> Item:
        (answer,) = answers
        cut = answer.finish == "length"
        blocks = blocks_of(answer.events)
        items = [self._item(block, cut=cut and block is blocks[-1]) for block in blocks]
        return self._ended(items, usage, cut=cut)

    def cancelled(self) -> Item:
        """The response as it is when it is cancelled."""
        return self._response("cancelled", self._done)

    def _ended(self, items: list[Item], usage: Usage, *, cut: bool) -> Item:
        response = self._response("incomplete" if cut else "completed", items)
        response["usage"] = usage_object(usage)
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        self._keep(response)
        return response

    def _keep(self, response: Item) -> None:
        if self._store:
            self._asked.responses.put(response, self._items)

    def _response(self, status: str, output: list[Item] | None = None) -> Item:
        known = {"id": self._id, "created_at": self._created}
        return {**self._echo, **known, "status": status, "output": output or []}

    def _events(self, step: Step, *, cut: bool = False) -> Iterator[bytes]:
        block = step.block
        place = {"item_id": self._item_id(block), "output_index": block.index}
        match step.kind:
            case "open":
                yield from self._opened(block, place)
            case "grow":
                yield from self._grown(block, place, step.text)
            case "close":
                item = self._item(block, cut=cut)
                self._done.append(item)
                yield from self._closed(block, place, item)
                yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _opened(self, block: Block, place: Item) -> Iterator[bytes]:
        self._free_form = FreeFormReader()
        begun = self._begun(block)
        yield self._event("response.output_item.added", output_index=block.index, item=begun)
        if block.kind == "text":
            yield self._event("response.content_part.added", **place, **_text_part(""))
        if block.kind == "reasoning":
            part = {"summary_index": 0, "part": {"type": "summary_text", "text": ""}}
            yield self._event("response.reasoning_summary_part.added", **place, **part)

    def _grown(self, block: Block, place: Item, text: str) -> Iterator[bytes]:
        match block.kind, self._kind(block):
            case "text", _:
                facts = {"content_index": 0, "delta": text, "logprobs": []}
                yield self._event("response.output_text.delta", **place, **facts)
            case "reasoning", _:
                facts = {"summary_index": 0, "delta": text}
                yield self._event("response.reasoning_summary_text.delta", **place, **facts)
            case "call", "function":
                yield self._event("response.function_call_arguments.delta", **place, delta=text)
            case "call", "custom":
                if text := self._free_form.feed(text):
                    yield self._event("response.custom_tool_call_input.delta", **place, delta=text)

    def _closed(self, block: Block, place: Item, item: Item) -> Iterator[bytes]:
        match block.kind, self._kind(block):
            case "text", _:
                facts = {"content_index": 0, "text": block.text, "logprobs": []}
                yield self._event("response.output_text.done", **place, **facts)
                yield self._event("response.content_part.done", **place, **_text_part(block.text))
            case "reasoning", _:
                index = {"summary_index": 0}
                yield self._event(
                    "response.reasoning_summary_text.done", **place, **index, text=block.text
                )
                part = {"type": "summary_text", "text": block.text}
                yield self._event(
                    "response.reasoning_summary_part.done", **place, **index, part=part
                )
            case "call", "function":
                facts = {"name": item["name"], "arguments": block.text}
                yield self._event("response.function_call_arguments.done", **place, **facts)
            case "call", "custom":
                yield self._event(
                    "response.custom_tool_call_input.done", **place, input=item["input"]
                )

    def _begun(self, block: Block) -> Item:
        """An item as it is announced: nothing in it yet."""
        item = self._item(Block(block.index, block.kind, "", block.name, block.call), cut=False)
        match item["type"]:
            case "message":
                item["content"] = []
            case "reasoning":
                item["summary"], item["encrypted_content"] = [], None
        return {**item, "status": "in_progress"}

    def _item(self, block: Block, *, cut: bool) -> Item:
        """Args: cut: the answer ended within this item."""
        whole = block.valid if block.kind == "call" else not cut
        item: Item = {"id": self._item_id(block), "status": "completed" if whole else "incomplete"}
        match block.kind:
            case "text":
                part = {"type": "output_text", "text": block.text, "annotations": []}
                part["logprobs"] = []
                return item | {"type": "message", "role": "assistant", "content": [part]}
            case "reasoning":
                summary = [{"type": "summary_text", "text": block.text}]
                sealed = seal(block.text)
                return item | {"type": "reasoning", "summary": summary, "encrypted_content": sealed}
        return item | self._call(block)

    def _call(self, block: Block) -> Item:
        known = self._tools.get(block.name)
        name = known.name if known else block.name
        call: Item = {"call_id": call_id("call_", self._id, 0, block.call)}
        match self._kind(block):
            case "search":
                call |= {"type": "tool_search_call", "execution": "client"}
                return call | {"arguments": _object(block.text)}
            case "custom":
                call |= {"type": "custom_tool_call", "input": free_form_input(block.text)}
            case _:
                call |= {"type": "function_call", "arguments": block.text}
        call["name"] = name
        if known is not None and known.namespace is not None:
            call["namespace"] = known.namespace
        return call

    def _kind(self, block: Block) -> str:
        known: ClientTool | None = self._tools.get(block.name)
        return known.kind if known is not None else "function"

    def _item_id(self, block: Block) -> str:
        prefix = {"text": "msg_", "reasoning": "rs_"}.get(block.kind)
        return item_id(prefix or _ITEM_PREFIXES[self._kind(block)], self._id, block.index)

    def _event(self, kind: str, **facts: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **facts}, kind)


def _text_part(text: str) -> Item:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"content_index": 0, "part": part}


def _object(arguments: str) -> Any:
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments


def usage_object(usage: Usage) -> Item:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": 0,
            **usage.match(),
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
