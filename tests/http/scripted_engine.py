"""A fake engine that answers prompts from a script: an ``EngineHandle`` without any model.

It counts what it holds, so a test can ask whether everything has come back to rest.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ftd.engine.api import (
    EngineLimits,
    EngineRequest,
    EngineStatus,
    Finish,
    Output,
    TokenLogprob,
)
from ftd.errors import ContextExceeded, FtdError, NotReady, QueueFull, RequestCancelled


@dataclass(slots=True)
class Script:
    """What one prompt brings."""

    tokens: Sequence[int]
    finish: Finish | None = None  # after them; None: length if cut by max_tokens, else eos
    per_output: int = 1
    first_delay_s: float = 0.0  # the prefill
    delay_s: float = 0.0  # before each output
    error: FtdError | None = None  # in place of the output numbered ``error_at``
    error_at: int = 0
    reused_tokens: int = 0
    top: int = 3  # alternatives that exist


@dataclass(slots=True)
class ScriptedEngine:
    """``answer`` maps a request to its script; ``requests`` keeps what was submitted."""

    answer: Callable[[EngineRequest], Script]
    eos: int
    limits: EngineLimits = field(
        default_factory=lambda: EngineLimits(
            context_tokens=2048,
            pool_tokens=4096,
            max_running=4,
            max_waiting=8,
            vocab=4096,
            trained_tokens=8192,
        )
    )
    heartbeat: int = 0
    requests: list[EngineRequest] = field(default_factory=list)
    active: dict[str, ScriptedTicket] = field(default_factory=dict)
    counts: dict[Finish, int] = field(default_factory=dict)
    refusal: FtdError | None = None

    def submit(self, request: EngineRequest) -> ScriptedTicket:
        if self.refusal is not None:
            raise self.refusal
        if len(request.prompt_ids) >= self.limits.context_tokens:
            raise ContextExceeded(
                len(request.prompt_ids),
                self.limits.context_tokens - 1,
                raised_by=self.limits.raised_by,
            )
        if len(self.active) >= self.limits.max_running + self.limits.max_waiting:
            raise QueueFull(f"{len(self.active)} requests run or wait", retry_after_s=7)
        assert request.request_id not in self.active
        self.requests.append(request)
        ticket = ScriptedTicket(self, request, self.answer(request))
        self.active[request.request_id] = ticket
        return ticket

    def cancel(self, request_id: str, reason: str) -> bool:
        ticket = self.active.get(request_id)
        if ticket is not None:
            ticket.fail(RequestCancelled(f"request {request_id} was cancelled: {reason}"))
        return ticket is not None

    def status(self) -> EngineStatus:
        return EngineStatus(
            running=len(self.active),
            finished=sum(n for f, n in self.counts.items() if f is not Finish.CANCELLED),
            cancelled=self.counts.get(Finish.CANCELLED, 0),
        )

    async def drain(self, timeout_s: float) -> bool:
        self.refusal = NotReady("the model is being drained", retry_after_s=5)
        return not self.active

    async def close(self, cause: Exception | None = None) -> None:
        for ticket in list(self.active.values()):
            ticket.fail(cause or NotReady("the model is no longer loaded", retry_after_s=5))

    async def wait_failed(self) -> Exception:
        return await asyncio.Future()

    def forget(self, request_id: str, finish: Finish) -> None:
        if self.active.pop(request_id, None) is not None:
            self.counts[finish] = self.counts.get(finish, 0) + 1


class ScriptedTicket:
    def __init__(self, engine: ScriptedEngine, request: EngineRequest, script: Script) -> None:
        self.request_id = request.request_id
        self._engine = engine
        self._request = request
        self._script = script
        self._sent = 0  # outputs
        self._over = False
        self._failure: Exception | None = None
        self._changed = asyncio.Event()

    def __aiter__(self) -> ScriptedTicket:
        return self

    async def __anext__(self) -> Output:
        if self._over:
            raise StopAsyncIteration
        first = self._sent == 0
        await self._pause(self._script.delay_s + (self._script.first_delay_s if first else 0))
        if self._over:
            raise StopAsyncIteration
        output = self._next()
        self._sent += 1
        if output.finish is not None:
            self._over = True
            self._engine.forget(self.request_id, output.finish)
        return output

    def end(self, finish: Finish = Finish.CANCELLED) -> None:
        self._over = True
        self._changed.set()
        self._engine.forget(self.request_id, finish)

    def fail(self, error: Exception) -> None:
        self._failure = error
        self._changed.set()

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _next(self) -> Output:
        script, request = self._script, self._request
        error = self._failure
        if script.error is not None and self._sent == script.error_at:
            error = script.error
        if error is not None:
            finish = Finish.CANCELLED if isinstance(error, RequestCancelled) else Finish.ERROR
            return Output(self.request_id, finish=finish, error=error)
        tokens, finish = self._tokens()
        output = Output(self.request_id, tokens=tokens, finish=finish)
        if request.sampling.logprobs is not None:
            output = dataclasses.replace(output, logprobs=tuple(map(self._logprob, tokens)))
        if self._sent == 0:
            output = dataclasses.replace(
                output,
                reused_tokens=script.reused_tokens,
                prompt_logprobs=self._prompt_logprobs(),
            )
        return output

    def _tokens(self) -> tuple[tuple[int, ...], Finish | None]:
        """This output's tokens: as a real engine it stops at max_tokens, eos and stop ids."""
        script, request = self._script, self._request
        every = [*script.tokens]
        if script.finish is None and request.eos_ids:
            every.append(self._engine.eos)
        every = every[: request.max_tokens]
        start = self._sent * script.per_output
        tokens = every[start : start + script.per_output]
        for i, token in enumerate(tokens):
            if token in request.eos_ids or token in request.stop_ids:
                ended = Finish.EOS if token in request.eos_ids else Finish.STOP
                return tuple(tokens[: i + 1]), ended
        if start + len(tokens) < len(every):
            return tuple(tokens), None
        return tuple(tokens), script.finish or Finish.LENGTH

    def _logprob(self, token: int) -> TokenLogprob:
        alternatives = tuple(
            ((token + i) % self._engine.limits.vocab, -0.5 - i)
            for i in range(min(self._script.top, self._request.sampling.logprobs or 0))
        )
        return TokenLogprob(token, -0.5, alternatives)

    def _prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        if self._request.prompt_logprobs is None:
            return None
        return (None, *(TokenLogprob(token, -1.0) for token in self._request.prompt_ids[1:]))
