"""A model that nobody asks for gives its memory back, until somebody does."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import NoReturn

from ftd.engine.api import EngineStatus
from ftd.errors import FtdError
from ftd.lifecycle.lifecycle import Lifecycle

LOOKS = 20  # within the time that has to pass


class IdleClock:
    """For how long an engine has had nothing to do; pure but for the times it is given."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._ended = -1

    def idle_s(self, now_s: float, status: EngineStatus | None) -> float:
        """
        Args:
            status: None: no model takes requests.
        """
        ended = status.finished + status.cancelled + status.failed if status else -1
        if status is None or status.running or status.waiting or ended != self._ended:
            self._since_s = None
        if self._since_s is None:
            self._since_s = now_s
        self._ended = ended
        return now_s - self._since_s


async def unload_when_idle(
    lifecycle: Lifecycle, idle_s: float, clock: Callable[[], float] = time.monotonic
) -> NoReturn:
    """Unload the model each time that no request was there for ``idle_s``."""
    idle = IdleClock()
    while True:
        await asyncio.sleep(idle_s / LOOKS)
        model = lifecycle.model if lifecycle.ready else None
        status = model.engine.status() if model else None
        del model
        if idle.idle_s(clock(), status) >= idle_s and status is not None:
            with contextlib.suppress(FtdError):  # busy: a reload or drain is under way
                await lifecycle.unload()
