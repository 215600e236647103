"""What clients may do with a response by its id: read, delete, cancel."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from ftd.errors import FtdError

from .errors import json_response
from .front import FRONT_END, FrontEnd
from .responses import Responses


class UpgradeRefused(FtdError):
    """Codex tries a WebSocket first; this status makes it go on with POST at once."""

    code, status = "upgrade_required", 426


async def refuse_websocket(request: web.Request) -> web.Response:
    if request.headers.get("Upgrade", "").lower() == "websocket":
        raise UpgradeRefused("responses are not sent over a WebSocket", hint="use POST")
    raise web.HTTPMethodNotAllowed("GET", ["POST"])


async def retrieve(request: web.Request) -> web.Response:
    return json_response(_front(request).responses.get(_id(request)).response)


async def delete(request: web.Request) -> web.Response:
    _front(request).responses.delete(_id(request))
    return json_response({"id": _id(request), "object": "response", "deleted": True})


async def cancel(request: web.Request) -> web.Response:
    """End a response that is being made; one that has ended stays as it is."""
    story = _front(request).running.get(_id(request))
    if story is None or not isinstance(story.dialect, Responses) or story.generation is None:
        return await retrieve(request)
    story.generation.cancel("its client asked for that")
    return json_response(story.dialect.cancelled())


async def input_items(request: web.Request) -> web.Response:
    items: list[dict[str, Any]] = _front(request).responses.get(_id(request)).items
    items = [{"id": f"item_{i}", **item} for i, item in enumerate(items)]
    ids = [item["id"] for item in items] or [None]
    return json_response(
        {"object": "list", "data": items, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}
    )


def _front(request: web.Request) -> FrontEnd:
    return request.app[FRONT_END]


def _id(request: web.Request) -> str:
    return request.match_info["id"]


ROUTES = [
    web.get("/v1/responses", refuse_websocket),
    web.get("/v1/responses/{id}", retrieve),
    web.delete("/v1/responses/{id}", delete),
    web.post("/v1/responses/{id}/cancel", cancel),
    web.get("/v1/responses/{id}/input_items", input_items),
]
