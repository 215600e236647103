"""The page at ``/`` that shows what ftd does and lets people try the model; all files are local.

The page needs no key and tells nothing: what it shows comes from ``/status``, which asks for one.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from aiohttp import web

from ftd import __version__
from ftd.errors import NotReady

from .errors import json_response
from .front import FRONT_END

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_HEADERS = {
    # nothing from elsewhere, nothing inline, in nobody's frame
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


async def show(request: web.Request) -> web.Response:
    if request.method == "HEAD" and request.path == "/":
        raise web.HTTPNotFound  # clients that look for an API here take a page for something else
    name = request.match_info.get("name", "index.html")
    body = _FILES.get(name)
    if body is None:
        raise web.HTTPNotFound
    kind = _TYPES[name.rpartition(".")[2]]
    return web.Response(body=body, content_type=kind, charset="utf-8", headers=_HEADERS)


async def status(request: web.Request) -> web.Response:
    """What ``ftctl watch`` shows, as far as a page needs it; 200 in every state."""
    lifecycle = request.app[FRONT_END].lifecycle
    facts: dict[str, Any] = {"version": __version__, "health": lifecycle.health()}
    try:
        engine = lifecycle.current().engine
    except NotReady:
        return json_response(facts | {"limits": None, "engine": None})
    return json_response(facts | {"limits": engine.limits, "engine": engine.status()})


_FILES = {
    file.name: file.read_bytes()
    for file in (resources.files("ftd") / "http" / "static").iterdir()
    if file.name.rpartition(".")[2] in _TYPES
}
ROUTES = (
    web.get("/", show),
    web.get("/static/{name}", show),
    web.get("/status", status),
)
