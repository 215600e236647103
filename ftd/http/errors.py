"""Errors as OpenAI's and Anthropic's clients read them."""

from __future__ import annotations

import math
from typing import Any

import orjson
from aiohttp import web

from ftd.errors import ContextExceeded, FtdError, NotReady, RequestInvalid

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = _TYPES | {
    404: "not_found_error",
    413: "request_too_large",
    504: "timeout_error",
    529: "overloaded_error",
}
RETRY_AFTER_S = 5.0  # where the error does not know better


class Forbidden(FtdError):
    """A request from where none is expected: a foreign Host or Origin."""

    code, status = "forbidden", 403


class BodyTooSlow(RequestInvalid):
    code, status = "request_timeout", 408


class BodyCompressed(RequestInvalid):
    code, status = "unsupported_content_encoding", 415


class NoSuchRoute(FtdError):
    code, status = "not_found", 404


class NoSuchModel(RequestInvalid):
    code, status = "model_not_found", 404


class MethodNotAllowed(FtdError):
    code, status = "method_not_allowed", 405


def readable(text: str) -> str:
    """``text`` of a header or path, where what was no UTF-8 is a mark: JSON knows no such bytes."""
    return text.encode("utf-8", "replace").decode()


def error_object(error: FtdError) -> dict[str, Any]:
    """``{"error": ...}`` for a body or an event; ``hint`` is ours, clients ignore it."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    body = {
        "message": readable(error.message),
        "type": _TYPES.get(error.status, kind),
        "param": error.param if isinstance(error, RequestInvalid) else None,
        "code": error.code,
    }
    return {"error": body | ({"hint": readable(error.hint)} if error.hint else {})}


def anthropic_status(error: FtdError) -> int:
    """529 is what Anthropic's clients wait on; other APIs do not know it."""
    return 529 if isinstance(error, NotReady) else error.status


def anthropic_error_object(error: FtdError) -> dict[str, Any]:
    status = anthropic_status(error)
    message = error.message
    if isinstance(error, ContextExceeded):  # this wording makes clients compact: keep it
        message = f"prompt is too long: {error.prompt_tokens} tokens > {error.limit_tokens} maximum"
    elif error.hint:
        message = f"{message} ({error.hint})"
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": readable(message)}}


def error_response(error: FtdError, *, anthropic: bool = False) -> web.Response:
    headers = {}
    if error.retry_after_s is not None or isinstance(error, NotReady) or error.status == 429:
        headers["Retry-After"] = str(math.ceil(error.retry_after_s or RETRY_AFTER_S))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if anthropic:
        body, status = anthropic_error_object(error), anthropic_status(error)
    else:
        body, status = error_object(error), error.status
    return json_response(body, status=status, headers=headers)


def json_bytes(error: FtdError, *, anthropic: bool) -> bytes:
    return orjson.dumps(anthropic_error_object(error) if anthropic else error_object(error))


def json_response(
    body: Any, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    return web.Response(
        body=orjson.dumps(body), status=status, headers=headers, content_type="application/json"
    )
