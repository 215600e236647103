"""Engines and models that do what a test says: stand-ins for loader and engine of the lifecycle."""

from __future__ import annotations

import asyncio
import mmap
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path

from ftd.engine.api import EngineLimits, EngineStatus, Finish, Output, RequestInfo
from ftd.errors import (
    BudgetExceeded,
    FtdError,
    ModelNotFound,
    NotReady,
    RequestCancelled,
)
from ftd.lifecycle.served import BudgetDone, Loaded, MemoryUse, Preflight, Reads
from ftd.lifecycle.succession import Footprint

LIMITS = EngineLimits(context_tokens=64, pool_tokens=128, max_running=4, max_waiting=8, vocab=32)


class ScriptedTicket:
    def __init__(self, engine, request):
        self.request_id, self.request = request.request_id, request
        self.began_s = time.monotonic()
        self.produced = 0
        self._engine = engine
        self._outputs = deque()
        self._arrived = asyncio.Event()
        self._over = False

    def __aiter__(self):
        return self

    async def __anext__(self):
        while not self._outputs:
            if self._over:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._outputs.popleft()

    def push(self, output):
        self._outputs.append(output)
        self._over = self._over or output.finish is not None
        self._arrived.set()

    def end(self, finish=Finish.CANCELLED):
        self._engine.tickets.pop(self.request_id, None)
        self._over = True
        self._arrived.set()


class ScriptedEngine:
    """Gives every request one token each ``step_s``; at most as many as it asked for."""

    def __init__(self, *, step_s=0.0, ballast_bytes=0, slots=0, close_s=0.0):
        self.limits = LIMITS
        self.heartbeat = 0
        self.failure = None
        self.closed = False
        self.tickets = {}
        self.ballast = _touched(ballast_bytes)
        self.finished = 0
        self.push_hook = lambda ticket: None  # called after each token
        self.slots = slots
        self._step_s = step_s
        self._close_s = close_s
        self._refusal = None
        self._failed = asyncio.Event()
        self._task = None

    async def wait_failed(self):
        await self._failed.wait()
        return self.failure

    def submit(self, request):
        if self._refusal:
            raise self._refusal
        ticket = self.tickets[request.request_id] = ScriptedTicket(self, request)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._steps())
        return ticket

    async def _steps(self):
        while self.tickets:
            await asyncio.sleep(self._step_s)
            self.heartbeat += 1
            for ticket in list(self.tickets.values()):
                ticket.produced += 1
                last = ticket.produced >= ticket.request.max_tokens
                if last:
                    del self.tickets[ticket.request_id]
                    self.finished += 1
                finish = Finish.LENGTH if last else None
                ticket.push(Output(ticket.request_id, tokens=(ticket.produced,), finish=finish))
                self.push_hook(ticket)

    def fail(self, cause):
        self.failure = cause
        self._refusal = NotReady(str(cause))
        self._end_all(cause)
        self._failed.set()

    def _end_all(self, cause):
        for ticket in list(self.tickets.values()):
            del self.tickets[ticket.request_id]
            finish = Finish.CANCELLED if isinstance(cause, RequestCancelled) else Finish.ERROR
            ticket.push(Output(ticket.request_id, finish=finish, error=cause))

    def cancel(self, request_id, reason):
        ticket = self.tickets.pop(request_id, None)
        if ticket:
            ticket.push(Output(request_id, finish=Finish.CANCELLED, error=RequestCancelled(reason)))
        return ticket is not None

    def status(self):
        now_s = time.monotonic()
        return EngineStatus(
            running=len(self.tickets),
            pages_total=16,
            pages_free=12,
            pages_held=4,
            pages_cached=4,
            page_tokens=8,
            slots_total=self.slots,
            slots_used=self.slots // 2,
            expert_hits=3,
            expert_misses=1,
            decode_tokens_per_s=120.5,
            decode_pace_tokens_per_s=240.0,
            step_ms_p50=8.3,
            finished=self.finished,
            requests=tuple(
                RequestInfo(t.request_id, "decode", 3, 3, 2, t.produced, now_s - t.began_s)
                for t in self.tickets.values()
            ),
        )

    async def drain(self, timeout_s):
        self._refusal = NotReady("draining")
        try:
            async with asyncio.timeout(timeout_s):
                while self.tickets:  # noqa: ASYNC110 - a test double may poll
                    await asyncio.sleep(0.002)
        except TimeoutError:
            return False
        return True

    async def close(self, cause=None):
        self._refusal = cause or NotReady("closed")
        self._end_all(self._refusal)
        if self._task:
            self._task.cancel()
        await asyncio.sleep(self._close_s)
        self.closed = True


