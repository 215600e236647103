"""Errors as OpenAI clients read them."""

from __future__ import annotations

import math
from typing import Any

import orjson
from aiohttp import web

from ftd.errors import FtdError, NotReady, RequestInvalid

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
RETRY_AFTER_S = 5.0  # where the error does not know better


class Forbidden(FtdError):
    """A request from where none is expected: a foreign Host or Origin."""

    code, status = "forbidden", 403


class BodyTooSlow(RequestInvalid):
    code, status = "request_timeout", 408


class NoSuchRoute(FtdError):
    code, status = "not_found", 404


class NoSuchModel(RequestInvalid):
    code, status = "model_not_found", 404


class MethodNotAllowed(FtdError):
    code, status = "method_not_allowed", 405


def error_object(error: FtdError) -> dict[str, Any]:
    """``{"error": ...}`` for a body or an event; ``hint`` is ours, clients ignore it."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    body = {
        "message": error.message,
        "type": _TYPES.get(error.status, kind),
        "param": error.param if isinstance(error, RequestInvalid) else None,
        "code": error.code,
    }
    return {"error": body | ({"hint": error.hint} if error.hint else {})}


def error_response(error: FtdError) -> web.Response:
    headers = {}
    if error.retry_after_s is not None or isinstance(error, NotReady) or error.status == 429:
        headers["Retry-After"] = str(math.ceil(error.retry_after_s or RETRY_AFTER_S))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error_object(error), status=error.status, headers=headers)


def json_response(
    body: Any, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    return web.Response(
        body=orjson.dumps(body), status=status, headers=headers, content_type="application/json"
    )
