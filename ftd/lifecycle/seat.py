"""The seat of the served model: which one has it, whether it takes requests, and why not.

Lives on the event loop. Nothing here may keep an engine alive once it is closed: memory is what
this is about.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ftd.engine.api import EngineHandle
from ftd.errors import NotReady
from ftd.lifecycle.beside import on_thread, trim_memory
from ftd.lifecycle.leaving import close, empty
from ftd.lifecycle.opening import Opening
from ftd.lifecycle.served import (
    Candidate,
    How,
    Listed,
    Models,
    Phase,
    Progress,
    ServedModel,
    State,
)
from ftd.lifecycle.succession import retry_after_s

if TYPE_CHECKING:
    from ftd.config import Config


class Seat:
    """What operations on the served model find, and leave behind.

    Args:
        config: of the first model; its settings but ``model`` hold for every other.
        models: does the blocking work.
        clock: monotonic seconds.
    """

    def __init__(self, config: Config, models: Models, clock: Callable[[], float]) -> None:
        self.state = State.LOADING
        self.cause = "the model is loading"  # why no model takes requests
        self.ready = False  # takes requests: after the first real step, until it fails or goes
        self.model: ServedModel | None = None  # the loaded one, whether or not it takes requests
        self.config = config  # of that model, or the last one
        self.unloaded: Listed | None = None  # the model that the next request loads
        self.by_need = False  # budgets of models to come, too, are divided by need
        self.last_failure: str | None = None  # of an engine or a reload; a good reload clears it
        self.stopping = threading.Event()  # read by loader threads
        self.cutting = asyncio.Event()  # nobody waits for requests to finish any longer
        self.clock = clock
        self.opening = Opening(
            models,
            old=lambda: self.model.memory.footprint if self.model else None,
            given_up=self.stopping.is_set,
            clock=clock,
        )
        self._changed = asyncio.Event()  # replaced at each change

    # ---- what anybody may ask at any time

    @property
    def progress(self) -> Progress | None:
        """Of the operation under way."""
        return self.opening.progress

    @property
    def heartbeat(self) -> int:
        """Differs from its last value if whoever works now has moved on."""
        if self.model and self.state is not State.FAILED:
            return self.model.engine.heartbeat
        if self.progress and self.progress.phase is Phase.READING:
            return self.opening.pieces
        return time.monotonic_ns()  # only the loop itself is at work

    def current(self) -> ServedModel:
        """The model that takes requests now. Raises NotReady with cause and Retry-After."""
        if self.model is None or not self.ready:
            raise self._not_ready()
        return self.model

    def listed(self) -> Listed:
        """Of the model that takes requests, or will once one comes. Raises NotReady."""
        if self.unloaded is not None and self.model is None:
            return self.unloaded
        return self.current().listed

    def health(self) -> dict[str, Any]:
        refusal = None if self.ready else self._not_ready()
        known = self.model or self.unloaded
        return {
            "status": str(self.state),
            "ready": self.ready or self.state is State.UNLOADED,
            "model": known.name if known else None,
            "cause": refusal.message if refusal else None,
            "retry_after_s": refusal.retry_after_s if refusal else None,
            "last_failure": self.last_failure,
            "progress": self.progress.facts() if self.progress else None,
        }

    def _not_ready(self) -> NotReady:
        progress = self.progress
        if progress is None:
            return NotReady(self.cause, hint="ftctl status says more", retry_after_s=5)
        elapsed_s = self.clock() - progress.began_s
        after_s = round(retry_after_s(elapsed_s, progress.done_bytes, progress.total_bytes))
        return NotReady(
            f"{self.cause}: {progress}", hint=f"retry in {after_s} s", retry_after_s=after_s
        )

    async def wait_changed(self) -> None:
        """Wait until state, model or operation differ."""
        await self._changed.wait()

    # ---- how it changes

    def stand(self, state: State, cause: str, *, ready: bool) -> None:
        self.state, self.cause, self.ready = state, cause, ready
        self.notify()

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def look_at(self, model: str | None = None) -> Candidate:
        """Another model, or the one that the configuration names. Raises what is wrong with it."""
        config = replace(self.config, model=model) if model else self.config
        return await self.opening.look_at(config)

    async def open(self, candidate: Candidate) -> ServedModel:
        return await self.opening.open(candidate, by_need=self.by_need)

    def serve(self, model: ServedModel) -> None:
        self.model, self.opening.progress, self.unloaded = model, None, None
        self.stand(State.READY, "", ready=True)

    async def empty(self, engine: EngineHandle, how: How, timeout_s: float) -> bool:
        """Wait until an engine has no requests. False: some are left."""
        self.opening.phase(Phase.DRAINING)
        return await empty(engine, how, timeout_s, self.cutting)

    async def make_room(self, how: How, timeout_s: float, why: str) -> bool:
        """Free the model. False: some of its requests were cut."""
        self.stand(self.state, why, ready=False)
        if self.model is None:
            return True
        engine, self.model = self.model.engine, None
        try:
            return await self.empty(engine, how, timeout_s)
        finally:
            await close(engine, NotReady(why, retry_after_s=5))
            del engine
            await on_thread(trim_memory)

    def since(self, began_s: float) -> float:
        return round(self.clock() - began_s, 3)
