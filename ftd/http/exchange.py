"""One request from body to last byte, the same for every API.

Read and refuse in a worker, submit, and only then send headers: whatever is refused keeps its
status. A client that leaves cancels the handler, which leaves the generation, which ends the work.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

import structlog
from aiohttp import web

from ftd.config import Config
from ftd.errors import BodyTooLarge, FtdError, NotReady, QueueFull, RequestInvalid
from ftd.text.answer import Piece, joined

from .errors import BodyTooSlow, json_response
from .fields import Fields, parse_body
from .generation import Generation, Job, Usage, as_ftd_error
from .metrics import Metrics
from .ports import Lifecycle, ServedModel
from .response_store import ResponseStore
from .stream import EventStream, ReaderLost, request_id_headers

log = structlog.get_logger(__name__)

BODY_TIMEOUT_S = 60.0  # for a body to arrive; the largest at 5 Mbit/s
T = TypeVar("T")


class Plain(Protocol):
    """One request in one API's words: what it asks for, and how it wants to be answered."""

    job: Job
    stream: bool  # it is a ``Dialect``, and its events are wanted

    def reply(self, answers: list[Piece], usage: Usage) -> dict[str, Any]:
        """The body of a plain reply."""
        ...


class Dialect(Plain, Protocol):
    """One that can be streamed as well."""

    def opening(self) -> Iterable[bytes]:
        """Events as soon as the request is admitted."""
        ...

    def piece(self, index: int, piece: Piece) -> Iterable[bytes]: ...

    def beat(self) -> Iterable[bytes]:
        """A sign of life that every client's timer accepts."""
        ...

    def closing(self, usage: Usage) -> Iterable[bytes]: ...

    def failure(self, error: FtdError) -> Iterable[bytes]:
        """Headers are out: the error as an event."""
        ...


@dataclass(frozen=True, slots=True)
class Asked:
    """A request beside its body: what a reader, in a worker thread, may look at."""

    served: ServedModel
    request_id: str
    config: Config
    responses: ResponseStore
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def tool_dialect(self) -> str | None:
        """The one that was set; None: the template tells."""
        return None if self.config.tool_dialect == "auto" else self.config.tool_dialect


Reader = Callable[[Fields, Asked], Plain]
Counter = Callable[[Fields, Asked], dict[str, Any]]


@dataclass(slots=True)
class FrontEnd:
    """What handlers share; owned by the application."""

    lifecycle: Lifecycle
    config: Config
    metrics: Metrics
    workers: ThreadPoolExecutor
    responses: ResponseStore = field(default_factory=ResponseStore)
    running: dict[str, Story] = field(default_factory=dict)  # by request id
    held: int = 0  # requests that wait for a model

    async def wait_ready(self) -> ServedModel:
        """The served model; while one is loaded a request waits, as clients give up on a refusal.

        Raises:
            NotReady: none came in time, or none is on its way.
            QueueFull: too many wait already.
        """
        with contextlib.suppress(NotReady):
            return self.lifecycle.current()
        if self.held >= self.config.max_waiting:
            raise QueueFull(
                f"{self.held} requests wait for the model, {self.config.max_waiting} is the most",
                hint="--max-waiting raises the limit",
            )
        self.held += 1
        try:
            return await self.lifecycle.wait_ready(self.config.hold)
        finally:
            self.held -= 1

    def asked(self, request: web.Request, served: ServedModel, request_id: str) -> Asked:
        return Asked(served, request_id, self.config, self.responses, request.headers)

    async def work(self, run: Callable[..., T], *args: Any) -> T:
        """Run what takes longer than the loop may wait, in a worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self.workers, run, *args)


FRONT_END = web.AppKey("front_end", FrontEnd)


@dataclass(slots=True)
class Story:
    """What the one ``request.finished`` line tells."""

    request_id: str
    endpoint: str
    started_s: float = field(default_factory=time.monotonic)
    model: str | None = None
    dialect: Plain | None = None
    generation: Generation | None = None
    outcome: str = "cancelled"  # until something else is known: the client left
    status: int = 499
    answers: dict[int, list[str]] = field(default_factory=dict)  # only with --log-prompts

    @property
    def ttft_s(self) -> float | None:
        first_s = self.generation.first_token_s if self.generation else None
        return None if first_s is None else first_s - self.started_s

    @property
    def gaps_s(self) -> Sequence[float]:
        return self.generation.gaps_s if self.generation else ()

    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "request_id": self.request_id,
            "endpoint": self.endpoint,
            "model": self.model,
            "status": self.status,
            "outcome": self.outcome,
            "duration_ms": _ms(time.monotonic() - self.started_s),
        }
        if self.generation is not None and self.dialect is not None:
            usage = self.generation.usage()
            gaps = sorted(self.gaps_s)
            facts |= {
                "stream": self.dialect.stream,
                "answers": self.dialect.job.answers,
                "prompt_tokens": usage.prompt_tokens,
                "output_tokens": usage.completion_tokens,
                "reused_tokens": usage.cached_tokens,
                "ttft_ms": None if self.ttft_s is None else _ms(self.ttft_s),
                "itl_p50_ms": _ms(gaps[len(gaps) // 2]) if gaps else None,
                "itl_p99_ms": _ms(gaps[len(gaps) * 99 // 100]) if gaps else None,
            }
        if self.answers and self.dialect is not None:
            facts["prompts"] = [p.text or list(p.ids) for p in self.dialect.job.prompts]
            facts["texts"] = ["".join(texts) for _, texts in sorted(self.answers.items())]
        return facts


def handler(endpoint: str, id_prefix: str, read: Reader) -> Callable[[web.Request], Any]:
    """An aiohttp handler that answers generation requests in the dialect ``read`` makes."""

    async def handle(request: web.Request) -> web.StreamResponse:
        front = request.app[FRONT_END]
        story = Story(f"{id_prefix}{uuid.uuid4().hex}", endpoint)
        try:
            return await _answer(request, front, story, read)
        except FtdError as error:
            story.outcome, story.status = error.code, error.status
            raise
        except ReaderLost:
            story.outcome = "reader_lost"
            raise
        except Exception:
            story.outcome, story.status = FtdError.code, FtdError.status
            raise
        finally:
            front.metrics.request_finished(
                endpoint, story.status, story.outcome, story.ttft_s, story.gaps_s
            )
            log.info("request.finished", **story.facts())

    return handle


def counter(count: Counter) -> Callable[[web.Request], Any]:
    """An aiohttp handler for requests that need the model's text side only: no place in a queue."""

    async def handle(request: web.Request) -> web.StreamResponse:
        front = request.app[FRONT_END]
        served = await front.wait_ready()
        body = await read_body(request, front.config.body_limit)
        asked = front.asked(request, served, f"count_{uuid.uuid4().hex}")
        return json_response(await front.work(lambda: count(parse_body(body), asked)))

    return handle


