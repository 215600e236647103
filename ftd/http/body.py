"""A request's body: whole, in time, and not too large."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import web
from aiohttp.http import HttpProcessingError

from ftd.errors import BodyTooLarge, QueueFull, RequestInvalid
from ftd.lifecycle.beside import trim_heap

from .errors import BodyCompressed, BodyTooSlow
from .front import FrontEnd

BODY_TIMEOUT_S = 60.0  # for a body to arrive; the largest at 5 Mbit/s
BODIES = 8  # of the largest size may be held at once, by however many requests
LARGE_BODY_BYTES = 1 << 20  # what was made of such a one is many times as large


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
