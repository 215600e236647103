"""An engine that has failed is loaded again, more slowly each time."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from ftd.errors import EngineFailed, NotReady
from ftd.lifecycle.beside import cancel_all, on_thread, trim_memory
from ftd.lifecycle.leaving import close
from ftd.lifecycle.seat import Seat
from ftd.lifecycle.served import Phase, State
from ftd.lifecycle.succession import recovery_delay_s

log = structlog.get_logger(__name__)


async def engine_failure(seat: Seat) -> Exception:
    """Wait for the failure of whichever engine is loaded at that time."""
    while True:
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(seat.wait_changed())]
        if seat.model and seat.state is not State.FAILED:
            waits.append(asyncio.ensure_future(seat.model.engine.wait_failed()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if waits[-1].done() and len(waits) > 1:
                return waits[-1].result()
        finally:
            await cancel_all(*waits)


async def recover(seat: Seat, failures_s: list[float], cause: str) -> None:
    """Load the failed model again, waiting longer each time.

    Args:
        failures_s: when engines have failed before; grows.
    Raises:
        EngineFailed: too often.
    """
    while True:
        failures_s.append(seat.clock())
        delay_s = recovery_delay_s(failures_s, seat.clock())
        if delay_s is None:
            raise EngineFailed(f"the engine failed too often, at last: {cause}")
        seat.opening.phase(Phase.WAITING)
        if seat.model:
            engine, seat.model = seat.model.engine, None
            await close(engine, NotReady(f"the engine failed: {cause}", retry_after_s=5))
            del engine
            await on_thread(trim_memory)
        await asyncio.sleep(delay_s)
        try:
            seat.serve(await seat.open(await seat.look_at()))
        except Exception as error:
            if seat.stopping.is_set():
                raise
            cause = f"loading {seat.config.model} again failed: {error}"
            log.error("model.not_recovered", failures=len(failures_s), cause=cause)
            seat.last_failure = cause
            seat.stand(State.FAILED, cause, ready=False)
        else:
            log.warning("model.recovered", model=seat.config.model, cause=cause)
            return