async def _answer(
    request: web.Request, front: FrontEnd, story: Story, read: Reader
) -> web.StreamResponse:
    await front.wait_ready()  # before the body is read: many bodies would be a lot of memory
    body = await read_body(request, front.config.body_limit)
    while True:
        served = await front.wait_ready()
        asked = front.asked(request, served, story.request_id)
        dialect = await front.work(_prepare, body, read, asked)
        generation = Generation(served.engine, served.text, dialect.job, story.request_id)
        story.model, story.dialect, story.generation = served.name, dialect, generation
        front.running[story.request_id] = story
        try:
            async with generation:
                if dialect.stream:
                    streamed = cast(Dialect, dialect)
                    return await _stream(request, front, story, streamed, generation)
                return await _reply(front, story, dialect, generation)
        except NotReady:
            if generation.admitted or await front.wait_ready() is served:
                raise
            # the model was switched while this request was being read: ask the new one
        finally:
            del front.running[story.request_id]


def _prepare(body: bytes, read: Reader, asked: Asked) -> Plain:
    return read(parse_body(body), asked)


async def read_body(request: web.Request, limit_bytes: int) -> bytes:
    """The whole body; a length that is too large is refused before a byte is read."""
    if (request.content_length or 0) > limit_bytes:
        raise _too_large(request.content_length or 0, limit_bytes)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large(limit_bytes + 1, limit_bytes) from error
    except TimeoutError as error:
        raise BodyTooSlow(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from error
    except web.RequestPayloadError as error:
        raise RequestInvalid(f"the body could not be read: {error}") from error


def _too_large(size_bytes: int, limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body has at least {size_bytes:,} bytes, {limit_bytes:,} bytes is the most",
        hint="--body-limit raises the limit",
    )


async def _reply(
    front: FrontEnd, story: Story, dialect: Plain, generation: Generation
) -> web.Response:
    collected: list[list[Piece]] = [[] for _ in range(dialect.job.answers)]

    async def take(index: int, piece: Piece) -> None:
        collected[index].append(piece)
        _note(front, story, index, piece)

    async def beat() -> None:
        """A plain reply cannot be begun before it is known."""

    await generation.deliver(take, beat, front.config.heartbeat)
    answers = [joined(pieces) for pieces in collected]
    story.status = 200
    body = dialect.reply(answers, generation.usage())
    return json_response(body, headers=request_id_headers(story.request_id))


async def _stream(
    request: web.Request, front: FrontEnd, story: Story, dialect: Dialect, generation: Generation
) -> web.StreamResponse:
    events = EventStream(request, story.request_id)

    async def take(index: int, piece: Piece) -> None:
        _note(front, story, index, piece)
        await events.send(dialect.piece(index, piece))

    async def beat() -> None:
        await events.send(dialect.beat())

    await events.send(dialect.opening())
    try:
        await generation.deliver(take, beat, front.config.heartbeat)
    except ReaderLost:
        raise
    except Exception as error:
        shown = as_ftd_error(error)
        if shown is not error:
            log.exception("request.failed", request_id=story.request_id)
        story.outcome, story.status = shown.code, 200
        await events.send(dialect.failure(shown))
        return await events.close()
    story.status = 200
    await events.send(dialect.closing(generation.usage()))
    return await events.close()


def _note(front: FrontEnd, story: Story, index: int, piece: Piece) -> None:
    if piece.finish:
        story.outcome = piece.finish
    if front.config.log_prompts:
        story.answers.setdefault(index, []).append(piece.text)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)
