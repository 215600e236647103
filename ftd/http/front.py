"""What the handlers of requests share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web

from ftd.config import Config
from ftd.errors import NotReady, QueueFull

from .metrics import Metrics
from .ports import Lifecycle, ServedModel
from .response_store import ResponseStore
from .story import Story

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request beside its body: what a reader, in a worker thread, may look at."""

    served: ServedModel
    request_id: str
    config: Config
    responses: ResponseStore
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def tool_dialect(self) -> str | None:
        """The one that was set; None: the template tells."""
        return None if self.config.tool_dialect == "auto" else self.config.tool_dialect


@dataclass(slots=True)
class FrontEnd:
    """What handlers share; owned by the application."""

    lifecycle: Lifecycle
    config: Config
    metrics: Metrics
    workers: ThreadPoolExecutor
    responses: ResponseStore = field(default_factory=ResponseStore)
    running: dict[str, Story] = field(default_factory=dict)  # by request id
    held: int = 0  # requests that wait for a model
    body_bytes: int = 0  # of requests that have not ended

    async def wait_ready(self, hold_s: float | None) -> ServedModel:
        """The served model; while one is loaded a request waits, as clients give up on a refusal.

        Args:
            hold_s: for how long; None: as long as one may come.
        Raises:
            NotReady: none came in time, or none is on its way.
            QueueFull: too many wait already.
        """
        with contextlib.suppress(NotReady):
            return self.lifecycle.current()
        if self.held >= self.config.max_waiting:
            raise QueueFull(
                f"{self.held} requests wait for the model, {self.config.max_waiting} is the most",
                hint="--max-waiting raises the limit",
            )
        self.held += 1
        try:
            return await self.lifecycle.wait_ready(hold_s)
        finally:
            self.held -= 1

    def asked(self, request: web.Request, served: ServedModel, request_id: str) -> Asked:
        return Asked(served, request_id, self.config, self.responses, request.headers)

    async def work(self, run: Callable[..., T], *args: Any) -> T:
        """Run what takes longer than the loop may wait, in a worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self.workers, run, *args)


FRONT_END = web.AppKey("front_end", FrontEnd)
