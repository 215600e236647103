"""The promises of load, reload, drain, stop and recovery, on a scripted loader and engine."""

import asyncio
import gc
import threading
import weakref
from collections import deque
from contextlib import asynccontextmanager, suppress

import psutil
import pytest
from scripted_models import Script, ScriptedModels

from ftd.config import Config
from ftd.engine.api import EngineRequest, Finish
from ftd.errors import (
    Busy,
    CheckpointError,
    EngineFailed,
    GpuLost,
    LoadFailed,
    ModelNotFound,
    NotReady,
    TimedOut,
)
from ftd.lifecycle import Lifecycle
from ftd.lifecycle.served import How, Phase, State


async def until(condition, timeout_s=5.0):
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.002)


@asynccontextmanager
async def served(models, **config):
    """A lifecycle that serves model "a"."""
    lifecycle = Lifecycle(Config(model="a", **config), models)
    await lifecycle.load()
    try:
        yield lifecycle
    finally:
        await lifecycle.stop(0.0)


async def ask(lifecycle, request_id="r", max_tokens=3):
    """All outputs of one request, as a client that waits for the switch gets them."""
    model = await lifecycle.wait_ready(5.0)
    ticket = model.engine.submit(EngineRequest(request_id, (1, 2), max_tokens=max_tokens))
    return [output async for output in ticket]


class TestLoad:
    async def test_ready_only_after_a_real_step(self):
        gate = threading.Event()
        models = ScriptedModels(a=Script(gate=gate))
        lifecycle = Lifecycle(Config(model="a"), models)
        loading = asyncio.create_task(lifecycle.load())
        await until(lambda: lifecycle.progress and lifecycle.progress.fraction == 0.75)
        health = lifecycle.health()
        assert (health["status"], health["ready"]) == ("loading", False)
        assert health["progress"]["done_bytes"] == 3072
        assert health["progress"]["total_bytes"] == 4096
        with pytest.raises(NotReady, match=r"reading weights, 75% of 4\.00 KiB") as refusal:
            lifecycle.current()
        assert refusal.value.retry_after_s >= 1
        gate.set()
        await loading
        assert lifecycle.health()["ready"] is True
        await lifecycle.stop(0.0)

    async def test_names_follow_served_name(self):
        async with served(ScriptedModels(a=Script()), served_name=("x", "y")) as lifecycle:
            assert lifecycle.current().name == "x"
            assert lifecycle.current().aliases == ("y", "a", "/models/a")

    @pytest.mark.parametrize(
        ("script", "error"),
        [
            (Script(refusal=CheckpointError("shard 2 is missing")), CheckpointError),
            (Script(failures=deque([OSError("disk on fire")])), LoadFailed),
        ],
        ids=["refused", "failed"],
    )
    async def test_failure_says_why(self, script, error):
        lifecycle = Lifecycle(Config(model="a"), ScriptedModels(a=script))
        with pytest.raises(error) as raised:
            await lifecycle.load()
        assert lifecycle.state is State.FAILED
        assert lifecycle.health()["cause"] == str(raised.value)
        with pytest.raises(NotReady):
            await lifecycle.wait_ready(5.0)

    async def test_first_step_that_fails_is_a_failed_load(self):
        class Sick(ScriptedModels):
            def load(self, *args):
                super().load(*args)  # all read: then comes the first step
                raise EngineFailed("a step failed")

        lifecycle = Lifecycle(Config(model="a"), Sick(a=Script()))
        with pytest.raises(EngineFailed, match="a step failed"):
            await lifecycle.load()
        assert lifecycle.state is State.FAILED and lifecycle.health()["cause"] == "a step failed"

    async def test_stop_gives_up_loading(self):
        models = ScriptedModels(a=Script(gate=threading.Event()))
        lifecycle = Lifecycle(Config(model="a"), models)
        loading = asyncio.create_task(lifecycle.load())
        await until(lambda: lifecycle.progress and lifecycle.progress.phase is Phase.READING)
        async with asyncio.timeout(0.9):  # well before a stuck loader would be left behind
            await lifecycle.stop(3.0)
        with pytest.raises(NotReady, match="given up"):
            await loading
        assert lifecycle.state is State.STOPPED

    async def test_stop_leaves_a_stuck_loader_behind(self, monkeypatch):
        monkeypatch.setattr("ftd.lifecycle.operations.CANCEL_TIMEOUT_S", 0.05)
        lifecycle = Lifecycle(Config(model="a"), ScriptedModels(a=Script(stuck_s=0.5)))
        loading = asyncio.create_task(lifecycle.load())
        await until(lambda: lifecycle.progress and lifecycle.progress.phase is Phase.READING)
        await lifecycle.stop(3.0)
        with pytest.raises(asyncio.CancelledError):
            await loading


