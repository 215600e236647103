"""Blocking work beside the event loop, and what is left to do after it."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def on_thread(work: Callable[[], T]) -> T:
    """Run blocking work on a thread that does not keep the process alive should it be stuck."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():  # given up
            return
        if error:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result = error = None
        try:
            result = work()
        except BaseException as caught:
            error = caught
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="ftd-work", daemon=True).start()
    return await done


async def cancel_all(*tasks: asyncio.Future[Any]) -> None:
    """Cancel, and wait until each has ended: a task that still runs keeps its objects alive."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def trim_memory() -> None:
    """Hand freed memory back to the system, what only cycles held included."""
    gc.collect()
    trim_heap()


def trim_heap() -> None:
    """Hand back what is free; glibc keeps what lay below its growing threshold, in each arena."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)
