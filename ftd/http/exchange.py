"""One request from body to last byte, the same for every API.

Read and refuse in a worker, submit, and then send headers: whatever is refused keeps its status.
Only if that takes longer than a heartbeat, as while a model is being loaded, do the headers of a
stream go out before. A client that leaves cancels the handler, which leaves the generation, which
ends the work.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import structlog
from aiohttp import web

from ftd.errors import FtdError, NotReady
from ftd.text.answer import Piece, joined

from .body import read_body
from .dialect import Dialect, Plain
from .errors import json_response
from .fields import Fields, parse_body
from .front import FRONT_END, Asked, FrontEnd
from .generation import Generation, as_ftd_error
from .listener import Hold, Listener
from .ports import ServedModel
from .story import Story
from .stream import EventStream, ReaderLost, request_id_headers

log = structlog.get_logger(__name__)

T = TypeVar("T")


Reader = Callable[[Fields, Asked], Plain]
Counter = Callable[[Fields, Asked], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Api:
    """A way to ask for answers."""

    endpoint: str  # its name in logs and metrics
    id_prefix: str
    read: Reader
    hold: Callable[[Fields, str], Hold] | None = None  # None: it cannot be streamed


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