class TestReload:
    async def test_beside_if_both_fit(self):
        gate = threading.Event()
        models = ScriptedModels(a=Script(engine={"step_s": 0.005}), b=Script(gate=gate))
        async with served(models) as lifecycle:
            old = lifecycle.current().engine
            asking = asyncio.create_task(ask(lifecycle, max_tokens=40))
            await until(lambda: old.tickets)
            reloading = asyncio.create_task(lifecycle.reload("b"))
            await until(lambda: lifecycle.progress and lifecycle.progress.fraction == 0.75)
            assert lifecycle.state is State.RELOADING
            assert lifecycle.current().name == "a", "serves on while the next one loads"
            gate.set()
            await until(lambda: lifecycle.current().name == "b")
            done = await reloading
            outputs = await asking
        assert (done.model, done.was, done.beside, done.drained) == ("b", "a", True, True)
        assert done.unready_s == 0
        assert outputs[-1].finish is Finish.LENGTH and len(outputs) == 40
        assert old.closed

    async def test_cut_beside_ends_old_requests_with_retry_after(self):
        models = ScriptedModels(a=Script(engine={"step_s": 10}), b=Script())
        async with served_slow(models) as lifecycle:
            asking = asyncio.create_task(ask(lifecycle, max_tokens=40))
            await until(lambda: lifecycle.current().engine.tickets)
            done = await lifecycle.reload("b", How.CUT)
            (output,) = await asking
        assert done.beside and not done.drained
        assert isinstance(output.error, NotReady) and output.error.retry_after_s == 1

    async def test_after_if_both_do_not_fit(self):
        models = ScriptedModels(a=Script(engine={"step_s": 0.005}), b=Script(beside=False))
        async with served(models) as lifecycle:
            old = lifecycle.current().engine
            asking = asyncio.create_task(ask(lifecycle, max_tokens=20))
            await until(lambda: old.tickets)
            reloading = asyncio.create_task(lifecycle.reload("b"))
            await until(lambda: not lifecycle.ready)
            assert not old.closed, "drains first"
            waiting = asyncio.create_task(ask(lifecycle, "late"))
            done = await reloading
            assert (await asking)[-1].finish is Finish.LENGTH
            assert len(await waiting) == 3, "a request that came during the switch was served"
            assert lifecycle.current().name == "b"
        assert old.closed
        assert (done.beside, done.drained) == (False, True)
        assert done.unready_s > 0

    async def test_drain_that_takes_too_long_is_cut(self):
        models = ScriptedModels(a=Script(engine={"step_s": 10}), b=Script(beside=False))
        async with served_slow(models) as lifecycle:
            asking = asyncio.create_task(ask(lifecycle, max_tokens=20))
            await until(lambda: lifecycle.current().engine.tickets)
            done = await lifecycle.reload("b", How.DRAIN, timeout_s=0.02)
            assert not done.drained
            (output,) = await asking
            assert isinstance(output.error, NotReady) and output.error.retry_after_s == 5

    async def test_old_memory_is_freed_before_the_next_load(self):
        models = ScriptedModels(a=Script(), b=Script(beside=False))
        async with served(models) as lifecycle:
            old = weakref.ref(lifecycle.current().engine)
            seen = []
            load = models.load
            models.load = lambda *args: (seen.append(old()), load(*args))[1]
            await lifecycle.reload("b")
            assert seen == [None]

    @pytest.mark.parametrize(
        ("model", "error"), [("broken", CheckpointError), ("absent", ModelNotFound)]
    )
    @pytest.mark.parametrize("beside", [True, False], ids=["beside", "after"])
    async def test_refused_before_the_old_one_is_touched(self, model, error, beside):
        broken = Script(refusal=CheckpointError("tensor x: shape [1] expected"), beside=beside)
        async with served(ScriptedModels(a=Script(), broken=broken)) as lifecycle:
            engine = lifecycle.current().engine
            with pytest.raises(error):
                await lifecycle.reload(model, How.CUT)
            assert lifecycle.current().engine is engine and not engine.closed
            assert lifecycle.state is State.READY
            assert len(await ask(lifecycle)) == 3

    async def test_failure_beside_leaves_the_old_one_serving(self):
        models = ScriptedModels(a=Script(), b=Script(failures=deque([OSError("unreadable")])))
        async with served(models) as lifecycle:
            engine = lifecycle.current().engine
            with pytest.raises(LoadFailed, match="unreadable"):
                await lifecycle.reload("b")
            assert lifecycle.current().engine is engine
            assert lifecycle.config.model == "a"

    async def test_late_failure_brings_the_old_one_back(self):
        b = Script(beside=False, failures=deque([OSError("unreadable")]))
        models = ScriptedModels(a=Script(), b=b)
        async with served(models) as lifecycle:
            with pytest.raises(LoadFailed, match=r"unreadable.*a was loaded again"):
                await lifecycle.reload("b")
            assert lifecycle.current().name == "a"
            assert models.loads == ["a", "b", "a"]
            assert "unreadable" in lifecycle.health()["last_failure"]
            await lifecycle.reload("b")
            assert lifecycle.health()["last_failure"] is None

    async def test_no_model_state_names_both_causes_and_a_reload_ends_it(self):
        b = Script(beside=False, failures=deque([OSError("first")]))
        models = ScriptedModels(a=Script(failures=deque([None, OSError("second")])), b=b)
        async with served(models) as lifecycle:
            with pytest.raises(LoadFailed, match=r"first.*second"):
                await lifecycle.reload("b")
            health = lifecycle.health()
            assert health["status"] == "failed" and health["model"] is None
            assert "first" in health["cause"] and "second" in health["cause"]
            await lifecycle.reload("b")
            assert lifecycle.current().name == "b"

    async def test_second_operation_is_refused(self):
        gate = threading.Event()
        async with served(ScriptedModels(a=Script(), b=Script(gate=gate))) as lifecycle:
            reloading = asyncio.create_task(lifecycle.reload("b"))
            await until(lambda: lifecycle.progress and lifecycle.progress.phase is Phase.READING)
            with pytest.raises(Busy, match="no reload now: a reload is under way"):
                await lifecycle.reload("a")
            with pytest.raises(Busy, match="no drain now"):
                await lifecycle.drain()
            gate.set()
            assert (await reloading).model == "b"

    async def test_goes_on_when_whoever_asked_leaves(self):
        gate = threading.Event()
        async with served(ScriptedModels(a=Script(), b=Script(gate=gate))) as lifecycle:
            reloading = asyncio.create_task(lifecycle.reload("b"))
            await until(lambda: lifecycle.progress and lifecycle.progress.phase is Phase.READING)
            reloading.cancel()
            with suppress(asyncio.CancelledError):
                await reloading
            gate.set()
            await until(lambda: lifecycle.current().name == "b")

    @pytest.mark.parametrize("beside", [True, False], ids=["beside", "after"])
    async def test_twenty_reloads_keep_no_engine_and_no_memory(self, beside):
        script = Script(beside=beside, engine={"ballast_bytes": 2**24})
        process = psutil.Process()
        async with served(ScriptedModels(a=script)) as lifecycle:
            supervising = asyncio.create_task(lifecycle.supervise())
            await lifecycle.reload()
            before = process.memory_info().rss
            engines = []
            for _ in range(20):
                engines.append(weakref.ref(lifecycle.current().engine))
                await lifecycle.reload()
            await asyncio.sleep(0)
            gc.collect()
            assert [ref for ref in engines if ref() is not None] == []
            assert process.memory_info().rss < before + 2**24, "less than one engine"
            supervising.cancel()


