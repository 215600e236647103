"""The HTTP front end: routes, and the few that do not generate."""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from ftd.config import Config
from ftd.lifecycle.served import Listed
from ftd.text.dialects import refuse_unknown

from . import guard, openapi, page
from .chat import read_chat
from .compaction import read_compaction
from .completions import read_completion
from .connection import Runner
from .errors import NoSuchModel, json_response
from .exchange import Api, counter, handler
from .front import FRONT_END, FrontEnd
from .hold import ChatHold, CompletionHold, MessagesHold, ResponsesHold
from .messages import count_messages, read_messages
from .metrics import CONTENT_TYPE, Metrics
from .ports import Lifecycle
from .responses import count_responses, read_responses
from .stored_responses import ROUTES as STORED_RESPONSES
from .unreadable import log_without_bytes

_APIS = {
    "/v1/chat/completions": Api("chat", "chatcmpl-", read_chat, ChatHold),
    "/v1/completions": Api("completions", "cmpl-", read_completion, CompletionHold),
    "/v1/messages": Api("messages", "msg_", read_messages, MessagesHold),
    "/v1/responses": Api("responses", "resp_", read_responses, ResponsesHold),
    "/v1/responses/compact": Api("compact", "resp_", read_compaction),
}
_ALIASES = ("claude-", "gpt-")  # names agents ask for; any name is served, these are shown too
WORKERS = 4  # threads that tokenize and render; a runaway template takes one for some seconds


def make_app(lifecycle: Lifecycle, config: Config) -> web.Application:
    """The application; run it with ``make_runner``, which also notices clients that leave.

    Raises:
        ConfigError: the API key file cannot be used, or there is no such tool dialect.
    """
    refuse_unknown(config.tool_dialect)
    app = web.Application(
        middlewares=[
            guard.errors,
            guard.host_check(config.allowed_hosts, config.http.host),
            guard.cross_origin(config.allow_origin),
            guard.key_check(guard.read_keys(config.api_key_file)),
        ],
        client_max_size=config.body_limit,
    )
    app.on_response_prepare.append(guard.allow_origin(config.allow_origin))
    workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="ftd-text")
    app[FRONT_END] = FrontEnd(lifecycle, config, Metrics(lifecycle), workers)
    app.cleanup_ctx.append(_workers)
    app.add_routes(
        [
            *(web.post(path, handler(api)) for path, api in _APIS.items()),
            web.post("/v1/messages/count_tokens", counter(count_messages)),
            web.post("/v1/responses/input_tokens", counter(count_responses)),
            *STORED_RESPONSES,
            web.get("/v1/models", list_models),
            web.get("/v1/models/{id:.+}", show_model),
            web.get("/health", health),
            web.get("/health/live", live),
            web.get("/metrics", metrics),
            web.get("/openapi.json", openapi.show),
            *page.ROUTES,
        ]
    )
    return app


def make_runner(app: web.Application, *, close_s: float = 0.5) -> web.AppRunner:
    """A runner that cancels the handler of a client who left, wherever it waits.

    Args:
        close_s: how long handlers may still run when it is cleaned up.
    """
    log_without_bytes()
    return Runner(
        app,
        handler_cancellation=True,
        access_log=None,
        auto_decompress=False,  # compressed bodies are refused: see body.read_body
        handle_signals=False,
        shutdown_timeout=close_s,
    )


async def _workers(app: web.Application) -> AsyncIterator[None]:
    yield
    app[FRONT_END].workers.shutdown(wait=False, cancel_futures=True)


async def list_models(request: web.Request) -> web.Response:
    served = request.app[FRONT_END].lifecycle.listed()
    entries = [_entry(served, name) for name in _names(served)]
    return json_response(
        {
            "object": "list",
            "data": entries,
            "has_more": False,
            "first_id": entries[0]["id"],
            "last_id": entries[-1]["id"],
        }
    )


async def show_model(request: web.Request) -> web.Response:
    served = request.app[FRONT_END].lifecycle.listed()
    name = request.match_info["id"]
    if name not in _names(served) and not name.startswith(_ALIASES):
        raise NoSuchModel(
            f"there is no model {name[:200]!r}", param="model", hint=f"there is {served.name}"
        )
    return json_response(_entry(served, name))


async def health(request: web.Request) -> web.Response:
    """200 only when a request would be taken; else why not, and how far loading is."""
    facts = request.app[FRONT_END].lifecycle.health()
    ready = bool(facts["ready"])
    return json_response(
        facts, status=200 if ready else 503, headers={} if ready else {"Retry-After": "1"}
    )


async def live(request: web.Request) -> web.Response:
    return json_response({"live": True})


async def metrics(request: web.Request) -> web.Response:
    front = request.app[FRONT_END]
    body = await front.work(front.metrics.text)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


def _names(served: Listed) -> list[str]:
    return list(dict.fromkeys([served.name, *sorted(served.aliases)]))


def _entry(served: Listed, name: str) -> dict[str, Any]:
    """One object that both OpenAI's and Anthropic's client accept."""
    limits = served.limits
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "created": int(served.created),
        "created_at": _iso(served.created),
        "owned_by": "ftd",
        "display_name": name,
        "lifecycle": "active",
        "max_input_tokens": min(limits.context_tokens, limits.pool_tokens) - 1,
        "max_tokens": min(limits.context_tokens, limits.pool_tokens) - 1,
        "context_length": limits.context_tokens,
    }


def _iso(unix_s: float) -> str:
    return datetime.fromtimestamp(int(unix_s), UTC).isoformat().replace("+00:00", "Z")
