"""Operations on the served model: one at a time, each to its end even if whoever asked leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import Any, TypeVar

import structlog

from ftd.errors import Busy, FtdError

log = structlog.get_logger(__name__)

CANCEL_TIMEOUT_S = 1.0  # a loader notices within one piece of reading; a stuck one is left behind

T = TypeVar("T")


class Operations:
    """
    Args:
        stopping: whether nothing may begin any more.
        doing: what is going on, for whoever is refused.
        over: called when an operation has ended.
    """

    def __init__(
        self, stopping: Callable[[], bool], doing: Callable[[], str], over: Callable[[], None]
    ) -> None:
        self._stopping, self._doing, self._over = stopping, doing, over
        self._task: asyncio.Task[Any] | None = None

    @property
    def under_way(self) -> bool:
        return self._task is not None

    def is_one_of(self, names: Collection[str]) -> bool:
        """Whether one of these is under way, and will not be given up."""
        return self._task is not None and self._task.get_name() in names and not self._stopping()

    async def run(self, name: str, operation: Coroutine[Any, Any, T]) -> T:
        """Raises Busy: another one is under way."""
        return await asyncio.shield(self.begin(name, operation))

    def begin(
        self, name: str, operation: Coroutine[Any, Any, T], *, tells: bool = True
    ) -> asyncio.Task[T]:
        """Without waiting for its end.

        Args:
            tells: log its failure.
        Raises:
            Busy: another one is under way.
        """
        if self._task or self._stopping():
            operation.close()
            other = self._task.get_name() if self._task else "stop"
            raise Busy(
                f"no {name} now: a {other} is under way ({self._doing()})",
                hint="ftctl watch shows when it is over",
            )
        task = asyncio.get_running_loop().create_task(operation, name=name)
        self._task = task
        task.add_done_callback(lambda task: self._ended(task, tells))
        return task

    def _ended(self, task: asyncio.Task[Any], tells: bool) -> None:
        self._task = None
        self._over()
        if not task.cancelled() and (error := task.exception()):
            surprise = None if isinstance(error, FtdError) else error
            if surprise or tells:
                tell = log.error if surprise else log.warning
                name, cause = task.get_name(), str(error)
                tell("operation.failed", operation=name, error=cause, exc_info=surprise)

    async def wait_ended(self) -> None:
        if self._task:
            await asyncio.wait({self._task})

    async def abandon(self) -> None:
        """A load notices ``stopping`` by itself; whatever waits longer is cancelled."""
        if task := self._task:
            await asyncio.wait({task}, timeout=CANCEL_TIMEOUT_S)
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_TIMEOUT_S)
