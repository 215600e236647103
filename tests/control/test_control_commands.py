"""Commands over a real lifecycle whose models are scripted."""

import asyncio
import os
import threading

import pytest
from scripted_models import Script, ScriptedModels

from ftd.config import Config
from ftd.control import protocol as p
from ftd.control.commands import LifecycleCommands
from ftd.engine.api import EngineRequest, Finish
from ftd.errors import CheckpointError, ModelNotFound, NotReady, RequestInvalid, TimedOut
from ftd.lifecycle import Lifecycle


@pytest.fixture
def models():
    return ScriptedModels(
        a=Script(engine={"step_s": 0.002, "slots": 8}),
        b=Script(),
        broken=Script(refusal=CheckpointError("shard 2 is missing")),
    )


@pytest.fixture
async def lifecycle(models):
    lifecycle = Lifecycle(Config(model="a"), models)
    await lifecycle.load()
    yield lifecycle
    await lifecycle.stop(0.0)


@pytest.fixture
def commands(lifecycle):
    stops = []
    commands = LifecycleCommands(lifecycle, stop=lambda: stops.append(True))
    commands.http = "http://127.0.0.1:1919"
    commands.stops = stops
    return commands


async def test_status_while_ready(commands):
    status = await commands.run(p.Status())
    assert (status.state, status.ready, status.cause) == ("ready", True, None)
    assert (status.model, status.path, status.pid) == ("a", "/models/a", os.getpid())
    assert status.http == "http://127.0.0.1:1919"
    assert status.limits.context_tokens == 64
    assert status.engine.slots_total == 8 and status.engine.requests == ()
    assert status.rss_bytes > 2**20
    assert await commands.run(p.Health()) == p.HealthResult("ready", True, None)


async def test_status_while_loading_has_bytes(models):
    gate = threading.Event()
    models.scripts["a"].gate = gate
    lifecycle = Lifecycle(Config(model="a"), models)
    commands = LifecycleCommands(lifecycle, stop=lambda: None)
    loading = asyncio.create_task(lifecycle.load())
    while not (lifecycle.progress and lifecycle.progress.fraction == 0.75):  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    status = await commands.run(p.Status())
    assert (status.state, status.ready, status.engine) == ("loading", False, None)
    assert status.progress == p.Progress("reading weights", 3072, 4096)
    assert await commands.run(p.Requests()) == p.RequestsResult(None, ())
    with pytest.raises(NotReady, match="loading"):
        await commands.run(p.Experts())
    gate.set()
    await loading
    await lifecycle.stop(0.0)


async def test_requests_and_cancel(commands, lifecycle):
    engine = lifecycle.current().engine
    ticket = engine.submit(EngineRequest("req-1", (1, 2, 3), max_tokens=10_000))
    (row,) = (await commands.run(p.Requests())).requests
    assert (row.request_id, row.prompt_tokens) == ("req-1", 3)
    assert await commands.run(p.Cancel("req-1")) == p.CancelResult("req-1")
    last = [output async for output in ticket][-1]
    assert last.finish is Finish.CANCELLED
    with pytest.raises(RequestInvalid, match="no request 'req-1' is running or waiting"):
        await commands.run(p.Cancel("req-1"))


async def test_experts(commands, lifecycle, models):
    assert await commands.run(p.Experts()) == p.ExpertsResult(8, 4, 3, 1, 0, 0)
    await lifecycle.reload("b")
    with pytest.raises(NotReady, match="served without expert slots"):
        await commands.run(p.Experts())


async def test_check_changes_nothing(commands, lifecycle):
    engine = lifecycle.current().engine
    result = await commands.run(p.Check("b"))
    assert (result.model, result.beside) == ("b", True)
    assert result.report == ("weights  1.00 GiB",)
    with pytest.raises(CheckpointError, match="shard 2"):
        await commands.run(p.Check("broken"))
    with pytest.raises(ModelNotFound):
        await commands.run(p.Check("absent"))
    assert lifecycle.current().engine is engine


@pytest.mark.parametrize("command", [p.Reload(""), p.Check("")], ids=["reload", "check"])
async def test_a_model_without_a_name_is_not_the_served_one(commands, command, models):
    with pytest.raises(RequestInvalid, match="name is empty"):
        await commands.run(command)
    assert models.loads == ["a"]


async def test_reload_and_drain(commands, lifecycle):
    done = await commands.run(p.Reload("b"))
    assert (done.model, done.was, done.beside, done.drained) == ("b", "a", True, True)
    drained = await commands.run(p.Drain())
    assert drained.model == "b"
    assert (await commands.run(p.Health())).state == "draining"


async def test_drain_out_of_time(commands, lifecycle):
    ticket = lifecycle.current().engine.submit(EngineRequest("r", (1,), max_tokens=10_000))
    with pytest.raises(TimedOut):
        await commands.run(p.Drain(0.01))
    ticket.end()


@pytest.mark.parametrize("command", [p.Reload(timeout_s=-1.0), p.Drain(timeout_s=1e9)])
async def test_absurd_times_are_refused(commands, command):
    with pytest.raises(RequestInvalid, match="0 to 86400 s are possible"):
        await commands.run(command)


async def test_watch_refuses_to_be_a_busy_loop(commands):
    with pytest.raises(RequestInvalid, match=r"0\.05 to 60"):
        await anext(commands.stream(p.Watch(0.0)))
    assert (await anext(commands.stream(p.Watch(0.05)))).ready


async def test_watch_shows_requests(commands, lifecycle):
    ticket = lifecycle.current().engine.submit(EngineRequest("r", (1,), max_tokens=10_000))
    status = await anext(commands.stream(p.Watch()))
    assert [r.request_id for r in status.engine.requests] == ["r"]
    ticket.end()


async def test_stop_asks_the_daemon(commands):
    assert await commands.run(p.Stop()) == p.StopResult(os.getpid())
    assert commands.stops == [True]
