"""Server-sent events to one client, who is cut off if they stop reading."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import orjson
import structlog
from aiohttp import web
from aiohttp.http import StreamWriter

log = structlog.get_logger(__name__)

SLOW_READER_S = 30.0  # without taking what the socket's buffers could not hold
DONE = b"data: [DONE]\n\n"


class ReaderLost(ConnectionError):
    """The client left, or read so slowly that it was cut off."""


def event(data: Any, name: str | None = None) -> bytes:
    """One event; ``data`` becomes JSON."""
    prefix = b"" if name is None else b"event: %s\n" % name.encode()
    return b"%sdata: %s\n\n" % (prefix, orjson.dumps(data))


def request_id_headers(request_id: str) -> dict[str, str]:
    """Under the names OpenAI's and Anthropic's clients look for."""
    return {"X-Request-Id": request_id, "Request-Id": request_id}


class EventStream:
    """Sends events; headers go out with the first.

    Each goes to the socket at once. Only if the system takes no more, a send waits: what a slow
    reader can fill are the kernel's buffer and the transport's.
    """

    def __init__(self, request: web.Request, request_id: str) -> None:
        self._request, self._request_id = request, request_id
        self._writer: StreamWriter | None = None  # once headers are under way
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # nginx would collect events otherwise
            }
            | request_id_headers(request_id)
        )

    @property
    def begun(self) -> bool:
        """Whether headers are out, so that no other status can be sent."""
        return self._writer is not None

    async def send(self, frames: Iterable[bytes]) -> None:
        """Send events.

        Raises:
            ReaderLost: nothing more can be sent.
        """
        data = b"".join(frames)
        if not data:
            return
        try:
            if self._writer is None:
                writer = await self._response.prepare(self._request)
                assert isinstance(writer, StreamWriter)  # None: the response is over
                self._writer = writer
            await self._writer.write(data, drain=False)
            if self._request.protocol.writing_paused:
                await self._drain(self._writer)
        except ConnectionError as error:
            raise ReaderLost("the client left") from error

    async def _drain(self, writer: StreamWriter) -> None:
        try:
            async with asyncio.timeout(SLOW_READER_S):
                await writer.drain()
        except TimeoutError as error:
            transport = self._request.transport
            if transport is not None and not transport.is_closing():  # answers share a connection
                log.warning(
                    "stream.reader_cut_off",
                    request_id=self._request_id,
                    took_nothing_s=SLOW_READER_S,
                )
                transport.abort()
            raise ReaderLost(f"the client took nothing for {SLOW_READER_S:g} s") from error

    async def close(self) -> web.StreamResponse:
        with suppress(ConnectionError):  # whoever has all events may leave at once
            await self._response.write_eof()
        return self._response
