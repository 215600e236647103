"""A front end on a real socket, over a scripted engine and the demo model's text side."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from ftd.config import Config
from ftd.errors import NotReady
from ftd.http.app import make_app, make_runner
from ftd.http.front import Asked
from ftd.http.response_store import ResponseStore
from ftd.lifecycle.served import Listed
from ftd.text.textmodel import TextModel


def _beside(name: str) -> Any:
    spec = spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


scripted_engine = _beside("scripted_engine")
Script, ScriptedEngine = scripted_engine.Script, scripted_engine.ScriptedEngine
DEMO = Path(__file__).parents[2] / "ftd" / "demo"


@dataclass
class Served:
    text: TextModel
    engine: Any
    name: str = "test-model"
    aliases: frozenset[str] = frozenset({"gpt-test"})
    created: int = 1_700_000_000


@dataclass
class FakeLifecycle:
    served: Served | None
    facts: dict[str, Any] = field(default_factory=lambda: {"ready": True, "status": "ready"})

    def current(self) -> Served:
        if self.served is None:
            raise NotReady("the model is loading, 40%", hint="retry shortly", retry_after_s=3)
        return self.served

    async def wait_ready(self, timeout_s: float) -> Served:
        return self.current()

    def listed(self) -> Listed:
        served = self.current()
        return Listed(served.name, served.aliases, served.created, served.engine.limits)

    def health(self) -> dict[str, Any]:
        return self.facts


@dataclass
class Front:
    """A running front end and a client for it."""

    url: str
    client: aiohttp.ClientSession
    lifecycle: FakeLifecycle
    text: TextModel
    config: Config
    scripts: dict[str, Any]  # prompt ends with this text -> script

    @property
    def engine(self) -> Any:
        return self.lifecycle.served.engine

    @property
    def asked(self) -> Asked:
        """What a reader of bodies is given."""
        return Asked(self.lifecycle.served, "req_1", self.config, ResponseStore())

    def script(self, key: str, text: str = "", **options: Any) -> None:
        """From now on prompts that contain ``key`` are answered with ``text``."""
        tokens = options.pop("tokens", None)
        tokens = self.text.encode(text) if tokens is None else tokens
        self.scripts[key] = Script(tokens, **options)

    async def post(self, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        async with self.client.post(f"{self.url}{path}", json=body, **options) as response:
            return response.status, orjson.loads(await response.read())

    async def chat(self, content: Any, **fields: Any) -> tuple[int, Any]:
        messages = [{"role": "user", "content": content}]
        return await self.post("/v1/chat/completions", {"messages": messages, **fields})

    async def complete(self, prompt: Any, **fields: Any) -> tuple[int, Any]:
        return await self.post("/v1/completions", {"prompt": prompt, **fields})

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - what is awaited has no event
                await asyncio.sleep(0.005)

    async def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Every event's data in order; ``[DONE]`` stays text."""
        options = {"json": {**body, "stream": True}}
        async with self.client.post(f"{self.url}{path}", **options) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            return events_of(await response.read())

    async def message(self, content: Any, **fields: Any) -> tuple[int, Any]:
        messages = [{"role": "user", "content": content}]
        return await self.post("/v1/messages", {"max_tokens": 1000, "messages": messages, **fields})

    async def stream_message(self, content: Any, **fields: Any) -> list[Any]:
        messages = [{"role": "user", "content": content}]
        return await self.stream(
            "/v1/messages", {"max_tokens": 1000, "messages": messages, **fields}
        )

    async def respond(self, given: Any, **fields: Any) -> tuple[int, Any]:
        return await self.post("/v1/responses", {"input": given, **fields})

    async def stream_response(self, given: Any, **fields: Any) -> list[Any]:
        return await self.stream("/v1/responses", {"input": given, **fields})

    def prompt(self, number: int = -1) -> str:
        """The prompt of a request the engine got, special tokens left out."""
        return self.text.decode(self.engine.requests[number].prompt_ids)

    async def stream_chat(self, content: Any, **fields: Any) -> list[Any]:
        messages = [{"role": "user", "content": content}]
        return await self.stream("/v1/chat/completions", {"messages": messages, **fields})


def events_of(data: bytes) -> list[Any]:
    """Every event's data; a named event must bear the name its data has."""
    events = []
    for block in data.decode().split("\n\n"):
        if not block:
            continue
        *names, line = block.split("\n")
        assert line.startswith("data: "), block
        payload = line.removeprefix("data: ")
        events.append(payload if payload == "[DONE]" else orjson.loads(payload))
        if names:
            assert names == [f"event: {events[-1]['type']}"]
    return events


@pytest.fixture(scope="session")
def demo_text() -> TextModel:
    return TextModel(DEMO)


StartFront = Callable[..., Awaitable[Front]]


@pytest.fixture
async def start_front(demo_text: TextModel) -> AsyncIterator[StartFront]:
    runners: list[web.AppRunner] = []
    clients: list[aiohttp.ClientSession] = []

    async def start(config: Config | None = None, *, text: TextModel = demo_text) -> Front:
        scripts: dict[str, Any] = {}

        def answer(request: Any) -> Any:
            prompt = text.decode(request.prompt_ids)
            found = next((s for key, s in scripts.items() if key in prompt), None)
            return found or Script(text.encode("unscripted"))

        engine = ScriptedEngine(answer, eos=2)
        lifecycle = FakeLifecycle(Served(text, engine))
        config = config or Config()
        runner = make_runner(make_app(lifecycle, config))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        runners.append(runner)
        port = runner.addresses[0][1]
        clients.append(aiohttp.ClientSession())
        return Front(f"http://127.0.0.1:{port}", clients[-1], lifecycle, text, config, scripts)

    yield start
    for client in clients:
        await client.close()
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
async def front(start_front: StartFront) -> Front:
    return await start_front()