class TestDrain:
    async def test_waits_then_refuses_until_reload(self):
        models = ScriptedModels(a=Script(engine={"step_s": 0.002}))
        async with served(models) as lifecycle:
            asking = asyncio.create_task(ask(lifecycle, max_tokens=10))
            await until(lambda: lifecycle.current().engine.tickets)
            await lifecycle.drain()
            assert len(await asking) == 10
            assert lifecycle.state is State.DRAINING
            with pytest.raises(NotReady, match="being drained"):
                await lifecycle.wait_ready(5.0)
            await lifecycle.reload()
            assert lifecycle.ready

    async def test_refused_reload_leaves_it_drained(self):
        async with served(ScriptedModels(a=Script())) as lifecycle:
            await lifecycle.drain()
            with pytest.raises(ModelNotFound):
                await lifecycle.reload("absent")
            assert (lifecycle.state, lifecycle.ready) == (State.DRAINING, False)

    async def test_time_out_says_what_is_left(self):
        async with served_slow(ScriptedModels(a=Script(engine={"step_s": 10}))) as lifecycle:
            asking = asyncio.create_task(ask(lifecycle))
            await until(lambda: lifecycle.current().engine.tickets)
            with pytest.raises(TimedOut, match=r"1 running and 0 waiting .* after 0.01 s"):
                await lifecycle.drain(0.01)
            with pytest.raises(TimedOut):
                await lifecycle.drain(0.0)
            await lifecycle.stop(0.0)
            await asking


