"""One request from body to last byte, the same for every API.

Read and refuse in a worker, submit, and then send headers: whatever is refused keeps its status.
Only if that takes longer than a heartbeat, as while a model is being loaded, do the headers of a
stream go out before. A client that leaves cancels the handler, which leaves the generation, which
ends the work.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

import structlog
from aiohttp import web
from aiohttp.http import HttpProcessingError

from ftd.config import Config
from ftd.errors import BodyTooLarge, FtdError, NotReady, QueueFull, RequestInvalid
from ftd.lifecycle.beside import trim_heap
from ftd.text.answer import Piece, joined

from .errors import BodyCompressed, BodyTooSlow, json_response
from .fields import Fields, parse_body
from .generation import Generation, Job, Usage, as_ftd_error
from .listener import Hold, Listener, Voice
from .metrics import Metrics
from .ports import Lifecycle, ServedModel
from .response_store import ResponseStore
from .stream import EventStream, ReaderLost, request_id_headers

log = structlog.get_logger(__name__)

BODY_TIMEOUT_S = 60.0  # for a body to arrive; the largest at 5 Mbit/s
BODIES = 8  # of the largest size may be held at once, by however many requests
LARGE_BODY_BYTES = 1 << 20  # what was made of such a one is many times as large
T = TypeVar("T")


class Plain(Protocol):
    """One request in one API's words: what it asks for, and how it wants to be answered."""

    job: Job
    stream: bool  # it is a ``Dialect``, and its events are wanted

    def reply(self, answers: list[Piece], usage: Usage) -> dict[str, Any]:
        """The body of a plain reply."""
        ...


class Dialect(Plain, Voice, Protocol):
    """One that can be streamed as well."""

    def opening(self, told: int) -> Iterable[bytes]:
        """Events as soon as the request is admitted, after ``told`` events of its hold."""
        ...

    def piece(self, index: int, piece: Piece) -> Iterable[bytes]: ...

    def closing(self, usage: Usage) -> Iterable[bytes]: ...


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


@dataclass(frozen=True, slots=True)
class Api:
    """A way to ask for answers."""

    endpoint: str  # its name in logs and metrics
    id_prefix: str
    read: Reader
    hold: Callable[[Fields, str], Hold] | None = None  # None: it cannot be streamed


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
    body_bytes: int = 0  # of requests that have not ended

    async def wait_ready(self, hold_s: float | None) -> ServedModel:
        """The served model; while one is loaded a request waits, as clients give up on a refusal.

        Args:
            hold_s: for how long; None: as long as one may come.
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
            return await self.lifecycle.wait_ready(hold_s)
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
                **usage.match(),
                "resumed_behind": _anchor(usage),
                "ttft_ms": None if self.ttft_s is None else _ms(self.ttft_s),
                "itl_p50_ms": _ms(gaps[len(gaps) // 2]) if gaps else None,
                "itl_p99_ms": _ms(gaps[len(gaps) * 99 // 100]) if gaps else None,
            }
        if self.answers and self.dialect is not None:
            facts["prompts"] = [p.text or list(p.ids) for p in self.dialect.job.prompts]
            facts["texts"] = ["".join(texts) for _, texts in sorted(self.answers.items())]
        return facts


def handler(api: Api) -> Callable[[web.Request], Any]:
    """An aiohttp handler that answers generation requests in the words of ``api``."""

    async def handle(request: web.Request) -> web.StreamResponse:
        front = request.app[FRONT_END]
        story = Story(f"{api.id_prefix}{uuid.uuid4().hex}", api.endpoint)
        try:
            async with read_body(request, front) as body:
                return await _answer(request, front, story, api, body)
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
                api.endpoint, story.status, story.outcome, story.ttft_s, story.gaps_s
            )
            log.info("request.finished", **story.facts())

    return handle


def counter(count: Counter) -> Callable[[web.Request], Any]:
    """An aiohttp handler for requests that need the model's text side only: no place in a queue."""

    async def handle(request: web.Request) -> web.StreamResponse:
        front = request.app[FRONT_END]
        async with read_body(request, front) as body:
            fields = await front.work(parse_body, body)
            served = await front.wait_ready(front.config.hold)
            asked = front.asked(request, served, f"count_{uuid.uuid4().hex}")
            return json_response(await front.work(count, fields, asked))

    return handle


