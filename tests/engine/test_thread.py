"""The engine thread against a small scripted core: every request ends once, whatever happens."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest

from ftd.cuda.faults import is_lost
from ftd.engine.admission import check_request
from ftd.engine.api import EngineLimits, EngineRequest, EngineStatus, Finish, Output, Sampling
from ftd.engine.thread import EngineThread
from ftd.errors import (
    ContextExceeded,
    EngineFailed,
    GpuLost,
    NotReady,
    QueueFull,
    RequestCancelled,
    RequestInvalid,
)

LIMITS = EngineLimits(context_tokens=100, pool_tokens=200, max_running=2, max_waiting=1, vocab=50)


def request(name: str, max_tokens: int = 3, prompt: list[int] | None = None) -> EngineRequest:
    return EngineRequest(name, prompt or [1, 2], max_tokens, Sampling())


class CountingCore:
    """Each step gives each request its next number; a closed ``gate`` holds a step open."""

    def __init__(self) -> None:
        self.beat: Callable[[], None] = lambda: None
        self.deliver: Callable[[list[Output]], None] = lambda outputs: None
        self.beside = False  # while a step is held open, steps of others run in its pauses
        self.left: dict[str, int] = {}
        self.prefill: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.fail: Exception | None = None
        self.closed = False
        self.interrupted = 0

    def add(self, request: EngineRequest) -> None:
        self.left[request.request_id] = request.max_tokens

    def end(self, request_id: str, finish: Finish) -> bool:
        return self.left.pop(request_id, None) is not None

    def has_work(self) -> bool:
        return bool(self.left)

    def in_prefill(self, request_id: str) -> bool:
        return request_id in self.prefill

    def step(self) -> list[Output]:
        if self.fail:
            raise self.fail
        self.entered.set()
        while not self.gate.wait(0.001):
            self.beat()
            if self.beside:
                self.deliver(self.outputs(set(self.left) - self.prefill))
        return self.outputs(set(self.left))

    def outputs(self, names: set[str]) -> list[Output]:
        outputs = []
        for name in [name for name in self.left if name in names]:
            self.left[name] -= 1
            last = self.left[name] == 0
            outputs.append(Output(name, (self.left[name],), finish=Finish.LENGTH if last else None))
            if last:
                del self.left[name]
        return outputs

    def settle(self) -> list[Output]:
        return []

    def status(self) -> EngineStatus:
        return EngineStatus(running=len(self.left))

    def failed_for_good(self, error: Exception) -> bool:
        return is_lost(error)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def core() -> CountingCore:
    return CountingCore()


@pytest.fixture
async def engine(core: CountingCore) -> AsyncIterator[EngineThread]:
    engine = EngineThread(core, LIMITS)
    yield engine
    core.gate.set()
    await engine.close()
    assert core.closed


async def collect(ticket) -> list[Output]:
    return [output async for output in ticket]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - the condition is another thread's
            await asyncio.sleep(0.002)


async def test_outputs_come_in_order_and_end_once(engine):
    a, b = engine.submit(request("a")), engine.submit(request("b", 5))
    got_a, got_b = await asyncio.gather(collect(a), collect(b))
    assert [t for o in got_a for t in o.tokens] == [2, 1, 0]
    assert [t for o in got_b for t in o.tokens] == [4, 3, 2, 1, 0]
    assert [o.finish for o in got_a] == [None, None, Finish.LENGTH]
    assert await collect(a) == []  # iterating an ended ticket ends


async def test_end_stops_outputs_at_once_and_the_core_at_the_safe_point(engine, core):
    core.gate.clear()
    ticket = engine.submit(request("a", 1000))
    await until(core.entered.is_set)
    ticket.end()
    ticket.end()
    assert await collect(ticket) == []
    core.gate.set()
    await until(lambda: not core.left)


async def test_ending_a_prefill_gives_up_its_step_at_the_next_layer(engine, core):
    core.gate.clear()
    core.prefill.add("long")
    ticket = engine.submit(request("long", 1000))
    await until(core.entered.is_set)
    ticket.end()
    await until(lambda: not core.left)  # although the gate is still closed
    assert await collect(ticket) == []


async def test_ending_a_decode_does_not_void_the_neighbours_step(engine, core):
    core.gate.clear()
    core.prefill.add("long")
    keep, leave = engine.submit(request("long", 2)), engine.submit(request("b", 9))
    await until(core.entered.is_set)
    leave.end()
    await asyncio.sleep(0.01)
    assert "b" in core.left  # the step goes on; the message waits for its end
    core.gate.set()
    assert [t for o in await collect(keep) for t in o.tokens] == [1, 0]
    await until(lambda: not core.left)


async def test_requests_come_and_end_in_pauses_of_a_pass(engine, core):
    core.gate.clear()
    core.beside = True
    core.prefill.add("long")
    long = engine.submit(request("long", 2))
    await until(core.entered.is_set)
    stream = engine.submit(request("stream", 5))
    assert [t for o in await collect(stream) for t in o.tokens] == [4, 3, 2, 1, 0]
    leaving = engine.submit(request("leaving", 10**9))
    await anext(leaving)
    leaving.end()
    await until(lambda: "leaving" not in core.left)
    assert "long" in core.left  # and nothing of the pass has come yet
    called = asyncio.ensure_future(engine.at_safe_point(lambda core: None))
    await asyncio.sleep(0.01)
    assert not called.done()  # whatever may change the engine waits for the end of the pass
    core.gate.set()
    await called
    assert [t for o in await collect(long) for t in o.tokens] == [1, 0]


async def test_a_pass_is_given_up_though_its_pauses_have_read_the_message(engine, core):
    core.gate.clear()
    core.beside = True
    core.prefill.add("long")
    ticket = engine.submit(request("long", 1000))
    await until(core.entered.is_set)
    ticket.end()
    await until(lambda: not core.left)  # although the gate is still closed


async def test_operator_cancel_ends_with_a_typed_error(engine, core):
    core.gate.clear()
    ticket = engine.submit(request("a"))
    assert engine.cancel("a", "ftctl cancel")
    (last,) = await collect(ticket)
    assert last.finish is Finish.CANCELLED and isinstance(last.error, RequestCancelled)
    assert not engine.cancel("a", "again")


async def test_a_full_queue_refuses_and_a_free_place_accepts(engine, core):
    core.gate.clear()
    tickets = [engine.submit(request(f"r{i}")) for i in range(3)]
    with pytest.raises(QueueFull, match="3 requests") as refused:
        engine.submit(request("r3"))
    assert refused.value.retry_after_s >= 1
    tickets[0].end()
    tickets.append(engine.submit(request("r4")))
    core.gate.set()
    for ticket in tickets[1:]:
        assert (await collect(ticket))[-1].finish is Finish.LENGTH


async def test_a_failed_step_ends_every_request_and_refuses_new_ones(core):
    engine = EngineThread(core, LIMITS)
    core.gate.clear()
    tickets = [engine.submit(request("a", 99)), engine.submit(request("b", 99))]
    await until(core.entered.is_set)
    core.fail = RuntimeError("boom")
    core.gate.set()
    for ticket in tickets:
        last = (await collect(ticket))[-1]
        assert last.finish is Finish.ERROR and isinstance(last.error, EngineFailed)
    assert "boom" in str(await engine.wait_failed())
    with pytest.raises(NotReady, match="boom"):
        engine.submit(request("c"))
    await until(lambda: core.closed)
    with pytest.raises(NotReady):
        await engine.at_safe_point(lambda core: None)
    await engine.close()


async def test_a_lost_gpu_is_a_failure_for_good_and_nothing_is_given_back_to_it(core):
    engine = EngineThread(core, LIMITS)
    core.fail = RuntimeError(
        "CUDA error: an illegal memory access was encountered\nSearch for `cudaErrorIllegalAddress'"
        "\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    )
    last = (await collect(engine.submit(request("a", 99))))[-1]
    assert isinstance(last.error, GpuLost) and last.error.__cause__ is core.fail
    said = "the GPU failed: CUDA error: an illegal memory access was encountered"
    assert last.error.message == said
    assert await engine.wait_failed() is last.error
    await engine.close()
    assert not core.closed


async def test_close_in_mid_prefill_ends_everything_with_the_cause(core):
    engine = EngineThread(core, LIMITS)
    core.gate.clear()
    core.prefill.add("a")
    ticket = engine.submit(request("a", 99))
    await until(core.entered.is_set)
    await engine.close(NotReady("reloading", retry_after_s=3))
    (last,) = await collect(ticket)
    assert last.finish is Finish.ERROR and last.error.retry_after_s == 3
    assert core.closed


async def test_drain_waits_for_the_running_and_refuses_the_new(engine, core):
    core.gate.clear()
    ticket = engine.submit(request("a"))
    assert not await engine.drain(0.01)
    with pytest.raises(NotReady, match="drained"):
        engine.submit(request("b"))
    core.gate.set()
    assert await engine.drain(5)
    assert (await collect(ticket))[-1].finish is Finish.LENGTH


async def test_a_call_runs_between_steps_and_its_error_comes_back(engine):
    assert await engine.at_safe_point(lambda core: list(core.left)) == []
    assert await engine.at_safe_point(lambda _: threading.current_thread().name) == "ftd-engine"
    with pytest.raises(ZeroDivisionError):
        await engine.at_safe_point(lambda _: 1 / 0)
    ticket = engine.submit(request("a"))  # the engine lives on
    assert (await collect(ticket))[-1].finish is Finish.LENGTH


async def test_the_heartbeat_moves_when_idle_and_within_a_step(engine, core):
    before = engine.heartbeat
    core.gate.clear()
    ticket = engine.submit(request("a"))
    await until(lambda: engine.heartbeat > before + 3)
    ticket.end()
    core.gate.set()
    idle = engine.heartbeat
    start = time.monotonic()
    await until(lambda: engine.heartbeat > idle + 1)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("prompt", "limits", "message"),
    [
        (list(range(50)) * 2, LIMITS, "maximum context length is 99 tokens"),
        ([1] * 60, EngineLimits(100, 60, 2, 1, 50), "maximum context length is 59 tokens"),
    ],
)
def test_a_prompt_without_room_for_an_answer_is_refused_with_both_numbers(prompt, limits, message):
    with pytest.raises(ContextExceeded, match=message) as refused:
        check_request(request("a", prompt=prompt), limits)
    assert f"resulted in {len(prompt)} tokens" in refused.value.message
    check_request(request("a", prompt=prompt[:-1]), limits)


@pytest.mark.parametrize(
    ("context", "pool", "trained", "hint"),
    [
        (100, 60, 100, "--kv-tokens raises the limit"),
        (100, 200, 400, "--context raises the limit"),
        (100, 100, 400, "--context with --kv-tokens raises the limit"),
        (100, 200, 100, ""),  # nothing helps
    ],
)
def test_a_refusal_for_length_hints_only_at_what_can_help(context, pool, trained, hint):
    limits = EngineLimits(context, pool, 2, 1, 50, trained_tokens=trained)
    with pytest.raises(ContextExceeded) as refused:
        check_request(request("a", prompt=[1] * 100), limits)
    assert refused.value.hint == hint


@pytest.mark.parametrize(("prompt", "named"), [([50], 50), ([5, -1], -1), ([3, 99], 99)])
def test_token_ids_outside_the_vocabulary_are_refused(prompt, named):
    with pytest.raises(RequestInvalid, match=f"id is {named}, .* 0 to 49"):
        check_request(request("a", prompt=prompt), LIMITS)
