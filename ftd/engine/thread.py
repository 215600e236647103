"""The engine thread: the step loop, and the handle through which the event loop speaks to it.

Commands reach the engine as messages that wait for the safe point between two steps. Whatever a
step brought goes back in one ``call_soon_threadsafe``. Nothing here knows tensors or text.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from ftd.errors import (
    EngineFailed,
    FtdError,
    GpuLost,
    NotReady,
    QueueFull,
    RequestCancelled,
    first_line,
)

from .admission import check_request, retry_after_s
from .api import EngineLimits, EngineRequest, EngineStatus, Finish, Output
from .ticket import EngineTicket

log = structlog.get_logger(__name__)

PUBLISH_S = 0.02  # a busy engine's status is at most this old
IDLE_BEAT_S = 1.0  # the heartbeat of an engine without work
JOIN_TIMEOUT_S = 30.0  # a prefill layer of a large model on a small CPU takes seconds, not more


class StepInterrupted(Exception):
    """The step was given up at a layer border, since a message made its work worthless."""


class Core(Protocol):
    """What the thread drives; ``ftd.engine.core.EngineCore``, or a small model of it in tests."""

    beat: Callable[[], None]  # called at every layer; may raise StepInterrupted
    deliver: Callable[[list[Output]], None]  # called in mid-step with what others' steps brought
    wake: Callable[[], None]  # called from any thread when there is work again

    def add(self, request: EngineRequest) -> None: ...
    def end(self, request_id: str, finish: Finish) -> bool: ...
    def has_work(self) -> bool: ...
    def step(self) -> list[Output]: ...
    def settle(self) -> list[Output]: ...
    def in_prefill(self, request_id: str) -> bool: ...
    def status(self) -> EngineStatus: ...
    def failed_for_good(self, error: Exception) -> bool: ...  # no engine of this process can go on
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Add:
    request: EngineRequest


@dataclass(frozen=True, slots=True)
class _End:
    request_id: str
    finish: Finish


@dataclass(frozen=True, slots=True)
class _Call:
    run: Callable[[Any], Any]
    done: Future[Any]


@dataclass(frozen=True, slots=True)
class _Close:
    pass


@dataclass(frozen=True, slots=True)
class _Wake:
    pass


_Message = _Add | _End | _Call | _Close | _Wake


class EngineThread:
    """``api.EngineHandle`` over a core on a thread of its own.

    Args:
        core: owned from now on; touched by the engine thread only.
        limits: what requests may ask for.
    """

    def __init__(self, core: Core, limits: EngineLimits) -> None:
        self.limits = limits
        self.heartbeat = 0  # moves each step, each layer, each second when idle
        self.failure: Exception | None = None
        self._core = core
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._unread: deque[_Message] = deque()  # taken out of the inbox by an interrupt check
        self._tickets: dict[str, EngineTicket] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._refusal: FtdError | None = None  # why new requests are refused
        self._idle = asyncio.Event()
        self._idle.set()
        self._failed: asyncio.Event = asyncio.Event()
        self._status = core.status()
        self._published_s = 0.0
        core.beat = self._layer_border
        core.deliver = self._deliver
        core.wake = self._wake
        self._thread = threading.Thread(target=self._run, name="ftd-engine", daemon=True)
        self._thread.start()

    # ---- on the event loop

    def submit(self, request: EngineRequest) -> EngineTicket:
        self._loop = asyncio.get_running_loop()
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)  # or each raise would add to it
        check_request(request, self.limits)
        most = self.limits.max_running + self.limits.max_waiting
        if len(self._tickets) >= most:
            raise QueueFull(
                f"{len(self._tickets)} requests run or wait, {most} is the most",
                hint="retry later, or start ftd with a larger --max-waiting",
                retry_after_s=retry_after_s(self._status),
            )
        assert request.request_id not in self._tickets, request.request_id
        ticket = EngineTicket(request.request_id, self._leave)
        self._tickets[request.request_id] = ticket
        self._idle.clear()
        self._send(_Add(request))
        return ticket

    def cancel(self, request_id: str, reason: str) -> bool:
        ticket = self._tickets.get(request_id)
        if ticket is None:
            return False
        self._send(_End(request_id, Finish.CANCELLED))
        self._end_with(ticket, RequestCancelled(f"request {request_id} was cancelled: {reason}"))
        return True

    def status(self) -> EngineStatus:
        return self._status

    async def wait_failed(self) -> Exception:
        """Return the cause once the engine has failed; every request has had its error by then."""
        await self._failed.wait()
        assert self.failure is not None
        return self.failure

    async def at_safe_point(self, run: Callable[[Any], Any]) -> Any:
        """Run ``run(core)`` on the engine thread between two steps and return its result."""
        if self._refusal is not None and not self._thread.is_alive():
            raise self._refusal.with_traceback(None)  # or each raise would add to it
        done: Future[Any] = Future()
        self._send(_Call(run, done))
        return await asyncio.wrap_future(done)

    async def drain(self, timeout_s: float) -> bool:
        if self._refusal is None:
            self._refusal = NotReady(
                "the model is being drained: it takes no new requests",
                hint="retry shortly",
                retry_after_s=5,
            )
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self, cause: Exception | None = None) -> None:
        self._refusal = _as_refusal(cause)
        self._send(_Close())
        for ticket in list(self._tickets.values()):
            self._end_with(ticket, self._refusal)
        await asyncio.to_thread(self._thread.join, JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            raise EngineFailed(
                f"the engine thread did not stop within {JOIN_TIMEOUT_S:.0f} s",
                hint="its memory is not given back before the process ends",
            )

    def _end_with(self, ticket: EngineTicket, error: Exception) -> None:
        finish = Finish.CANCELLED if isinstance(error, RequestCancelled) else Finish.ERROR
        self._forget(ticket)
        ticket.push(Output(ticket.request_id, finish=finish, error=error))

    def _leave(self, ticket: EngineTicket, finish: Finish) -> None:
        """Whoever holds it wants no more."""
        self._forget(ticket)
        self._send(_End(ticket.request_id, finish))

    def _forget(self, ticket: EngineTicket) -> None:
        self._tickets.pop(ticket.request_id, None)
        if not self._tickets:
            self._idle.set()

    def _dispatch(self, outputs: list[Output]) -> None:
        for output in outputs:
            ticket = self._tickets.get(output.request_id)
            if ticket is None:  # ended while its step ran: the surplus is thrown away
                continue
            if output.finish is not None:
                self._forget(ticket)
            ticket.push(output)

    def _fail_all(self, cause: Exception) -> None:
        self._refusal = NotReady(
            f"the engine failed: {cause}", hint="retry shortly", retry_after_s=5
        )
        for ticket in list(self._tickets.values()):
            self._end_with(ticket, cause)
        self._failed.set()

    # ---- from any thread

    def _send(self, message: _Message) -> None:
        self._inbox.put(message)

    def _wake(self) -> None:
        self._send(_Wake())

    def _on_loop(self, call: Callable[..., None], *args: Any) -> None:
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            pass  # the loop is closed: nobody is left to be told

    # ---- on the engine thread

    def _run(self) -> None:
        try:
            while self._safe_point():
                if self._core.has_work():
                    self._step()
                self._publish()
        except Exception as error:
            log.exception("engine.failed")
            cause = self.failure = _as_failure(error, self._core.failed_for_good(error))
            self._on_loop(self._fail_all, cause)
        finally:
            self._refuse_calls()
            if not isinstance(self.failure, GpuLost):  # else each call would fail, and ftd ends
                self._core.close()
            self._publish()

    def _safe_point(self) -> bool:
        """Obey what has arrived; wait for something if there is no work. False: close."""
        self.heartbeat += 1
        wait_s = None if self._core.has_work() else IDLE_BEAT_S
        for message in self._arrived(wait_s):
            match message:
                case _Add() | _End():
                    self._take(message)
                case _Call(run, done):
                    self._call(run, done)
                case _Close():
                    return False
                case _Wake():
                    pass  # has_work is asked next
        return True

    def _arrived(self, wait_s: float | None) -> list[_Message]:
        messages = list(self._unread)
        self._unread.clear()
        if not messages and wait_s is not None:
            try:
                messages.append(self._inbox.get(timeout=wait_s))
            except queue.Empty:
                return messages
        return messages + _drain(self._inbox)

    def _step(self) -> None:
        try:
            outputs = self._core.step()
        except StepInterrupted:
            return  # nothing was committed; the messages wait in ``_unread``
        if outputs:
            self._on_loop(self._dispatch, outputs)

    def _layer_border(self) -> None:
        """Called by the core at each layer: give up a step whose prefill nobody wants any more."""
        self.heartbeat += 1
        self._unread.extend(_drain(self._inbox))
        for message in self._unread:
            if isinstance(message, _Close) or (
                isinstance(message, _End) and self._core.in_prefill(message.request_id)
            ):
                raise StepInterrupted

    def _take(self, message: _Add | _End) -> None:
        if isinstance(message, _Add):
            self._core.add(message.request)
        else:
            self._core.end(message.request_id, message.finish)

    def _deliver(self, outputs: list[Output]) -> None:
        """Called by the core in a pause of a pass, between two steps of other requests.

        These may begin and end now; whatever else has arrived waits for the end of the pass.
        """
        if outputs:
            self._on_loop(self._dispatch, outputs)
        self._unread.extend(_drain(self._inbox))
        while self._unread:
            message = self._unread[0]
            if not isinstance(message, _Add | _End):
                break
            if isinstance(message, _End) and self._core.in_prefill(message.request_id):
                break
            self._take(message)
            self._unread.popleft()
        self._publish()

    def _call(self, run: Callable[[Any], Any], done: Future[Any]) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            outputs = self._core.settle()
        except Exception as error:  # of a step: the engine fails, as in ``step``
            done.set_exception(error)
            raise
        if outputs:
            self._on_loop(self._dispatch, outputs)
        try:
            result = run(self._core)
        except Exception as error:
            done.set_exception(error)
        else:
            self._status = self._core.status()  # what it changed is seen by whoever asked for it
            done.set_result(result)

    def _refuse_calls(self) -> None:
        for message in itertools.chain(self._unread, _drain(self._inbox)):
            if isinstance(message, _Call):
                message.done.set_exception(NotReady("the engine is closed", retry_after_s=5))

    def _publish(self) -> None:
        now_s = time.monotonic()
        if self._core.has_work() and now_s < self._published_s + PUBLISH_S:
            return
        self._published_s = now_s
        self._status = self._core.status()


def _as_refusal(cause: Exception | None) -> FtdError:
    if isinstance(cause, FtdError):
        return cause
    return NotReady("the model is no longer loaded", hint="retry shortly", retry_after_s=5)


def _as_failure(error: Exception, for_good: bool) -> FtdError:
    if for_good:
        failure: FtdError = GpuLost(
            f"the GPU failed: {first_line(error)}", hint="ftd has to be started again"
        )
    elif isinstance(error, FtdError):
        return error
    else:
        cause = f"{type(error).__name__}: {first_line(error)}"
        failure = EngineFailed(f"a step failed: {cause}", hint="the log has the traceback")
    failure.__cause__ = error
    return failure


def _drain(inbox: queue.SimpleQueue[_Message]) -> list[_Message]:
    messages = []
    while True:
        try:
            messages.append(inbox.get_nowait())
        except queue.Empty:
            return messages
