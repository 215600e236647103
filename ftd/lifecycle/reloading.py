"""One served model takes the place of another: beside it if both fit, else after it."""

from __future__ import annotations

from dataclasses import replace

import structlog

from ftd.errors import LoadFailed, NotReady
from ftd.lifecycle.beside import on_thread, trim_memory
from ftd.lifecycle.leaving import close
from ftd.lifecycle.seat import Seat
from ftd.lifecycle.served import Candidate, How, Reloaded, ServedModel, State

log = structlog.get_logger(__name__)

_NO_MODEL = "no model is loaded; try ftctl reload MODEL"


async def reload(seat: Seat, name: str | None, how: How, timeout_s: float) -> Reloaded:
    """See ``Lifecycle.reload``."""
    before = seat.state, seat.cause, seat.ready
    was = seat.model.name if seat.model else None
    began_s = seat.clock()
    fresh = None
    why = "the model is being replaced"
    seat.stand(State.RELOADING, why, ready=seat.ready)
    try:
        candidate = await seat.look_at(name)
        if seat.model and candidate.preflight.beside:
            fresh = await seat.open(candidate)
    except BaseException:
        if seat.state is State.RELOADING:  # else the old engine has failed meanwhile
            seat.stand(before[0], before[1], ready=before[2])
        raise
    if fresh:
        load_s, unready_s = seat.since(began_s), 0.0
        drained = await _switch(seat, fresh, candidate, how, timeout_s)
    else:
        left_s = seat.clock()
        drained = await seat.make_room(how, timeout_s, why)
        began_s = seat.clock()
        await _replace(seat, candidate, was if before[0] is not State.FAILED else None)
        load_s, unready_s = seat.since(began_s), seat.since(left_s)
    seat.last_failure = None
    done = Reloaded(candidate.source.name, was, fresh is not None, drained, load_s, unready_s)
    log.info("model.reloaded", model=done.model, was=was, load_s=load_s, unready_s=unready_s)
    return done


async def _switch(
    seat: Seat, fresh: ServedModel, candidate: Candidate, how: How, timeout_s: float
) -> bool:
    """Serve ``fresh`` at once; the old model's requests finish. False: some were cut."""
    assert seat.model is not None
    engine, seat.config = seat.model.engine, candidate.config
    seat.serve(fresh)
    try:
        return await seat.empty(engine, how, timeout_s)
    finally:
        await close(engine, NotReady("the model was replaced", retry_after_s=1))
        del engine
        await on_thread(trim_memory)


async def _replace(seat: Seat, candidate: Candidate, old_name: str | None) -> None:
    """Load into the room made; if that fails, load the old model (None: there was none)."""
    try:
        now_alone = await seat.opening.preflight(candidate.config, candidate.source)
        seat.serve(await seat.open(replace(candidate, preflight=now_alone)))
    except Exception as error:
        failure = f"loading {candidate.source.name} failed: {error}"
    else:
        seat.config = candidate.config
        return
    seat.last_failure = failure
    if old_name is None or seat.stopping.is_set():
        seat.stand(State.FAILED, failure, ready=False)
        raise LoadFailed(failure, hint=_NO_MODEL)
    log.error("model.load_failed", model=candidate.source.name, error=failure)
    try:
        seat.serve(await seat.open(await seat.look_at()))
    except Exception as error:
        failure = f"{failure}; loading {old_name} again failed too: {error}"
        seat.stand(State.FAILED, failure, ready=False)
        raise LoadFailed(failure, hint=_NO_MODEL) from error
    raise LoadFailed(failure, hint=f"{old_name} was loaded again and serves")