def _touched(num_bytes):
    """Resident memory from the system itself, as a host pool is; goes when it is collected."""
    if not num_bytes:
        return None
    memory = mmap.mmap(-1, num_bytes)
    for page in range(0, num_bytes, mmap.PAGESIZE):
        memory[page] = 1
    return memory


@dataclass
class Script:
    """How one model behaves. ``gate``: loading waits for it after ``gate_at`` of its pieces."""

    refusal: FtdError | None = None  # of check
    failures: deque = field(default_factory=deque)  # of load, one each; None: this one succeeds
    pieces: int = 4
    piece_s: float = 0.0
    gate: threading.Event | None = None
    beside: bool = True
    engine: dict = field(default_factory=dict)  # arguments of ScriptedEngine
    stuck_s: float = 0.0  # a loader that does not look at ``cancelled``


class ScriptedMemory:
    """Sizes that change as they are told; budgets of more than 8 slots are refused."""

    def __init__(self, config, engine):
        self.config, self.footprint, self.auto = config, Footprint(2**30, 2**20), False
        self.engine = engine

    reads = Reads(2**20, 2**22, on_gpu=False)

    def uses(self):
        return (MemoryUse("expert slots", 2**20, 2**19, "half of them"),)

    def table(self):
        return "KV pool    1.00 MiB"

    async def apply(self, change):
        if isinstance(change.expert_slots, int) and change.expert_slots > 8:
            raise BudgetExceeded("9 slots, there is room for 8", hint="use --expert-slots 8")
        await asyncio.sleep(0)
        were, self.auto = self.engine.slots, change.auto
        self.engine.slots = were if change.expert_slots is None else change.expert_slots
        if isinstance(change.kv_tokens, int):
            limits = self.engine.limits
            self.engine.limits = replace(limits, context_tokens=min(64, change.kv_tokens))
        return BudgetDone(128, 128, self.engine.slots, were, 0, 0, 2, 1, 0.0384)

    @property
    def moves(self):
        return self.auto

    async def rebalance(self):
        return None


class ScriptedText(str):
    def prepare_constraints(self, vocab, dialect):
        """Nothing is held to a grammar here."""


@dataclass(frozen=True)
class Source:
    name: str
    path: Path


class ScriptedModels:
    def __init__(self, **scripts):
        self.scripts = scripts
        self.loads = []  # names, in order
        self.engines = []  # weak references would be the test's business

    def resolve(self, model, progress):
        if model not in self.scripts:
            raise ModelNotFound(f"--model {model}: there is no such directory")
        return Source(model, Path("/models") / model)

    def check(self, config, source, old):
        script = self.scripts[source.name]
        if script.refusal:
            raise script.refusal
        beside = script.beside and old is not None
        return Preflight(beside, 2**30, 2**40, lambda: ("weights  1.00 GiB",), prepared=source.name)

    def open_text(self, source):
        return ScriptedText(f"text of {source.name}")

    def load(self, config, preflight, progress, cancelled):
        script = self.scripts[preflight.prepared]
        self.loads.append(preflight.prepared)
        failure = script.failures.popleft() if script.failures else None
        time.sleep(script.stuck_s)
        for piece in range(script.pieces):
            if cancelled():
                raise NotReady("loading was given up")
            if failure and piece == script.pieces // 2:
                raise failure
            progress(piece * 1024, script.pieces * 1024)
            if script.gate and piece == script.pieces - 1:
                while not script.gate.wait(0.005):
                    if cancelled():
                        raise NotReady("loading was given up")
            time.sleep(script.piece_s)
        engine = ScriptedEngine(**script.engine)
        return Loaded(engine, ScriptedMemory(config, engine))
