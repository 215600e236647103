"""The core every API adapts: a job goes to the engine, pieces of its answers come back.

No API's words are in here. A job may have several prompts and several copies of each; answer
``i`` belongs to prompt ``i // copies``.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ftd.engine.api import (
    EngineHandle,
    EngineLimits,
    EngineRequest,
    Finish,
    Output,
    Sampling,
    Ticket,
)
from ftd.errors import ContextExceeded, EngineFailed, FtdError, RequestCancelled, RequestInvalid
from ftd.kv.anchors import Anchor, Resumed
from ftd.text.answer import Answer, Piece, Reading
from ftd.text.echo import Call, Place, Said
from ftd.text.events import Block
from ftd.text.textmodel import TextModel

from .ids import call_id

if TYPE_CHECKING:
    from ftd.text.constrain import MakeConstraint

GAPS_KEPT = 2048  # of the times between tokens, for the log line's percentiles


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: Sequence[int]
    text: str | None = None  # what they were made from; None if nobody will want to see it
    place: Place | None = None  # of its answer; None: it is not to be remembered
    anchors: tuple[Anchor, ...] = ()  # where work may resume


@dataclass(frozen=True, slots=True)
class Job:
    prompts: tuple[Prompt, ...]
    copies: int
    max_tokens: int | None  # None: until the context ends; 0: no answer, only prompt logprobs
    sampling: Sampling
    reading: Reading
    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    prompt_logprobs: int | None = None
    constraint: MakeConstraint | None = None  # of each answer
    session: str = ""  # the conversation's, where the client names it

    @property
    def answers(self) -> int:
        return len(self.prompts) * self.copies

    @property
    def remember(self) -> bool:
        """Whether answers may come back in later prompts."""
        return any(prompt.place for prompt in self.prompts)


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int  # of the completion tokens
    resumed: Resumed | None = None  # of the first prompt: where, and why not further on

    @property
    def recomputed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    def match(self) -> dict[str, Any]:
        """What was not found in the prefix cache, and why."""
        ended = {"match_ended": str(self.resumed.ended)} if self.resumed else {}
        return {"recomputed_tokens": self.recomputed_tokens, **ended}


def room_tokens(prompt_tokens: int, limits: EngineLimits, *, param: str = "messages") -> int:
    """How many tokens an answer to such a prompt may have; at least one.

    Raises:
        RequestInvalid: an empty prompt.
        ContextExceeded: no room is left.
    """
    if prompt_tokens == 0:
        raise RequestInvalid("the prompt has 0 tokens, at least 1 is needed", param=param)
    most = min(limits.context_tokens, limits.pool_tokens)
    if prompt_tokens >= most:
        raise ContextExceeded(prompt_tokens, most - 1, raised_by=limits.raised_by)
    return most - prompt_tokens


def refuse_too_long(least_tokens: int, limits: EngineLimits) -> None:
    """Of a prompt that is not tokenized yet. Raises ContextExceeded."""
    if least_tokens:
        room_tokens(least_tokens, limits)


class Generation:
    """A job in the engine, from admission until every answer has ended or the client has left.

    Use as ``async with``: leaving ends what still runs. Entering submits, and raises what the
    engine refuses with (QueueFull, ContextExceeded, NotReady) before anything else has happened.
    Each answer has a task that takes its outputs all the way to the socket, so that a token costs
    one turn of the loop; what the socket does not take waits in the engine's queue.
    """

    def __init__(self, engine: EngineHandle, text: TextModel, job: Job, request_id: str) -> None:
        self.started_s = time.monotonic()
        self.admitted = False  # the engine has taken every part of the job
        self.first_token_s: float | None = None
        self.gaps_s: deque[float] = deque(maxlen=GAPS_KEPT)
        self._engine = engine
        self._text = text
        self._job = job
        self._request_id = request_id
        self._answers = [
            Answer(text, job.reading, partial(self._remember, index) if job.remember else None)
            for index in range(job.answers)
        ]
        self._tickets: list[Ticket] = []
        self._pumps: set[asyncio.Task[None]] = set()
        self._told_s = 0.0  # when something was last handed on

    async def __aenter__(self) -> Generation:
        limits = self._engine.limits
        if self._job.answers > limits.max_running + limits.max_waiting:
            raise RequestInvalid(
                f"{self._job.answers} answers are asked for at once, "
                f"{limits.max_running + limits.max_waiting} requests may run or wait here",
                param="n",
                hint="--max-waiting raises the limit",
            )
        try:
            for index in range(self._job.answers):
                self._tickets.append(self._engine.submit(self._request(index)))
        except BaseException:
            self._end()
            raise
        self.admitted = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def deliver(
        self,
        take: Callable[[int, Piece], Awaitable[None]],
        beat: Callable[[], Awaitable[None]],
        heartbeat_s: float,
    ) -> None:
        """Hand every piece with something in it to ``take``, those of one answer in their order.

        Args:
            beat: called when ``heartbeat_s`` passed without a piece.
        Raises:
            FtdError: the engine's reason for ending an answer early; nothing is taken after it.
        """
        self._told_s = time.monotonic()
        self._pumps = {
            asyncio.create_task(self._pump(index, ticket, take))
            for index, ticket in enumerate(self._tickets)
        }
        running = self._pumps
        try:
            while running:
                silent_s = time.monotonic() - self._told_s
                if silent_s >= heartbeat_s:
                    self._told_s += silent_s
                    await beat()
                    continue
                ended, running = await asyncio.wait(
                    running,
                    timeout=heartbeat_s - silent_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for pump in ended:
                    pump.result()
        finally:
            self._end()
            await asyncio.gather(*self._pumps, return_exceptions=True)

    def cancel(self, reason: str) -> None:
        """End every answer with RequestCancelled."""
        for ticket in self._tickets:
            self._engine.cancel(ticket.request_id, reason)

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=sum(len(prompt.ids) for prompt in self._job.prompts),
            completion_tokens=sum(answer.tokens for answer in self._answers),
            cached_tokens=sum(a.reused_tokens for a in self._answers[:: self._job.copies]),
            reasoning_tokens=sum(answer.reasoning_tokens for answer in self._answers),
            resumed=self._answers[0].resumed,
        )

    def _request(self, index: int) -> EngineRequest:
        job = self._job
        prompt_index, copy = divmod(index, job.copies)
        prompt = job.prompts[prompt_index]
        room = room_tokens(len(prompt.ids), self._engine.limits)
        sampling = job.sampling
        if copy and sampling.seed is not None:
            sampling = replace(sampling, seed=(sampling.seed + copy) % 2**63)
        return EngineRequest(
            request_id=self._engine_id(index),
            prompt_ids=prompt.ids,
            max_tokens=room if job.max_tokens is None else max(1, min(job.max_tokens, room)),
            sampling=sampling,
            eos_ids=job.eos_ids,
            stop_ids=job.stop_ids,
            prompt_logprobs=job.prompt_logprobs,
            copies_of=self._engine_id(index - copy) if copy else None,
            arrival_s=self.started_s,
            constraint=job.constraint() if job.constraint else None,
            anchors=prompt.anchors,
            session=job.session,
        )

    def _remember(self, index: int, tokens: Sequence[int], blocks: Sequence[Block]) -> None:
        place = self._job.prompts[index // self._job.copies].place
        if place is None or not all(block.valid for block in blocks):
            return
        said = Said(
            "".join(block.text for block in blocks if block.kind == "text"),
            [block.text for block in blocks if block.kind == "reasoning"],
            [
                Call(call_id("", self._request_id, index, block.call), block.name, block.text)
                for block in blocks
                if block.kind == "call"
            ],
        )
        if said.text or said.calls:
            self._text.echoes.keep(place, tokens, said)

    def _engine_id(self, index: int) -> str:
        return f"{self._request_id}-{index}" if index else self._request_id

    async def _pump(
        self, index: int, ticket: Ticket, take: Callable[[int, Piece], Awaitable[None]]
    ) -> None:
        answer = self._answers[index]
        last_s = 0.0
        async for output in ticket:
            if output.finish in (Finish.ERROR, Finish.CANCELLED):
                raise _cause(output)
            if output.tokens:
                last_s = self._mark(last_s)
            piece = answer.push(output)
            if piece.finish:
                ticket.end(Finish.STOP)  # the engine knows of stop ids, not of stop strings
            if piece != _NOTHING:
                await take(index, piece)
                self._told_s = time.monotonic()
            if piece.finish:
                return
        raise EngineFailed(f"request {ticket.request_id} ended without a reason")

    def _mark(self, last_s: float) -> float:
        now_s = time.monotonic()
        if self.first_token_s is None:
            self.first_token_s = now_s
        if last_s:
            self.gaps_s.append(now_s - last_s)
        return now_s

    def _end(self) -> None:
        for ticket in self._tickets:
            ticket.end()
        for pump in self._pumps:
            pump.cancel()


_NOTHING = Piece()


def _cause(output: Output) -> Exception:
    if output.error is not None:
        return output.error
    if output.finish is Finish.CANCELLED:
        return RequestCancelled(f"request {output.request_id} was cancelled")
    return EngineFailed(f"request {output.request_id} failed", hint="the log has the cause")


def as_ftd_error(error: Exception) -> FtdError:
    """What a client may see of ``error``; anything untyped is our mistake and stays in the log."""
    if isinstance(error, FtdError):
        return error
    return FtdError("ftd made a mistake while answering", hint="the log has the traceback")