class TestStop:
    async def test_lets_requests_finish(self):
        lifecycle = Lifecycle(Config(model="a"), ScriptedModels(a=Script(engine={"step_s": 0.002})))
        await lifecycle.load()
        engine = lifecycle.current().engine
        asking = asyncio.create_task(ask(lifecycle, max_tokens=10))
        await until(lambda: engine.tickets)
        await lifecycle.stop(3.0)
        assert len(await asking) == 10
        assert engine.closed and lifecycle.state is State.STOPPED

    async def test_cut_ends_the_wait(self):
        models = ScriptedModels(a=Script(engine={"step_s": 10}))
        async with served_slow(models) as lifecycle:
            asking = asyncio.create_task(ask(lifecycle))
            await until(lambda: lifecycle.current().engine.tickets)
            stopping = asyncio.create_task(lifecycle.stop(60.0))
            await asyncio.sleep(0.01)
            with pytest.raises(NotReady, match="ftd is stopping"):
                lifecycle.current()
            lifecycle.cut()
            await stopping
            (output,) = await asking
            assert "ftd is stopping" in str(output.error)

    async def test_in_the_midst_of_a_reload_closes_both_engines(self):
        gate = threading.Event()
        async with served(ScriptedModels(a=Script(), b=Script(gate=gate))) as lifecycle:
            engine = lifecycle.current().engine
            reloading = asyncio.create_task(lifecycle.reload("b"))
            await until(lambda: lifecycle.progress and lifecycle.progress.phase is Phase.READING)
            await lifecycle.stop(0.5)
            with pytest.raises(NotReady):
                await reloading
            assert engine.closed
            with pytest.raises(Busy, match="a stop is under way"):
                await lifecycle.reload("b")


