"""Who may speak to us: errors as JSON, Host and Origin checks, keys, CORS.

A page on the web can make a browser send requests to 127.0.0.1. A foreign Host means that a name
was rebound to this machine; a foreign Origin, that a page of another site is asking. Both are
refused. Without configured origins no CORS header is ever sent.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from urllib.parse import urlsplit

import structlog
from aiohttp import web

from ftd.config import read_small
from ftd.errors import ConfigError, FtdError, Unauthorized

from .errors import Forbidden, MethodNotAllowed, NoSuchRoute, error_response
from .stream import ReaderLost

log = structlog.get_logger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OPEN_PATHS = frozenset(
    # supervisors have no key; a page asks for one, and shows nothing without
    {"/health", "/health/live", "/", "/static/page.css", "/static/page.js"}
)
_ELSEWHERE = {
    "/v1/embeddings": "ftd serves models that generate text, and those give no embeddings",
    "/v1/moderations": "ftd has no moderation model",
    "/v1/images": "ftd generates text only",
    "/v1/audio": "ftd generates text only",
}


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure becomes an error object with its status, in the words of the API asked."""
    headers = {}
    try:
        return await handler(request)
    except FtdError as error:
        refusal = error
    except web.HTTPMethodNotAllowed as error:
        headers["Allow"] = ", ".join(sorted(error.allowed_methods))
        refusal = MethodNotAllowed(
            f"{request.method} {request.path} does not exist", hint=f"use {headers['Allow']}"
        )
    except web.HTTPNotFound:
        refusal = _no_route(request.path or request.raw_path, request.app)  # CONNECT has no path
    except web.HTTPException as error:
        refusal = FtdError(error.reason)
        refusal.status, refusal.code = error.status, "http_error"
    except ReaderLost:
        return web.Response(status=499)  # nobody will read it; raised, it would be logged
    except Exception:
        log.exception("http.failed", method=request.method, path=request.path)
        refusal = FtdError("ftd made a mistake while answering", hint="the log has the traceback")
    response = error_response(refusal, anthropic=_asks_anthropic(request))
    response.headers.update(headers)
    return response


def _asks_anthropic(request: web.Request) -> bool:
    return request.path.startswith("/v1/messages") or "anthropic-version" in request.headers


def _no_route(path: str, app: web.Application) -> NoSuchRoute:
    for prefix, reason in _ELSEWHERE.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            return NoSuchRoute(f"{path} does not exist: {reason}")
    routes = sorted({resource.canonical for resource in app.router.resources()})
    return NoSuchRoute(f"{path[:200]} does not exist", hint=f"there are {', '.join(routes)}")


def host_check(
    allowed: Iterable[str], bind_host: str
) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Refuse requests addressed to a name that is not ours; addresses cannot be rebound."""
    names = {"localhost", bind_host.lower(), socket.gethostname().lower(), *map(str.lower, allowed)}

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        host = _host_name(f"//{request.headers.get('Host', '')}")
        ours = host in names or host.endswith(".localhost") or _is_address(host)
        if "*" not in names and not ours:
            raise Forbidden(
                f"this server is not {host[:100]}" if host else "the request names no host",
                hint="name it with --allowed-hosts if it is",
            )
        return await handler(request)

    return check


def key_check(keys: Iterable[bytes]) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Ask for one of ``keys``, as a bearer token or in ``x-api-key``. No keys: none is needed."""
    digests = [hashlib.sha256(key).digest() for key in keys]

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if digests and request.path not in OPEN_PATHS and not _known(_sent_key(request), digests):
            raise Unauthorized(
                "this server needs an API key and the request has none that it knows",
                hint="send Authorization: Bearer KEY, or x-api-key: KEY",
            )
        return await handler(request)

    return check


def read_keys(path: Path | None) -> list[bytes]:
    """One key a line; empty lines and lines that start with # do not count.

    Raises:
        ConfigError: the file cannot be read, or holds no key.
    """
    if path is None:
        return []
    try:
        lines = read_small(path).splitlines()
    except OSError as error:
        raise ConfigError(
            f"--api-key-file {path} cannot be read: {error.strerror}",
            hint="put one key a line into a file the daemon may read",
        ) from error
    keys = [key for line in lines if (key := line.strip()) and not key.startswith(b"#")]
    if not keys:
        raise ConfigError(
            f"--api-key-file {path} holds no key, at least 1 is needed",
            hint="put one key a line into it, or leave the flag out",
        )
    return keys


def cross_origin(allowed: Iterable[str]) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Refuse pages of other sites; answer preflights of the allowed ones, which carry no key."""
    origins = {origin.rstrip("/").lower() for origin in allowed}

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        origin = request.headers.get("Origin", "")
        if not origin:
            return await handler(request)
        permitted = origin.isascii() and ("*" in origins or origin.lower() in origins)
        if not permitted and _is_foreign(origin, request.headers.get("Host", "")):
            raise Forbidden(
                f"pages of {origin[:100]} may not use this server",
                hint="name the origin with --allow-origin if they should",
            )
        preflight = (
            request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        )
        if permitted and preflight:
            return web.Response(status=204, headers=_preflight_headers(request))
        return await handler(request)

    return check


def allow_origin(
    allowed: Iterable[str],
) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """An ``on_response_prepare`` hook: streams and errors need the header as well."""
    origins = {origin.rstrip("/").lower() for origin in allowed}

    async def add(request: web.Request, response: web.StreamResponse) -> None:
        origin = request.headers.get("Origin", "")
        if origin.isascii() and origin and ("*" in origins or origin.lower() in origins):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"
            response.headers["Vary"] = "Origin"

    return add


def _preflight_headers(request: web.Request) -> dict[str, str]:
    asked = request.headers.get("Access-Control-Request-Headers", "*")
    return {
        "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
        "Access-Control-Allow-Headers": asked if asked.isascii() else "*",
        "Access-Control-Max-Age": "600",
    }


def _is_foreign(origin: str, host: str) -> bool:
    """Whether a page of the web: apps (``app://``) and pages of this machine are not."""
    if origin == "null":  # what a sandboxed frame of any site says
        return True
    if urlsplit(origin).scheme not in ("http", "https"):
        return False
    name = _host_name(origin)
    local = name == "localhost" or name.endswith(".localhost") or _is_loopback(name)
    return not local and name != _host_name(f"//{host}")


def _host_name(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").rstrip(".").lower()
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return _is_address(host) and ipaddress.ip_address(host).is_loopback


def _sent_key(request: web.Request) -> bytes:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
    return key.encode("utf-8", "surrogateescape")


def _known(key: bytes, digests: list[bytes]) -> bool:
    """Constant time: every digest is compared, and digests have one length."""
    sent = hashlib.sha256(key).digest()
    return sum(hmac.compare_digest(sent, digest) for digest in digests) > 0