@contextlib.asynccontextmanager
async def read_body(request: web.Request, front: FrontEnd) -> AsyncIterator[bytes]:
    """The whole body; a length that is too large is refused before a byte is read.

    It counts until the request ends: what was made of it lives as long.
    """
    limit_bytes, body = front.config.body_limit, bytearray()
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise BodyCompressed(
            f"the body is compressed ({encoding[:50]}), and a small one could become a huge one",
            hint="send it as it is; no agent compresses",
        )
    if (request.content_length or 0) > limit_bytes:
        raise _too_large(request.content_length or 0, limit_bytes)
    try:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for part in request.content.iter_any():
                    body += part
                    front.body_bytes += len(part)
                    if len(body) > limit_bytes:
                        raise _too_large(len(body), limit_bytes)
                    if front.body_bytes > BODIES * limit_bytes:
                        raise _too_many(front.body_bytes, limit_bytes)
        except TimeoutError as error:
            raise BodyTooSlow(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from error
        except (web.RequestPayloadError, HttpProcessingError) as error:
            raise RequestInvalid(f"the body could not be read: {error}") from error
        yield bytes(body)
    finally:
        front.body_bytes -= len(body)
        if len(body) > LARGE_BODY_BYTES:
            front.workers.submit(trim_heap)


def _too_large(size_bytes: int, limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body has at least {size_bytes:,} bytes, {limit_bytes:,} bytes is the most",
        hint="--body-limit raises the limit",
    )


def _too_many(size_bytes: int, limit_bytes: int) -> QueueFull:
    return QueueFull(
        f"the bodies of all requests have {size_bytes:,} bytes, "
        f"{BODIES * limit_bytes:,} bytes is the most",
        hint=f"retry later; the most is {BODIES} times --body-limit",
    )


async def _answer(
    request: web.Request, front: FrontEnd, story: Story, api: Api, body: bytes
) -> web.StreamResponse:
    fields = await front.work(parse_body, body)
    del body
    if api.hold is None or not fields.flag("stream"):
        reply = await _generate(request, front, story, api, fields, None)
        assert reply is not None
        return reply
    events = EventStream(request, story.request_id)
    listener = Listener(events, api.hold(fields, story.request_id), front.config.heartbeat)
    try:
        await _generate(request, front, story, api, fields, listener)
    except ReaderLost:
        raise
    except Exception as error:
        if not listener.begun:
            raise
        shown = as_ftd_error(error)
        if shown is not error:
            log.exception("request.failed", request_id=story.request_id)
        story.outcome, story.status = shown.code, 200
        await listener.fail(shown)
    return await events.close()


async def _generate(
    request: web.Request,
    front: FrontEnd,
    story: Story,
    api: Api,
    fields: Fields,
    listener: Listener | None,
) -> web.Response | None:
    """Ask the served model; what is sent to ``listener`` is not returned."""

    async def patient(work: Awaitable[T]) -> T:
        return await (work if listener is None else listener.patient(work))

    async def prepared() -> tuple[ServedModel, Plain]:
        served = await front.wait_ready(hold_s)
        asked = front.asked(request, served, story.request_id)
        return served, await front.work(api.read, fields, asked)

    hold_s = front.config.hold if listener is None else None
    while True:
        served, dialect = await patient(prepared())
        generation = Generation(served.engine, served.text, dialect.job, story.request_id)
        story.model, story.dialect, story.generation = served.name, dialect, generation
        front.running[story.request_id] = story
        try:
            async with generation:
                if listener is None:
                    return await _reply(front, story, dialect, generation)
                await _stream(front, story, cast(Dialect, dialect), generation, listener)
                return None
        except NotReady:
            if generation.admitted or await patient(front.wait_ready(hold_s)) is served:
                raise
            # the model was switched while this request was being read: ask the new one
        finally:
            del front.running[story.request_id]


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
    front: FrontEnd, story: Story, dialect: Dialect, generation: Generation, listener: Listener
) -> None:
    async def take(index: int, piece: Piece) -> None:
        _note(front, story, index, piece)
        await listener.say(dialect.piece(index, piece))

    listener.voice = dialect
    await listener.say(dialect.opening(listener.hold.told))
    await generation.deliver(take, listener.beat, front.config.heartbeat)
    story.status = 200
    await listener.say(dialect.closing(generation.usage()))


def _note(front: FrontEnd, story: Story, index: int, piece: Piece) -> None:
    if piece.finish:
        story.outcome = piece.finish
    if front.config.log_prompts:
        story.answers.setdefault(index, []).append(piece.text)


def _anchor(usage: Usage) -> str | None:
    anchor = usage.resumed.anchor if usage.resumed else None
    return f"{anchor.kind} at {anchor.position}" if anchor else None


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)