class TestFailure:
    async def test_not_ready_with_the_cause_then_recovers(self, monkeypatch):
        monkeypatch.setattr("ftd.lifecycle.succession.FIRST_DELAY_S", 0.01)
        gate = threading.Event()
        gate.set()
        async with served(ScriptedModels(a=Script(gate=gate))) as lifecycle:
            supervising = asyncio.create_task(lifecycle.supervise())
            await asyncio.sleep(0)
            gate.clear()
            engine = lifecycle.current().engine
            engine.fail(EngineFailed("a step failed: out of memory"))
            await until(lambda: not lifecycle.ready)
            assert "out of memory" in lifecycle.health()["cause"]
            waiting = asyncio.create_task(ask(lifecycle))
            await until(lambda: lifecycle.progress and lifecycle.progress.phase is Phase.READING)
            gate.set()
            assert len(await waiting) == 3, "who waits is served after the recovery"
            assert engine.closed and lifecycle.state is State.READY
            assert "out of memory" in lifecycle.health()["last_failure"]
            supervising.cancel()

    async def test_a_lost_gpu_ends_it_at_once(self):
        models = ScriptedModels(a=Script())
        async with served(models) as lifecycle:
            supervising = asyncio.create_task(lifecycle.supervise())
            await asyncio.sleep(0)
            lifecycle.current().engine.fail(GpuLost("the GPU failed: CUDA error"))
            with pytest.raises(GpuLost, match="the GPU failed"):
                await supervising
            assert lifecycle.health()["cause"] == "the GPU failed: CUDA error"
            assert len(models.loads) == 1, "nothing is loaded again"
            await lifecycle.stop(1.0)
            with pytest.raises(NotReady) as refused:
                await lifecycle.wait_ready(1.0)
            assert refused.value.message.startswith("ftd has stopped: the GPU failed: CUDA error")

    async def test_gives_up_after_too_many(self, monkeypatch):
        monkeypatch.setattr("ftd.lifecycle.succession.FIRST_DELAY_S", 0.001)
        failures = deque([None, OSError("1"), OSError("2"), OSError("3"), OSError("4")])
        models = ScriptedModels(a=Script(failures=failures))
        async with served(models) as lifecycle:
            supervising = asyncio.create_task(lifecycle.supervise())
            await asyncio.sleep(0)
            lifecycle.current().engine.fail(EngineFailed("a step failed"))
            with pytest.raises(EngineFailed, match="too often, at last: loading a again failed"):
                await supervising
            assert lifecycle.state is State.FAILED
            assert len(models.loads) == 4

    async def test_stop_ends_the_recovery(self, monkeypatch):
        monkeypatch.setattr("ftd.lifecycle.succession.FIRST_DELAY_S", 0.001)
        gate = threading.Event()
        gate.set()
        async with served(ScriptedModels(a=Script(gate=gate))) as lifecycle:
            supervising = asyncio.create_task(lifecycle.supervise())
            await asyncio.sleep(0)
            gate.clear()
            lifecycle.current().engine.fail(EngineFailed("a step failed"))
            await until(lambda: lifecycle.progress and lifecycle.progress.phase is Phase.READING)
            await lifecycle.stop(1.0)
            with pytest.raises(NotReady, match="given up"):
                await supervising

    async def test_of_the_old_engine_during_a_reload_is_healed_by_it(self):
        gate = threading.Event()
        models = ScriptedModels(a=Script(), b=Script(gate=gate))
        async with served(models) as lifecycle:
            supervising = asyncio.create_task(lifecycle.supervise())
            reloading = asyncio.create_task(lifecycle.reload("b"))
            await until(lambda: lifecycle.progress and lifecycle.progress.phase is Phase.READING)
            lifecycle.current().engine.fail(EngineFailed("a step failed"))
            await until(lambda: not lifecycle.ready)
            gate.set()
            await reloading
            assert lifecycle.current().name == "b"
            await asyncio.sleep(0.01)
            assert lifecycle.ready and models.loads == ["a", "b"]
            supervising.cancel()


class TestHeartbeat:
    async def test_moves_with_pieces_while_loading_and_with_the_engine_after(self):
        gate = threading.Event()
        lifecycle = Lifecycle(Config(model="a"), ScriptedModels(a=Script(gate=gate)))
        assert lifecycle.heartbeat != lifecycle.heartbeat, "nothing to watch but the loop"
        loading = asyncio.create_task(lifecycle.load())
        await until(lambda: lifecycle.progress and lifecycle.progress.fraction == 0.75)
        assert lifecycle.heartbeat == lifecycle.heartbeat, (
            "a loader that hangs starves the watchdog"
        )
        gate.set()
        await loading
        assert lifecycle.heartbeat == lifecycle.heartbeat
        before = lifecycle.heartbeat
        await ask(lifecycle)
        assert lifecycle.heartbeat != before
        await lifecycle.stop(0.0)


@asynccontextmanager
async def served_slow(models):
    """Like ``served``, loaded before the step time of the script counts."""
    slow_s, models.scripts["a"].engine["step_s"] = models.scripts["a"].engine["step_s"], 0.0
    async with served(models) as lifecycle:
        lifecycle.current().engine._step_s = slow_s
        yield lifecycle
