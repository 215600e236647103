"""How an engine's requests end, and then the engine itself."""

from __future__ import annotations

import asyncio

import structlog

from ftd.engine.api import EngineHandle
from ftd.errors import FtdError
from ftd.lifecycle.beside import cancel_all
from ftd.lifecycle.served import How

log = structlog.get_logger(__name__)


async def empty(engine: EngineHandle, how: How, timeout_s: float, cutting: asyncio.Event) -> bool:
    """Wait until an engine has no requests. False: some are left: cut, or out of time.

    Args:
        cutting: once it is set nobody waits any longer.
    """
    if how is How.CUT or cutting.is_set():
        status = engine.status()
        return not (status.running or status.waiting)
    draining = asyncio.ensure_future(engine.drain(max(0.0, timeout_s)))
    cut = asyncio.ensure_future(cutting.wait())
    try:
        await asyncio.wait({draining, cut}, return_when=asyncio.FIRST_COMPLETED)
        return draining.done() and draining.result()
    finally:
        await cancel_all(draining, cut)


async def close(engine: EngineHandle, cause: Exception | None) -> None:
    """End what is left of its requests with ``cause``; an engine that will not end is left."""
    try:
        await engine.close(cause)
    except FtdError as error:
        log.error("engine.not_closed", error=str(error))
