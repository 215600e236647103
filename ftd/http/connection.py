"""A client's connection, below the application: what is no HTTP, and what never arrives whole.

aiohttp answers what it cannot parse in plain text; here a client gets the error object it knows.
Headers have a time limit of their own, as bodies have (``body.read_body``), and a body that
turns out to be garbage is refused at once: aiohttp tells only whoever asks next.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.web_protocol import _ErrInfo

from ftd.errors import FtdError, RequestInvalid

from .errors import error_response, json_bytes

HEADERS_TIMEOUT_S = 30.0  # from a request's first byte, or from the beginning of a connection
_BEGINNING_BYTES = 64  # of a request: its path tells which API's clients speak


class NotHttp(RequestInvalid):
    code, status = "http_invalid", 400


class HeadersTooLarge(RequestInvalid):
    code, status = "headers_too_large", 431


class HeadersTooSlow(RequestInvalid):
    code, status = "request_timeout", 408


class Connection(web.RequestHandler):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._headers_due: asyncio.TimerHandle | None = None
        self._beginning = b""

    # ---- headers in time

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._headers_came()

    def data_received(self, data: bytes) -> None:
        if self._is_idle and self._headers_due is None:
            self._expect_headers()
        if self._headers_due is not None and len(self._beginning) < _BEGINNING_BYTES:
            self._beginning += data[:_BEGINNING_BYTES]
        before = self._request_count
        super().data_received(data)
        if self._request_count != before:
            self._headers_came()
            self._refuse_broken_body()

    @property
    def _is_idle(self) -> bool:
        return self._waiter is not None and not self._waiter.done()

    def _expect_headers(self) -> None:
        self._beginning = b""
        self._headers_due = self._loop.call_later(HEADERS_TIMEOUT_S, self._give_up)

    def _headers_came(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def _give_up(self) -> None:
        self._headers_due = None
        if self._beginning and self.transport is not None:
            error = HeadersTooSlow(f"the headers did not arrive within {HEADERS_TIMEOUT_S:g} s")
            self.transport.write(_answer(error, anthropic=self._asks_anthropic("")))
        self.force_close()

    # ---- what is no HTTP

    def _refuse_broken_body(self) -> None:
        """The parser gave up within the body that a handler reads: tell the handler."""
        reading = self._current_request
        if reading is None or reading.content.is_eof() or not self._messages:
            return
        refusal = self._messages[-1][0]
        if isinstance(refusal, _ErrInfo):
            self._messages.pop()
            reading.content.set_exception(web.RequestPayloadError(_first_line(refusal.exc)))
            reading.content.feed_eof()
            self.close()  # once it is answered: where the next request begins cannot be known

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # logs; raises if an answer has begun
        response = error_response(
            _as_error(status, exc), anthropic=self._asks_anthropic(request.path)
        )
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.HTTPException):  # raised before the application was asked
            anthropic = self._asks_anthropic(request.path)
            resp = error_response(_as_error(resp.status, None), anthropic=anthropic)
        return await super().finish_response(request, resp, start_time)

    def _asks_anthropic(self, path: str) -> bool:
        return path.startswith("/v1/messages") or b" /v1/messages" in self._beginning


class Server(web.Server):
    """``web.Server`` with such connections."""

    @classmethod
    def like(cls, other: web.Server) -> Server:
        return cls(
            other.request_handler,
            request_factory=other.request_factory,
            handler_cancellation=other.handler_cancellation,
            loop=other._loop,
            **other._kwargs,
        )

    def __call__(self) -> web.RequestHandler:
        return Connection(self, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    async def _make_server(self) -> web.Server:
        return Server.like(await super()._make_server())


def _as_error(status: int, cause: BaseException | None) -> FtdError:
    if isinstance(cause, LineTooLong):
        return HeadersTooLarge(
            "a line of the request's head is too long for this server",
            hint="8,190 bytes are possible, and 128 headers",
        )
    if isinstance(cause, HttpProcessingError):
        return NotHttp(f"the request is no HTTP that can be read: {_first_line(cause)}")
    error = FtdError(HTTPStatus(status).phrase)
    error.status = status
    if status != HTTPStatus.INTERNAL_SERVER_ERROR:
        error.code = "http_error"
    return error


def _first_line(cause: BaseException) -> str:
    """Without the bytes that aiohttp quotes below it."""
    text = cause.message if isinstance(cause, HttpProcessingError) else str(cause)
    return text.strip().partition("\n")[0].rstrip(": ")


def _answer(error: FtdError, *, anthropic: bool) -> bytes:
    """A whole answer, where there is no request to answer."""
    body = json_bytes(error, anthropic=anthropic)
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        "Content-Type: application/json\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
