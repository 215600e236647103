"""The client of a stream: kept patient while there is nothing to say, told what went wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Protocol, TypeVar

from ftd.errors import FtdError

from .stream import EventStream

T = TypeVar("T")


class Voice(Protocol):
    """Speaks to the client in its API's words."""

    def beat(self) -> Iterable[bytes]:
        """A sign of life that every client's timer accepts."""
        ...

    def failure(self, error: FtdError) -> Iterable[bytes]:
        """Headers are out: the error as an event."""
        ...


class Hold(Voice, Protocol):
    """The voice until the request is admitted; it knows the request's fields alone."""

    told: int  # events so far


class Listener:
    """Headers go out with the first thing said, so what fails before keeps its status."""

    def __init__(self, events: EventStream, hold: Hold, heartbeat_s: float) -> None:
        self.voice: Voice = hold
        self.hold = hold
        self._events = events
        self._heartbeat_s = heartbeat_s

    async def patient(self, work: Awaitable[T]) -> T:
        """What ``work`` brings; a sign of life each time the heartbeat's interval passes."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=self._heartbeat_s))[0]:
                await self.beat()
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @property
    def begun(self) -> bool:
        return self._events.begun

    async def say(self, frames: Iterable[bytes]) -> None:
        """Raises ReaderLost."""
        await self._events.send(frames)

    async def beat(self) -> None:
        await self._events.send(self.voice.beat())

    async def fail(self, error: FtdError) -> None:
        await self._events.send(self.voice.failure(error))
