"""Unloading what nobody asks for, and loading it for the next request."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

import pytest
from scripted_models import Script, ScriptedModels

from ftd.config import Config
from ftd.engine.api import EngineRequest, EngineStatus
from ftd.errors import NotReady
from ftd.lifecycle import Lifecycle
from ftd.lifecycle.idle import IdleClock, unload_when_idle
from ftd.lifecycle.served import State


async def loaded(**script: object) -> tuple[Lifecycle, ScriptedModels]:
    models = ScriptedModels(a=Script(**script), b=Script())
    lifecycle = Lifecycle(Config(model="a", drain_timeout=1.0), models)
    await lifecycle.load()
    return lifecycle, models


async def test_many_requests_that_come_at_once_load_it_once():
    lifecycle, models = await loaded()
    name = lifecycle.current().name
    await lifecycle.unload()
    assert lifecycle.model is None and lifecycle.state is State.UNLOADED
    assert lifecycle.listed().name == name
    health = lifecycle.health()
    assert health["ready"] and health["model"] == name and "until a request" in health["cause"]
    with pytest.raises(NotReady):
        lifecycle.current()
    served = await asyncio.gather(*(lifecycle.wait_ready(5.0) for _ in range(6)))
    assert {s.name for s in served} == {name} and models.loads == ["a", "a"]
    await lifecycle.stop(0.0)


async def test_a_request_that_comes_while_it_goes_waits_for_the_next_load():
    lifecycle, models = await loaded(engine={"close_s": 0.05})
    going = asyncio.create_task(lifecycle.unload())
    while lifecycle.ready:  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(0)
    assert (await lifecycle.wait_ready(5.0)).name == "a"
    await going
    assert models.loads == ["a", "a"]
    await lifecycle.stop(0.0)


async def test_a_load_that_fails_is_told_and_tried_again_for_the_next_request():
    lifecycle, models = await loaded()
    await lifecycle.unload()
    models.scripts["a"].failures = deque([OSError("disk on fire")])
    waits = [asyncio.create_task(lifecycle.wait_ready(5.0)) for _ in range(3)]
    for wait in waits:
        with pytest.raises(NotReady, match="disk on fire"):
            await wait
    assert models.loads == ["a", "a"] and lifecycle.state is State.UNLOADED
    assert (await lifecycle.wait_ready(5.0)).name == "a"
    await lifecycle.stop(0.0)


async def test_a_reload_of_an_unloaded_model_serves_the_new_one():
    lifecycle, _ = await loaded()
    await lifecycle.unload()
    await lifecycle.reload("b")
    assert lifecycle.current().name == "b" and lifecycle.listed().name == "b"
    await lifecycle.stop(0.0)


async def test_it_goes_when_idle_and_not_before():
    lifecycle, _ = await loaded(engine={"step_s": 0.01})
    watch = asyncio.create_task(unload_when_idle(lifecycle, 0.2))
    ticket = lifecycle.current().engine.submit(EngineRequest("r", (1,), max_tokens=40))
    async for _ in ticket:
        assert lifecycle.ready
    while lifecycle.state is not State.UNLOADED:  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(0.01)
    watch.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watch
    await lifecycle.stop(0.0)


def test_the_clock_starts_anew_with_each_request():
    clock, quiet = IdleClock(), EngineStatus(finished=3)
    assert clock.idle_s(10.0, quiet) == 0.0
    assert clock.idle_s(15.0, quiet) == 5.0
    assert clock.idle_s(16.0, EngineStatus(finished=3, running=1)) == 0.0
    assert clock.idle_s(20.0, EngineStatus(finished=4)) == 0.0
    assert clock.idle_s(25.0, EngineStatus(finished=4)) == 5.0
    assert clock.idle_s(26.0, None) == 0.0
    assert clock.idle_s(27.0, EngineStatus(finished=4)) == 0.0, "loaded anew"
