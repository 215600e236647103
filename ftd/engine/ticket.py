"""A request on its way, as the event loop holds it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from .api import Finish, Output


class EngineTicket:
    """See ``api.Ticket``; lives on the event loop.

    Args:
        leave: called when whoever holds it wants no more.
    """

    __slots__ = ("_leave", "_outputs", "_over", "_wake", "request_id")

    def __init__(self, request_id: str, leave: Callable[[EngineTicket, Finish], None]) -> None:
        self.request_id = request_id
        self._leave = leave
        self._outputs: deque[Output] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._over = False  # nothing will be pushed any more

    def __aiter__(self) -> EngineTicket:
        return self

    async def __anext__(self) -> Output:
        while not self._outputs:
            if self._over:
                raise StopAsyncIteration
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            finally:
                self._wake = None
        return self._outputs.popleft()

    def end(self, finish: Finish = Finish.CANCELLED) -> None:
        if not self._over:
            self._leave(self, finish)
            self._outputs.clear()
            self._finish()

    def push(self, output: Output) -> None:
        self._outputs.append(output)
        if output.finish is not None:
            self._finish()
        else:
            self._wake_up()

    def _finish(self) -> None:
        self._over = True
        self._wake_up()

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
